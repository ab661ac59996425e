"""The run's code as one file, for hosts that have nothing of it: packed once as the run starts.

Which files that are is `listing.py`'s matter, what looks like a secret `withheld.py`'s; `unpacked.py` is the other end.
Each file is read once, and what the local workers execute is taken from the pack too (`modules`): so an edit at any
moment makes nobody differ. Invariant: the same files give the same hash, whatever their times, owners and order, and
whichever zlib compresses them; it is a fact of every worker's signature.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole.code import withheld
from farandole.code.listing import Listing, link, listing
from farandole.errors import UsageError

FACT = "code pack"
MOST_BYTES = 100_000_000
NAMED = 5
DIGITS = 32


@dataclass(frozen=True, kw_only=True)
class Pack:
    """`content`: a tar file, compressed. `script` and `files`: names within, relative to the working folder.

    `left_out`: secrets. `astray`: links that lead out. `gone`: files that vanished meanwhile.
    """

    content: bytes
    hash: str
    script: str
    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    astray: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    note: str = ""

    @property
    def said(self) -> Iterator[str]:
        """For whoever starts the run."""
        yield f"packed {len(self.files)} files for other hosts, {len(self.content) / 1e6:.1f} MB"
        if self.note:
            yield f"note: {self.note}"
        if self.left_out:
            yield (
                f"left out as secrets: {', '.join(self.left_out)}; what other hosts need of them, a line of --files "
                f"has to name"
            )
        if self.astray:
            yield f"left out, as links that lead out of the working folder: {_some(self.astray)}"
        if self.gone:
            yield f"left out, as they vanished while being packed: {_some(self.gone)}"

    def modules(self) -> Iterator[tuple[str, bytes]]:
        """Each Python file, and what is in it."""
        with gzip.GzipFile(fileobj=io.BytesIO(self.content)) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for entry in archive.getmembers():
                if entry.name.endswith(".py") and (source := archive.extractfile(entry)):
                    yield entry.name, source.read()


def pack(folder: Path, script: str, listed: Path | None = None, *, run: Path | None = None) -> Pack:
    """What is to be packed of `folder`, and `script` in any case. `listed`: a list, in place of git's view. `run`: the
    run's own folder, which does not go along.

    Raises:
        UsageError: the script is elsewhere, the list names what is not there, a file can't be read, or it is more than
            `MOST_BYTES`.
    """
    folder = folder.resolve()
    name = within(folder, script)
    needed = tuple({name: None, within(folder, os.path.realpath(folder / name)): None})
    chosen = listing(folder, listed, needed=needed, run=run)
    _check_sizes(chosen)
    return _packed(chosen, name)


def within(folder: Path, script: str) -> str:
    """What the file `script` is called in `folder`.

    Raises:
        UsageError: it is elsewhere.
    """
    for path in (os.path.abspath(script), os.path.realpath(script)):
        if Path(path).is_relative_to(folder):
            return str(Path(path).relative_to(folder))
    raise UsageError(
        f"script {script} is not in the working folder {folder}, which goes to other hosts: start the run in a folder "
        f"that holds the script and what it imports"
    )


def _check_sizes(chosen: Listing) -> None:
    sizes: dict[str, int] = {}
    for name in chosen.names:
        try:
            info = os.lstat(chosen.folder / name)
        except OSError:
            continue
        sizes[name] = info.st_size if stat.S_ISREG(info.st_mode) else 0
    if sum(sizes.values()) > MOST_BYTES:
        largest = [f"{n} ({sizes[n] / 1e6:.0f} MB)" for n in sorted(sizes, key=lambda n: -sizes[n])[:NAMED]]
        raise UsageError(
            f"{chosen.folder} has {sum(sizes.values()) / 1e6:.0f} MB to pack for other hosts, and at most "
            f"{MOST_BYTES / 1e6:.0f} can be; the largest: {', '.join(largest)}; have git ignore what is no code, or "
            f"list what is needed with --files"
        )


def _packed(chosen: Listing, script: str) -> Pack:
    plain, kept = io.BytesIO(), list[str]()
    secrets, gone, left = list(chosen.secrets), list[str](), MOST_BYTES
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in chosen.names:
            try:
                entry, content = _entry(chosen.folder, name)
            except FileNotFoundError:
                gone.append(name)
                continue
            except OSError as error:
                raise UsageError(
                    f"{chosen.folder / name} can't be packed for other hosts: {error.strerror}; have git ignore it, "
                    f"or list what is needed with --files"
                ) from None
            if withheld.by_content(content) and name not in chosen.named:
                secrets.append(name)
                continue
            left -= len(content)
            if left < 0:
                raise UsageError(f"{chosen.folder / name} grows while it is packed: {len(content)} bytes by now")
            archive.addfile(entry, io.BytesIO(content))
            kept.append(name)
    if script not in kept:
        raise UsageError(f"script {script} vanished while it was packed for other hosts")
    return Pack(
        content=gzip.compress(plain.getvalue(), mtime=0), hash=digest(plain.getvalue()), script=script,
        files=tuple(kept), left_out=tuple(sorted(secrets)), astray=chosen.astray, gone=tuple(gone), note=chosen.said,
    )  # fmt: skip


def digest(plain: bytes) -> str:
    """The hash of a pack, before it is compressed."""
    return hashlib.sha256(plain).hexdigest()[:DIGITS]


def _entry(folder: Path, name: str) -> tuple[tarfile.TarInfo, bytes]:
    """One file as it is now, without its times and owner. Raises OSError: it can't be read, or is not there."""
    path, entry = folder / name, tarfile.TarInfo(name)
    if path.is_symlink():
        entry.type, entry.linkname = tarfile.SYMTYPE, link(folder, name) or ""
        if not entry.linkname:
            raise FileNotFoundError(name)
        return entry, b""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise FileNotFoundError(name)
        content = file.read(MOST_BYTES + 1)
    entry.size, entry.mode = len(content), 0o700 if info.st_mode & stat.S_IXUSR else 0o600
    return entry, content


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
