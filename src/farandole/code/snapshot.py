"""Executes the run's copies of the script and the modules in its folder (`pack.py`), whatever is edited meanwhile.

`__file__`, `sys.argv[0]`, `sys.path[0]`, the working folder and the lines in a traceback are those of the originals.

Invariant: the executed sources are facts of the worker's signature (`facts`), so that a worker with its own files,
which has no copies, is compared at admission.

DataLoader's processes: forked ones inherit all of this; spawned ones (spawn, forkserver) run the script once more, as
multiprocessing does, and `code/spawned.py` makes them run the copy.

Not covered: installed packages, extension modules, data files, modules that another import hook loads. __pycache__ is
neither read nor written, because its time stamps can't distinguish two edits within a second: a worker compiles the
modules that it imports, 50,000 lines in about a second.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import linecache
import os
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import farandole
from farandole.code.pack import FACT, Origin, content, copied
from farandole.settings import Settings

# --- sources ----------------------------------------------------------------------------------------------------------

OWN = "farandole's code"
_DIGITS = 16  # digits of a SHA-256: enough, because this does not protect against an attacker
_SPAWNED = "farandole.code.spawned"


class Sources(MetaPathFinder):
    """The sources of the script's folder that this process executes. `copies`: the run's; None for the files.

    `file`: the script's file, as its `__file__` has it. A module runs in its package, and its folder is the one that
    holds the package.
    """

    def __init__(self, script: str, copies: Path | None) -> None:
        self.origin = Origin.read(copies) if copies else Origin.from_script(script)
        self.file = self.origin.script if self.origin.module else script
        self._copies = copies
        self._executed: dict[str, str] = {}  # hash of each executed source, by fact name
        self._places: dict[str, Path | None] = {}  # path of each folder relative to the script's
        self._installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

    def run(self) -> None:
        """Execute the script as `__main__`."""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        self.run_as(main)

    def run_as(self, main: types.ModuleType) -> None:
        """Execute the script as `main`."""
        name = self.origin.name
        main.__dict__.update(__file__=self.file, __cached__=None)
        if package := self.origin.module.rpartition(".")[0]:
            importlib.import_module(package)  # of the script, as `python -m` does
            main.__package__ = package
        _Loader(f"script {name}", self.file, Path(name), self).exec_module(main)

    def facts(self) -> Iterator[tuple[str, str]]:
        return iter(sorted(self._executed.items(), key=lambda fact: (fact[0].startswith("module "), fact)))

    def source(self, fact: str, name: Path, file: str) -> bytes:
        """Return the source to execute for `file`, `name` in the script's folder; record it as fact `fact`."""
        source = copied(self._copies, name, file) if self._copies else Path(file).read_bytes()
        self._executed[fact] = _hash(source)
        with suppress(SyntaxError, UnicodeDecodeError):  # compiling gives a better error
            lines = decode_source(source).splitlines(keepends=True)
            linecache.cache[file] = (len(source), None, lines, file)  # without a time: it is never looked up again
        return source

    # --- as a finder of modules ------------------------------------------------------------------------------

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "farandole":
            return None
        copy, before = self._first_copied(fullname, sys.path if path is None else path)
        if copy is None:
            spec = self._find_elsewhere(fullname, path, target)
        else:
            spec = PathFinder.find_spec(fullname, before, target) if before else None
            if spec is None or spec.loader is None:
                return copy
        if spec is None or spec.origin is None or type(spec.loader) is not SourceFileLoader:
            return spec
        place = self.place(os.path.dirname(spec.origin))
        return spec if place is None else self._spec(fullname, spec.origin, place / os.path.basename(spec.origin))

    def _first_copied(self, fullname: str, folders: Sequence[str]) -> tuple[ModuleSpec | None, list[str]]:
        """Return the first copied module, and the folders outside the script's that come before it in the search.

        A module of the same name in one of these folders takes precedence.
        """
        for number, folder in enumerate(folders) if self._copies else ():
            if spec := self._copied(fullname, folder):
                return spec, [each for each in folders[:number] if self.place(each) is None]
        return None, []

    def _copied(self, fullname: str, folder: str) -> ModuleSpec | None:
        """Find a module among the copies, because the original may be deleted, or be a package now."""
        place, tail = self.place(folder), fullname.rpartition(".")[2]
        if place is None or self._copies is None:
            return None
        for name in (Path(tail, "__init__.py"), Path(f"{tail}.py")):
            if (self._copies / place / name).is_file():
                return self._spec(fullname, os.path.join(folder, name), place / name)
        return None

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            if spec := finder.find_spec(fullname, path, target):
                return spec
        return None

    def _spec(self, fullname: str, file: str, name: Path) -> ModuleSpec | None:
        return spec_from_file_location(fullname, file, loader=_Loader(f"module {fullname}", file, name, self))

    def place(self, folder: str) -> Path | None:
        """Return the path of `folder` relative to the script's; None if it is outside, or holds installed packages."""
        if folder not in self._places:
            self._places[folder] = next(self._below(folder), None)
        return self._places[folder]

    def _below(self, folder: str) -> Iterator[Path]:
        for form in (os.path.abspath(folder), os.path.realpath(folder)) if folder else ():
            path = Path(form)
            if path.is_relative_to(self.origin.root) and not any(map(path.is_relative_to, self._installed)):
                yield path.relative_to(self.origin.root)


class _Loader(SourceFileLoader):
    """The loader of one file of the script's folder. `what`: the name of its fact."""

    def __init__(self, fact: str, file: str, name: Path, sources: Sources) -> None:
        super().__init__(fact.partition(" ")[2], file)
        self._source = functools.partial(sources.source, fact, name, file)

    def get_code(self, fullname: str) -> types.CodeType:
        del fullname
        return self.source_to_code(self._source(), self.path)

    def get_data(self, path: str) -> bytes:
        return self._source() if path == self.path else super().get_data(path)


_current: Sources | None = None


def install(script: str, copies: Path | None) -> Sources:
    """Make this process execute `script` and the modules of its folder from `copies`; without copies only record them.

    Raises:
        FarandoleError: the copies do not exist.
    """
    global _current
    _current = sources = Sources(script, copies)
    own()
    first = os.getcwd() if sources.origin.module else sources.origin.root
    if first not in sys.path[:1]:
        sys.path.insert(0, first)
    sys.meta_path.insert(0, sources)
    if copies:
        os.environ["FARANDOLE_CODE"] = str(copies)
    if copies or sources.origin.module:
        _tell_spawned(_SPAWNED if copies else sources.origin.module)
    return sources


def _tell_spawned(module: str) -> None:
    """Make processes that multiprocessing spawns begin with `module` instead of the file of the script."""
    before = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = before(name)
        if data.pop("init_main_from_path", None):
            data["init_main_from_name"] = module
        return data

    spawn.get_preparation_data = prepared


# --- facts ---------------------------------------------------------------------------------------------------


def facts() -> Iterator[tuple[str, str]]:
    """Yield the facts of the code that must be equal in all workers: "script NAME", "module NAME", farandole's own."""
    yield from _current.facts() if _current else _as_they_are()
    if pack := Settings.read().pack:
        yield FACT, pack
    yield OWN, own()


def of_kept(copies: Path) -> tuple[tuple[str, str], ...]:
    """Return the facts of a run that has just begun, whose script was copied to `copies`.

    Raises:
        FarandoleError: the script was not copied.
    """
    name = Origin.read(copies).name
    return (f"script {name}", _hash((copies / name).read_bytes())), (OWN, own())


def of_file(script: str) -> tuple[tuple[str, str], ...]:
    """Return the facts of a script itself.

    Raises:
        OSError: the script can't be read.
    """
    origin = Origin.from_script(script)
    return (f"script {origin.name}", _hash(Path(origin.script).read_bytes())), (OWN, own())


def _hash(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:_DIGITS]


@functools.cache
def own() -> str:
    """Return a hash of this package's sources."""
    package, digest = Path(farandole.__file__).parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:_DIGITS]


def _as_they_are() -> Iterator[tuple[str, str]]:
    """Yield the facts of a script that Python itself runs, from the files: its executed sources are not recorded."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if not script:
        return
    spec = getattr(main, "__spec__", None)  # None if Python runs a file, and not a module
    sources = Sources(spec.name if spec else script, None)
    if (source := content(Path(script))) is not None:
        yield f"script {sources.origin.name}", _hash(source)
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_own = name.partition(".")[0] in ("farandole", "__main__", "__mp_main__")
        is_copied = not is_own and file.endswith(".py") and sources.place(os.path.dirname(file)) is not None
        if is_copied and (source := content(Path(file))) is not None:
            yield f"module {name}", _hash(source)


# --- commit -----------------------------------------------------------------------------------------------------------
#
# The git commit of the script, and whether its files have uncommitted changes.

LIMIT_S = 5.0
DIRTY = ", with changes that are not committed"


def commit(folder: Path) -> str:
    """Return the commit of the repository that contains `folder`; "" if there is none, or git fails."""
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return ""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return (
        head if changed == "" else f"{head}{DIRTY}" if changed else f"{head}, and git can't tell whether with changes"
    )


def _git(folder: Path, *words: str) -> str | None:
    """Return the output of git; None if it fails."""
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *words]
    try:
        result = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.decode(errors="replace").strip()
