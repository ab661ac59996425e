"""A command on all hosts at once, its output told line by line."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shlex
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from farandole.errors import UsageError
from farandole.pool.ssh import HostLine, RemoteCommand, why

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


# --- everywhere -------------------------------------------------------------------------------------------------------

LONGEST = 1 << 16  # bytes of a line; a longer one comes in pieces


async def run(
    lines: Sequence[HostLine], text: str, there: RemoteCommand, told: Callable[[str, str], None]
) -> dict[str, int]:
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


def filled(text: str, index: int, count: int, line: HostLine) -> str:
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


# --- sending ----------------------------------------------------------------------------------------------------------
#
# A file or a folder to a host, as a tar stream through ssh: nothing is needed there but `tar`.
#
# SOURCE becomes TARGET there, whatever TARGET's name: files are replaced, what is in a folder besides stays. Tried
# and not taken: rsync, which has to be installed on both ends, and scp, which tells no progress to a program. Left
# out: going on where a copy was broken off; it begins anew.


def size(source: Path) -> int:
    """Of its files, in bytes.

    Raises:
        UsageError: it is not there.
    """
    if not source.exists():
        raise UsageError(f"{source}: no such file or folder")
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def send(source: Path, target: str, line: HostLine, there: RemoteCommand, sent: Callable[[int], None]) -> str:
    """To one host; `sent` hears of each further number of bytes. Returns "", or why not."""
    if line.local and Path(target).expanduser().resolve() == source.resolve():
        return ""
    path = PurePosixPath(target)
    folder, name = (path, ".") if source.is_dir() else (path.parent, path.name)
    where = _quoted(folder)
    command = there.shell(line, f"mkdir -p {where} && tar -xf - -C {where}")
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    assert process.stdin is not None
    assert process.stdout is not None
    lost = ""
    try:
        with process.stdin as pipe, tarfile.open(fileobj=_Counted(pipe, sent), mode="w|") as archive:
            archive.add(source, name)
    except BrokenPipeError:
        pass  # what it says tells why
    except OSError as error:
        lost = f"{error.filename or source}: {error.strerror}"
        process.kill()
    said = process.stdout.read().decode(errors="replace")
    process.stdout.close()
    return lost or (why(said, process.returncode) if process.wait() else "")


def _quoted(folder: PurePosixPath) -> str:
    """For a shell; ~ is the user's home there."""
    home, *rest = folder.parts or (".",)
    if home == "~":
        return '"$HOME"' + (f"/{shlex.quote('/'.join(rest))}" if rest else "")
    return shlex.quote(str(folder))


class _Counted(io.RawIOBase):
    """A pipe that tells what was written to it."""

    def __init__(self, pipe: IO[bytes], sent: Callable[[int], None]) -> None:
        super().__init__()
        self._pipe, self._sent = pipe, sent

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        whole = bytes(data)
        self._pipe.write(whole)
        self._sent(len(whole))
        return len(whole)
