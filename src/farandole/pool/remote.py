"""A pool's link to the agents of its hosts, through the run's coordinator: orders go out, reports come back.

`RemoteHosts` holds the state of the hosts. `AgentLink` is the connection; it also writes the workers' logs to the run's
folder, like those of local workers. A broken connection is made again, and each side then sends all its state.
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

# --- remote hosts -----------------------------------------------------------------------------------------------------
#
# A pool's state of hosts whose workers an agent starts: a pure function of the agents' reports.
#
# The pool orders, an agent reports, and either may restart without the other:
#
# - No order is made for a host before its agent has reported to this process of the pool. The workers that run there
#   then were started for an earlier process. They are taken over (`RunningWorker`), and each order names them.
# - A worker's exit is reported when its agent reports it, or when a report does not contain the worker: then it
#   belonged to another instance of the agent, and an agent's workers end with it. An exit is never reported because a
#   host is unreachable.
# - A worker that was ordered and is in no report has not started, if the report answers an order without it. If another
#   instance reports, an earlier one may have started it: that start has failed, and its id is not used again.
# - At the very end the pool does not wait for an unreachable host (`forget`): its workers end when they are orphaned.

AGENT_RESTARTED = "the agent of its host has restarted"
AWAY = "its host is out of reach"
CALLED_OFF = "cancelled before it had started"


@dataclass(kw_only=True)
class RemoteHost:
    """One host, as in its agent's last report. `state` is "" before the first.

    `ordered`: workers that were ordered and are in no report yet. `running`: workers that run. `acknowledged`: workers
    whose end is known. `stopping`: workers to stop, with the number of the order that no longer names them.
    """

    connected: bool = False
    instance: str = ""
    state: str = ""
    reason: str = ""
    ordered: list[str] = field(default_factory=list[str])
    running: list[str] = field(default_factory=list[str])
    stopping: dict[str, int] = field(default_factory=dict[str, int])
    acknowledged: tuple[str, ...] = ()
    reported_at: float = 0.0  # the host's deadline that was reported last
    preempted: bool = False  # it was more than advice

    @property
    def workers(self) -> list[str]:
        return [*self.running, *self.ordered]

    @property
    def ready(self) -> bool:
        """Returns True if a worker that is ordered there would start now."""
        return self.connected and self.state == "ready"


class RemoteHosts:
    """The hosts by name. The methods return the events that have happened, in order."""

    def __init__(self, session: str) -> None:
        self.hosts: dict[str, RemoteHost] = {}
        self._session = session
        self._serial = 0

    def remember(self, worker: str, host: str) -> None:
        """Add a worker of an earlier process of this pool. The next report shows if it still runs."""
        self.hosts.setdefault(host, RemoteHost()).running.append(worker)

    def start(self, worker: str, host: str) -> None:
        """Raises KeyError: that host has never reported."""
        self.hosts[host].ordered.append(worker)

    def stop(self, worker: str) -> str:
        """Stop the worker. Returns the host whose order changes by that, "" if none does."""
        for name, remote in self.hosts.items():
            if worker in remote.workers and worker not in remote.stopping:
                remote.stopping[worker] = self._serial + 1
                return name
        return ""

    def mark_disconnected(self, host: str) -> None:
        """The host's agent is no longer connected."""
        if remote := self.hosts.get(host):
            remote.connected = False

    def forget(self, host: str) -> list[Event]:
        """Remove the host. Its workers count as exited, because no report will come."""
        remote = self.hosts.pop(host, RemoteHost())
        exited: list[Event] = [WorkerExited(worker, AWAY) for worker in remote.running]
        return [*exited, *(WorkerStartFailed(worker, AWAY) for worker in remote.ordered)]

    def order(self, host: str, job: Job, logs: dict[str, int], *, end: bool = False) -> AgentOrder | None:
        """A new order for the host's agent; None if no agent is connected. `logs`: the bytes that are here, by
        worker.
        """
        remote = self.hosts.get(host)
        if remote is None or not remote.connected:
            return None
        self._serial += 1
        workers = () if end else tuple(worker for worker in remote.workers if worker not in remote.stopping)
        return AgentOrder(
            job=job,
            session=self._session,
            serial=self._serial,
            instance=remote.instance,
            workers=workers,
            acknowledged=remote.acknowledged,
            logs={worker: logs.get(worker, 0) for worker in remote.workers},
            end=end,
        )

    def on_report(self, host: str, report: Report, now: float) -> list[Event]:
        """Process a report of the host's agent. `now` is Unix time."""
        remote = self.hosts.setdefault(host, RemoteHost())
        remote.connected, remote.state, remote.reason = True, report.state, report.reason
        return [
            *self._on_instance(remote, report),
            *self._on_workers(host, remote, report),
            *_preemption_events(host, remote, report, now),
        ]

    def _on_instance(self, remote: RemoteHost, report: Report) -> Iterator[Event]:
        previous, remote.instance = remote.instance, report.instance
        if previous in ("", report.instance):
            return
        for worker in remote.ordered:
            yield WorkerStartFailed(worker, AGENT_RESTARTED)
        remote.ordered = []

    def _on_workers(self, host: str, remote: RemoteHost, report: Report) -> Iterator[Event]:
        for worker in (*report.running, *report.ended):
            if worker in remote.ordered:
                remote.ordered.remove(worker)
                remote.running.append(worker)
                yield Started(worker, host)
            elif worker not in remote.running and worker not in remote.acknowledged:
                remote.running.append(worker)
                yield RunningWorker(worker, host)
        unknown = {w: AGENT_RESTARTED for w in remote.running if w not in report.running and w not in report.ended}
        for worker, reason in {**unknown, **report.ended}.items():
            if worker in remote.running:
                remote.running.remove(worker)
                remote.stopping.pop(worker, None)
                yield WorkerExited(worker, reason)
        answered = report.serial if report.session == self._session else 0
        called_off = {w: CALLED_OFF for w in remote.ordered if remote.stopping.get(w, answered + 1) <= answered}
        for worker, reason in {**called_off, **report.failed}.items():
            if worker in remote.ordered:
                remote.ordered.remove(worker)
                remote.stopping.pop(worker, None)
                yield WorkerStartFailed(worker, reason)
        remote.acknowledged = (*report.ended, *report.failed)


def _preemption_events(host: str, remote: RemoteHost, report: Report, now: float) -> Iterator[Event]:
    notified = report.notified
    if notified is None or notified.at == remote.reported_at:
        return
    remote.reported_at = notified.at
    if notified.advice:
        yield HostRebalance(host, notified.reason)
    else:
        remote.preempted = True
        yield HostPreempted(host, max(notified.at - now, 0.0), notified.reason)


# --- link -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
AGAIN_S = 0.2


class AgentLink:
    """Connects a pool to its agents. `serve` runs in a task; the other methods return at once.

    `changed` is called with each host whose state was reported.

    Attributes:
        far: the state of the hosts.
        connected: the coordinator is reachable. If not, no agent's state is known.
    """

    def __init__(
        self, ticket: Ticket, pool: str, job: messages.Job, logs: Path, events: Events, changed: Callable[[str], None]
    ) -> None:
        self.far = RemoteHosts(secrets.token_hex(8))
        self.connected = False
        self._ticket, self._pool, self._job, self._logs = ticket, pool, job, logs
        self._events, self._changed = events, changed
        self._outgoing: asyncio.Queue[messages.ToHost] = asyncio.Queue()
        self._ending: set[str] = set()
        self._over = False

    def remember(self, worker: str, host: str) -> None:
        """Add a worker of an earlier process of this pool."""
        self.far.remember(worker, host)
        self._events.put(RunningWorker(worker, host))

    def start(self, worker: str, host: str) -> None:
        """Raises KeyError: that host has never reported."""
        self.far.start(worker, host)
        self._order(host)

    def stop(self, worker: str) -> None:
        if host := self.far.stop(worker):
            self._order(host)

    def end(self, host: str) -> None:
        """Order the host's agent to end, with all its workers."""
        self._ending.add(host)
        self._order(host)

    def run_over(self) -> None:
        """The run is over: a lost coordinator will not come back."""
        self._over = True

    def allow_restart(self, host: str) -> None:
        """Let the host serve again if it was ordered to end."""
        self._ending.discard(host)

    async def serve(self) -> None:
        """Serve until cancelled."""
        while True:
            hello = messages.Hello(kind="agent_pool", host=socket.gethostname(), pid=os.getpid(), pool=self._pool)
            with contextlib.suppress(CoordinatorUnreachable):
                async with subscribe(self._ticket, hello) as subscription:
                    self.connected = True
                    await self._run_session(subscription)
            self.connected = False
            for host in tuple(self.far.hosts):
                self.far.mark_disconnected(host)
                for event in self.far.forget(host) if self._over else ():
                    self._events.put(event)
                self._changed(host)
            await asyncio.sleep(AGAIN_S)

    async def _run_session(self, subscription: Subscription) -> None:
        sending = asyncio.ensure_future(self._send(subscription))
        try:
            while (message := await subscription.receive()) is not None:
                if isinstance(message, messages.FromHost):
                    self._on_message(message)
        finally:
            sending.cancel()

    async def _send(self, subscription: Subscription) -> None:
        while True:
            await subscription.send(await self._outgoing.get())

    def _on_message(self, message: messages.FromHost) -> None:
        host = message.host
        match message.message:
            case messages.Report() as report:
                previous = self.far.hosts.get(host)
                before_report = (previous.connected, previous.acknowledged) if previous else (False, ())
                for event in self.far.on_report(host, report, time.time()):
                    self._events.put(event)
                if before_report != (True, self.far.hosts[host].acknowledged):
                    self._order(host)
                self._changed(host)
            case messages.Output() as output:
                self._write(output)
            case None:
                self.far.mark_disconnected(host)
                self._changed(host)

    def _order(self, host: str) -> None:
        remote = self.far.hosts.get(host)
        sizes = {worker: self._size(worker) for worker in remote.workers} if remote else {}
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
        """Append the new part of the output. Bytes already written are skipped. Output after a gap is dropped: the next
        order requests it again.
        """
        size = self._size(output.worker)
        new = output.content[size - output.offset :] if output.offset <= size else b""
        try:
            if new and "/" not in output.worker:
                with append(self._log_of(output.worker)) as log:
                    log.write(new)
        except OSError as error:  # a full disk: the worker is worth more than its output
            _log.warning("%s is not written: %s", self._log_of(output.worker), error)
