"""Which files of the working folder travel with a run: as git sees them, or those of a list.

    as git sees them   tracked ones as they are now, and new ones that .gitignore does not name; submodules and other
                       repositories within likewise. In a folder that is in no repository: all files
    a list             one path or pattern a line (`*.py`, `configs/**`), relative to the folder; a folder stands for
                       all that is seen in it; # begins a comment; a line that fits nothing is an error

Never: .git, __pycache__, virtual environments, folders of runs, sockets, devices, links that lead out of the folder.
What looks like a secret stays here as well (`withheld.py`), unless a line of the list is its very name.

Invariant: where git is asked and can't tell, nothing is taken: what it would have ignored must not go to other hosts.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from farandole.code import withheld
from farandole.code.copies import ORIGIN
from farandole.errors import UsageError

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
        if withheld.by_name(name) and name not in named:
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
