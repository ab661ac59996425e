"""The run's code as one file, for hosts that do not have it: packed once when the run starts.

This file also selects the files, withholds those that look like a secret, and unpacks them on the other hosts. Each
file is read once, and local workers execute the packed content too (`modules`): so an edit at any time does not make
workers differ. Invariant: the same files give the same hash, for any times, owners and order, and for any version of
zlib that compresses them. The hash is a fact of every worker's signature.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from farandole.errors import FarandoleError, UsageError
from farandole.platform import files as file_lock

# --- withheld ---------------------------------------------------------------------------------------------------------
#
# The files of a working folder that are not packed: those that look like a secret, by name or by content. Pure.
#
# It is a safety net, not a guarantee: a password in a script's text is not detected. Withheld files are reported by
# name. A user who needs one on the other hosts names the file itself in a list (`--files`).

LOOKED_AT = 64 * 1024  # bytes that are searched at a file's beginning
FOLDERS = {".aws", ".ssh", ".gnupg", ".azure", ".gcloud", ".kube", ".docker", ".kaggle"}
NAMES = {
    ".env", ".netrc", "_netrc", ".pgpass", ".pypirc", ".git-credentials", ".htpasswd", ".boto", ".s3cfg",
    ".vault-token", ".dockercfg", ".aws", ".credentials", "credentials", "credentials.json", "kubeconfig",
    "kaggle.json", "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk",
}  # fmt: skip
SUFFIXES = (".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".kdbx", ".ppk", ".ticket", ".tfstate", ".env")
SHOWN = {"example", "sample", "template", "dist"}  # a file such as .env.example is meant to be public
CONTENT = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:\s|\\[rn])+(?:[A-Za-z0-9+/=]{16}|Proc-Type)"
    rb"|PuTTY-User-Key-File-\d"
    rb"|aws_secret_access_key[\"']?\s*[=:]\s*[\"']?[A-Za-z0-9/+=]{30}"
    rb"|\"secret\":\s*\"[0-9a-f]{64}\""  # a run's ticket
)


def by_name(name: str) -> bool:
    """Return True if `name`, relative to the working folder, looks like the name of a secret."""
    *folders, last = (part.casefold() for part in PurePosixPath(name).parts)
    if last in NAMES or last.endswith(SUFFIXES) or not FOLDERS.isdisjoint(folders):
        return True
    return last.startswith(".env.") and last.rpartition(".")[2] not in SHOWN


def by_content(content: bytes) -> bool:
    """Return True if a file that begins with `content` holds a private key, an AWS secret or a ticket."""
    return CONTENT.search(content[:LOOKED_AT]) is not None


# --- copies -----------------------------------------------------------------------------------------------------------
#
# The copies of a run's code: the script, and each module of its folder that a worker imports.
#
# A replacement that runs an edited script has other bits, and nothing else would show it. So `farandole run` copies the
# script into the run's folder (`keep`), and a module is copied by the worker of its pool that imports it first
# (`copied`). Everyone executes the copies.
#
# Invariant: a copy appears whole or not at all, and never changes.

_log = logging.getLogger(__name__)
ORIGIN = "origin.json"  # beside the copies: no module's name


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a script was: `script` as an absolute path, and its file's folder and name, symbolic links followed."""

    script: str
    root: str
    name: str

    @staticmethod
    def of(script: str) -> Origin:
        file = Path(script).resolve()
        return Origin(script=os.path.abspath(script), root=str(file.parent), name=file.name)

    @staticmethod
    def read(copies: Path) -> Origin:
        """Raises FarandoleError where there is none."""
        try:
            return Origin(**json.loads((copies / ORIGIN).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise FarandoleError(f"{copies}: no copy of the run's script is there ({error})") from None


def keep(script: str, copies: Path, modules: Mapping[str, bytes] = MappingProxyType({})) -> tuple[str, ...]:
    """Copy `script` into the folder `copies`, made anew. Names the files of an earlier copy that are others now.

    `modules`: what was read before of files in the script's folder, by their names there, itself among them.

    Raises:
        FarandoleError: it can't be written.
        UsageError: the folder is there, and holds the script itself or files that nobody copied.
    """
    origin = Origin.of(script)
    _check_ours(copies, origin)
    edited = tuple(_edited(copies, origin))
    try:
        sources = dict(modules) if origin.name in modules else {**modules, origin.name: Path(script).read_bytes()}
        with suppress(FileNotFoundError):
            shutil.rmtree(copies)
        file_lock.make(copies)
        file_lock.write(copies / ORIGIN, json.dumps(asdict(origin)).encode())
        for name, source in sources.items():
            for folder in reversed(Path(name).parents):
                file_lock.make(copies / folder)
            file_lock.write(copies / name, source)
    except OSError as error:
        raise FarandoleError(
            f"the script can't be copied to {copies} ({error.strerror}), and a run's workers need the copy; name "
            f"another folder with --folder"
        ) from None
    return edited


def below(script: str, folder: Path, modules: Iterable[tuple[str, bytes]]) -> dict[str, bytes]:
    """Those of `modules`, files of `folder`, that lie in the script's own folder, by their names there."""
    root = Origin.of(script).root
    return {
        os.path.relpath(folder / name, root): source for name, source in modules if (folder / name).is_relative_to(root)
    }


def _check_ours(copies: Path, origin: Origin) -> None:
    """What is about to be removed must be an earlier copy."""
    if Path(origin.root).is_relative_to(copies.resolve()):
        raise UsageError(
            f"{origin.script} lies among the copies of the run in {copies.parent}: copy them elsewhere first"
        )
    if copies.is_dir() and not (copies / ORIGIN).exists() and any(copies.iterdir()):
        raise UsageError(f"{copies} is wanted for a copy of the script, and holds other files: name another --folder")


def _edited(copies: Path, origin: Origin) -> Iterator[str]:
    try:
        before = Origin.read(copies)
    except FarandoleError:
        return
    names = {before.name, *(str(copy.relative_to(copies)) for copy in copies.rglob("*.py"))}
    if before.name != origin.name:
        names.discard(before.name)
        yield f"{origin.name} instead of {before.name}"
    for name in sorted(names):
        if content(copies / name) != content(Path(origin.root, name)):
            yield name


def content(file: Path) -> bytes | None:
    """None where it can't be read."""
    try:
        return file.read_bytes()
    except OSError:
        return None


def copied(copies: Path, name: Path, file: str) -> bytes:
    """The copy of a file, which is `name` in the script's folder, made now if there is none.

    Of two workers at the same time, the first makes it.

    Raises:
        OSError: there is none, and the file can't be read.
    """
    copy = copies / name
    with suppress(OSError):
        return copy.read_bytes()
    source = Path(file).read_bytes()
    try:
        for folder in reversed(name.parents):
            file_lock.make(copies / folder)
        beside = copy.with_name(f".{copy.name}.{os.getpid()}")
        file_lock.write(beside, source)
        try:
            os.link(beside, copy)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.rename(beside, copy)
        finally:
            beside.unlink(missing_ok=True)
        return copy.read_bytes()
    except OSError as error:  # no space, say: a worker that executes other code than the others is refused
        _log.warning("%s is not copied to %s: %s", file, copy, error)
        return source


# --- listing ----------------------------------------------------------------------------------------------------------
#
# Which files of the working folder travel with a run: as git sees them, or those of a list.
#
#     as git sees them   tracked ones as they are now, and new ones that .gitignore does not name; submodules and other
#                        repositories within likewise. In a folder that is in no repository: all files
#     a list             one path or pattern a line (`*.py`, `configs/**`), relative to the folder; a folder stands for
#                        all that is seen in it; # begins a comment; a line that fits nothing is an error
#
# Never: .git, __pycache__, virtual environments, folders of runs, sockets, devices, links that lead out of the folder.
# What looks like a secret stays here as well (`pack.py`), unless a line of the list is its very name.
#
# Invariant: where git is asked and can't tell, nothing is taken: what it would have ignored must not go to other hosts.

MOST_FILES = 20_000
_APART = {".git", "__pycache__"}
_NO_CODE = {".hg", ".svn", "node_modules", ".tox", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"}


@dataclass(frozen=True, kw_only=True)
class Listing:
    """`names` are relative to `folder`, in the archive's order. `secrets` and `astray` (links that lead out, or
    nowhere) stay here. `named`: those that were asked for by their very names. `said`: what else there is to tell.
    """

    folder: Path
    names: tuple[str, ...]
    named: frozenset[str] = frozenset()
    secrets: tuple[str, ...] = ()
    astray: tuple[str, ...] = ()
    said: str = ""


def listing(
    folder: Path, lines: Path | None = None, *, needed: tuple[str, ...] = (), run: Path | None = None
) -> Listing:
    """What of `folder`, or what the file `lines` lists of it, and what is `needed` in any case. `run`: its folder.

    Raises:
        UsageError: the list names what is not there, git can't tell, or there are too many files.
    """
    folder, seen = folder.resolve(), _Seen(run)
    named = set(needed)
    found = set(needed)
    found.update(seen.of_list(folder, lines, named) if lines else seen.of_folder(folder, ""))
    kept, secrets, astray = list[str](), list[str](), list[str]()
    for name in sorted(found, key=os.fsencode):
        try:
            mode = os.lstat(folder / name).st_mode
        except FileNotFoundError:
            continue  # deleted, and git still has it
        except OSError as error:
            raise UsageError(f"{folder / name}: {error.strerror}; it can't travel with the run") from None
        if by_name(name) and name not in named:
            secrets.append(name)
        elif stat.S_ISLNK(mode) and link(folder, name) is None:
            astray.append(name)
        elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            kept.append(name)
    return Listing(
        folder=folder, names=tuple(kept), named=frozenset(named), secrets=tuple(secrets), astray=tuple(astray),
        said=seen.said,
    )  # fmt: skip


def link(folder: Path, name: str) -> str | None:
    """Where the symbolic link `name` leads, relative to its own folder; None: out of `folder`, or nowhere."""
    target = os.path.realpath(folder / name)
    if not os.path.exists(target) or not Path(target).is_relative_to(folder) or Path(target) == folder:
        return None
    return os.path.relpath(target, (folder / name).parent)


class _Seen:
    def __init__(self, run: Path | None) -> None:
        self.said = ""
        self._run = run and run.resolve()
        self._apart: dict[Path, bool] = {}
        self._number = 0

    def of_folder(self, folder: Path, within: str) -> Iterator[str]:
        """The files that are seen in `folder` / `within`, relative to `folder`."""
        listed = self._of_git(folder / within)
        for name in self._walked(folder / within, "") if listed is None else listed:
            path = Path(within, name)
            if any(self._is_apart(folder / parent) for parent in (path, *path.parents[:-1])):
                continue
            if not (folder / path).is_symlink() and (folder / path).is_dir():
                yield from self.of_folder(folder, str(path))  # a repository within
                continue
            self._number += 1
            if self._number > MOST_FILES:
                raise UsageError(
                    f"{folder} has more than {MOST_FILES} files that would travel with the run: start it in the "
                    f"script's own folder, put what is no code into .gitignore, or list what is needed with --files"
                )
            yield str(path)

    def of_list(self, folder: Path, lines: Path, named: set[str]) -> Iterator[str]:
        """Those of the list; files that a line is the very name of become `named`."""
        try:
            text = lines.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not text"
            raise UsageError(f"--files {lines}: {why}; it lists paths or patterns, one a line") from None
        for number, line in enumerate(text.splitlines(), 1):
            pattern = line.partition("#")[0].strip()
            if not pattern:
                continue
            for path in _matching(folder, pattern, f"--files {lines}, line {number}: {pattern}"):
                name = str(path.relative_to(folder))
                if path.is_dir():
                    yield from self.of_folder(folder, "" if name == "." else name)
                elif not self._is_apart(path) and not any(map(self._is_apart, path.parents)):
                    yield name
                    named.update({name} & {os.path.normpath(pattern)})

    def _of_git(self, folder: Path) -> list[str] | None:
        """None: it is in no repository."""
        command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        environ = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
        try:
            done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        except OSError:
            if any((parent / ".git").exists() for parent in (folder, *folder.parents)):
                self.said = "there is no git here, so the run's code is all that lies in its folder, ignored or not"
            return None
        if done.returncode == 0:
            return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
        why = done.stderr.decode(errors="replace").strip()
        if "not a git repository" in why:
            return None
        raise UsageError(
            f"git can't say what is in {folder} ({' '.join(why.split())}); list what is needed with --files"
        )

    def _walked(self, folder: Path, within: str) -> Iterator[str]:
        with os.scandir(folder / within) as entries:
            for entry in sorted(entries, key=lambda entry: os.fsencode(entry.name)):
                name = os.path.join(within, entry.name)
                if not entry.is_dir(follow_symlinks=False):
                    yield name
                elif entry.name not in _NO_CODE and not self._is_apart(folder / name):
                    yield from self._walked(folder, name)

    def _is_apart(self, path: Path) -> bool:
        if path not in self._apart:
            self._apart[path] = (
                path.name in _APART
                or path == self._run
                or (path / "pyvenv.cfg").is_file()
                or (path / "code" / ORIGIN).is_file()  # a run's folder
            )
        return self._apart[path]


def _matching(folder: Path, pattern: str, where: str) -> list[Path]:
    """Raises UsageError where there is nothing, or it is elsewhere."""
    path = Path(os.path.normpath(pattern))
    if path.is_absolute() or ".." in path.parts:
        raise UsageError(f"{where}: not within {folder}; what travels with a run lies in the folder in which it starts")
    found = [folder / path] if os.path.lexists(folder / path) else []
    try:
        found = found or sorted(folder.glob(pattern))
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"{where}: {error}") from None
    if not found:
        raise UsageError(f"{where}: there is no such file")
    for match in found:
        through = next((p for p in match.parents if p != folder and p.is_relative_to(folder) and p.is_symlink()), None)
        if through:
            raise UsageError(f"{where}: {through} is a symbolic link; name what it leads to")
    return found


# --- pack -------------------------------------------------------------------------------------------------------------

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
            if by_content(content) and name not in chosen.named:
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


# --- unpacked ---------------------------------------------------------------------------------------------------------
#
# A run's code on a host that has nothing of it: one folder for each pack, `~/.cache/farandole/code/HASH`.
#
# Invariants: the folder appears whole or not at all; what it has of the pack is the pack's, looked at again whenever
# somebody is about to begin there; nothing is written outside it, whatever the archive says; one process at a time. An
# archive is taken only if its hash is the one that was named, and then no entry but plain files and links within.
#
# What scripts and `--setup` put there beside it stays, for the next run of the same pack as well. Left out: removing
# folders that nobody needs any more; they may be, when no run is on.

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
        file_lock.make(place.parent)
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
    with open(place.with_name(f"{place.name}.lock"), "ab", opener=file_lock.opener) as lock:
        file_lock.take(lock.fileno(), place.parent, _NO_LOCKS, wait=True)
        yield


def _kept(archive: Path, pack: str) -> bytes | None:
    """What was fetched before, None if nothing was, or it is damaged."""
    try:
        return _plain(file_lock.read(archive), pack)
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
        file_lock.write(beside, content)
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
        file_lock.make(beside)
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
            if (os.readlink(path) == entry.linkname) if entry.issym() else (file_lock.read(path) == content):
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
        (folder / parent).mkdir(mode=file_lock.FOLDER_MODE, exist_ok=True)
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
