"""Which files go to other hosts, and which stay here: ignored ones, links that lead out, secrets."""

from __future__ import annotations

import errno
import gzip
import os
import re
from pathlib import Path

import pytest

from farandole.code import pack
from farandole.errors import UsageError
from tests.support.projects import entries, git, packed, project, put

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return project(tmp_path)


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


@pytest.mark.failure(
    "External workers, pools and machines",
    "the working folder can't be copied to hosts: too large, a script outside it, an empty list, a git error",
)
def test_git_that_can_not_tell_is_an_error_and_not_everything(folder: Path) -> None:
    """Else what it would have ignored went to other hosts."""
    git(folder, "init", "-q")
    (folder / ".git" / "index").write_text("rubbish")
    with pytest.raises(UsageError, match=rf"\bgit\b.*{re.escape(str(folder))}\b.*--files"):
        packed(folder)


def test_where_there_is_no_git_for_a_repository_that_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(folder, "init", "-q")
    monkeypatch.setenv("PATH", "")
    assert any(re.search(r"\bgit\b", line) for line in packed(folder).summary)


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
    for line, named in (
        ("none*", ""), ("../x", str(folder)), ("/etc/passwd", str(folder)), ("way/a.py", str(folder / "way")),
    ):  # fmt: skip
        listed.write_text(f"train.py\n{line}\n")
        with pytest.raises(UsageError, match=rf"list, line 2\b.*{re.escape(named)}"):
            packed(folder, listed)
    with pytest.raises(UsageError, match=rf"--files .*missing.*{os.strerror(errno.ENOENT)}"):
        packed(folder, folder / "missing")
    listed.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"--files .*list"):
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
    links = {name: entry.linkname for name, entry in entries(found.content).items() if entry.issym()}
    assert links == {"in": "lib/a.py", "lib/whole": "../src", "start.py": "src/run.py"}
    assert found.astray == ("chain", "loop", "nowhere", "out", "self", "up")
    assert any(found.astray[0] in line for line in found.summary)
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
    assert [name for name in SECRET if not pack.by_name(name)] == []
    assert [name for name in OPEN if pack.by_name(name)] == []


def test_by_content() -> None:
    ticket = f'{{"address":"http://127.0.0.1:1","secret":"{"a" * 64}","run":"r"}}'
    service = '{"private_key": "-----BEGIN PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG9w0B"}'
    for secret in (KEY, ticket, service, f"aws_secret_access_key = {'A' * 40}", "PuTTY-User-Key-File-2: ssh-rsa"):
        assert pack.by_content(secret.encode()), secret
    for harmless in ('BEGIN = "-----BEGIN PRIVATE KEY-----"', "-----BEGIN CERTIFICATE-----\nMIIEvQIBADANBgkqhkiG", ""):
        assert not pack.by_content(harmless.encode()), harmless


def test_they_stay_here_and_are_named(folder: Path) -> None:
    put(folder, {".env": "PASSWORD=hush", "notes/key": KEY, "sub/.netrc": "hush"})
    git(folder, "init", "-q")
    git(folder, "add", "-f", ".")
    found = packed(folder)
    assert found.left_out == (".env", "notes/key", "sub/.netrc")
    assert any(all(name in line for name in found.left_out) for line in found.summary)
    assert not any(word in gzip.decompress(found.content) for word in (b"hush", b"OPENSSH", b".netrc"))
