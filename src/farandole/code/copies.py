"""The copies of a run's code: the script, and each module of its folder that a worker imports.

A replacement that runs an edited script has other bits, and nothing else would show it. So `farandole run` copies the
script into the run's folder (`keep`), and a module is copied by the worker of its pool that imports it first
(`copied`). Everyone executes the copies.

Invariant: a copy appears whole or not at all, and never changes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from farandole.errors import FarandoleError, UsageError
from farandole.platform import private

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
        private.make(copies)
        private.write(copies / ORIGIN, json.dumps(asdict(origin)).encode())
        for name, source in sources.items():
            for folder in reversed(Path(name).parents):
                private.make(copies / folder)
            private.write(copies / name, source)
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
            private.make(copies / folder)
        beside = copy.with_name(f".{copy.name}.{os.getpid()}")
        private.write(beside, source)
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
