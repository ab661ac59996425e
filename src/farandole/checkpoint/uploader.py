"""Delivers a checkpoint to a remote store, in a process of its own.

    python -m farandole.checkpoint.uploader URL STEM KEEP [IDENTITY NAME]

Clients of remote stores keep threads, hold locks that a forked loader process would inherit, and draw from Python's
global random state when they retry (botocore and gcsfs do), which would show in the bits of whoever trains. So none of
them is ever loaded to write from the training process. The state streams through a pipe in frames, each headed by its
length; a length of zero ends it, and the manifest follows as one more. If the worker gives up, which it says, or dies,
which ends the stream, nothing is left behind. (Closing the pipe says nothing as long as the worker lives: a loader
process that was forked meanwhile has a copy of it.)
"""

from __future__ import annotations

import logging
import struct
import subprocess
import sys
from typing import Any, BinaryIO, cast

from farandole.checkpoint.attempts import NotDelivered, passing
from farandole.checkpoint.sealing import Produce, Sink
from farandole.checkpoint.store import RunIdentity, Store, first_line

_LENGTH = struct.Struct("<Q")
_GIVEN_UP = (1 << 64) - 1
_PIECE = 1 << 20
REFUSED = 2  # its exit code where another attempt would not help

_log = logging.getLogger("farandole.checkpoint.uploader")


class Frames:
    """The worker's end of the pipe."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes:
            self._pipe.write(_LENGTH.pack(view.nbytes))
            self._pipe.write(view)
        return view.nbytes

    def flush(self) -> None:
        self._pipe.flush()


def send(store: Store, stem: str, produce: Produce, keep: int, *, here: bool = False) -> None:
    """As `Store.write`, by an uploader. `here`: by this process, where none can be started (a limit on processes).

    Raises:
        OSError: the place is full or can't be reached.
    """
    run = (store.run.id, store.run.name) if store.run else ()
    command = [sys.executable, "-m", "farandole.checkpoint.uploader", store.url, stem, str(keep), *run]
    try:
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        if not here:
            raise OSError(error.errno, f"no process could be started to write it ({error.strerror})") from error
        store.write(stem, produce, keep)
        return
    with started as uploader:
        pipe, errors = cast(BinaryIO, uploader.stdin), cast(BinaryIO, uploader.stderr)
        try:
            try:
                manifest = produce(Frames(pipe))
                pipe.write(_LENGTH.pack(0) + _LENGTH.pack(len(manifest)) + manifest)
            except BrokenPipeError:
                raise
            except BaseException:
                pipe.write(_LENGTH.pack(_GIVEN_UP))
                raise
            finally:
                pipe.close()
        except BrokenPipeError:
            pass  # the uploader has given up, and says why
        said = errors.read().decode(errors="replace").strip()
        code = uploader.wait()
        if code != 0:
            raise (NotDelivered if code == REFUSED else OSError)(
                said.rpartition("\n")[2] or f"the uploader ended with {code}"
            )
        if said:
            _log.warning("%s", said)


def _receive(pipe: BinaryIO, sink: Sink) -> bytes:
    while True:
        length = _length(pipe)
        if length == 0:
            return _exactly(pipe, _length(pipe))
        if length == _GIVEN_UP:
            raise OSError("the worker has given up")
        while length:
            piece = _exactly(pipe, min(length, _PIECE))
            sink.write(piece)
            length -= len(piece)


def _length(pipe: BinaryIO) -> int:
    return _LENGTH.unpack(_exactly(pipe, _LENGTH.size))[0]


def _exactly(pipe: BinaryIO, size: int) -> bytes:
    found = pipe.read(size)
    if len(found) != size:
        raise OSError("the worker has died in the middle")
    return found


def main(url: str, stem: str, keep: int, run: RunIdentity | None) -> int:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        Store(url, run).write(stem, lambda sink: _receive(sys.stdin.buffer, sink), keep)
    except Exception as error:  # noqa: BLE001  the clients of stores have errors of their own
        print(f"{type(error).__name__}: {first_line(error)}", file=sys.stderr)
        return 1 if passing(error, local=False) else REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), RunIdentity(*sys.argv[4:]) if sys.argv[4:] else None))
