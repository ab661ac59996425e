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
import sys
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
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
# A replacement worker that runs an edited script computes other bits, and nothing else would show it. So `farandole
# run` copies the script into the run's folder (`keep`). The worker of its pool that imports a module first copies that
# module (`copied`). All workers execute the copies.
#
# Invariant: a copy appears whole or not at all, and never changes.

_log = logging.getLogger(__name__)
ORIGIN = "origin.json"  # lies beside the copies; no module can have this name


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The original location of a script: `script`, its absolute path; `root` and `name`, the folder and the name of its
    file after symbolic links are followed.

    `module`: its name if it runs as by `python -m`, "" if it runs as a file. Then `root` is the folder that holds its
    top package, and `name` is relative to it.
    """

    script: str
    root: str
    name: str
    module: str = ""

    @staticmethod
    def from_script(script: str) -> Origin:
        """`script`: the path of a Python file, or the name of a module."""
        if not os.path.exists(script) and (found := _module(script)):
            return found
        file = Path(script).resolve()
        return Origin(script=os.path.abspath(script), root=str(file.parent), name=file.name)

    @property
    def run_name(self) -> str:
        """A name for a run of this script: the file's without its suffix, and the package's for its `__main__`."""
        path = Path(self.script)
        return path.parent.name if self.module and path.stem == "__main__" else path.stem

    @staticmethod
    def read(copies: Path) -> Origin:
        """Read the origin of `copies`. Raises FarandoleError: there is none."""
        try:
            return Origin(**json.loads((copies / ORIGIN).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise FarandoleError(f"{copies}: this folder has no copy of the run's script ({error})") from None


def _module(name: str) -> Origin | None:
    """Return the origin of what `python -m name` runs; None if there is none. Imports nothing, since that runs code."""
    parts = name.split(".")
    if not all(map(str.isidentifier, parts)):
        return None
    for folder in map(os.path.abspath, (os.getcwd(), *sys.path)):
        for file, module in (
            (Path(*parts, "__main__.py"), f"{name}.__main__"),
            (Path(*parts).with_suffix(".py"), name),
        ):
            script = os.path.join(folder, file)
            if os.path.isfile(script):
                return Origin(script=script, root=os.path.realpath(folder), name=str(file), module=module)
    return None


def keep(script: str, copies: Path, modules: Mapping[str, bytes] = MappingProxyType({})) -> tuple[str, ...]:
    """Copy `script` into the folder `copies`, which is created anew. Returns the names of files that differ from an
    earlier copy.

    `modules`: the content of files in the script's folder that were read before, by their names there. It may contain
    the script too.

    Raises:
        FarandoleError: the copy can't be written.
        UsageError: the folder exists, and holds the script itself or files that are no copies.
    """
    origin = Origin.from_script(script)
    _check_ours(copies, origin)
    edited = tuple(_edited(copies, origin))
    try:
        sources = {**modules}
        if origin.name not in sources:
            sources[origin.name] = Path(origin.script).read_bytes()
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
    """Return the files of `modules` that lie in the script's own folder, by their names there.

    The names in `modules` are relative to `folder`.
    """
    root = Origin.from_script(script).root
    return {
        os.path.relpath(folder / name, root): source for name, source in modules if (folder / name).is_relative_to(root)
    }


def _check_ours(copies: Path, origin: Origin) -> None:
    """Raise UsageError if the folder `copies`, which will be removed, is not an earlier copy."""
    if Path(origin.root).is_relative_to(copies.resolve()):
        raise UsageError(
            f"{origin.script} lies among the copies of the run in {copies.parent}: copy them elsewhere first"
        )
    if copies.is_dir() and not (copies / ORIGIN).exists() and any(copies.iterdir()):
        raise UsageError(f"{copies} is needed for a copy of the script, but holds other files: name another --folder")


def _edited(copies: Path, origin: Origin) -> Iterator[str]:
    """Yield the files that differ from the copies of an earlier run in this folder."""
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
    """Return the content of a file; None if it can't be read."""
    try:
        return file.read_bytes()
    except OSError:
        return None


def copied(copies: Path, name: Path, file: str) -> bytes:
    """Return the content of the copy of `file`, which is `name` in the script's folder. Copies it if there is no copy.

    If two workers do this at the same time, the copy of the first one counts.

    Raises:
        OSError: there is no copy, and the file can't be read.
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
    except OSError as error:  # for example a full disk; a worker whose code differs from the others' is refused
        _log.warning("%s could not be copied to %s: %s", file, copy, error)
        return source


# --- listing ----------------------------------------------------------------------------------------------------------
#
# Selects the files of the working folder that are sent to other hosts: from git, or from a list.
#
#     git      tracked files in their present state, and new files that .gitignore does not name. The same holds for
#              submodules and other repositories in the folder. If the folder is in no repository: all files
#     a list   one path or pattern a line (`*.py`, `configs/**`), relative to the folder. A folder stands for all of its
#              files that git would select; # begins a comment; a line without a match is an error
#
# Never selected: .git, __pycache__, virtual environments, folders of runs, sockets, devices, links that lead out of the
# folder. Files that look like a secret are not selected either (section "withheld"), unless a line of the list is their
# exact name.
#
# Invariant: if git fails in a repository, nothing is selected, because files that git would have ignored must not go to
# other hosts.

MOST_FILES = 20_000
_SKIPPED_NAMES = {".git", "__pycache__"}
_NO_CODE = {".hg", ".svn", "node_modules", ".tox", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"}


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The selected files. `names` are relative to `folder`, in the archive's order.

    `secrets` and `astray` (links that lead out of the folder, or nowhere) are not sent. `named`: files that the list
    names exactly. `note`: a remark for the user, "" for none.
    """

    folder: Path
    names: tuple[str, ...]
    named: frozenset[str] = frozenset()
    secrets: tuple[str, ...] = ()
    astray: tuple[str, ...] = ()
    note: str = ""


def listing(
    folder: Path, lines: Path | None = None, *, required: tuple[str, ...] = (), run: Path | None = None
) -> Listing:
    """Return the files of `folder` that are sent to other hosts.

    `lines`: a file with a list, used instead of git. `required`: names that are selected in any case. `run`: the run's
    own folder, which is not sent.

    Raises:
        UsageError: the list names a file that does not exist, git fails, or there are too many files.
    """
    folder, finder = folder.resolve(), _Finder(run)
    named = set(required)
    candidates = set(required)
    candidates.update(finder.in_list(folder, lines, named) if lines else finder.in_folder(folder, ""))
    names, secrets, astray = list[str](), list[str](), list[str]()
    for name in sorted(candidates, key=os.fsencode):
        try:
            mode = os.lstat(folder / name).st_mode
        except FileNotFoundError:
            continue  # it was deleted, but git still tracks it
        except OSError as error:
            raise UsageError(f"{folder / name}: {error.strerror}; it can't be packed for other hosts") from None
        if by_name(name) and name not in named:
            secrets.append(name)
        elif stat.S_ISLNK(mode) and link(folder, name) is None:
            astray.append(name)
        elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            names.append(name)
    return Listing(
        folder=folder, names=tuple(names), named=frozenset(named), secrets=tuple(secrets), astray=tuple(astray),
        note=finder.note,
    )  # fmt: skip


def link(folder: Path, name: str) -> str | None:
    """Return the target of the symbolic link `name`, relative to the link's own folder.

    None: it leads out of `folder`, or nowhere.
    """
    target = os.path.realpath(folder / name)
    if not os.path.exists(target) or not Path(target).is_relative_to(folder) or Path(target) == folder:
        return None
    return os.path.relpath(target, (folder / name).parent)


class _Finder:
    """Finds files by git, in folders, or by a list. `note`: a remark for the user, "" for none."""

    def __init__(self, run: Path | None) -> None:
        self.note = ""
        self._run = run and run.resolve()
        self._skipped: dict[Path, bool] = {}
        self._number = 0

    def in_folder(self, folder: Path, within: str) -> Iterator[str]:
        """Yield the files in `folder` / `within` that are selected, relative to `folder`."""
        listed = self._ls_files(folder / within)
        for name in self._walk(folder / within, "") if listed is None else listed:
            path = Path(within, name)
            if any(self._is_skipped(folder / parent) for parent in (path, *path.parents[:-1])):
                continue
            if not (folder / path).is_symlink() and (folder / path).is_dir():
                yield from self.in_folder(folder, str(path))  # a repository in this folder
                continue
            self._number += 1
            if self._number > MOST_FILES:
                raise UsageError(
                    f"{folder} has more than {MOST_FILES} files to pack for other hosts: start the run in the script's "
                    f"own folder, have git ignore files that are no code, or list the needed files with --files"
                )
            yield str(path)

    def in_list(self, folder: Path, lines: Path, named: set[str]) -> Iterator[str]:
        """Yield the files of the list in `lines`. Files that a line names exactly are added to `named`."""
        try:
            text = lines.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not text"
            raise UsageError(f"--files {lines}: {why}; it must list paths or patterns, one a line") from None
        for number, line in enumerate(text.splitlines(), 1):
            pattern = line.partition("#")[0].strip()
            if not pattern:
                continue
            for path in _matching(folder, pattern, f"--files {lines}, line {number}: {pattern}"):
                name = str(path.relative_to(folder))
                if path.is_dir():
                    yield from self.in_folder(folder, "" if name == "." else name)
                elif not self._is_skipped(path) and not any(map(self._is_skipped, path.parents)):
                    yield name
                    named.update({name} & {os.path.normpath(pattern)})

    def _ls_files(self, folder: Path) -> list[str] | None:
        """Return the names that git lists; None: the folder is in no repository, or git is not installed."""
        command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        environ = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
        try:
            result = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        except OSError:
            if any((parent / ".git").exists() for parent in (folder, *folder.parents)):
                self.note = (
                    "git is not installed here, so all files of the folder are packed, also those that git would ignore"
                )
            return None
        if result.returncode == 0:
            return [os.fsdecode(name) for name in result.stdout.split(b"\0") if name]
        why = result.stderr.decode(errors="replace").strip()
        if "not a git repository" in why:
            return None
        raise UsageError(
            f"git can't list the files of {folder} ({' '.join(why.split())}); list the needed files with --files"
        )

    def _walk(self, folder: Path, within: str) -> Iterator[str]:
        with os.scandir(folder / within) as entries:
            for entry in sorted(entries, key=lambda entry: os.fsencode(entry.name)):
                name = os.path.join(within, entry.name)
                if not entry.is_dir(follow_symlinks=False):
                    yield name
                elif entry.name not in _NO_CODE and not self._is_skipped(folder / name):
                    yield from self._walk(folder, name)

    def _is_skipped(self, path: Path) -> bool:
        if path not in self._skipped:
            self._skipped[path] = (
                path.name in _SKIPPED_NAMES
                or path == self._run
                or (path / "pyvenv.cfg").is_file()
                or (path / "code" / ORIGIN).is_file()  # a run's folder
            )
        return self._skipped[path]


def _matching(folder: Path, pattern: str, where: str) -> list[Path]:
    """Return the paths that match. Raises UsageError: there are none, or they are outside `folder`."""
    path = Path(os.path.normpath(pattern))
    if path.is_absolute() or ".." in path.parts:
        raise UsageError(f"{where}: not within {folder}; only files of the folder in which the run starts are packed")
    matches = [folder / path] if os.path.lexists(folder / path) else []
    try:
        matches = matches or sorted(folder.glob(pattern))
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"{where}: {error}") from None
    if not matches:
        raise UsageError(f"{where}: there is no such file")
    for match in matches:
        through = next((p for p in match.parents if p != folder and p.is_relative_to(folder) and p.is_symlink()), None)
        if through:
            raise UsageError(f"{where}: {through} is a symbolic link; name its target")
    return matches


# --- pack -------------------------------------------------------------------------------------------------------------

FACT = "code pack"
MOST_BYTES = 100_000_000
NAMED = 5
DIGITS = 32


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A run's code. `content`: a compressed tar file.

    `script`: the name of the script's file, or of a module. `files`: names relative to the working folder. Files that
    are not in it: `left_out`, secrets; `astray`, links that lead out of the folder; `vanished`, files that disappeared
    meanwhile. `note`: a remark for the user.
    """

    content: bytes
    hash: str
    script: str
    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    astray: tuple[str, ...] = ()
    vanished: tuple[str, ...] = ()
    note: str = ""

    @property
    def summary(self) -> Iterator[str]:
        """Lines for the user who starts the run."""
        yield f"packed {len(self.files)} files for other hosts, {len(self.content) / 1e6:.1f} MB"
        if self.note:
            yield f"note: {self.note}"
        if self.left_out:
            yield (
                f"left out as secrets: {', '.join(self.left_out)}; if other hosts need one of them, name it in a line "
                f"of the --files list"
            )
        if self.astray:
            yield f"left out, as links that lead out of the working folder: {_some(self.astray)}"
        if self.vanished:
            yield f"left out, as they vanished while they were packed: {_some(self.vanished)}"

    def modules(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name and the content of each Python file."""
        with gzip.GzipFile(fileobj=io.BytesIO(self.content)) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for entry in archive.getmembers():
                if entry.name.endswith(".py") and (source := archive.extractfile(entry)):
                    yield entry.name, source.read()


def pack(folder: Path, script: str, listed: Path | None = None, *, run: Path | None = None) -> Pack:
    """Pack the selected files of `folder`, and `script` in any case. `listed`: a file with a list, used instead of git.
    `run`: the run's own folder, which is not packed.

    Raises:
        UsageError: the script is not in `folder`, the list names a file that does not exist, a file can't be read, or
            there are more than `MOST_BYTES`.
    """
    folder = folder.resolve()
    origin = Origin.from_script(script)
    name = within(folder, origin.script)
    required = tuple({name: None, within(folder, os.path.realpath(folder / name)): None})
    chosen = listing(folder, listed, required=required, run=run)
    check_sizes(chosen)
    packed = _packed(chosen, name)
    return replace(packed, script=script) if origin.module else packed


def within(folder: Path, script: str) -> str:
    """Return the name of the file `script` relative to `folder`.

    Raises:
        UsageError: it is not in `folder`.
    """
    for path in (os.path.abspath(script), os.path.realpath(script)):
        if Path(path).is_relative_to(folder):
            return str(Path(path).relative_to(folder))
    raise UsageError(
        f"script {script} is not in the working folder {folder}, which is packed for other hosts: start the run in a "
        f"folder that holds the script and the modules that it imports"
    )


def check_sizes(chosen: Listing) -> None:
    """Check the sum of the files' sizes. Raises UsageError: there are more than `MOST_BYTES`."""
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
            f"{MOST_BYTES / 1e6:.0f} MB are allowed; the largest: {', '.join(largest)}; have git ignore files that are "
            f"no code, or list the needed files with --files"
        )


def _packed(chosen: Listing, script: str) -> Pack:
    plain, packed = io.BytesIO(), list[str]()
    secrets, vanished, budget = list(chosen.secrets), list[str](), MOST_BYTES
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in chosen.names:
            try:
                entry, content = _entry(chosen.folder, name)
            except FileNotFoundError:
                vanished.append(name)
                continue
            except OSError as error:
                raise UsageError(
                    f"{chosen.folder / name} can't be packed for other hosts: {error.strerror}; have git ignore it, "
                    f"or list the needed files with --files"
                ) from None
            if by_content(content) and name not in chosen.named:
                secrets.append(name)
                continue
            budget -= len(content)
            if budget < 0:
                raise UsageError(f"{chosen.folder / name} grows while it is packed: {len(content)} bytes by now")
            archive.addfile(entry, io.BytesIO(content))
            packed.append(name)
    if script not in packed:
        raise UsageError(f"script {script} vanished while it was packed for other hosts")
    return Pack(
        content=gzip.compress(plain.getvalue(), mtime=0), hash=digest(plain.getvalue()), script=script,
        files=tuple(packed), left_out=tuple(sorted(secrets)), astray=chosen.astray, vanished=tuple(vanished),
        note=chosen.note,
    )  # fmt: skip


def digest(plain: bytes) -> str:
    """Return the hash of a pack's uncompressed content."""
    return hashlib.sha256(plain).hexdigest()[:DIGITS]


def _entry(folder: Path, name: str) -> tuple[tarfile.TarInfo, bytes]:
    """Return the present state of one file, without its times and owner.

    Raises OSError: it can't be read, or does not exist.
    """
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
# A run's code on a host that does not have it: one folder for each pack, `~/.cache/farandole/code/HASH`.
#
# Invariants: the folder appears whole or not at all. The pack's files in it have the pack's content, which is verified
# before each use. Nothing is written outside the folder, whatever the archive contains. One process works on it at a
# time. An archive is accepted only if its hash is the requested one, and if all of its entries are plain files, or
# links within the folder.
#
# Other files that scripts and `--setup` write there stay, also for the next run of the same pack. Not implemented:
# removing folders that are no longer needed. A user may remove them when no run is active.

FOLDER = Path("~/.cache/farandole/code")
ARCHIVE = ".tar.gz"
_NO_LOCKS = (
    "two workers would unpack the run's code at once; put the user's home, or its ~/.cache, on one that has locks"
)
MOST_PLAIN = MOST_BYTES + 4096 * MOST_FILES  # uncompressed bytes, including the headers
Entry = tuple[tarfile.TarInfo, bytes]


def place_of(pack: str) -> Path:
    """Return the folder of a pack on this host. All runs with that pack share it.

    Raises:
        FarandoleError: `pack` is not the hash of a pack.
    """
    if len(pack) != DIGITS or not set(pack) <= set("0123456789abcdef"):
        raise FarandoleError(
            f"{pack[:DIGITS]!r} is not the hash of a run's code: the coordinator is of another version"
        )
    return FOLDER.expanduser() / pack


def provide(pack: str, fetch: Callable[[], bytes]) -> Path:
    """Return the folder with all files of `pack`. `fetch` returns its archive, and is called if this host lacks it.

    Raises:
        FarandoleError: the archive is damaged, has an entry that no pack has, or there is no space.
        Exception: any exception of `fetch`.
    """
    place = place_of(pack)
    try:
        file_lock.make(place.parent)
        with _locked(place):
            archive = place.with_name(pack + ARCHIVE)
            plain = _stored(archive, pack)
            if plain is None:
                content = fetch()
                plain = _plain(content, pack)
                _store(content, archive)
            if place.is_dir():
                _mend(plain, place)
            else:
                _unpack(plain, place)
    except OSError as error:
        if isinstance(error, FarandoleError):
            raise
        room = "; free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise FarandoleError(f"the run's code can't be unpacked to {place}: {error.strerror}{room}") from None
    return place


def set_up_mark(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the path of a mark that records that `name` was done in a pack's `folder`, and the path of a lock for it.

    The mark is removed when the folder is unpacked again.
    """
    return folder.with_name(f"{folder.name}.{name}.done"), folder.with_name(f"{folder.name}.setup")


@contextlib.contextmanager
def _locked(place: Path) -> Generator[None]:
    with open(place.with_name(f"{place.name}.lock"), "ab", opener=file_lock.opener) as lock:
        file_lock.take(lock.fileno(), place.parent, _NO_LOCKS, wait=True)
        yield


def _stored(archive: Path, pack: str) -> bytes | None:
    """Return the content of the archive that was fetched before; None if there is none, or it is damaged."""
    try:
        return _plain(file_lock.read(archive), pack)
    except FileNotFoundError:
        return None
    except FarandoleError:
        _log.warning("%s is damaged: fetching it again", archive)
        return None


def _plain(content: bytes, pack: str) -> bytes:
    """Return the uncompressed archive. Raises FarandoleError: it is not that pack."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            plain = file.read(MOST_PLAIN + 1)
    except (OSError, EOFError, zlib.error):
        plain = b""
    if len(plain) > MOST_PLAIN or digest(plain) != pack:
        raise FarandoleError(f"the run's code is damaged: received {len(content)} bytes that are not pack {pack}")
    return plain


def _store(content: bytes, archive: Path) -> None:
    beside = archive.with_name(f".{archive.name}")
    try:
        file_lock.write(beside, content)
        os.replace(beside, archive)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _unpack(plain: bytes, place: Path) -> None:
    beside = place.with_name(f"{place.name}.part")
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that was killed
    for mark in place.parent.glob(f"{place.name}.*.done"):
        mark.unlink(missing_ok=True)
    try:
        file_lock.make(beside)
        _extract(plain, beside)
        os.rename(beside, place)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _mend(plain: bytes, place: Path) -> None:
    """Restore the files whose content differs from the pack's."""
    for entry, content in _entries(plain):
        path = place / entry.name
        with contextlib.suppress(OSError):
            if (os.readlink(path) == entry.linkname) if entry.issym() else (file_lock.read(path) == content):
                continue
        _log.warning("%s differs from the packed file: restoring it", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        _write(entry, content, place)


def _extract(plain: bytes, folder: Path) -> None:
    """Write all entries. Links come last, so that no file is written through one.

    No link may lead out of `folder`, also not by way of other links. Raises FarandoleError: one does.
    """
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
    """Return the plain files, then the links.

    Raises:
        FarandoleError: there is another kind of entry, or more than a pack can have.
    """
    files: list[Entry] = []
    links: list[Entry] = []
    budget = len(plain)  # a sparse file claims more bytes
    try:
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
            for entry in archive:
                budget -= entry.size
                if budget < 0:
                    raise _unfit(entry.name)
                checked = _checked(entry, archive)
                (links if entry.issym() else files).append(checked)
                if len(files) + len(links) > MOST_FILES:
                    raise FarandoleError(f"the run's code can't be unpacked: it has more than {MOST_FILES} files")
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        if isinstance(error, FarandoleError):
            raise
        raise FarandoleError(f"the run's code can't be unpacked: {error}") from None
    return files + links


def _checked(entry: tarfile.TarInfo, archive: tarfile.TarFile) -> Entry:
    """Return the entry and its content. Raises FarandoleError: a pack has no such entry."""
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
    """Write an entry. Raises OSError: an existing file or folder is in the way."""
    path = folder / entry.name
    for parent in reversed(path.relative_to(folder).parents[:-1]):
        (folder / parent).mkdir(mode=file_lock.FOLDER_MODE, exist_ok=True)
    if entry.issym():
        if os.path.realpath(path.parent) != str(Path(os.path.realpath(folder), path.parent.relative_to(folder))):
            raise _unfit(entry.name)  # its folder is reached by way of another link
        os.symlink(entry.linkname, path)
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o700 if entry.mode & 0o100 else 0o600), "wb") as file:
        file.write(content)


def _unfit(name: str) -> FarandoleError:
    return FarandoleError(f"the run's code can't be unpacked: {name!r} is not a kind of entry that a pack has")
