"""The other end of a pack: whole, private, one at a time, and nothing outside its folder whatever an archive says."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farandole.code import pack, unpacked
from farandole.errors import FarandoleError
from tests.support import disks
from tests.support.fake_worker import until
from tests.support.harness import ENVIRON


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place))
    return place


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
    return unpacked.provide(found.hash, lambda: found.content)


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
    assert unpacked.provide(packed.hash, nobody) == place
    assert (place / "mine").exists(), "what scripts leave there stays"


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
    assert unpacked.provide(packed.hash, nobody) == place
    assert (place / "train.py").read_text() == "T = 1\n"
    assert (place / "near" / "a.py").read_text() == "A = 1\n"
    assert (place / "tool").stat().st_mode & 0o777 == 0o700


def test_what_was_kept_and_is_damaged_is_fetched_anew(packed: pack.Pack) -> None:
    place = provide(packed)
    archive = place.with_name(packed.hash + unpacked.ARCHIVE)
    for damage in (b"", packed.content[:-20], gzip.compress(b"another")):
        archive.write_bytes(damage)
        assert provide(packed) == place
        assert archive.read_bytes() == packed.content


def test_what_was_done_there_is_forgotten_with_the_folder(packed: pack.Pack) -> None:
    place = provide(packed)
    done, _ = unpacked.set_up_mark(place, "x")
    done.touch()
    provide(packed)
    assert done.exists()
    os.rename(place, place.with_name("elsewhere"))
    provide(packed)
    assert not done.exists()


def test_another_hash_is_told_and_leaves_nothing(packed: pack.Pack, home: Path) -> None:
    with pytest.raises(FarandoleError, match=r"damaged: \d+ bytes have come that are not pack 0000"):
        unpacked.provide("0" * pack.DIGITS, lambda: packed.content)
    with pytest.raises(FarandoleError, match="damaged"):
        unpacked.provide(packed.hash, lambda: packed.content[:100])
    assert [path.name for path in (home / ".cache/farandole/code").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("name", ["", "..", "../../x", "a/b", "A" * 32, "0" * 31, "0" * 33])
def test_what_is_no_hash_names_no_folder(name: str) -> None:
    with pytest.raises(FarandoleError, match="not the hash of a run's code"):
        unpacked.provide(name, nobody)


# --- hostile archives ------------------------------------------------------------------------------------------------


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", **pax: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.pax_headers = kind, target, {k.replace("_", "."): v for k, v in pax.items()}
    return made


def archive(entries: Iterable[tarfile.TarInfo], content: bytes = b"evil") -> tuple[str, bytes]:
    """The pack of these entries: its hash, which is right, and the bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as made:
        for each in entries:
            each.size = len(content) if each.isreg() else 0
            made.addfile(each, io.BytesIO(content))
    return pack.digest(buffer.getvalue()), gzip.compress(buffer.getvalue(), mtime=0)


FILE, SYM, LNK = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
HOSTILE = {
    "absolute": [("/tmp/evil", FILE, "")],
    "upwards": [("a/../../evil", FILE, "")],
    "nothing": [(".", FILE, "")],
    "hard link": [("link", LNK, "/etc/passwd")],
    "device": [("null", tarfile.CHRTYPE, "")],
    "pipe": [("pipe", tarfile.FIFOTYPE, "")],
    "folder": [("folder", tarfile.DIRTYPE, "")],
    "contiguous": [("file", tarfile.CONTTYPE, "")],
    "link, absolute": [("link", SYM, "/etc/passwd")],
    "link, upwards": [("a/link", SYM, "../../evil")],
    "link to nothing": [("link", SYM, "")],
    "through a link": [("link", SYM, "real"), ("real/x", FILE, ""), ("link/file", FILE, "")],
    "a link through a link": [("real/x", FILE, ""), ("link", SYM, "real"), ("link/deep", SYM, "x")],
    "links that lead out together": [("d/e/x", FILE, ""), ("d/e/up", SYM, "../.."), ("out", SYM, "d/e/up/../evil")],
    "twice": [("a", FILE, ""), ("a", FILE, "")],
    "file and folder": [("a", FILE, ""), ("a/b", FILE, "")],
    "a name that is too long": [("x" * 5000, FILE, "")],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_pack_holds_is_not_unpacked(what: str, tmp_path: Path) -> None:
    name, content = archive(entry(*each) for each in HOSTILE[what])
    with pytest.raises(FarandoleError, match="can't be unpacked"):
        unpacked.provide(name, lambda: content)
    assert_inside(tmp_path, name, there=False)


@pytest.mark.parametrize("pax", [{"GNU_sparse_major": "1", "GNU_sparse_minor": "0", "GNU_sparse_realsize": "9" * 12}])
def test_a_file_that_claims_more_than_there_is(pax: dict[str, str], tmp_path: Path) -> None:
    name, content = archive([entry("a", **pax)])
    with pytest.raises(FarandoleError, match="can't be unpacked"):
        unpacked.provide(name, lambda: content)
    assert_inside(tmp_path, name, there=False)


def assert_inside(tmp_path: Path, name: str, *, there: bool) -> None:
    """Nothing of it lies, or leads, anywhere else."""
    place = unpacked.place_of(name)
    assert place.exists() == there
    assert not Path("/tmp/evil").exists()
    known = (".lock", unpacked.ARCHIVE)
    assert not [path for path in place.parent.iterdir() if not path.is_dir() and not path.name.endswith(known)]
    assert not [path for path in place.parent.iterdir() if path.is_dir() and len(path.name) != pack.DIGITS]
    assert {path.name for path in tmp_path.iterdir()} <= {"home", "project"}
    assert [path.name for path in (tmp_path / "home").iterdir()] == [".cache"]
    for path in place.rglob("*"):
        assert Path(os.path.realpath(path)).is_relative_to(os.path.realpath(place))


PARTS = st.sampled_from(["a", "b", "c", "..", ".", "", "ü"])
NAMES = st.builds("/".join, st.lists(PARTS, min_size=1, max_size=4))
KINDS = st.sampled_from([FILE] * 3 + [SYM] * 4 + [LNK, tarfile.DIRTYPE, tarfile.CHRTYPE])
ENTRIES = st.lists(st.tuples(NAMES, KINDS, NAMES), max_size=6)
Raw = list[tuple[str, bytes, str]]


def unpack_or_not(plain: bytes, tmp_path: Path) -> None:
    name = pack.digest(plain)
    try:
        unpacked.provide(name, lambda: gzip.compress(plain, mtime=0))
    except FarandoleError:
        assert_inside(tmp_path, name, there=False)
    else:
        assert_inside(tmp_path, name, there=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(entries=ENTRIES)
def test_no_archive_of_any_entries_gets_out(entries: Raw, tmp_path: Path) -> None:
    unpack_or_not(gzip.decompress(archive(entry(*each) for each in entries)[1]), tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.binary(max_size=600), entries=ENTRIES, at=st.integers(0, 3000))
def test_any_bytes_raise_our_error_or_are_a_pack(data: bytes, entries: Raw, at: int, tmp_path: Path) -> None:
    """The right hash proves nothing but who has made it: what is in it is looked at all the same."""
    plain = bytearray(gzip.decompress(archive(entry(*each) for each in entries)[1]))
    plain[at : at + len(data)] = data
    unpack_or_not(bytes(plain), tmp_path)


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(unpacked, "MOST_PLAIN", 100_000)
        plain = bytes(10_000_000)
        with pytest.raises(FarandoleError, match="damaged"):
            unpacked.provide(pack.digest(plain), lambda: gzip.compress(plain))
    monkeypatch.setattr(unpacked, "MOST_FILES", 3)
    name, content = archive(entry(str(number)) for number in range(4))
    with pytest.raises(FarandoleError, match="more than 3 files"):
        unpacked.provide(name, lambda: content)


# --- processes, and disks --------------------------------------------------------------------------------------------

FETCH = """
import sys
from pathlib import Path
from farandole.code.unpacked import provide

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
    said = [process.communicate(timeout=60)[0].splitlines() for process in others]
    assert sorted(len(lines) for lines in said) == [1, 2], "one of them fetched it"
    assert {lines[-1] for lines in said} == {str(unpacked.place_of(packed.hash))}
    assert not half.exists()
    assert (unpacked.place_of(packed.hash) / "train.py").read_text() == "T = 1\n"


def _let_go(gate: Path) -> bool:
    """Whoever reads there; False: nobody does yet."""
    try:
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


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
        with pytest.raises(FarandoleError, match=rf"can't be unpacked to .*{found.hash}: No space left .*make room"):
            provide(found)
        assert not unpacked.place_of(found.hash).exists()
        assert not [path for path in (disk / "code").iterdir() if path.name.endswith(".part")]
        os.truncate(next((disk / "code").glob("*.gz")), 0)
        disks.fill(disk)
        with pytest.raises(FarandoleError, match="make room"):
            provide(found)
        (disk / "full").unlink()
        assert not list((disk / "code").glob(".*")), "no half of an archive"
