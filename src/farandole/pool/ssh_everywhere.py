"""Runs a command on all hosts at once and passes on its output line by line; copies files to hosts."""

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
from farandole.pool.ssh import HostLine, RemoteCommand, failure_reason

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


# --- commands ---------------------------------------------------------------------------------------------------------

LONGEST = 1 << 16  # bytes of a line; a longer line is passed on in pieces


async def run(
    lines: Sequence[HostLine], text: str, remote: RemoteCommand, on_line: Callable[[str, str], None]
) -> dict[str, int]:
    """Run `text` in each host's shell, with {index}, {count} and {host} replaced by the host's values.

    `on_line` is called with the host and each line of its output. Returns the exit codes by host; 255: ssh has failed.
    """
    codes = await asyncio.gather(
        *(
            _one(remote.shell(line, substituted(text, n, len(lines), line)), line.name, on_line)
            for n, line in enumerate(lines, 1)
        )
    )
    return dict(zip([line.name for line in lines], codes, strict=True))


def substituted(text: str, index: int, count: int, line: HostLine) -> str:
    """The text with the host's values; `index` starts at 1. Other braces stay unchanged."""
    values: Mapping[str, object] = {"{index}": index, "{count}": count, "{host}": line.name}
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


async def _one(command: Sequence[str], host: str, on_line: Callable[[str, str], None]) -> int:
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        on_line(host, f"{command[0]}: {error.strerror}")
        return 255
    assert process.stdout is not None
    partial_line = b""
    try:
        while chunk := await process.stdout.read(LONGEST):
            *lines, partial_line = (partial_line + chunk).split(b"\n")
            for line in lines:
                on_line(host, line.decode(errors="replace"))
            if len(partial_line) > LONGEST:
                on_line(host, partial_line.decode(errors="replace"))
                partial_line = b""
        if partial_line:
            on_line(host, partial_line.decode(errors="replace"))
        return await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


# --- sending ----------------------------------------------------------------------------------------------------------
#
# Copies a file or a folder to a host, as a tar stream through ssh: the host needs only `tar`.
#
# SOURCE becomes TARGET there, whatever TARGET's name. Files are replaced; other files in a folder stay. Rejected after
# a trial: rsync, which must be installed on both ends, and scp, which reports no progress to a program. Not covered:
# resuming an interrupted copy; it starts again from the beginning.


def size(source: Path) -> int:
    """The size of all files of `source`, in bytes.

    Raises:
        UsageError: it does not exist.
    """
    if not source.exists():
        raise UsageError(f"{source}: no such file or folder")
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def send(source: Path, target: str, line: HostLine, remote: RemoteCommand, on_bytes_sent: Callable[[int], None]) -> str:
    """Copy to one host. `on_bytes_sent` is called with each further number of bytes. Returns "", or the reason of a
    failure.
    """
    if line.local and Path(target).expanduser().resolve() == source.resolve():
        return ""
    path = PurePosixPath(target)
    folder, name = (path, ".") if source.is_dir() else (path.parent, path.name)
    where = _quoted(folder)
    command = remote.shell(line, f"mkdir -p {where} && tar -xf - -C {where}")
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    assert process.stdin is not None
    assert process.stdout is not None
    failure = ""
    try:
        with process.stdin as pipe, tarfile.open(fileobj=_CountedPipe(pipe, on_bytes_sent), mode="w|") as archive:
            archive.add(source, name)
    except BrokenPipeError:
        pass  # its output says why
    except OSError as error:
        failure = f"{error.filename or source}: {error.strerror}"
        process.kill()
    output = process.stdout.read().decode(errors="replace")
    process.stdout.close()
    return failure or (failure_reason(output, process.returncode) if process.wait() else "")


def _quoted(folder: PurePosixPath) -> str:
    """The folder quoted for a shell. ~ is the user's home on the host."""
    home, *parts = folder.parts or (".",)
    if home == "~":
        return '"$HOME"' + (f"/{shlex.quote('/'.join(parts))}" if parts else "")
    return shlex.quote(str(folder))


class _CountedPipe(io.RawIOBase):
    """A pipe that reports the number of bytes written to it."""

    def __init__(self, pipe: IO[bytes], on_bytes_sent: Callable[[int], None]) -> None:
        super().__init__()
        self._pipe, self._on_bytes_sent = pipe, on_bytes_sent

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        content = bytes(data)
        self._pipe.write(content)
        self._on_bytes_sent(len(content))
        return len(content)
