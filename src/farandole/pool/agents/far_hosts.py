"""What a pool knows of hosts whose workers an agent starts: a pure function of the agents' reports.

Who knows what when: the pool orders, an agent reports, and either may begin anew without the other.

- No order is made for a host before its agent has reported to this process of the pool. What runs there then was
  started for an earlier one; it is taken over (`Found`), and the order names it from the beginning.
- A worker's end is told once its agent reports it; or when a report knows nothing of it, for then another instance
  of the agent has had it, and an agent's workers end with it. It is never told because a host can't be reached.
- A worker that was ordered and is in no report has not begun, where the report answers an order without it. Where
  another instance reports, an earlier one may have begun it: that start has failed, and its id is not used again.
- At the very end nobody waits for a host out of reach (`forget`): its workers end when they are orphaned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from farandole.membership.hosts import Job, Order, Report
from farandole.pool.base import Advice, Event, Found, Gone, Notice, Started, StartFailed

ANEW = "the agent of its host has begun anew"
AWAY = "its host is out of reach"
CALLED_OFF = "called off before it had started"


@dataclass(kw_only=True)
class Far:
    """One host, as its agent has reported last: `state` is "" before that.

    `asked` were ordered and have not been heard of, `running` are there; `heard`: whose end is known; `stopping`: when
    the order is made without them, and its number.
    """

    connected: bool = False
    instance: str = ""
    state: str = ""
    reason: str = ""
    asked: list[str] = field(default_factory=list[str])
    running: list[str] = field(default_factory=list[str])
    stopping: dict[str, int] = field(default_factory=dict[str, int])
    heard: tuple[str, ...] = ()
    told: float = 0.0  # when it goes, as was told last

    @property
    def workers(self) -> list[str]:
        return [*self.running, *self.asked]

    @property
    def ready(self) -> bool:
        """A worker that is ordered there would start now."""
        return self.connected and self.state == "ready"


class FarHosts:
    """By name. What its methods return has happened, in order."""

    def __init__(self, session: str) -> None:
        self.hosts: dict[str, Far] = {}
        self._session = session
        self._serial = 0

    def remember(self, worker: str, host: str) -> None:
        """It was there, for an earlier process of this pool: the next report says whether it is."""
        self.hosts.setdefault(host, Far()).running.append(worker)

    def start(self, worker: str, host: str) -> None:
        """Raises KeyError: nothing was heard of that host."""
        self.hosts[host].asked.append(worker)

    def stop(self, worker: str) -> str:
        """The host whose order is another one by that, "" for none."""
        for name, far in self.hosts.items():
            if worker in far.workers and worker not in far.stopping:
                far.stopping[worker] = self._serial + 1
                return name
        return ""

    def lost(self, host: str) -> None:
        """Its agent is not connected any more."""
        if far := self.hosts.get(host):
            far.connected = False

    def forget(self, host: str) -> list[Event]:
        """Nothing is heard of it any more."""
        far = self.hosts.pop(host, Far())
        gone: list[Event] = [Gone(worker, AWAY) for worker in far.running]
        return [*gone, *(StartFailed(worker, AWAY) for worker in far.asked)]

    def order(self, host: str, job: Job, logs: dict[str, int], *, end: bool = False) -> Order | None:
        """What its agent is to be told now; None where none is connected."""
        far = self.hosts.get(host)
        if far is None or not far.connected:
            return None
        self._serial += 1
        workers = () if end else tuple(worker for worker in far.workers if worker not in far.stopping)
        return Order(
            job=job,
            session=self._session,
            serial=self._serial,
            instance=far.instance,
            workers=workers,
            heard=far.heard,
            logs={worker: logs.get(worker, 0) for worker in far.workers},
            end=end,
        )

    def reported(self, host: str, report: Report, now: float) -> list[Event]:
        """`now` is Unix time."""
        far = self.hosts.setdefault(host, Far())
        far.connected, far.state, far.reason = True, report.state, report.reason
        return [*self._anew(far, report), *self._workers(host, far, report), *_notified(host, far, report, now)]

    def _anew(self, far: Far, report: Report) -> Iterator[Event]:
        before, far.instance = far.instance, report.instance
        if before in ("", report.instance):
            return
        for worker in far.asked:
            yield StartFailed(worker, ANEW)
        far.asked = []

    def _workers(self, host: str, far: Far, report: Report) -> Iterator[Event]:
        for worker in (*report.running, *report.ended):
            if worker in far.asked:
                far.asked.remove(worker)
                far.running.append(worker)
                yield Started(worker, host)
            elif worker not in far.running and worker not in far.heard:
                far.running.append(worker)
                yield Found(worker, host)
        unknown = {w: ANEW for w in far.running if w not in report.running and w not in report.ended}
        for worker, reason in {**unknown, **report.ended}.items():
            if worker in far.running:
                far.running.remove(worker)
                far.stopping.pop(worker, None)
                yield Gone(worker, reason)
        answered = report.serial if report.session == self._session else 0
        called_off = {w: CALLED_OFF for w in far.asked if far.stopping.get(w, answered + 1) <= answered}
        for worker, reason in {**called_off, **report.failed}.items():
            if worker in far.asked:
                far.asked.remove(worker)
                far.stopping.pop(worker, None)
                yield StartFailed(worker, reason)
        far.heard = (*report.ended, *report.failed)


def _notified(host: str, far: Far, report: Report, now: float) -> Iterator[Event]:
    notified = report.notified
    if notified is None or notified.at == far.told:
        return
    far.told = notified.at
    if notified.advice:
        yield Advice(host, notified.reason)
    else:
        yield Notice(host, max(notified.at - now, 0.0), notified.reason)
