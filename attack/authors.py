"""Who makes files that somebody else then uses: the folder of a run, to be replayed."""

from __future__ import annotations

import json
import os
import shutil

from attack.base import AUTHOR, Attack, Succeeded
from attack.live import Live
from attack.stranger import NOBODY
from chaos.launched import FARANDOLE
from farandole.control.run_folder import CODE, SETTINGS

END_S = 60.0


def replaying(live: Live) -> str:
    """A folder from somebody else, whose settings name a program and whose copies of the code are others."""
    folder, canary = live.place / "handed", live.place / "ran"
    shutil.copytree(live.folder, folder)
    program = f"open({str(canary)!r}, 'w').close()\n"
    theirs = live.place / "theirs.py"
    theirs.write_text(program)
    for copy in (folder / CODE).rglob("*.py"):
        copy.write_text(program)
    settings = json.loads((folder / SETTINGS).read_bytes())
    (folder / SETTINGS).write_text(json.dumps({**settings, "command": [str(theirs)], "directory": str(live.place)}))
    for path in (folder, theirs, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    code, said = command(live, "replay", str(folder))
    shutil.rmtree(folder)
    if canary.exists():
        raise Succeeded("`farandole replay` ran the program that the folder names")
    if code == 0 or "SCRIPT" not in said:
        raise Succeeded(f"`farandole replay` of another user's folder: exit code {code}, {said[-200:]!r}")
    return f"refused: {last(said)}"


def command(live: Live, *arguments: str) -> tuple[int | None, str]:
    """A command's exit code, and what it said."""
    before = live.run.output.stat().st_size
    process = live.run.start([*FARANDOLE, *arguments])
    live.until(lambda: process.poll() is not None, END_S, f"the end of `farandole {arguments[0]}`")
    with live.run.output.open("rb") as file:
        file.seek(before)
        return process.returncode, file.read().decode(errors="replace")


def last(said: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith("farandole: error")]
    return repr((lines or [""])[-1][:160])


ATTACKS = (Attack(name="author: a run's folder to be replayed", who=AUTHOR, act=replaying, needs_root=True),)
