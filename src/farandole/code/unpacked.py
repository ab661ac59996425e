"""A run's code on a host that has nothing of it: one folder for each pack, `~/.cache/farandole/code/HASH`.

Invariants: the folder appears whole or not at all; what it has of the pack is the pack's, looked at again whenever
somebody is about to begin there; nothing is written outside it, whatever the archive says; one process at a time. An
archive is taken only if its hash is the one that was named, and then no entry but plain files and links within.

What scripts and `--setup` put there beside it stays, for the next run of the same pack as well. Left out: removing
folders that nobody needs any more; they may be, when no run is on.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import logging
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Generator
from pathlib import Path, PurePosixPath

from farandole.code.listing import MOST_FILES
from farandole.code.pack import DIGITS, MOST_BYTES, digest
from farandole.errors import FarandoleError
from farandole.platform import file_lock, private

_log = logging.getLogger(__name__)

FOLDER = Path("~/.cache/farandole/code")
ARCHIVE = ".tar.gz"
_NO_LOCKS = "two workers would unpack the run's code at once; have the user's home, or its ~/.cache, on one that does"
MOST_PLAIN = MOST_BYTES + 4096 * MOST_FILES  # with the headers
Entry = tuple[tarfile.TarInfo, bytes]


def place_of(pack: str) -> Path:
    """Where a pack is unpacked on this host, for whichever runs have it.

    Raises:
        FarandoleError: that is no pack's hash.
    """
    if len(pack) != DIGITS or not set(pack) <= set("0123456789abcdef"):
        raise FarandoleError(
            f"{pack[:DIGITS]!r} is not the hash of a run's code: the coordinator is of another version"
        )
    return FOLDER.expanduser() / pack


def provide(pack: str, fetch: Callable[[], bytes]) -> Path:
    """The folder in which `pack` is, whole. `fetch` gets it, if it is not here yet.

    Raises:
        FarandoleError: it is damaged, holds what no pack does, or there is no room. And what `fetch` raises.
    """
    place = place_of(pack)
    try:
        private.make(place.parent)
        with _locked(place):
            archive = place.with_name(pack + ARCHIVE)
            plain = _kept(archive, pack)
            if plain is None:
                content = fetch()
                plain = _plain(content, pack)
                _keep(content, archive)
            if place.is_dir():
                _mend(plain, place)
            else:
                _unpack(plain, place)
    except OSError as error:
        if isinstance(error, FarandoleError):
            raise
        room = "; make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise FarandoleError(f"the run's code can't be unpacked to {place}: {error.strerror}{room}") from None
    return place


def set_up_mark(folder: Path, name: str) -> tuple[Path, Path]:
    """A file that says that something was done in a pack's `folder`, which goes with that; and a lock for doing it."""
    return folder.with_name(f"{folder.name}.{name}.done"), folder.with_name(f"{folder.name}.setup")


@contextlib.contextmanager
def _locked(place: Path) -> Generator[None]:
    with open(place.with_name(f"{place.name}.lock"), "ab", opener=private.opener) as lock:
        file_lock.take(lock.fileno(), place.parent, _NO_LOCKS, wait=True)
        yield


def _kept(archive: Path, pack: str) -> bytes | None:
    """What was fetched before, None if nothing was, or it is damaged."""
    try:
        return _plain(private.read(archive), pack)
    except FileNotFoundError:
        return None
    except FarandoleError:
        _log.warning("%s is damaged, and fetched anew", archive)
        return None


def _plain(content: bytes, pack: str) -> bytes:
    """Raises FarandoleError where it is not that pack."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            plain = file.read(MOST_PLAIN + 1)
    except (OSError, EOFError, zlib.error):
        plain = b""
    if len(plain) > MOST_PLAIN or digest(plain) != pack:
        raise FarandoleError(f"the run's code is damaged: {len(content)} bytes have come that are not pack {pack}")
    return plain


def _keep(content: bytes, archive: Path) -> None:
    beside = archive.with_name(f".{archive.name}")
    try:
        private.write(beside, content)
        os.replace(beside, archive)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _unpack(plain: bytes, place: Path) -> None:
    beside = place.with_name(f"{place.name}.part")
    shutil.rmtree(beside, ignore_errors=True)  # of one that was killed
    for done in place.parent.glob(f"{place.name}.*.done"):
        done.unlink(missing_ok=True)
    try:
        private.make(beside)
        _extract(plain, beside)
        os.rename(beside, place)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _mend(plain: bytes, place: Path) -> None:
    """Put back what is not as it was packed."""
    for entry, content in _entries(plain):
        path = place / entry.name
        with contextlib.suppress(OSError):
            if (os.readlink(path) == entry.linkname) if entry.issym() else (private.read(path) == content):
                continue
        _log.warning("%s is not as it was packed, and put back", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        _write(entry, content, place)


def _extract(plain: bytes, folder: Path) -> None:
    """Links come last, so that no file is written through one; and none may lead out, by whatever other links."""
    links: list[Path] = []
    for entry, content in _entries(plain):
        if entry.issym():
            links.append(folder / entry.name)
        _write(entry, content, folder)
    root = os.path.realpath(folder)
    for path in links:
        if not Path(os.path.realpath(path)).is_relative_to(root):
            raise _unfit(path.name)


def _entries(plain: bytes) -> list[Entry]:
    """Plain files, then links.

    Raises:
        FarandoleError: there is anything else, or more than can be packed.
    """
    files: list[Entry] = []
    links: list[Entry] = []
    left = len(plain)  # a sparse file claims more
    try:
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
            for entry in archive:
                left -= entry.size
                if left < 0:
                    raise _unfit(entry.name)
                made = _looked_at(entry, archive)
                (links if entry.issym() else files).append(made)
                if len(files) + len(links) > MOST_FILES:
                    raise FarandoleError(f"the run's code can't be unpacked: it has more than {MOST_FILES} files")
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        if isinstance(error, FarandoleError):
            raise
        raise FarandoleError(f"the run's code can't be unpacked: {error}") from None
    return files + links


def _looked_at(entry: tarfile.TarInfo, archive: tarfile.TarFile) -> Entry:
    """Raises FarandoleError where a pack has no such entry."""
    name = PurePosixPath(entry.name)
    if not name.parts or name.is_absolute() or ".." in name.parts or "\0" in entry.name + entry.linkname:
        raise _unfit(entry.name)
    if entry.issym():
        target = os.path.normpath(name.parent / entry.linkname)
        if entry.linkname and not os.path.isabs(target) and target.partition("/")[0] != "..":
            return entry, b""
    elif entry.type == tarfile.REGTYPE and not entry.issparse() and (file := archive.extractfile(entry)):
        return entry, file.read()
    raise _unfit(entry.name)


def _write(entry: tarfile.TarInfo, content: bytes, folder: Path) -> None:
    """Raises OSError: what is there is in the way."""
    path = folder / entry.name
    for parent in reversed(path.relative_to(folder).parents[:-1]):
        (folder / parent).mkdir(mode=private.FOLDER_MODE, exist_ok=True)
    if entry.issym():
        if os.path.realpath(path.parent) != str(Path(os.path.realpath(folder), path.parent.relative_to(folder))):
            raise _unfit(entry.name)  # by way of another link
        os.symlink(entry.linkname, path)
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o700 if entry.mode & 0o100 else 0o600), "wb") as file:
        file.write(content)


def _unfit(name: str) -> FarandoleError:
    return FarandoleError(f"the run's code can't be unpacked: {name!r} is nothing that a pack holds")
