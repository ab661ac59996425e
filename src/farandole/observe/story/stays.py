"""Who was there, from when to when, and why each came and went: from events alone.

A stay is one worker process: it starts, it is in the views from one moment on, it is gone. What ends it counts in the
order in which it is said: that it is lost comes before what its process died of. A worker of which nothing says that it
went, since everything was killed, ends with the last line before the run was on again.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from farandole.membership import events
from farandole.membership.metrics import Line
from farandole.observe.words import describe

How = Literal["", "left", "lost", "failed", "end"]


class Stay(msgspec.Struct, kw_only=True):
    """Unix times in seconds. `entered`: in a view since then, None: never. `gone` None: it is there.

    `how` it went: it left gracefully, was lost without notice, could not start or was not let in, or the run ended.
    `notice`: it knows since then that it has to go.
    """

    worker: str
    host: str
    came: float
    entered: float | None = None
    cause: str = ""
    notice: float | None = None
    gone: float | None = None
    how: How = ""
    why: str = ""


class Stays:
    """`take` every event, oldest first.

    Attributes:
        all: in the order in which they came.
        changes: numbers of those that have changed, oldest first; it only grows.
        members: the workers of the view in force.
        last_gone: who left or was lost last.
    """

    def __init__(self) -> None:
        self.all: list[Stay] = []
        self.changes: list[int] = []
        self.members: tuple[str, ...] = ()
        self.last_gone: Stay | None = None
        self._there: dict[str, int] = {}
        self._last = 0.0
        self._known = False  # the lines say who was there when this start of the run began

    def take(self, event: Line) -> None:
        time = getattr(event, "time", 0.0)
        match event:
            case events.Starting(worker=worker, host=host):
                self._came(worker, host, time)
            case events.Ready(worker=worker, host=host) if worker not in self._there:
                self._came(worker, host, time)
            case events.View(members=members):
                self._view(members, event.cause, time)
            case events.Notice(worker=worker, reason=reason) if worker in self._there:
                stay = self._changed(worker)
                stay.notice, stay.why = time, reason
            case events.Left(worker=worker, reason=reason):
                self._gone(worker, "left", self._notice(worker) or reason, time)
            case events.Lost(worker=worker, reason=reason):
                self._gone(worker, "lost", reason, time)
            case events.Exited(worker=worker, reason=reason) | events.StartFailed(worker=worker, reason=reason):
                self._gone(worker, "failed", reason, time)
            case events.Refused(worker=worker, reason=reason):
                self._gone(worker, "failed", reason, time)
            case events.StateLost():
                self.members, self._known = (), True
            case events.RunStarted():
                self._cut_off(tuple(self._there))
                self._known = True
            case events.Resumed() if not self._known:  # lines of a version that wrote no `run started`
                self._cut_off(tuple(name for name, at in self._there.items() if self.all[at].entered is not None))
            case events.Over():
                self._known = True
                for worker in tuple(self._there):
                    self._gone(worker, "end", describe(event), time)
                self.members = ()
            case _:
                pass
        if not isinstance(event, events.Starting):  # which may be the first word of a start that comes later
            self.at(time)

    def at(self, time: float) -> None:
        """The run was on then."""
        self._last = time

    def _cut_off(self, workers: tuple[str, ...]) -> None:
        """The run is on again: they are gone, although nothing has said so."""
        for worker in workers:
            self._gone(worker, "lost", "nothing says what became of it: the run was cut off", self._last)
        self.members = ()

    def _came(self, worker: str, host: str, time: float) -> None:
        if worker in self._there:  # of an earlier session
            self._gone(worker, "lost", "another one of its name has come", self._last)
        self._there[worker] = len(self.all)
        self.all.append(Stay(worker=worker, host=host, came=time))
        self.changes.append(len(self.all) - 1)

    def _view(self, members: tuple[str, ...], cause: str, time: float) -> None:
        for worker in members:
            if worker not in self._there:
                self._came(worker, "", time)
            if self.all[self._there[worker]].entered is None:
                stay = self._changed(worker)
                stay.entered, stay.cause = time, cause
        self.members = members

    def _notice(self, worker: str) -> str:
        return self.all[self._there[worker]].why if worker in self._there else ""

    def _changed(self, worker: str) -> Stay:
        self.changes.append(self._there[worker])
        return self.all[self._there[worker]]

    def _gone(self, worker: str, how: How, why: str, time: float) -> None:
        if worker in self._there:
            stay = self._changed(worker)
            stay.gone, stay.how, stay.why = time, how, why
            if how in ("left", "lost"):
                self.last_gone = stay
            del self._there[worker]
