"""Programs of other people, ported: fetches one at its commit, and applies our changes to it.

    python examples/ported/port.py                                     the list
    python examples/ported/port.py time_sequence FOLDER                writes original.py, ported.py and what it needs
    python examples/ported/port.py time_sequence FOLDER --source REPO  from a clone or a bare repository

The changes are an ed script (`diff -e original.py ported.py`): line numbers and our lines. `programs.json` names the
source, the commit and the licence of each program.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
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


def port(name: str, folder: Path, source: str | None = None) -> Path:
    """Write the original program `name`, the ported one and the other files to `folder`. Return the ported one.

    `source`: the repository, None to fetch it.

    Raises:
        subprocess.CalledProcessError: the repository can't be fetched, or lacks the commit.
    """
    program = PROGRAMS[name]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        if source is None:
            git = ["git", "-C", temporary]
            subprocess.run([*git, "init", "--quiet"], check=True)
            subprocess.run([*git, "fetch", "--quiet", "--depth", "1", program["source"], program["commit"]], check=True)
            source = temporary

        def content(path: str) -> str:
            show = ["git", "-C", source, "show", f"{program['commit']}:{path}"]
            return subprocess.run(show, check=True, capture_output=True, text=True).stdout

        original = content(program["script"])
        (folder / "original.py").write_text(original)
        for path in program["files"]:
            (folder / Path(path).name).write_text(content(path))
    ported = folder / "ported.py"
    ported.write_text(apply((HERE / f"{name}.ed").read_text(), original))
    return ported


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", choices=[*PROGRAMS])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--source")
    args = parser.parse_args()
    if args.name is None or args.folder is None:
        for name, program in PROGRAMS.items():
            lines = len(added((HERE / f"{name}.ed").read_text()))
            print(f"{name:16} {lines:2} lines  {program['about']}  {program['source']} {program['script']}")
        return
    print(port(args.name, args.folder, args.source))


if __name__ == "__main__":
    main()
