"""The run's code as other hosts get it: which files, what stays here, and that the same files are the same pack."""

from __future__ import annotations

import gzip
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from farandole.code import copies, listing, pack, withheld
from farandole.code.pack import Pack
from farandole.errors import UsageError

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU\n"


def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return put(tmp_path / "project", {"train.py": "import lib.a\n", "lib/a.py": "A = 1\n", "data/big": "1" * 50})


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def packed(folder: Path, listed: Path | None = None) -> Pack:
    return pack.pack(folder, str(folder / "train.py"), listed)


def plain(content: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=BytesIO(gzip.decompress(content))) as archive:
        return {entry.name: entry for entry in archive}


# --- which files -----------------------------------------------------------------------------------------------------


def test_without_git_all_but_what_is_no_code(folder: Path) -> None:
    """A folder is told by what is in it: a package may well be called env, or runs."""
    put(
        folder,
        {
            "env/cartpole.py": "", "runs/__init__.py": "", "runs/old/code/origin.json": "{}", "runs/old/ticket": "x",
            "lib/__pycache__/a.pyc": "x", "my-env/pyvenv.cfg": "", "my-env/lib/x.py": "", "node_modules/x.js": "",
            ".mypy_cache/x": "",
        },
    )  # fmt: skip
    os.mkfifo(folder / "pipe")
    assert packed(folder).files == ("data/big", "env/cartpole.py", "lib/a.py", "runs/__init__.py", "train.py")


def test_as_git_sees_it(folder: Path) -> None:
    """Tracked and new files as they are now, nothing that is ignored or deleted; nothing of the folder above."""
    put(folder, {".gitignore": "data\n*.log\n", "gone.py": "x", "new.py": "y", "x.log": "", "staged.py": "old"})
    put(folder.parent, {"above.py": ""})
    git(folder.parent, "init", "-q")
    git(folder, "add", "train.py", "gone.py", "staged.py")
    (folder / "gone.py").unlink()
    (folder / "staged.py").write_text("dirty")
    found = packed(folder)
    assert found.files == (".gitignore", "lib/a.py", "new.py", "staged.py", "train.py")
    assert dict(found.modules())["staged.py"] == b"dirty"


def test_repositories_within_are_seen_by_themselves(folder: Path, tmp_path: Path) -> None:
    other = put(tmp_path / "other", {"sub.py": "", ".gitignore": "no\n", "no": ""})
    for place in (other, folder):
        git(place, "init", "-q")
        git(place, "add", "-A")
        git(place, "commit", "-qm", "x")
    git(folder, "submodule", "add", "-q", str(other), "vendored")
    git(folder, "clone", "-q", str(other), "cloned")
    put(folder, {"cloned/no": "", "vendored/no": "", "vendored/new.py": ""})
    assert {name for name in packed(folder).files if "/" in name} == {
        "lib/a.py", "data/big", "vendored/sub.py", "vendored/.gitignore", "vendored/new.py", "cloned/sub.py",
        "cloned/.gitignore",
    }  # fmt: skip


def test_git_that_can_not_tell_is_an_error_and_not_everything(folder: Path) -> None:
    """Else what it would have ignored went to other hosts."""
    git(folder, "init", "-q")
    (folder / ".git" / "index").write_text("rubbish")
    with pytest.raises(UsageError, match=r"git can't say what is in .*--files"):
        packed(folder)


def test_where_there_is_no_git_for_a_repository_that_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(folder, "init", "-q")
    monkeypatch.setenv("PATH", "")
    assert any("no git here" in line for line in packed(folder).said)


def test_all_that_is_ignored_is_not_all_there_is(folder: Path) -> None:
    """Nothing to see is another thing than no git; the script goes along in any case."""
    put(folder, {".gitignore": "*\n"})
    git(folder, "init", "-q")
    assert packed(folder).files == ("train.py",)


def test_the_runs_own_folder_stays(folder: Path) -> None:
    put(folder, {"mine/lock": ""})
    assert "mine/lock" not in pack.pack(folder, str(folder / "train.py"), run=folder / "mine").files


def test_the_files_of_a_list(folder: Path) -> None:
    put(folder, {"lib/b.txt": "", "configs/x/a.yml": "", "keys/site.pem": "k", "secret.pem": "s"})
    listed = put(folder, {"list": "# what goes\n\nlib  # all of it\nconfigs/**/*.yml\nkeys\nsecret.pem\n"}) / "list"
    found = packed(folder, listed)
    assert found.files == ("configs/x/a.yml", "lib/a.py", "lib/b.txt", "secret.pem", "train.py")
    assert found.left_out == ("keys/site.pem",), "whose very name stands there goes along"
    listed.write_text(".\n")
    assert set(packed(folder, listed).files) > {"data/big", "lib/a.py", "train.py"}
    (folder / "way").symlink_to("lib")
    for line, why in (
        ("none*", "no such file"), ("../x", "not within"), ("/etc/passwd", "not within"), ("way/a.py", "symbolic link"),
    ):  # fmt: skip
        listed.write_text(f"train.py\n{line}\n")
        with pytest.raises(UsageError, match=f"list, line 2.*{why}"):
            packed(folder, listed)
    with pytest.raises(UsageError, match=r"--files .*No such file"):
        packed(folder, folder / "missing")
    listed.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not text"):
        packed(folder, listed)


# --- links -----------------------------------------------------------------------------------------------------------


def test_links_within_stay_links_and_those_that_lead_out_stay_here(folder: Path) -> None:
    put(folder, {"src/run.py": "import near\n", "src/near.py": ""})
    for name, target in {
        "out": "/etc/hostname", "up": "..", "nowhere": "none", "chain": "out", "loop": "loop", "self": ".",
        "in": "lib/a.py", "lib/whole": str(folder / "src"), "start.py": "src/run.py",
    }.items():  # fmt: skip
        (folder / name).symlink_to(target)
    found = pack.pack(folder, str(folder / "start.py"))
    links = {name: entry.linkname for name, entry in plain(found.content).items() if entry.issym()}
    assert links == {"in": "lib/a.py", "lib/whole": "../src", "start.py": "src/run.py"}
    assert found.astray == ("chain", "loop", "nowhere", "out", "self", "up")
    assert any("links that lead out of the working folder: chain, " in line for line in found.said)
    assert dict(found.modules())["start.py"] == b"import near\n"


def test_a_script_that_is_a_link_brings_what_it_leads_to(folder: Path) -> None:
    put(folder, {".gitignore": "src\n", "src/run.py": ""})
    git(folder, "init", "-q")
    (folder / "train.py").unlink()
    (folder / "train.py").symlink_to("src/run.py")
    assert {"train.py", "src/run.py"} <= set(packed(folder).files)


# --- secrets ---------------------------------------------------------------------------------------------------------

SECRET = [
    ".env", "sub/.env.local", "prod.env", ".netrc", ".aws/config", "keys/site.pem", "id_rsa", "deep/ID_ED25519",
    ".ssh/x", "credentials", "credentials.json", "bob.ticket", "a.tfstate", ".git-credentials", ".pypirc", "x.p12",
]  # fmt: skip
OPEN = [
    "train.py", "secrets.py", "id_map.py", ".env.example", "credentials.py", "ticket/sale.py", "monkey.py",
    "keys/names.py", "env/cartpole.py", "environment.yml",
]  # fmt: skip


def test_by_name() -> None:
    assert [name for name in SECRET if not withheld.by_name(name)] == []
    assert [name for name in OPEN if withheld.by_name(name)] == []


def test_by_content() -> None:
    ticket = f'{{"address":"http://127.0.0.1:1","secret":"{"a" * 64}","run":"r"}}'
    service = '{"private_key": "-----BEGIN PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG9w0B"}'
    for secret in (KEY, ticket, service, f"aws_secret_access_key = {'A' * 40}", "PuTTY-User-Key-File-2: ssh-rsa"):
        assert withheld.by_content(secret.encode()), secret
    for harmless in ('BEGIN = "-----BEGIN PRIVATE KEY-----"', "-----BEGIN CERTIFICATE-----\nMIIEvQIBADANBgkqhkiG", ""):
        assert not withheld.by_content(harmless.encode()), harmless


def test_they_stay_here_and_are_named(folder: Path) -> None:
    put(folder, {".env": "PASSWORD=hush", "notes/key": KEY, "sub/.netrc": "hush"})
    git(folder, "init", "-q")
    git(folder, "add", "-f", ".")
    found = packed(folder)
    assert found.left_out == (".env", "notes/key", "sub/.netrc")
    assert "left out as secrets: .env, notes/key, sub/.netrc; " in "\n".join(found.said)
    assert not any(word in gzip.decompress(found.content) for word in (b"hush", b"OPENSSH", b".netrc"))


# --- the same files, the same pack -----------------------------------------------------------------------------------


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
    entries = plain(first.content).values()
    assert {(e.mtime, e.uid, e.gid, e.uname, e.gname) for e in entries} == {(0, 0, 0, "", "")}


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
    assert set(plain(first.content)) == set(first.files)
    assert packed(folder) == first


# --- what can't be ---------------------------------------------------------------------------------------------------


def test_what_can_not_be_packed_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {"other.py": ""})
    with pytest.raises(UsageError, match=r"other.py is not in the working folder .*start the run in a folder that"):
        pack.pack(folder, str(tmp_path / "other.py"))
    put(folder, {"m/small": "1" * 10})
    monkeypatch.setattr(pack, "MOST_BYTES", 60)
    with pytest.raises(UsageError, match=r"at most 0 can be; the largest: data/big \(0 MB\), train.py .*--files"):
        packed(folder)
    monkeypatch.setattr(listing, "MOST_FILES", 3)
    with pytest.raises(UsageError, match=r"more than 3 files .*--files"):
        packed(folder)


def test_a_script_that_vanishes(folder: Path) -> None:
    (folder / "train.py").unlink()
    with pytest.raises(UsageError, match=r"script train.py vanished"):
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
    chosen = listing.listing(folder, needed=("train.py",))
    assert "lib/a.py" in chosen.names
    change(folder / "lib" / "a.py")
    found = pack._packed(chosen, "train.py")
    assert (found.files, found.gone) == (("data/big", "train.py"), ("lib/a.py",))
    assert any("vanished while being packed: lib/a.py" in line for line in found.said)


def test_a_file_that_grows_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = listing.listing(folder)
    monkeypatch.setattr(pack, "MOST_BYTES", 50_000)
    (folder / "data" / "big").write_bytes(bytes(200_000))
    with pytest.raises(UsageError, match="data/big grows while it is packed"):
        pack._packed(chosen, "train.py")


# --- on this machine -------------------------------------------------------------------------------------------------


def test_local_workers_execute_what_was_packed(folder: Path, tmp_path: Path) -> None:
    """An edit after the first byte was read makes nobody differ: neither in the script nor in a module."""
    put(folder, {"jobs/run.py": "RUN = 1\n", "jobs/deep/near.py": "NEAR = 1\n"})
    script, kept = str(folder / "jobs" / "run.py"), tmp_path / "kept"
    found = pack.pack(folder, script)
    for name in ("jobs/run.py", "jobs/deep/near.py", "lib/a.py"):
        (folder / name).write_text("edited")
    copies.keep(script, kept, copies.below(script, folder, found.modules()))
    assert (kept / "run.py").read_text() == "RUN = 1\n"
    assert copies.copied(kept, Path("deep", "near.py"), str(folder / "jobs/deep/near.py")) == b"NEAR = 1\n"
    names = {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()}
    assert names == {"run.py", "deep/near.py", copies.ORIGIN}, "of the script's own folder, and Python alone"
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in kept.rglob("*")} == {0}
