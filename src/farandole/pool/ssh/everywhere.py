"""A command on all hosts at once, its output told line by line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from farandole.pool.ssh.hosts_file import Line
from farandole.pool.ssh.there import There

LONGEST = 1 << 16  # bytes of a line; a longer one comes in pieces


async def run(lines: Sequence[Line], text: str, there: There, told: Callable[[str, str], None]) -> dict[str, int]:
    """Have each host's shell do `text`, in which {index}, {count} and {host} stand for its own. `told` hears each line
    of output with its host. Returns the exit codes, by host: 255 where ssh itself has failed.
    """
    codes = await asyncio.gather(
        *(
            _one(there.shell(line, filled(text, n, len(lines), line)), line.name, told)
            for n, line in enumerate(lines, 1)
        )
    )
    return dict(zip([line.name for line in lines], codes, strict=True))


def filled(text: str, index: int, count: int, line: Line) -> str:
    """`index` from 1 on. Other braces stay as they are."""
    values: Mapping[str, object] = {"{index}": index, "{count}": count, "{host}": line.name}
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


async def _one(command: Sequence[str], host: str, told: Callable[[str, str], None]) -> int:
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        told(host, f"{command[0]}: {error.strerror}")
        return 255
    assert process.stdout is not None
    rest = b""
    try:
        while more := await process.stdout.read(LONGEST):
            *whole, rest = (rest + more).split(b"\n")
            for line in whole:
                told(host, line.decode(errors="replace"))
            if len(rest) > LONGEST:
                told(host, rest.decode(errors="replace"))
                rest = b""
        if rest:
            told(host, rest.decode(errors="replace"))
        return await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
