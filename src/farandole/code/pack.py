"""The run's code as one file, for hosts that have nothing of it: packed once as the run starts, unpacked by each host.

What is packed is the working folder as git sees it (tracked and new files, none that git ignores), or the files of a
list, or, where there is no git, all but what is clearly not code. Whatever looks like a secret is left out, and named.
Invariant: the same files give the same bytes, and so the same hash, which is a fact of every worker's signature; and
what is unpacked is whole, the user's own, and nothing of it lies outside its folder.
"""

from __future__ import annotations

import fcntl
import fnmatch
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from farandole.errors import FarandoleError, UsageError
from farandole.platform import private

FACT = "code pack"
MOST_BYTES = 100_000_000
FOLDER = Path("~/.cache/farandole/code")
NAMED = 5
SECRET = (
    *(".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_ed25519*", "id_ecdsa*", "*.ppk", ".netrc"),
    *(".pypirc", ".aws", ".ssh", ".gnupg", ".kube", "credentials", "credentials.*", "secrets.*", "*.ticket", "ticket"),
)
NO_CODE = (
    *(".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "env", "node_modules", "runs", "*.egg-info", ".tox"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".cache", ".ipynb_checkpoints", "*.pyc"),
)


@dataclass(frozen=True, kw_only=True)
class Pack:
    """`content`: a tar file, compressed. `files`: names within, relative to the working folder. `left_out`: secrets."""

    content: bytes
    files: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def said(self) -> str:
        """For whoever starts the run."""
        out = f"; left out as secrets: {', '.join(self.left_out)}" if self.left_out else ""
        return f"packed {len(self.files)} files for other hosts, {len(self.content) / 1e6:.1f} MB{out}"

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.content).hexdigest()[:32]


def pack(folder: Path, script: str, listed: Path | None = None) -> Pack:
    """What is to be packed of `folder`. `listed`: a file with a path or pattern in each line, in place of git's view.

    Raises:
        UsageError: the script is not among it, a line of the list fits nothing, or it is more than `MOST_BYTES`.
    """
    folder = folder.resolve()
    names = _listed(folder, listed) if listed else _seen_by_git(folder) or _all(folder)
    kept = [name for name in sorted(set(names)) if _is_file(folder, name) and not _fits(name, NO_CODE)]
    secret = tuple(name for name in kept if _fits(name, SECRET))
    kept = [name for name in kept if name not in secret]
    inside = Path(script).resolve()
    if not inside.is_relative_to(folder):
        raise UsageError(f"script {script} is not in the working folder {folder}, which goes to other hosts: cd there")
    if str(inside.relative_to(folder)) not in kept:
        raise UsageError(
            f"script {script} would not be packed for other hosts: git ignores it, or the list leaves it out"
        )
    sizes = {name: (folder / name).stat().st_size for name in kept}
    if sum(sizes.values()) > MOST_BYTES:
        largest = ", ".join(f"{n} ({sizes[n] / 1e6:.0f} MB)" for n in sorted(kept, key=lambda n: -sizes[n])[:NAMED])
        raise UsageError(
            f"the working folder has {sum(sizes.values()) / 1e6:.0f} MB to pack for other hosts, and at most "
            f"{MOST_BYTES / 1e6:.0f} can be: {largest}; have git ignore what is no code, or name the files by --files"
        )
    return Pack(content=_content(folder, kept), files=tuple(kept), left_out=secret)


def _content(folder: Path, names: Iterable[str]) -> bytes:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name in names:
            try:
                content = (folder / name).read_bytes()
            except OSError as error:
                raise UsageError(f"{folder / name} can't be packed for other hosts: {error.strerror}") from None
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o700 if os.access(folder / name, os.X_OK) else 0o600
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _seen_by_git(folder: Path) -> list[str]:
    """[] where there is no git, or `folder` is in none of its working trees."""
    words = ["git", "-C", str(folder), "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(words, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name] if done.returncode == 0 else []


def _all(folder: Path) -> list[str]:
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _fits(name, NO_CODE)]
        found += [str(Path(place, name).relative_to(folder)) for name in files]
    return found


def _listed(folder: Path, listed: Path) -> list[str]:
    try:
        lines = [line.strip() for line in listed.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--files {listed}: {error}") from None
    found: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("/") or ".." in Path(line).parts:
            raise UsageError(f"--files {listed}, line {number}: {line} is not below the working folder")
        places = [place for match in folder.glob(line) for place in ((match,) if match.is_file() else match.rglob("*"))]
        if not places:
            raise UsageError(f"--files {listed}, line {number}: {line} fits no file of {folder}")
        found += [str(place.relative_to(folder)) for place in places]
    return found


def _is_file(folder: Path, name: str) -> bool:
    """One whose content is in the folder: git also names what is deleted, and links lead anywhere."""
    place = folder / name
    return place.is_file() and place.resolve().is_relative_to(folder)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(part, pattern) for part in PurePosixPath(name).parts for pattern in patterns)


# --- on another host -------------------------------------------------------------------------------------------------


def place_of(digest: str) -> Path:
    """Where a pack is unpacked on this host, for whichever runs have it."""
    return FOLDER.expanduser() / digest


def unpack(content: bytes, digest: str) -> Path:
    """The folder in which it is. Of several processes the first unpacks it, the others wait.

    Raises:
        FarandoleError: it is damaged, holds what no pack does, or there is no room.
    """
    if hashlib.sha256(content).hexdigest()[:32] != digest:
        raise FarandoleError(f"the run's code is damaged: {len(content)} bytes that are not pack {digest}")
    place = place_of(digest)
    private.make(place.parent)
    with open(place.with_name(f"{digest}.lock"), "ab", opener=private.opener) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():
            return place
        beside = place.with_name(f"{digest}.part")
        shutil.rmtree(beside, ignore_errors=True)
        try:
            private.make(beside)
            _extract(content, beside)
            os.rename(beside, place)
        except (OSError, tarfile.TarError, EOFError, ValueError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise FarandoleError(f"the run's code can't be unpacked to {place}: {error}") from None
    return place


def _extract(content: bytes, folder: Path) -> None:
    """Plain files below `folder`, and no more of them than may have been packed."""
    left = MOST_BYTES
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
        for entry in archive:
            name, left = PurePosixPath(entry.name), left - entry.size
            if not entry.isreg() or name.is_absolute() or ".." in name.parts or left < 0 or not name.parts:
                raise ValueError(f"{entry.name!r} is nothing that a pack holds")
            private.make(folder / name.parent)
            source = archive.extractfile(entry)
            assert source is not None
            private.write(folder / name, source.read())
            if entry.mode & 0o100:
                (folder / name).chmod(0o700)
