"""Writes checkpoints while training continues.

The worker that the coordinator has selected (`protocol/coordinator/shutdown.py`) copies the state at a step's
beginning, on the training thread, and another thread writes the copy. Only one checkpoint is written at a time: one
that becomes due meanwhile is skipped, and this is reported. The code here does not draw the script's random numbers,
touch gradients, or hold a lock that other code waits for. Writing is retried if that can help. A failure is reported to
the coordinator, which lets another worker try; it does not end the run. The same holds if no thread can be started (a
limit on processes).

The last checkpoint is written when training is over: on the calling thread, and, if no process can be started to
deliver it, by this process.
"""

from __future__ import annotations

import logging
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, BinaryIO, cast

import msgspec

from farandole.checkpoint import content
from farandole.checkpoint.content import Content, HostCopy
from farandole.checkpoint.schedule import Every
from farandole.checkpoint.store import (
    Manifest,
    NotDelivered,
    Patience,
    Produce,
    RunIdentity,
    Sealing,
    Sink,
    Store,
    attempt,
    first_line,
    passing,
)
from farandole.errors import FarandoleError
from farandole.plan.shards import Position
from farandole.protocol.messages import Checkpointed

# --- uploader ---------------------------------------------------------------------------------------------------------
#
# Delivers a checkpoint to a remote store, in a separate process.
#
#     python -m farandole.checkpoint.save URL STEM KEEP [IDENTITY NAME]
#
# Clients of remote stores keep threads, hold locks that a forked loader process would inherit, and draw from Python's
# global random state when they retry (botocore and gcsfs do), which would change the bits of training. So the training
# process never imports one to write. The state is streamed through a pipe in frames, each preceded by its length; a
# length of zero ends it, and the manifest follows as one more frame. If the worker gives up, which it reports, or dies,
# which ends the stream, no checkpoint remains. (A closed pipe alone does not end the stream while the worker lives: a
# loader process that was forked meanwhile has a copy of it.)

_LENGTH = struct.Struct("<Q")
_GIVEN_UP = (1 << 64) - 1
_PIECE = 1 << 20
REFUSED = 2  # the uploader's exit code if a retry would not help
_log = logging.getLogger("farandole.checkpoint.save")


class Frames:
    """The worker's end of the pipe: a sink that writes frames."""

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


def send(store: Store, stem: str, produce: Produce, keep: int, *, may_write_here: bool = False) -> None:
    """Like `Store.write`, in an uploader process.

    `may_write_here`: write in this process if no other can be started (a limit on processes).

    Raises:
        OSError: the store is full or can't be reached.
        NotDelivered: the uploader failed, and a retry would not help.
    """
    run = (store.run.id, store.run.name) if store.run else ()
    command = [sys.executable, "-m", "farandole.checkpoint.save", store.url, stem, str(keep), *run]
    try:
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        if not may_write_here:
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
            pass  # the uploader has given up, and its output has the reason
        output = errors.read().decode(errors="replace").strip()
        code = uploader.wait()
        if code != 0:
            raise (NotDelivered if code == REFUSED else OSError)(
                output.rpartition("\n")[2] or f"the uploader ended with {code}"
            )
        if output:
            _log.warning("%s", output)


def _receive(pipe: BinaryIO, sink: Sink) -> bytes:
    """Copy the state from the pipe to `sink`. Returns the manifest."""
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
    data = pipe.read(size)
    if len(data) != size:
        raise OSError("the worker has died before the end of the state")
    return data


def main(url: str, stem: str, keep: int, run: RunIdentity | None) -> int:
    """Run the uploader: write the state on standard input to the store. Returns the exit code."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        Store(url, run).write(stem, lambda sink: _receive(sys.stdin.buffer, sink), keep)
    except Exception as error:  # noqa: BLE001  each store's client has its own errors
        print(f"{type(error).__name__}: {first_line(error)}", file=sys.stderr)
        return 1 if passing(error, local=False) else REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), RunIdentity(*sys.argv[4:]) if sys.argv[4:] else None))


# --- saver ------------------------------------------------------------------------------------------------------------

WRITING = Patience(attempts=3, limit_s=60.0, first_pause_s=1.0)  # no attempt begins after `limit_s`


class CheckpointSaver:
    """The checkpoint writer of one worker.

    `describe(position, whole)` returns a manifest, and may be replaced; `tell` sends a message to the coordinator.
    `parameters`: the "object.path" of the parameters that decide whether a state is finite.
    """

    def __init__(
        self,
        store: Store,
        every: Every,
        keep: int,
        *,
        describe: Callable[[Position, bool], Manifest],
        tell: Callable[[Checkpointed], None],
        parameters: Collection[str] = (),
        patience: Patience = WRITING,
    ) -> None:
        self._store = store
        self._every = every
        self._keep = keep
        self.describe = describe
        self._tell = tell
        self._parameters = parameters
        self._patience = patience
        self._copy = HostCopy()
        self._steps_led = 0
        self._at_once = False
        self._thread: threading.Thread | None = None
        self._writing: tuple[int, float] | None = None  # the step whose checkpoint is being written, and since when
        self._last_step, self._last_time = 0, 0.0

    def enter(self, step: int) -> None:
        """Start counting the period at `step`, whose state was created, loaded or received."""
        self._last_step, self._last_time = step, time.monotonic()

    def step_begins(self, position: Position, state: Callable[[], Any], *, leads: bool, at_once: bool = False) -> None:
        """Copy the state if a checkpoint is due and this worker `leads`. Call it on the training thread.

        The state must be whole. `at_once`: a checkpoint is due in any case.
        """
        if self._every == Every():
            return
        now = time.monotonic()
        is_due = self._every.is_due(position.step, now, last_step=self._last_step, last_time=self._last_time)
        if not leads:
            self._steps_led, self._at_once = 0, False
            if self._every.steps:
                self._last_step = position.step  # another worker writes it
            return
        self._at_once = self._at_once or at_once
        is_due = is_due or self._at_once
        self._steps_led += 1
        busy = self._thread is not None and self._thread.is_alive()
        if self._steps_led == 2 and not is_due and not busy:  # optimizers have their state after one step
            self._start(self._copy.reserve, state())  # without a thread the first copy takes longer
        elif is_due and not busy:
            self._last_step, self._last_time, self._at_once = position.step, now, False
            self._begin(position, state)
        elif is_due and self._writing is not None:
            step, since = self._writing
            self._last_step, self._last_time = position.step, now
            late = f"the one of step {step} is still being written after {now - since:.1f} s"
            self._tell(Checkpointed(step=position.step, error=late, late=True))

    def save(self, position: Position, state: Any, *, whole: bool) -> tuple[str, bool]:
        """Write the last checkpoint, after the one in progress, when training is over.

        Returns its path, and True if it is finite.

        Raises:
            OSError: the store is full or can't be reached.
        """
        if self._thread is not None:
            self._thread.join()
        path, _, finite = self._deliver(content.in_place(state), position, whole=whole, last=True)
        return path, finite

    def _begin(self, position: Position, state: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            copied_content = self._copy.take(state())
        except (RuntimeError, MemoryError, FarandoleError) as failure:  # for example out of memory
            self._tell(Checkpointed(step=position.step, error=first_line(failure)))
            return
        copied = time.perf_counter() - began
        self._writing = (position.step, time.monotonic())
        if reason := self._start(self._write, copied_content, position, copied):
            self._writing = None
            error = f"no thread could be started to write it ({reason}): check this host's process and thread limits"
            self._tell(Checkpointed(step=position.step, error=error))

    def _start(self, work: Callable[..., None], *args: Any) -> str:
        """Start `work` on a thread. Returns the reason if that fails, else ""."""
        thread = threading.Thread(target=work, args=args, name="checkpoint")
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            return first_line(error)
        self._thread = thread
        return ""

    def _write(self, saved_content: Content, position: Position, copied: float) -> None:
        began = time.monotonic()
        path, error, size, finite = "", "", 0, True
        try:
            path, size, finite = self._deliver(saved_content, position, whole=True)
        except Exception as failure:  # noqa: BLE001  training continues after any error, which is reported
            error = first_line(failure)
        self._writing = None
        _log.info("checkpoint of step %d: %s", position.step, path or error)
        self._tell(
            Checkpointed(
                step=position.step,
                path=path,
                error=error,
                bytes=size,
                seconds=round(time.monotonic() - began, 3),
                copy_ms=round(copied * 1e3, 2),
                finite=finite,
            )
        )

    def _deliver(
        self, saved_content: Content, position: Position, *, whole: bool, last: bool = False
    ) -> tuple[str, int, bool]:
        finite = content.finite(saved_content, self._parameters)
        manifest = msgspec.structs.replace(self.describe(position, whole), finite=finite)
        stem = self._store.name(manifest)
        size = 0

        def produce(sink: Sink) -> bytes:
            nonlocal size
            sealing = Sealing(sink)
            content.save(saved_content, position, sealing)
            size = sealing.size
            return sealing.seal(manifest)

        write = self._store.write if self._store.local else partial(send, self._store, may_write_here=last)
        attempt(
            lambda: write(stem, produce, self._keep),
            f"checkpoints at {self._store.url}: writing {stem}",
            self._patience,
            local=self._store.local,
        )
        return self._store.place(stem), size, finite
