"""A pool's link to the agents of its hosts, over the run's coordinator: orders go out, reports come back.

What is known of the hosts is in section "far hosts"; this is the connection and the workers' logs, which are kept in
the run's folder as those of local workers are. A connection that breaks is made again: each side says everything anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from farandole.control.client import Subscription, subscribe
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable
from farandole.platform.files import append
from farandole.pool.base import (
    Event,
    Events,
    HostPreempted,
    HostRebalance,
    RunningWorker,
    Started,
    WorkerExited,
    WorkerStartFailed,
)
from farandole.protocol import messages
from farandole.protocol.messages import AgentOrder, Job, Report

# --- far hosts --------------------------------------------------------------------------------------------------------
#
# What a pool knows of hosts whose workers an agent starts: a pure function of the agents' reports.
#
# Who knows what when: the pool orders, an agent reports, and either may begin anew without the other.
#
# - No order is made for a host before its agent has reported to this process of the pool. What runs there then was
#   started for an earlier one; it is taken over (`Found`), and the order names it from the beginning.
# - A worker's end is told once its agent reports it; or when a report knows nothing of it, for then another instance
#   of the agent has had it, and an agent's workers end with it. It is never told because a host can't be reached.
# - A worker that was ordered and is in no report has not begun, where the report answers an order without it. Where
#   another instance reports, an earlier one may have begun it: that start has failed, and its id is not used again.
# - At the very end nobody waits for a host out of reach (`forget`): its workers end when they are orphaned.

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
        gone: list[Event] = [WorkerExited(worker, AWAY) for worker in far.running]
        return [*gone, *(WorkerStartFailed(worker, AWAY) for worker in far.asked)]

    def order(self, host: str, job: Job, logs: dict[str, int], *, end: bool = False) -> AgentOrder | None:
        """What its agent is to be told now; None where none is connected."""
        far = self.hosts.get(host)
        if far is None or not far.connected:
            return None
        self._serial += 1
        workers = () if end else tuple(worker for worker in far.workers if worker not in far.stopping)
        return AgentOrder(
            job=job,
            session=self._session,
            serial=self._serial,
            instance=far.instance,
            workers=workers,
            acknowledged=far.heard,
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
            yield WorkerStartFailed(worker, ANEW)
        far.asked = []

    def _workers(self, host: str, far: Far, report: Report) -> Iterator[Event]:
        for worker in (*report.running, *report.ended):
            if worker in far.asked:
                far.asked.remove(worker)
                far.running.append(worker)
                yield Started(worker, host)
            elif worker not in far.running and worker not in far.heard:
                far.running.append(worker)
                yield RunningWorker(worker, host)
        unknown = {w: ANEW for w in far.running if w not in report.running and w not in report.ended}
        for worker, reason in {**unknown, **report.ended}.items():
            if worker in far.running:
                far.running.remove(worker)
                far.stopping.pop(worker, None)
                yield WorkerExited(worker, reason)
        answered = report.serial if report.session == self._session else 0
        called_off = {w: CALLED_OFF for w in far.asked if far.stopping.get(w, answered + 1) <= answered}
        for worker, reason in {**called_off, **report.failed}.items():
            if worker in far.asked:
                far.asked.remove(worker)
                far.stopping.pop(worker, None)
                yield WorkerStartFailed(worker, reason)
        far.heard = (*report.ended, *report.failed)


def _notified(host: str, far: Far, report: Report, now: float) -> Iterator[Event]:
    notified = report.notified
    if notified is None or notified.at == far.told:
        return
    far.told = notified.at
    if notified.advice:
        yield HostRebalance(host, notified.reason)
    else:
        yield HostPreempted(host, max(notified.at - now, 0.0), notified.reason)


# --- link -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
AGAIN_S = 0.2


class AgentLink:
    """`serve` in a task; the rest returns at once. `changed` is called with each host of which something was heard.

    Attributes:
        far: what is known of the hosts.
        connected: the coordinator is there; without it nothing is known of any agent.
    """

    def __init__(
        self, ticket: Ticket, pool: str, job: messages.Job, logs: Path, events: Events, changed: Callable[[str], None]
    ) -> None:
        self.far = FarHosts(secrets.token_hex(8))
        self.connected = False
        self._ticket, self._pool, self._job, self._logs = ticket, pool, job, logs
        self._events, self._changed = events, changed
        self._outgoing: asyncio.Queue[messages.ToHost] = asyncio.Queue()
        self._ending: set[str] = set()
        self._over = False

    def remember(self, worker: str, host: str) -> None:
        """It was there, for an earlier process of this pool."""
        self.far.remember(worker, host)
        self._events.put(RunningWorker(worker, host))

    def start(self, worker: str, host: str) -> None:
        """Raises KeyError: nothing was heard of that host."""
        self.far.start(worker, host)
        self._order(host)

    def stop(self, worker: str) -> None:
        if host := self.far.stop(worker):
            self._order(host)

    def end(self, host: str) -> None:
        """Its agent is to end, with all of its workers."""
        self._ending.add(host)
        self._order(host)

    def over(self) -> None:
        """The run is: a coordinator that is not there any more will not come back."""
        self._over = True

    def begins(self, host: str) -> None:
        """It is to serve again, should it have been told to end."""
        self._ending.discard(host)

    async def serve(self) -> None:
        """For ever."""
        while True:
            hello = messages.Hello(kind="agent_pool", host=socket.gethostname(), pid=os.getpid(), pool=self._pool)
            with contextlib.suppress(CoordinatorUnreachable):
                async with subscribe(self._ticket, hello) as subscription:
                    self.connected = True
                    await self._converse(subscription)
            self.connected = False
            for host in tuple(self.far.hosts):
                self.far.lost(host)
                for event in self.far.forget(host) if self._over else ():
                    self._events.put(event)
                self._changed(host)
            await asyncio.sleep(AGAIN_S)

    async def _converse(self, subscription: Subscription) -> None:
        sending = asyncio.ensure_future(self._send(subscription))
        try:
            while (message := await subscription.receive()) is not None:
                if isinstance(message, messages.FromHost):
                    self._heard(message)
        finally:
            sending.cancel()

    async def _send(self, subscription: Subscription) -> None:
        while True:
            await subscription.send(await self._outgoing.get())

    def _heard(self, message: messages.FromHost) -> None:
        host = message.host
        match message.message:
            case messages.Report() as report:
                before = self.far.hosts.get(host)
                known = (before.connected, before.heard) if before else (False, ())
                for event in self.far.reported(host, report, time.time()):
                    self._events.put(event)
                if known != (True, self.far.hosts[host].heard):
                    self._order(host)
                self._changed(host)
            case messages.Output() as output:
                self._write(output)
            case None:
                self.far.lost(host)
                self._changed(host)

    def _order(self, host: str) -> None:
        far = self.far.hosts.get(host)
        sizes = {worker: self._size(worker) for worker in far.workers} if far else {}
        if order := self.far.order(host, self._job, sizes, end=host in self._ending):
            self._outgoing.put_nowait(messages.ToHost(host=host, order=order))

    # --- logs ----------------------------------------------------------------------------------------------

    def _log_of(self, worker: str) -> Path:
        return self._logs / f"{worker}.log"

    def _size(self, worker: str) -> int:
        with contextlib.suppress(OSError):
            return self._log_of(worker).stat().st_size
        return 0

    def _write(self, output: messages.Output) -> None:
        """What is there already is left out; what has a gap before it comes again with the next order."""
        size = self._size(output.worker)
        new = output.content[size - output.offset :] if output.offset <= size else b""
        try:
            if new and "/" not in output.worker:
                with append(self._log_of(output.worker)) as log:
                    log.write(new)
        except OSError as error:  # a full disk: the worker is worth more than what it prints
            _log.warning("%s is not written: %s", self._log_of(output.worker), error)
