"""Writes checkpoints while training goes on.

The worker that the coordinator has named (`membership/saving.py`) copies the state at a step's beginning, on the
training thread, and a thread of its own writes the copy. One at a time: what comes due meanwhile is left out, and said
to be. Nothing here draws the script's random numbers, touches gradients, or holds a lock that anything else waits for.
Writing is tried again where that can help. A failure is told to the coordinator, which has another worker try, and ends
nothing; so is that no thread is to be had (a limit on processes).

The last checkpoint is written when nobody trains any more: on the calling thread, and, where no process can be started
to deliver it, by this one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec

from farandole.checkpoint import content, uploader
from farandole.checkpoint.attempts import Patience, attempt
from farandole.checkpoint.content import Content, HostCopy
from farandole.checkpoint.schedule import Every
from farandole.checkpoint.sealing import Sealing, Sink
from farandole.checkpoint.store import Manifest, Store, first_line
from farandole.errors import FarandoleError
from farandole.membership.messages import Checkpointed
from farandole.plan.shards import Position

WRITING = Patience(attempts=3, limit_s=60.0, first_pause_s=1.0)  # no attempt begins after so long
_log = logging.getLogger(__name__)


class Saver:
    """One worker's. `describe(position, whole)` gives a manifest; `tell` sends a message to the coordinator.

    `parameters`: "object.path" of those that are looked at to see whether a state is finite.
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
        self._describe = describe
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
        """The state as of `step` was made, loaded or handed over: periods count from here."""
        self._last_step, self._last_time = step, time.monotonic()

    def step_begins(self, position: Position, state: Callable[[], Any], *, leads: bool, at_once: bool = False) -> None:
        """On the training thread, with the state whole. Copies it if a checkpoint is due and this worker `leads`.

        `at_once`: one is due, whenever the last one was.
        """
        if self._every == Every():
            return
        now = time.monotonic()
        due = self._every.due(position.step, now, last_step=self._last_step, last_time=self._last_time)
        if not leads:
            self._steps_led, self._at_once = 0, False
            if self._every.steps:
                self._last_step = position.step  # another sees to it
            return
        self._at_once = self._at_once or at_once
        due = due or self._at_once
        self._steps_led += 1
        busy = self._thread is not None and self._thread.is_alive()
        if self._steps_led == 2 and not due and not busy:  # optimizers have their state after one step
            self._start(self._copy.reserve, state())  # without a thread the first copy takes longer
        elif due and not busy:
            self._last_step, self._last_time, self._at_once = position.step, now, False
            self._begin(position, state)
        elif due and self._writing is not None:
            step, since = self._writing
            self._last_step, self._last_time = position.step, now
            late = f"the one of step {step} is still being written after {now - since:.1f} s"
            self._tell(Checkpointed(step=position.step, error=late, late=True))

    def save(self, position: Position, state: Any, *, whole: bool) -> tuple[str, bool]:
        """Write the last checkpoint, after the one in progress: its path, and whether it is finite. Nobody trains any
        more.

        Raises:
            OSError: the place is full or can't be reached.
        """
        if self._thread is not None:
            self._thread.join()
        path, _, finite = self._deliver(content.in_place(state), position, whole=whole, last=True)
        return path, finite

    def _begin(self, position: Position, state: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            taken = self._copy.take(state())
        except (RuntimeError, MemoryError, FarandoleError) as failure:  # no memory for it, say
            self._tell(Checkpointed(step=position.step, error=first_line(failure)))
            return
        copied = time.perf_counter() - began
        self._writing = (position.step, time.monotonic())
        if why := self._start(self._write, taken, position, copied):
            self._writing = None
            error = f"no thread could be started to write it ({why}): see the limits on processes and threads here"
            self._tell(Checkpointed(step=position.step, error=error))

    def _start(self, work: Callable[..., None], *args: Any) -> str:
        """Begin `work` on a thread. Why that can't be done, "" if it is."""
        thread = threading.Thread(target=work, args=args, name="checkpoint")
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            return first_line(error)
        self._thread = thread
        return ""

    def _write(self, taken: Content, position: Position, copied: float) -> None:
        began = time.monotonic()
        path, error, size, finite = "", "", 0, True
        try:
            path, size, finite = self._deliver(taken, position, whole=True)
        except Exception as failure:  # noqa: BLE001  whatever it is, training goes on, and it is told
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

    def _deliver(self, taken: Content, position: Position, *, whole: bool, last: bool = False) -> tuple[str, int, bool]:
        finite = content.finite(taken, self._parameters)
        manifest = msgspec.structs.replace(self._describe(position, whole), finite=finite)
        stem = self._store.name(manifest)
        size = 0

        def produce(sink: Sink) -> bytes:
            nonlocal size
            sealing = Sealing(sink)
            content.save(taken, position, sealing)
            size = sealing.size
            return sealing.seal(manifest)

        write = self._store.write if self._store.local else partial(uploader.send, self._store, here=last)
        attempt(
            lambda: write(stem, produce, self._keep),
            f"checkpoints at {self._store.url}: writing {stem}",
            self._patience,
            local=self._store.local,
        )
        return self._store.place(stem), size, finite
