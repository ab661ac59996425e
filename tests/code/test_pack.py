"""The run's code as other hosts get it: what is packed, what is left out, and that nothing else can be unpacked."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.code import copies, pack
from farandole.errors import FarandoleError, UsageError


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def files(folder: Path, **content: str) -> Path:
    for name, text in content.items():
        place = folder / name.replace("__", "/").replace("_dot_", ".")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


def project(tmp_path: Path) -> Path:
    return files(
        tmp_path / "project", train_dot_py="import lib", lib__a_dot_py="A = 1", _dot_env="PASSWORD=x",
        data__big="1" * 50, id_rsa="key", runs__old__log="l", lib____pycache____a_dot_pyc="x", keys__site_dot_pem="k",
    )  # fmt: skip


def test_all_but_secrets_and_what_is_no_code(tmp_path: Path) -> None:
    folder = project(tmp_path)
    packed = pack.pack(folder, str(folder / "train.py"))
    assert packed.files == ("data/big", "lib/a.py", "train.py")
    assert packed.left_out == (".env", "id_rsa", "keys/site.pem")
    assert "id_rsa" in packed.said
    assert b"PASSWORD" not in gzip.decompress(packed.content)


def test_as_git_sees_it(tmp_path: Path) -> None:
    """Tracked and new files as they are now, nothing that is ignored or deleted."""
    folder = project(tmp_path)
    files(folder, _dot_gitignore="data\n", gone_dot_py="x", new_dot_py="y")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "train.py", "gone.py"], cwd=folder, check=True)
    (folder / "gone.py").unlink()
    assert pack.pack(folder, str(folder / "train.py")).files == (".gitignore", "lib/a.py", "new.py", "train.py")


def test_the_files_of_a_list(tmp_path: Path) -> None:
    folder = project(tmp_path)
    listed = files(folder, list="# what goes\ntrain.py\nlib\nkeys\n") / "list"
    packed = pack.pack(folder, str(folder / "train.py"), listed)
    assert packed.files == ("lib/a.py", "train.py")
    assert packed.left_out == ("keys/site.pem",)
    for line, why in (("none*", "fits no file"), ("../x", "not below"), ("/etc/passwd", "not below")):
        listed.write_text(f"train.py\n{line}\n")
        with pytest.raises(UsageError, match=f"line 2.*{why}"):
            pack.pack(folder, str(folder / "train.py"), listed)


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    folder = project(tmp_path)
    first = pack.pack(folder, str(folder / "train.py"))
    os.utime(folder / "train.py", (1, 1))
    assert pack.pack(folder, str(folder / "train.py")) == first
    (folder / "lib" / "a.py").write_text("A = 2")
    assert pack.pack(folder, str(folder / "train.py")).hash != first.hash


def test_what_can_not_be_packed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project(tmp_path)
    outside = files(tmp_path, other_dot_py="") / "other.py"
    with pytest.raises(UsageError, match=r"other.py is not in the working folder"):
        pack.pack(folder, str(outside))
    with pytest.raises(UsageError, match="would not be packed"):
        pack.pack(folder, str(folder / "lib" / "missing.py"))
    monkeypatch.setattr(pack, "MOST_BYTES", 40)
    with pytest.raises(UsageError, match=r"data/big .*--files"):
        pack.pack(folder, str(folder / "train.py"))


def test_links_that_lead_out_are_left_out(tmp_path: Path) -> None:
    folder = project(tmp_path)
    (folder / "out").symlink_to("/etc/hostname")
    (folder / "in").symlink_to("train.py")
    assert pack.pack(folder, str(folder / "train.py")).files == ("data/big", "in", "lib/a.py", "train.py")


def test_it_comes_whole_and_private_and_once(tmp_path: Path) -> None:
    folder = project(tmp_path)
    (folder / "train.py").chmod(0o755)
    packed = pack.pack(folder, str(folder / "train.py"))
    place = pack.unpack(packed.content, packed.hash)
    assert (place / "lib" / "a.py").read_text() == "A = 1"
    assert os.access(place / "train.py", os.X_OK)
    assert {path.lstat().st_mode & 0o077 for path in (place, *place.rglob("*"))} == {0}
    (place / "mine").touch()
    assert pack.unpack(packed.content, packed.hash) == place
    assert (place / "mine").exists(), "it was there already"


def archive(*entries: tarfile.TarInfo, content: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for entry in entries:
            entry.size = len(content) if entry.isreg() else 0
            made.addfile(entry, io.BytesIO(content))
    return gzip.compress(buffer.getvalue())


def link(kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo("link")
    entry.type, entry.linkname = kind, "/etc/passwd"
    return entry


HOSTILE = {
    "absolute": archive(tarfile.TarInfo("/tmp/evil")),
    "upwards": archive(tarfile.TarInfo("a/../../evil")),
    "symbolic link": archive(link(tarfile.SYMTYPE)),
    "hard link": archive(link(tarfile.LNKTYPE)),
    "device": archive(link(tarfile.CHRTYPE)),
    "no archive": b"nothing",
    "torn": archive(tarfile.TarInfo("a"), content=b"x" * 10_000)[:60],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_pack_holds_is_not_unpacked(what: str) -> None:
    content = HOSTILE[what]
    digest = hashlib.sha256(content).hexdigest()[:32]
    with pytest.raises(FarandoleError, match="can't be unpacked"):
        pack.unpack(content, digest)
    assert not pack.place_of(digest).exists()
    assert not Path("/tmp/evil").exists()


def test_more_than_can_be_packed_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive(tarfile.TarInfo("a"), content=bytes(1000))
    monkeypatch.setattr(pack, "MOST_BYTES", 999)
    with pytest.raises(FarandoleError, match="can't be unpacked"):
        pack.unpack(content, hashlib.sha256(content).hexdigest()[:32])


def test_another_hash_is_told(tmp_path: Path) -> None:
    folder = project(tmp_path)
    with pytest.raises(FarandoleError, match="damaged"):
        pack.unpack(pack.pack(folder, str(folder / "train.py")).content, "0" * 32)


@given(st.binary(max_size=300))
def test_any_bytes_raise_our_error_or_nothing(content: bytes) -> None:
    with suppress(FarandoleError):
        pack.unpack(content, hashlib.sha256(content).hexdigest()[:32])


def test_local_workers_execute_what_was_packed(tmp_path: Path) -> None:
    """An edit after the start makes nobody differ."""
    folder = project(tmp_path)
    packed = pack.pack(folder, str(folder / "train.py"))
    kept = tmp_path / "kept"
    copies.keep(str(folder / "train.py"), kept)
    copies.seed(kept, folder, packed.files)
    (folder / "lib" / "a.py").write_text("A = 2")
    assert copies.copied(kept, Path("lib", "a.py"), str(folder / "lib" / "a.py")) == b"A = 1"
    assert not (kept / "data").exists()
