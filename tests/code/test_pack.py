"""The same files are the same pack, an edit at any moment makes nobody differ, and what can't be packed is said."""

from __future__ import annotations

import gzip
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.code import pack as copies
from farandole.errors import UsageError
from tests.support.projects import entries, packed, project, put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return project(tmp_path)


def test_the_same_files_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    """Whatever their times, the order in which they were made, the umask, and the folder's name."""
    first = packed(folder)
    old = os.umask(0o077)
    again = put(tmp_path / "again", {"train.py": "import lib.a\n", "data/big": "1" * 50, "lib/a.py": "A = 1\n"})
    os.umask(old)
    os.utime(again / "train.py", (1, 1))
    assert packed(again) == first
    (again / "lib" / "a.py").write_text("A = 2")
    assert packed(again).hash != first.hash
    (folder / "train.py").chmod(0o755)
    assert packed(folder).hash != first.hash, "it can be executed now"
    told = {(e.mtime, e.uid, e.gid, e.uname, e.gname) for e in entries(first.content).values()}
    assert told == {(0, 0, 0, "", "")}


def test_a_secret_anywhere_in_what_is_looked_at_is_left_out(folder: Path) -> None:
    """Not at a file's beginning alone: a notebook, or a list of settings, has it further down."""
    secret = b"aws_secret_access_key = " + b"k" * 40
    deep = {f"at-{before}.txt": b"x\n" * (before // 2) + secret for before in (0, 64, 2000, 64_000)}
    for name, content in deep.items():
        (folder / name).write_bytes(content)
    found = packed(folder)
    assert found.left_out == tuple(sorted(deep))
    assert set(found.files).isdisjoint(deep)
    assert set(entries(found.content)) == set(found.files)


def test_the_hash_is_not_the_compressors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = packed(folder)
    stored = gzip.compress
    monkeypatch.setattr(gzip, "compress", lambda data, mtime: stored(data, compresslevel=0, mtime=mtime))
    other = packed(folder)
    assert (other.hash, other.content == first.content) == (first.hash, False)


def test_names_of_any_bytes(folder: Path) -> None:
    odd = os.fsdecode(b"a\xff\nb.py")
    put(folder, {odd: "", "long/" + "x" * 200 + ".py": "", "ünï.py": ""})
    first = packed(folder)
    assert {odd, "ünï.py", "long/" + "x" * 200 + ".py"} <= set(first.files)
    assert set(entries(first.content)) == set(first.files)
    assert packed(folder) == first


# --- what can't be ---------------------------------------------------------------------------------------------------


@pytest.mark.failure(
    "External workers, pools and machines",
    "the working folder can't be copied to hosts: too large, a script outside it, an empty list, a git error",
)
def test_what_can_not_be_packed_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {"other.py": ""})
    with pytest.raises(UsageError, match=rf"\bother\.py\b.*{re.escape(str(folder))}\b"):
        copies.pack(folder, str(tmp_path / "other.py"))
    put(folder, {"m/small": "1" * 10})
    monkeypatch.setattr(copies, "MOST_BYTES", 60)
    with pytest.raises(UsageError, match=r"\b0 MB\b.*data/big \(0 MB\), train\.py .*--files"):
        packed(folder)
    monkeypatch.setattr(copies, "MOST_FILES", 3)
    with pytest.raises(UsageError, match=r"\b3 .*--files"):
        packed(folder)


def test_a_script_that_vanishes(folder: Path) -> None:
    (folder / "train.py").unlink()
    with pytest.raises(UsageError, match=r"\btrain\.py\b"):
        packed(folder)


def vanishes(path: Path) -> None:
    path.unlink()


def becomes_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def becomes_a_link_out(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize("change", [vanishes, becomes_a_pipe, becomes_a_link_out])
def test_a_file_that_is_another_thing_between_the_listing_and_the_reading(
    change: Callable[[Path], None], folder: Path
) -> None:
    """As an editor or a build does it."""
    chosen = copies.listing(folder, required=("train.py",))
    assert "lib/a.py" in chosen.names
    change(folder / "lib" / "a.py")
    found = copies._packed(chosen, "train.py")
    assert (found.files, found.vanished) == (("data/big", "train.py"), ("lib/a.py",))
    assert any("lib/a.py" in line for line in found.summary)


def test_a_file_that_grows_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = copies.listing(folder)
    monkeypatch.setattr(copies, "MOST_BYTES", 50_000)
    (folder / "data" / "big").write_bytes(bytes(200_000))
    with pytest.raises(UsageError, match=r"data/big\b.*\b\d+ bytes"):
        copies._packed(chosen, "train.py")


# --- on this machine -------------------------------------------------------------------------------------------------


def test_local_workers_execute_what_was_packed(folder: Path, tmp_path: Path) -> None:
    """An edit after the first byte was read makes nobody differ: neither in the script nor in a module."""
    put(folder, {"jobs/run.py": "RUN = 1\n", "jobs/deep/near.py": "NEAR = 1\n"})
    script, kept = str(folder / "jobs" / "run.py"), tmp_path / "kept"
    found = copies.pack(folder, script)
    for name in ("jobs/run.py", "jobs/deep/near.py", "lib/a.py"):
        (folder / name).write_text("edited")
    copies.keep(script, kept, copies.below(script, folder, found.modules()))
    assert (kept / "run.py").read_text() == "RUN = 1\n"
    assert copies.copied(kept, Path("deep", "near.py"), str(folder / "jobs/deep/near.py")) == b"NEAR = 1\n"
    names = {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()}
    assert names == {"run.py", "deep/near.py", copies.ORIGIN}, "of the script's own folder, and Python alone"
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in kept.rglob("*")} == {0}
