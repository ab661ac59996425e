"""A pool's link to the agents of its hosts, over the run's coordinator: orders go out, reports come back.

What is known of the hosts is in `far_hosts.py`; this is the connection and the workers' logs, which are kept in the
run's folder as those of local workers are. A connection that breaks is made again: each side says everything anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from farandole.control.client import Subscription, subscribe
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable
from farandole.membership import hosts
from farandole.membership import messages as m
from farandole.platform.files import append
from farandole.pool.agents.far_hosts import FarHosts
from farandole.pool.base import Events, Found

_log = logging.getLogger(__name__)

AGAIN_S = 0.2


class Link:
    """`serve` in a task; the rest returns at once. `changed` is called with each host of which something was heard.

    Attributes:
        far: what is known of the hosts.
        connected: the coordinator is there; without it nothing is known of any agent.
    """

    def __init__(
        self, ticket: Ticket, pool: str, job: hosts.Job, logs: Path, events: Events, changed: Callable[[str], None]
    ) -> None:
        self.far = FarHosts(secrets.token_hex(8))
        self.connected = False
        self._ticket, self._pool, self._job, self._logs = ticket, pool, job, logs
        self._events, self._changed = events, changed
        self._outgoing: asyncio.Queue[hosts.ToHost] = asyncio.Queue()
        self._ending: set[str] = set()
        self._over = False

    def remember(self, worker: str, host: str) -> None:
        """It was there, for an earlier process of this pool."""
        self.far.remember(worker, host)
        self._events.put(Found(worker, host))

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
            hello = m.Hello(kind="agents", host=socket.gethostname(), pid=os.getpid(), pool=self._pool)
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
                if isinstance(message, hosts.FromHost):
                    self._heard(message)
        finally:
            sending.cancel()

    async def _send(self, subscription: Subscription) -> None:
        while True:
            await subscription.send(await self._outgoing.get())

    def _heard(self, message: hosts.FromHost) -> None:
        host = message.host
        match message.said:
            case hosts.Report() as report:
                before = self.far.hosts.get(host)
                known = (before.connected, before.heard) if before else (False, ())
                for event in self.far.reported(host, report, time.time()):
                    self._events.put(event)
                if known != (True, self.far.hosts[host].heard):
                    self._order(host)
                self._changed(host)
            case hosts.Output() as output:
                self._write(output)
            case None:
                self.far.lost(host)
                self._changed(host)

    def _order(self, host: str) -> None:
        far = self.far.hosts.get(host)
        sizes = {worker: self._size(worker) for worker in far.workers} if far else {}
        if order := self.far.order(host, self._job, sizes, end=host in self._ending):
            self._outgoing.put_nowait(hosts.ToHost(host=host, order=order))

    # --- logs ----------------------------------------------------------------------------------------------

    def _log_of(self, worker: str) -> Path:
        return self._logs / f"{worker}.log"

    def _size(self, worker: str) -> int:
        with contextlib.suppress(OSError):
            return self._log_of(worker).stat().st_size
        return 0

    def _write(self, output: hosts.Output) -> None:
        """What is there already is left out; what has a gap before it comes again with the next order."""
        size = self._size(output.worker)
        new = output.content[size - output.offset :] if output.offset <= size else b""
        try:
            if new and "/" not in output.worker:
                with append(self._log_of(output.worker)) as log:
                    log.write(new)
        except OSError as error:  # a full disk: the worker is worth more than what it prints
            _log.warning("%s is not written: %s", self._log_of(output.worker), error)
