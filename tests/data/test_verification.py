"""Copies of shards that others may have touched: each is compared with what its index says, once, and then known."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.data.cache import Copies
from farandole.errors import ShardError
from tests.support.file_server import FileServer

CONTENT = b"0123456789" * 500


class Served:
    """One file over HTTP, and its copies in a cache."""

    def __init__(self, folder: Path, server: FileServer) -> None:
        self.url, self.gets, self.cache = f"{server.url}/file.tar", server.gets, folder / "cache"
        self.digest = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()

    def read(self) -> bytes:
        """As a process does that has just been started."""
        copies = Copies(self.cache, 1 << 20)
        try:
            return os.pread(copies.open(self.url, len(CONTENT), self.digest), 1 << 20, 0)
        finally:
            copies.close()

    @property
    def copy(self) -> Path:
        [found] = self.cache.glob("*.tar")
        return found

    @property
    def note(self) -> Path:
        return self.copy.with_name(self.copy.name + ".seen")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "file.tar").write_bytes(CONTENT)
    with FileServer(tmp_path / "files") as server:
        yield Served(tmp_path, server)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One for each time that something was compared by MD5."""
    found: list[object] = []
    real = hashlib.md5
    monkeypatch.setattr(hashlib, "md5", lambda *a, **k: (found.append(a), real(*a, **k))[1])
    return found


def test_a_copy_is_compared_once_and_then_known(served: Served, compared: list[object]) -> None:
    for _ in range(3):
        assert served.read() == CONTENT
    assert served.gets == {"file.tar": 1}
    assert len(compared) == 0, "by whoever fetched it"


def change(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_another(path: Path) -> None:
    before = path.stat()
    path.unlink()
    path.write_bytes(b"x" + CONTENT[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.failure(
    "Data and loader processes",
    "a copy of a shard in the cache was changed or truncated, or other users can write it",
    seen="nothing: its MD5 is checked before use",
    outcome="the shard is fetched again",
)
@pytest.mark.parametrize("do", [change, put_another, lambda path: os.truncate(path, 10)])
def test_a_copy_that_is_not_what_it_was_is_fetched_anew(served: Served, do: Any) -> None:
    served.read()
    do(served.copy)
    assert served.read() == CONTENT
    assert served.copy.read_bytes() == CONTENT
    assert served.gets == {"file.tar": 2}


def test_a_copy_that_nobody_has_compared_is(served: Served, compared: list[object]) -> None:
    """One left there by whoever knew its name."""
    served.read()
    name = served.copy
    served.note.unlink()
    name.unlink()
    name.write_bytes(b"x" + CONTENT[1:])
    assert served.read() == CONTENT
    assert served.gets == {"file.tar": 2}
    served.note.unlink()
    compared.clear()
    assert served.read() == CONTENT
    assert served.gets == {"file.tar": 2}
    assert len(compared) == 1


@pytest.mark.failure(
    "Data and loader processes", "a copy of a shard in the cache was changed or truncated, or other users can write it"
)
def test_a_copy_or_a_note_that_others_can_write_is_compared(served: Served, compared: list[object]) -> None:
    served.read()
    for theirs in (served.copy, served.note):
        theirs.chmod(0o666)
        if theirs == served.copy:
            served.read()  # the note is as the copy is now
        compared.clear()
        assert served.read() == CONTENT
        assert len(compared) == 1
        theirs.chmod(0o600)
        served.read()


@pytest.mark.world
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's file takes root to make")
def test_another_user_s_copy_is_compared(served: Served, compared: list[object]) -> None:
    served.read()
    for theirs in (served.copy, served.note):
        os.chown(theirs, 65534, 65534)
        if theirs == served.copy:
            served.read()
        compared.clear()
        assert served.read() == CONTENT
        assert len(compared) == 1
        os.chown(theirs, 0, 0)
        served.read()


def test_no_link_is_followed_to_a_copy(served: Served, tmp_path: Path) -> None:
    served.read()
    served.copy.rename(tmp_path / "elsewhere")
    (served.cache / (tmp_path / "elsewhere").name).unlink(missing_ok=True)
    name = served.note.name.removesuffix(".seen") if list(served.cache.glob("*.tar")) else ""
    assert name == ""
    [note] = served.cache.glob("*.seen")
    (served.cache / note.name.removesuffix(".seen")).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ShardError, match=os.strerror(errno.ELOOP)):
        served.read()


def test_a_server_that_sends_more_than_the_index_says_is_not_listened_to(served: Served, tmp_path: Path) -> None:
    (tmp_path / "files" / "file.tar").write_bytes(bytes(32 << 20))
    with pytest.raises(ShardError, match=r"\bfile\.tar\b.*\bMD5\b"):
        served.read()
    assert not list(served.cache.glob("*.part"))
