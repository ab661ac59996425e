"""The coordinator's books: who there is, what is outstanding, and the few ways to write in them.

`planned`, `unplanned` and `ending` are functions over the books; `coordinator` holds them and feeds them. Every change
leaves through `actions`, in order.
"""

from __future__ import annotations

from typing import Any

from farandole.membership import messages as m
from farandole.membership.records import Action, Close, Departed, Ending, Record, RunSettings, Send, Stopping, Worker
from farandole.membership.speeds import Speeds
from farandole.membership.view import View

EVICTED = 3  # the exit code of workers that were
BARRED = 5  # ... because of what they did: a guest comes back after an eviction, but not after this
KEPT = 1000


class Books:
    """At most one of {a proposed view, a stop, a checkpoint being saved} is outstanding at any time.

    Attributes:
        early: guests that asked in before the run's first own worker, which they are to be compared with.
        view: the newest view in force for anyone.
        previous: the view before it, while some of its members may not have switched yet.
        proposed: a view on its way, until it is in force for everyone concerned.
        unswitched: who has not reported yet that it goes on in `proposed`, once anybody has.
        unlevel: joiners of `view` that do not hold the state yet.
        savers: who may still write the last checkpoint, the best first; nobody trains any more.
        between: those of them whose state is only that between two steps.
        departed: who was let go by a decision, the newest `KEPT`.
        barred: who broke the protocol, or is to stay out for another reason, the newest `KEPT`.
        gone: who makes no progress any more, for certain: its process has ended, or its lease.
        over: set once, at the very end.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.wanted = settings.wanted
        self.workers: dict[str, Worker] = {}
        self.departed: dict[str, Departed] = {}
        self.gone: dict[str, None] = {}  # in order
        self.barred: dict[str, None] = {}
        self.guests = 0
        self.signature: m.Signature | None = None
        self.early: dict[str, m.Signature] = {}
        self.view: View | None = None
        self.previous: View | None = None
        self.proposed: View | None = None
        self.proposed_at = 0.0
        self.cause = ""
        self.unswitched: set[str] = set()
        self.unlevel: set[str] = set()
        self.stopping: Stopping | None = None
        self.stops = 0
        self.ending: Ending | None = None
        self.savers: list[str] = []
        self.between: list[str] = []
        self.over: Ending | None = None
        self.startup_failures = 0
        self.last_line = (-1, 0)
        self.actions: list[Action] = []
        self.number = 0
        self.speeds = Speeds()

    # --- reading ---------------------------------------------------------------------------------------------

    def views(self) -> list[View]:
        """The views that workers may be in, the oldest first."""
        return [view for view in (self.previous, self.view, self.proposed) if view]

    def participants(self) -> list[str]:
        """Everyone alive who is in the view, in the proposed one, or still in the one before."""
        return [w for w in dict.fromkeys(w for view in self.views() for w in view.members) if w in self.workers]

    def has_part(self, worker: str) -> bool:
        """Whether the others may have to wait for it: it is in a view, is to answer a stop, or to save."""
        stopping = self.stopping
        asked = stopping is not None and (worker in stopping.waiting or worker in stopping.reports)
        return asked or worker in self.savers or any(worker in view.members for view in self.views())

    def let_in(self, worker: str) -> bool:
        """Whether the worker has, or has had, a part in the training."""
        return self.workers[worker].state in ("member", "finished") and worker not in self.unlevel

    def everyone_finished(self) -> bool:
        members = [w for w in (self.view.members if self.view else ()) if w in self.workers]
        return bool(members) and all(self.workers[w].state == "finished" for w in members)

    # --- writing ---------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def send(self, worker: str, message: m.Message) -> None:
        self.actions.append(Send(worker, message))

    def record(self, event: str, **fields: Any) -> None:
        self.actions.append(Record(event, fields))

    def dismiss(self, worker: str, reason: str, code: int = 0) -> None:
        """The worker's part is done: it exits by itself."""
        started = self.let_in(worker)
        gone = self.workers.pop(worker)
        self.record("left", worker=worker, host=gone.host, reason=reason)
        self.depart(gone, reason, code, started=started)

    def evict(self, worker: str, reason: str) -> None:
        """Take out a worker that may still be alive: its connection is closed, its pool is told to kill it."""
        started = self.let_in(worker)
        gone = self.workers.pop(worker)
        self.record("lost", worker=worker, host=gone.host, reason=reason)
        self.depart(gone, f"evicted: {reason}", self.eviction(worker), started=started)
        self.actions.append(Close(worker))

    def turn_out(self, worker: str, reason: str) -> None:
        """Tell it to go, and close its connection."""
        self.send(worker, m.Goodbye(reason=f"evicted: {reason}", code=self.eviction(worker)))
        self.actions.append(Close(worker))

    def depart(self, gone: Worker, reason: str, code: int, *, started: bool) -> None:
        """It exits with `code`; it is told again should it come back without having heard it."""
        self.departed[gone.id] = Departed(session=gone.session, reason=reason, code=code, started=started)
        _trim(self.departed)
        self.send(gone.id, m.Goodbye(reason=reason, code=code))

    def bar(self, worker: str) -> None:
        """When it is evicted now, it must not come back."""
        self.barred[worker] = None
        _trim(self.barred)

    def eviction(self, worker: str) -> int:
        """The exit code of `worker`, should it be evicted."""
        return BARRED if worker in self.barred else EVICTED

    def forget(self, worker: str) -> None:
        """It makes no progress any more, for certain."""
        self.gone[worker] = None
        _trim(self.gone)


def _trim(kept: dict[str, Any]) -> None:
    for oldest in list(kept)[:-KEPT]:
        del kept[oldest]
