"""The coordinator's books: who there is, what is outstanding, and the few ways to write in them.

`planned`, `unplanned` and `ending` are functions over the books; `coordinator` holds them and feeds them. Every change
leaves through `actions`, in order.
"""

from __future__ import annotations

from typing import Any

from farandole.membership import messages as m
from farandole.membership.records import Action, Close, Ending, Record, RunSettings, Send, Stopping, Worker
from farandole.membership.view import View


class Books:
    """At most one of {a proposed view, a stop, a checkpoint being saved} is outstanding at any time.

    Attributes:
        view: the newest view in force for anyone.
        previous: the view before it, while some of its members may not have switched yet.
        proposed: a view on its way, until it is in force for everyone concerned.
        unlevel: joiners of `view` that do not hold the state yet.
        savers: who may still write the last checkpoint, the best first; nobody trains any more.
        between: those of them whose state is only that between two steps.
        over: set once, at the very end.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.wanted = settings.wanted
        self.workers: dict[str, Worker] = {}
        self.evicted: list[str] = []
        self.view: View | None = None
        self.previous: View | None = None
        self.proposed: View | None = None
        self.proposed_at = 0.0
        self.cause = ""
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
        self._number = 0

    # --- reading ---------------------------------------------------------------------------------------------

    def views(self) -> list[View]:
        """The views that workers may be in, the oldest first."""
        return [view for view in (self.previous, self.view, self.proposed) if view]

    def participants(self) -> list[str]:
        """Everyone alive who is in the view, in the proposed one, or still in the one before."""
        return [w for w in dict.fromkeys(w for view in self.views() for w in view.members) if w in self.workers]

    def let_in(self, worker: str) -> bool:
        """Whether the worker has, or has had, a part in the training."""
        return self.workers[worker].state in ("member", "finished") and worker not in self.unlevel

    def everyone_finished(self) -> bool:
        members = [w for w in (self.view.members if self.view else ()) if w in self.workers]
        return bool(members) and all(self.workers[w].state == "finished" for w in members)

    # --- writing ---------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def send(self, worker: str, message: m.Message) -> None:
        self.actions.append(Send(worker, message))

    def record(self, event: str, **fields: Any) -> None:
        self.actions.append(Record(event, fields))

    def dismiss(self, worker: str, reason: str, code: int = 0) -> None:
        """The worker's part is done: it exits by itself."""
        gone = self.workers.pop(worker)
        self.record("left", worker=worker, host=gone.host, reason=reason)
        self.send(worker, m.Goodbye(reason=reason, code=code))

    def evict(self, worker: str, reason: str) -> None:
        """Take out a worker that may still be alive: its connection is closed, its pool is told to kill it."""
        gone = self.workers.pop(worker)
        self.evicted.append(worker)
        self.record("lost", worker=worker, host=gone.host, reason=reason)
        self.send(worker, m.Goodbye(reason=f"evicted: {reason}", code=3))
        self.actions.append(Close(worker))
