"""The other end of a pack: whole, private, put back where it was edited, one process at a time."""

from __future__ import annotations

import errno
import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.code import pack
from farandole.errors import FarandoleError
from tests.support import disks
from tests.support.fake_worker import until
from tests.support.harness import ENVIRON


@pytest.fixture
def packed(tmp_path: Path) -> pack.Pack:
    folder = tmp_path / "project"
    (folder / "lib" / "deep").mkdir(parents=True)
    (folder / "train.py").write_text("T = 1\n")
    (folder / "lib" / "deep" / "a.py").write_text("A = 1\n")
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o755)
    (folder / "near").symlink_to("lib/deep")
    return pack.pack(folder, str(folder / "train.py"))


def nobody() -> bytes:
    raise AssertionError("it is here already")


def provide(found: pack.Pack) -> Path:
    return pack.provide(found.hash, lambda: found.content)


def test_it_comes_whole_and_private_and_once(packed: pack.Pack) -> None:
    old = os.umask(0)
    place = provide(packed)
    os.umask(old)
    assert (place / "near" / "a.py").read_text() == "A = 1\n"
    there = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_symlink() or path.is_file()}
    assert there == set(packed.files)
    assert (place / "tool").stat().st_mode & 0o777 == 0o700
    assert (place / "train.py").stat().st_mode & 0o777 == 0o600
    mine = [path for path in place.parent.rglob("*") if not path.is_symlink()]
    assert {path.stat().st_mode & 0o077 for path in mine} == {0}
    (place / "mine").touch()
    assert pack.provide(packed.hash, nobody) == place
    assert (place / "mine").exists(), "what scripts leave there stays"


@pytest.mark.failure(
    "External workers, pools and machines", "the code is edited while the run is on, here or in the copy of a host"
)
def test_what_was_edited_there_is_put_back(packed: pack.Pack) -> None:
    """Who begins later has the same bits, whatever a script or a person has done to the folder."""
    place = provide(packed)
    (place / "train.py").write_text("T = 2\n")
    (place / "near").unlink()
    (place / "near").write_text("")
    (place / "tool").unlink()
    (place / "tool").mkdir()
    (place / "tool" / "x").touch()
    (place / "lib" / "deep" / "a.py").unlink()
    assert pack.provide(packed.hash, nobody) == place
    assert (place / "train.py").read_text() == "T = 1\n"
    assert (place / "near" / "a.py").read_text() == "A = 1\n"
    assert (place / "tool").stat().st_mode & 0o777 == 0o700


def test_what_was_kept_and_is_damaged_is_fetched_anew(packed: pack.Pack) -> None:
    place = provide(packed)
    archive = place.with_name(packed.hash + pack.ARCHIVE)
    for damage in (b"", packed.content[:-20], gzip.compress(b"another")):
        archive.write_bytes(damage)
        assert provide(packed) == place
        assert archive.read_bytes() == packed.content


def test_what_was_done_there_is_forgotten_with_the_folder(packed: pack.Pack) -> None:
    place = provide(packed)
    done, _ = pack.set_up_mark(place, "x")
    done.touch()
    provide(packed)
    assert done.exists()
    os.rename(place, place.with_name("elsewhere"))
    provide(packed)
    assert not done.exists()


def test_another_hash_is_told_and_leaves_nothing(packed: pack.Pack, home: Path) -> None:
    with pytest.raises(FarandoleError, match=rf"\b{len(packed.content)} bytes.*{'0' * pack.DIGITS}"):
        pack.provide("0" * pack.DIGITS, lambda: packed.content)
    with pytest.raises(FarandoleError, match=rf"\b100 bytes.*{packed.hash}"):
        pack.provide(packed.hash, lambda: packed.content[:100])
    assert [path.name for path in (home / ".cache/farandole/code").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("name", ["", "..", "../../x", "a/b", "A" * 32, "0" * 31, "0" * 33])
def test_what_is_no_hash_names_no_folder(name: str) -> None:
    with pytest.raises(FarandoleError, match=re.escape(repr(name[: pack.DIGITS]))):
        pack.provide(name, nobody)


# --- processes, and disks --------------------------------------------------------------------------------------------

FETCH = """
import sys
from pathlib import Path
from farandole.code.pack import provide

def fetch():
    print("fetching", flush=True)
    Path(sys.argv[3]).read_bytes()  # a pipe, until somebody opens it
    return Path(sys.argv[2]).read_bytes()

print(provide(sys.argv[1], fetch), flush=True)
"""


@pytest.mark.processes
def test_of_several_processes_one_fetches_it_and_one_that_is_killed_leaves_no_half(
    packed: pack.Pack, tmp_path: Path, home: Path
) -> None:
    content, gate = tmp_path / "content", tmp_path / "gate"
    content.write_bytes(packed.content)
    os.mkfifo(gate)
    command = [sys.executable, "-c", FETCH, packed.hash, str(content), str(gate)]

    def start() -> subprocess.Popen[str]:
        environ = {**ENVIRON, "HOME": str(home)}
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)

    first = start()
    assert first.stdout is not None
    assert first.stdout.readline() == "fetching\n"
    others = [start(), start()]
    first.kill()
    first.communicate()
    half = home / ".cache/farandole/code" / f"{packed.hash}.part"
    half.mkdir()
    (half / "train.py").write_text("half")
    until(lambda: _let_go(gate))
    said = [process.communicate(timeout=200)[0].splitlines() for process in others]
    assert sorted(len(lines) for lines in said) == [1, 2], "one of them fetched it"
    assert {lines[-1] for lines in said} == {str(pack.place_of(packed.hash))}
    assert not half.exists()
    assert (pack.place_of(packed.hash) / "train.py").read_text() == "T = 1\n"


def _let_go(gate: Path) -> bool:
    """Whoever reads there; False: nobody does yet."""
    try:
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@pytest.mark.failure(
    "External workers, pools and machines",
    "the disk of a host becomes full while the code is unpacked",
    seen="`not prepared`, with the folder",
    outcome="no incomplete file stays; the others continue",
)
@pytest.mark.world
def test_a_disk_that_is_full_is_named_with_the_remedy_and_gets_nothing(tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("")
    (folder / "large").write_bytes(os.urandom(600_000))
    found = pack.pack(folder, str(folder / "train.py"))
    (home / ".cache").mkdir()
    with disks.small_disk(home / ".cache" / "farandole", "1m") as disk:  # room for the archive, and not for its files
        os.chmod(disk, 0o700)
        with pytest.raises(FarandoleError, match=rf"{found.hash}.*{os.strerror(errno.ENOSPC)}"):
            provide(found)
        assert not pack.place_of(found.hash).exists()
        assert not [path for path in (disk / "code").iterdir() if path.name.endswith(".part")]
        os.truncate(next((disk / "code").glob("*.gz")), 0)
        disks.fill(disk)
        with pytest.raises(FarandoleError, match=os.strerror(errno.ENOSPC)):
            provide(found)
        (disk / "full").unlink()
        assert not list((disk / "code").glob(".*")), "no half of an archive"
