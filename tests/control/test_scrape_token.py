"""The file of the token: what is refused, and that nothing tells what is in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from farandole.control.ticket import LONGEST_TOKEN, SHORTEST, load_scrape_token
from farandole.errors import UsageError

TOKEN = "s3cret-0123456789abcdef"


def made(folder: Path, content: bytes | str = TOKEN, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("content", [TOKEN, f"{TOKEN}\n", f"{TOKEN}\r\n"])
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_one_line_that_others_can_not_read(tmp_path: Path, content: str, mode: int) -> None:
    assert load_scrape_token(made(tmp_path, content, mode)) == TOKEN.encode()


def test_a_link_is_followed_as_secrets_are_mounted(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made(tmp_path))
    assert load_scrape_token(tmp_path / "link") == TOKEN.encode()


EMPTY, WRONG = rf"\b{SHORTEST}\b(?!.*\b{LONGEST_TOKEN}\b)", rf"\b{SHORTEST}\b.*\b{LONGEST_TOKEN}\b"
REFUSED = [
    (b"", EMPTY),
    (b"\n\n", EMPTY),
    (b"x" * (SHORTEST - 1), WRONG),
    (b"x" * (LONGEST_TOKEN + 1), WRONG),
    (TOKEN.encode() + b"\n" + TOKEN.encode(), WRONG),
    (b"two words of a token", WRONG),
    (b"\xff" * 32, WRONG),
    (b'{"address": "http://127.0.0.1:1", "secret": "0123456789"}', WRONG),
]


@pytest.mark.parametrize(("content", "values"), REFUSED)
def test_what_is_no_token_is_refused_and_not_quoted(tmp_path: Path, content: bytes, values: str) -> None:
    path = made(tmp_path, content)
    with pytest.raises(UsageError, match=rf"--metrics-token {re.escape(str(path))}\b.*{values}") as refused:
        load_scrape_token(path)
    assert content.decode("latin-1") not in str(refused.value) or not content.strip()


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o660, 0o666])
def test_one_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = made(tmp_path, mode=mode)
    with pytest.raises(UsageError, match=rf"\(mode {mode:04o}\).*chmod 600 {re.escape(str(path))}") as refused:
        load_scrape_token(path)
    assert TOKEN not in str(refused.value)


def test_one_that_is_not_there_is_refused_with_the_way_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`\(umask 077; openssl rand -hex 32 > token\)`"):
        load_scrape_token(tmp_path / "token")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(UsageError, match=f"--metrics-token {re.escape(str(path))}"):
            load_scrape_token(path)
