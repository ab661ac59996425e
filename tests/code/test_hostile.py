"""Archives that are not what a pack is: whatever they say, nothing of them lies, or leads, outside their folder."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farandole.code import pack
from farandole.errors import FarandoleError


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
    with pytest.raises(FarandoleError):
        pack.provide(name, lambda: content)
    assert_inside(tmp_path, name, there=False)


@pytest.mark.parametrize("pax", [{"GNU_sparse_major": "1", "GNU_sparse_minor": "0", "GNU_sparse_realsize": "9" * 12}])
def test_a_file_that_claims_more_than_there_is(pax: dict[str, str], tmp_path: Path) -> None:
    name, content = archive([entry("a", **pax)])
    with pytest.raises(FarandoleError):
        pack.provide(name, lambda: content)
    assert_inside(tmp_path, name, there=False)


def assert_inside(tmp_path: Path, name: str, *, there: bool) -> None:
    """Nothing of it lies, or leads, anywhere else."""
    place = pack.place_of(name)
    assert place.exists() == there
    assert not Path("/tmp/evil").exists()
    known = (".lock", pack.ARCHIVE)
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
        pack.provide(name, lambda: gzip.compress(plain, mtime=0))
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
        patch.setattr(pack, "MOST_PLAIN", 100_000)
        plain = bytes(10_000_000)
        with pytest.raises(FarandoleError, match=pack.digest(plain)):
            pack.provide(pack.digest(plain), lambda: gzip.compress(plain))
    monkeypatch.setattr(pack, "MOST_FILES", 3)
    name, content = archive(entry(str(number)) for number in range(4))
    with pytest.raises(FarandoleError, match=r"\b3\b"):
        pack.provide(name, lambda: content)
