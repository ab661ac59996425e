"""The processes of a host's agents, found by the mark in their environment: `farandole hosts clean` ends them.

Invariant: nothing else is ended. A process is held by a pidfd before its environment is read, so that its number can't
be another's by the time of the signal; other users' processes are not looked at. What has cleared its environment is
not found. Linux only, as /proc is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from farandole.pool.agents.post import of_run
from farandole.settings import agent_of

END_S = 10.0  # for all of them to be gone
AGAIN_S = 0.02
SHOWN = 120  # characters of a command line


def end(agents: Collection[str]) -> dict[int, str]:
    """SIGKILL to all that these agents have started, and to them, until nothing of it is left. Returns the command
    lines, by process.
    """
    ended: dict[int, str] = {}
    deadline = time.monotonic() + END_S
    while found := _kill(agents):
        ended.update(found)
        if time.monotonic() > deadline:
            break
        time.sleep(AGAIN_S)
    return ended


def other_runs(agent: str, environs: Iterable[bytes]) -> int:
    """How many other runs than this agent's have agents, by the environments of processes."""
    found = {of_run(mark) for environ in environs if (mark := agent_of(environ))}
    return len(found - {of_run(agent)})


def environs() -> Iterator[bytes]:
    """Of this user's processes."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.geteuid():
                yield (process / "environ").read_bytes()


def is_of(environ: bytes, agents: Collection[str]) -> bool:
    """Whether a process with this environment is one of these agents'. One without a mark is nobody's."""
    found = agent_of(environ)
    return bool(found) and found in agents


def _kill(agents: Collection[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if process.stat().st_uid == os.geteuid() and (command := _kill_one(process, agents)):
                    found[int(process.name)] = command
    return found


def _kill_one(process: Path, agents: Collection[str]) -> str:
    """Its command line, "" where it is not theirs. Raises OSError: it has gone."""
    held = os.pidfd_open(int(process.name))
    try:
        if not is_of((process / "environ").read_bytes(), agents):
            return ""
        command = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        signal.pidfd_send_signal(held, signal.SIGKILL)
        return command[:SHOWN] or "?"
    finally:
        os.close(held)
