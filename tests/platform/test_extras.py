"""The command that installs an extra is one that pip can follow here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from farandole.platform.extras import how_to_install

ROOT = Path(__file__).parents[2]
USED = re.compile(r"how_to_install\(['\"](\w[\w-]*)['\"]\)")


def note(url: str, *, editable: bool = False) -> str:
    return json.dumps({"url": url, **({"dir_info": {"editable": True}} if editable else {"dir_info": {}})})


def test_a_checkout_is_installed_as_it_was() -> None:
    assert how_to_install("s3", note(ROOT.as_uri(), editable=True)) == f'pip install -e "{ROOT}[s3]"'
    assert how_to_install("s3", note(ROOT.as_uri())) == f'pip install "{ROOT}[s3]"'


def test_a_wheel_is_named_where_it_is(tmp_path: Path) -> None:
    wheel = tmp_path / "with space" / "farandole-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    assert how_to_install("tls", note(wheel.as_uri())) == f'pip install "{wheel}[tls]"'
    wheel.unlink()
    assert str(wheel) not in how_to_install("tls", note(wheel.as_uri()), package=tmp_path / "a" / "b"), "it is gone"


def test_what_came_from_elsewhere_comes_from_there() -> None:
    url = "https://example.org/farandole-0.1.0-py3-none-any.whl"
    assert how_to_install("s3", note(url)) == f'pip install "farandole[s3] @ {url}"'


def test_modules_of_a_checkout_that_pip_knows_nothing_of(tmp_path: Path) -> None:
    assert how_to_install("s3", "") == f'pip install -e "{ROOT}[s3]"'
    assert "PATH[s3]" in how_to_install("s3", "", package=tmp_path / "lib" / "farandole")


@pytest.mark.parametrize("damaged", ["{", "[]", "3", '{"url": 3}', "null"])
def test_a_damaged_note_is_none(damaged: str, tmp_path: Path) -> None:
    assert "[s3]" in how_to_install("s3", damaged, package=tmp_path / "lib" / "farandole")


def test_each_extra_that_an_error_names_exists_and_none_is_asked_of_an_index() -> None:
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    used = {extra for text in texts for extra in USED.findall(text)}
    there = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert len(used) > 5
    assert used <= there
    pages = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    assert not [text for text in (*texts, *pages) if re.search(r"pip install [\"']farandole\[[\w,-]+\][\"']", text)]
