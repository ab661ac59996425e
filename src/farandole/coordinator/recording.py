"""The record of a run: events and state go to the journal, lines go to files and observers.

Invariant: an event is in the journal, with the state that it led to, before any promise about it is sent (`keep`); its
line in metrics.jsonl is written after the messages have left. The journal is written if an event is pending. So each
change of `Durable` that a message promises has an event of the same input. So has every ending: the workers exit with
it, and nobody may be left who could report its reason again. Two kinds of change have no event. (a) A joiner is a
candidate again: the successor stops the view, gets all answers again, and decides the same. (b) The number of stops: a
successor may give the last number again, but no answer to a stop is sent on a later connection, so an old answer can't
reach it. See docs/protocol.md, Who knows what, and Session 1. A full or stuck disk costs lines and events, which are
counted and reported, and never the training. Nothing waits for a line, and for the journal at most `LIMIT_S` of
`platform/files.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from farandole.control.status import RATE_STEPS
from farandole.coordinator.journal import Journal, Shipping, outlived
from farandole.coordinator.observers import Observers
from farandole.protocol import events
from farandole.protocol.coordinator import reconnection
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.events import Recorded
from farandole.protocol.metrics import Line, StepLine

_log = logging.getLogger(__name__)


class Recording:
    """The record of one coordinator process.

    `recent`: the last lines of the process before it. `settings`: where the state is shipped to.

    Attributes:
        steps: the lines of the last steps.
    """

    def __init__(
        self, journal: Journal, recent: Iterable[Line], observers: Observers, settings: RunSettings | None = None
    ) -> None:
        self._journal, self._observers = journal, observers
        self._shipping = Shipping(settings, self._not_shipped) if settings and outlived(settings) else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: list[events.Event] = []
        self._unwritten: list[Line] = []
        self._lost_lines, self._why = 0, ""  # lines that could not be written, and are not reported yet
        self.steps = deque((line for line in recent if isinstance(line, StepLine)), maxlen=RATE_STEPS)

    def event(self, event: events.Event) -> None:
        """Queue an event. It is journaled before the next promise, at the next update at the latest."""
        self._pending.append(_now(event))

    def write_journal(self, coordinator: Coordinator) -> None:
        """Journal the queued events and the state that they led to. Call it before any promise, and at every update."""
        self._loop = asyncio.get_running_loop()
        pending, self._pending = self._pending, []
        if not pending and not (coordinator.unrecorded and self._journal.ready):
            return
        for event in pending:
            self.note(event)
        state = reconnection.to_durable(coordinator)
        if self._shipping:
            self._shipping.put(state)
        try:
            self._journal.commit(
                pending, state, partial(self._call_in_loop, self._on_late_commit, coordinator, len(pending))
            )
        except (OSError, sqlite3.Error) as error:  # a full disk must not end the training
            _log.error("the journal could not be written: %s; lost: %s", error, pending)
            if not coordinator.unrecorded:  # for observers: our own output is a file in the run's folder
                self.note(_now(events.NotRecordedEvent(reason=str(error))))
            coordinator.unrecorded += len(pending)
            self._journal.remember(reconnection.to_durable(coordinator))  # a successor may have room, and report it
        else:
            if coordinator.unrecorded:
                self.event(events.RecordedAgainEvent(missing=coordinator.unrecorded))
                coordinator.unrecorded = 0

    def _on_late_commit(self, coordinator: Coordinator, count: int) -> None:
        """Events that the disk had not taken within the limit are in the journal after all. If a later write came
        before this call, they have been counted as missing already.
        """
        if coordinator.unrecorded:
            coordinator.unrecorded -= count
            if not coordinator.unrecorded:
                self.event(events.RecordedAgainEvent(missing=0))

    def _call_in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        """Call it in the event loop, from another thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the run is over
            self._loop.call_soon_threadsafe(call, *arguments)

    def _not_shipped(self, reason: str) -> None:
        self._call_in_loop(self.event, events.NotShippedEvent(reason=reason))

    def close(self) -> None:
        """Ship the last state, if that is possible soon."""
        if self._shipping:
            self._shipping.close()

    def note(self, line: Line) -> None:
        """Queue a line for files and observers. It follows the messages: their writers were woken before this."""
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self.write_lines)
        self._unwritten.append(line)
        if isinstance(line, StepLine):
            self.steps.append(line)

    def write_lines(self) -> None:
        self._loop = asyncio.get_running_loop()
        lines, self._unwritten = self._unwritten, []
        for line in lines:
            self._observers.send(line)
            if not self._journal.write(line, partial(self._written, line)):
                self._lose(line, "the disk does not answer, and too many lines wait for it")

    def _written(self, line: Line, error: Exception | None) -> None:
        """Called in the journal's thread."""
        if error is not None:
            _log.error("metrics.jsonl could not be written: %s; lost: %s", error, line)
            self._call_in_loop(self._lose, line, str(error))
        elif self._lost_lines:
            self._call_in_loop(self._report_lost)

    def _lose(self, line: Line, why: str) -> None:
        self._lost_lines += not isinstance(line, Recorded)  # events are in the journal
        self._why = why

    def _report_lost(self) -> None:
        if self._lost_lines:
            self.event(events.LinesLostEvent(worker="", lines=self._lost_lines, reason=self._why))
            self._lost_lines = 0


def _now(event: events.Event) -> events.Event:
    return msgspec.structs.replace(event, time=time.time())
