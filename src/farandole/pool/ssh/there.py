"""A command on a host of a hosts file: by the system's `ssh`, or on this machine where the line says `localhost`.

The user's configuration, agent and jump hosts count. Nobody is asked for anything: where a password or a yes would be
needed, it has failed. What has gone wrong is told in one line, with the remedy where what was printed tells the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from farandole.platform.process import within
from farandole.pool.ssh.hosts_file import Line

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
TRY_S = 60.0  # for ssh to come back
LAST_WORDS = 300  # characters of what it has said
OTHER_PYTHON = "name the right one with python=PATH"
REMEDIES = {
    "Host key verification failed": "its key is not the one that is known; see that it is the right host, then "
    "`ssh-keygen -R` it and connect to it by hand once",
    "Permission denied": "it does not take this user's key; copy it there with ssh-copy-id, or name USER@HOST",
    "Could not resolve hostname": "no such name; write the host as ssh knows it",
    "No module named farandole": f"its Python has no farandole; install it there, or {OTHER_PYTHON}",
    "No such option": f"its farandole is another version; install the same there, or {OTHER_PYTHON}",
    "No such command": f"its farandole is another version; install the same there, or {OTHER_PYTHON}",
    "No such file or directory": f"the interpreter is not there; {OTHER_PYTHON}",
    "not found": f"the interpreter is not there; {OTHER_PYTHON}",
}


@dataclass(frozen=True, kw_only=True)
class There:
    """How hosts are reached: `ssh` with its options, and the interpreter of those whose line names none."""

    ssh: tuple[str, ...] = SSH
    python: str = "python3"

    def farandole(self, line: Line, *words: str) -> list[str]:
        """The command that runs `farandole WORDS` there."""
        python = line.python or (sys.executable if line.local else self.python)
        words = (python, "-m", "farandole", *words)
        return list(words) if line.local else self._over(line, shlex.join(words))

    def shell(self, line: Line, text: str) -> list[str]:
        """The command that has a shell there do `text`."""
        return ["sh", "-c", text] if line.local else self._over(line, text)

    def _over(self, line: Line, text: str) -> list[str]:
        port = ("-p", str(line.port)) if line.port else ()
        return [*self.ssh, *port, line.address, "--", text]


async def ask(command: Sequence[str], given: bytes = b"") -> tuple[str, str]:
    """Run it with that on its standard input. Returns why it failed, in one line ("": it did not), and its output."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}", ""
    try:
        output, _ = await within(TRY_S, process.communicate(given))
    except asyncio.TimeoutError:
        return f"nothing came back within {TRY_S:g} s", ""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # so that its pipes are closed before the loop is
    said = output.decode(errors="replace")
    return ("" if process.returncode == 0 else why(said, process.returncode or 0)), said


def why(said: str, code: int) -> str:
    """What has gone wrong, and what to do, from what ssh and the host have printed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for sign, remedy in REMEDIES.items():
        if any(sign in line for line in lines):
            told = next(line for line in lines if sign in line)
            return f"{told[:LAST_WORDS]}: {remedy}"
    return lines[-1][-LAST_WORDS:] if lines else f"ssh ended with code {code}"
