"""Programs of other people, ported: fetches one at its commit, and applies our changes to it.

    python examples/ported/port.py                                     the list
    python examples/ported/port.py time_sequence FOLDER                writes FOLDER/original and FOLDER/ported
    python examples/ported/port.py time_sequence FOLDER --source REPO  from a clone or a bare repository

The changes are ed scripts (`diff -e original/main.py ported/main.py`): line numbers and our lines. `programs.json` has
the source, the commit and the licence of each program, its files, and the ed script of each file that changes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

HERE = Path(__file__).parent
PROGRAMS: dict[str, dict[str, Any]] = json.loads((HERE / "programs.json").read_text())
COMMAND = re.compile(r"(\d+)(?:,(\d+))?([acd])")


def apply(changes: str, original: str) -> str:
    """Return `original` after the commands a, c and d of an ed script, which go from the end to the beginning.

    Raises:
        ValueError: it has another command.
    """
    lines, commands = original.splitlines(keepends=True), iter(changes.splitlines(keepends=True))
    for command in commands:
        found = COMMAND.fullmatch(command.rstrip("\n"))
        if found is None:
            raise ValueError(f"not a command of `diff -e`: {command!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        new = list(iter(lambda: next(commands), ".\n")) if found[3] in "ac" else []
        start, stop = (first, first) if found[3] == "a" else (first - 1, last)
        if start == len(lines) and lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        lines[start:stop] = new
    return "".join(lines)


def added(changes: str) -> list[str]:
    """Return the lines that an ed script adds, without blank and comment lines."""
    lines = [line for line in changes.splitlines() if not COMMAND.fullmatch(line) and line != "."]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def changes(name: str) -> dict[str, str]:
    """Return the ed scripts of program `name`, by the file of its repository that they change."""
    return {path: (HERE / file).read_text() for path, file in PROGRAMS[name]["changes"].items()}


def port(name: str, folder: Path, source: str | None = None) -> Path:
    """Write program `name` to `folder`/original, with our changes to `folder`/ported. Return the ported script.

    `source`: the repository, None to fetch it.

    Raises:
        subprocess.CalledProcessError: the repository can't be fetched, or lacks the commit.
    """
    program, changed = PROGRAMS[name], changes(name)
    root = PurePosixPath(program["script"]).parent
    with tempfile.TemporaryDirectory() as temporary:
        if source is None:
            git = ["git", "-C", temporary]
            subprocess.run([*git, "init", "--quiet"], check=True)
            subprocess.run([*git, "fetch", "--quiet", "--depth", "1", program["source"], program["commit"]], check=True)
            source = temporary
        for path in (program["script"], *program["files"]):
            show = ["git", "-C", source, "show", f"{program['commit']}:{path}"]
            content = subprocess.run(show, check=True, capture_output=True, text=True).stdout
            place = PurePosixPath(path).relative_to(root)
            for kind, text in (("original", content), ("ported", apply(changed.get(path, ""), content))):
                (folder / kind / place).parent.mkdir(parents=True, exist_ok=True)
                (folder / kind / place).write_text(text)
    return folder / "ported" / PurePosixPath(program["script"]).name


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", choices=[*PROGRAMS])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--source")
    args = parser.parse_args()
    if args.name is None or args.folder is None:
        for name, program in PROGRAMS.items():
            lines = sum(len(added(script)) for script in changes(name).values())
            print(f"{name:16} {lines:2} lines  {program['about']}  {program['source']} {program['script']}")
        return
    print(port(args.name, args.folder, args.source))


if __name__ == "__main__":
    main()
