"""What an agent is to do: a pure function of its pool's orders and of what has become of its workers.

Invariant: a worker is started at most once, and only by an order that names it and was made for this process. So an
order that is old, comes twice, or was made for an earlier agent of the host starts nobody again; and a worker that no
order names any more is stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

from farandole.membership.hosts import Notified, Order, Report
from farandole.pool.base import Event, Gone, Started, StartFailed


@dataclass(frozen=True, kw_only=True)
class Due:
    """`stop` these workers, then `start` these."""

    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()


class Duty:
    """Of one agent. `state` and `reason` are its own to set: preparing, ready, or failed.

    Attributes:
        order: the newest, None before the first.
        notified: what is known of the host's own end.
    """

    def __init__(self, instance: str) -> None:
        self.order: Order | None = None
        self.state, self.reason = "preparing", ""
        self.notified: Notified | None = None
        self._instance = instance
        self._asked: set[str] = set()  # all that were ever started, or are to be
        self._running: dict[str, bool] = {}  # whether its process is there
        self._stopped: set[str] = set()
        self._ended: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    @property
    def running(self) -> bool:
        """Somebody is there, or about to be."""
        return bool(self._running)

    def ordered(self, order: Order) -> bool:
        """Whether it is for this process."""
        if order.instance != self._instance:
            return False
        self.order = order
        for worker in order.heard:
            self._ended.pop(worker, None)
            self._failed.pop(worker, None)
        return True

    def due(self) -> Due:
        """What it names is taken to be done."""
        wanted = set(self.order.workers) if self.order and not self.order.end else set[str]()
        stop = tuple(w for w in self._running if w not in wanted and w not in self._stopped)
        self._stopped.update(stop)
        start = tuple(sorted(wanted - self._asked)) if self.state == "ready" else ()
        self._asked.update(start)
        self._running.update(dict.fromkeys(start, False))
        if self.state == "failed":
            for worker in sorted(wanted - self._asked):
                self._asked.add(worker)
                self._failed[worker] = self.reason
        return Due(stop=stop, start=start)

    def heard(self, event: Event) -> None:
        """Of the pool that has this host's processes."""
        match event:
            case Started(worker, _):
                self._running[worker] = True
            case StartFailed(worker, reason):
                del self._running[worker]
                self._failed[worker] = reason
            case Gone(worker, reason):
                del self._running[worker]
                self._ended[worker] = reason
            case _:
                pass

    def report(self) -> Report:
        return Report(
            instance=self._instance,
            state=self.state,
            reason=self.reason,
            session=self.order.session if self.order else "",
            serial=self.order.serial if self.order else 0,
            running=tuple(worker for worker, there in self._running.items() if there),
            ended=dict(self._ended),
            failed=dict(self._failed),
            notified=self.notified,
        )
