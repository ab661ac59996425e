"""A pool of EC2 instances: asks AWS for what `fleet` says, and lets their agents start the workers.

An instance joins by itself (`instance.py`), with the ticket that this pool keeps as a secret of AWS's while the run
lasts. Invariant: when `close` has returned without a warning, AWS has said of every instance that bears the run's
and the pool's tags that it is ended, but for failed ones that are to be kept a while; whoever comes later finds no
ticket, and ends itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from farandole.control.ticket import Ticket
from farandole.membership.hosts import Job
from farandole.platform.process import up_to
from farandole.pool.agents.link import Link
from farandole.pool.base import Event, Events, Host, Seen, StartFailed
from farandole.pool.ec2 import template
from farandole.pool.ec2.api import Aws, AwsError
from farandole.pool.ec2.asked import Asked, tokens
from farandole.pool.ec2.errors import CAPACITY, DOUBT
from farandole.pool.ec2.fleet import ANOTHER, Fleet
from farandole.pool.ec2.instances import Due, Instance, Request
from farandole.pool.ec2.market import Market
from farandole.pool.ec2.prices import Bill

_log = logging.getLogger(__name__)

END_S = 10.0  # for agents to end
AFTER_S = 600.0  # from the run's own limit until instances end themselves: its end is saved meanwhile
CLOSE_S = 120.0  # for AWS to say that all have ended


class Ec2Pool:
    """Needs a running event loop. `close` it in any case. `run`: its tag. `keep_failed_s`: for so long a failed
    instance is kept; `until`: Unix time at which the run ends; soon after, instances end themselves. `look_s`: how
    often AWS is asked what there is.
    """

    def __init__(
        self, aws: Aws, asked: Asked, *, run: str, ticket: Ticket, job: Job, logs: Path, name: str = "ec2",
        keep_failed_s: float = 0.0, until: float = math.inf, look_s: float = 5.0,
    ) -> None:  # fmt: skip
        self.name = name
        self.bill = Bill(asked.prices)
        self._aws, self._asked, self._run, self._look_s = aws, asked, run, look_s
        self._keep_failed_s, self._until = keep_failed_s, until
        self._events = Events()
        self._link = Link(ticket, name, job, logs, self._events, self._heard)
        market = Market(asked.zones, asked.markets, several=asked.several)
        self.fleet = Fleet(market, asked.slots, tokens(), keep_failed_s)
        self._secret = template.secret_name(run, name)
        self._ticket = msgspec.json.encode(ticket).decode()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._doing: set[asyncio.Task[None]] = set()
        self._troubled = ""
        self._closing: asyncio.Task[None] | None = None
        self._tasks = [asyncio.create_task(what) for what in (self._link.serve(), self._tend(), self._look())]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        self._do(self._put_ticket())

    # --- the seam ------------------------------------------------------------------------------------------

    def list(self) -> Sequence[Host]:
        return self.fleet.hosts()

    def start(self, worker: str, host: str) -> None:
        if host == ANOTHER:
            self.fleet.start(worker)
        elif host in self._link.far.hosts:
            self._link.start(worker, host)
            self._heard(host)
        else:
            self._events.put(StartFailed(worker, f"{host} is gone"))
        self._changed.set()

    def stop(self, worker: str) -> None:
        if not self.fleet.stop(worker):
            self._link.stop(worker)
        self._changed.set()

    async def events(self) -> Sequence[Event]:
        """Raises what has broken this pool: a bug of ours, which is to end the run and not to be passed over."""
        found = await self._events.take()
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        return found

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._events.put(Seen("", "broken", str(task.exception())))

    def remember(self, worker: str, host: str) -> None:
        """It was there, for an earlier process of this pool."""
        self.fleet.remember(host, self._loop.time())
        self._link.remember(worker, host)

    def over(self) -> None:
        """The run is."""
        self._link.over()

    # --- the loop ------------------------------------------------------------------------------------------

    def _heard(self, name: str) -> None:
        """Something has changed at its agent."""
        if far := self._link.far.hosts.get(name):
            self.fleet.agent(
                name, connected=far.connected, state=far.state, reason=far.reason, workers=len(far.workers),
                now=self._loop.time(),
            )  # fmt: skip
            if far.told:
                self.fleet.leaves(name)
        self._changed.set()

    async def _tend(self) -> None:
        while True:
            self._carry_out(self.fleet.due(self._loop.time()))
            self._changed.clear()
            await up_to(min(1.0, self._look_s), self._changed)

    async def _put_ticket(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._aws.put_secret, self._secret, self._ticket)
                return
            except AwsError as error:
                self._trouble(str(error))
                await asyncio.sleep(self._look_s)

    def _carry_out(self, due: Due) -> None:
        for event in due.events:
            self._events.put(event)
        for host in due.forget:
            for event in self._link.far.forget(host):
                self._events.put(event)
        for host in due.lets_go:
            self._link.end(host)
        for worker, host in due.starts:
            self._link.start(worker, host)
        for request in due.asks:
            self._do(self._ask(request))
        if due.ends:
            self._do(self._end(due.ends))
        if due.shown and not any(task.get_name() == "tags" for task in self._doing):
            self._do(self._show(due.shown), "tags")

    def _do(self, what: Coroutine[None, None, None], name: str = "") -> None:
        task = asyncio.create_task(what, name=name)
        self._doing.add(task)
        task.add_done_callback(self._doing.discard)

    def _trouble(self, text: str) -> None:
        """Told once, as long as it is the same."""
        if text != self._troubled:
            self._events.put(Seen("", "AWS", text))
        self._troubled = text

    # --- what is asked of AWS --------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(AwsError):
                await self._look_once()
            self._changed.set()
            await asyncio.sleep(self._look_s)

    async def _look_once(self) -> None:
        """Raises AwsError."""
        tags = {f"tag:{template.RUN}": [self._run], f"tag:{template.POOL}": [self.name]}
        try:
            rows = await self._aws.list(tags, tuple(self.fleet.instances), self._run)
        except AwsError as error:
            self._trouble(str(error))
            raise
        self._troubled = ""
        self.fleet.listed(rows, self._loop.time())
        for row in rows:
            if row.id in self.fleet.instances and row.state in ("pending", "running"):
                for priced in self.bill.saw(row.id, row.type, row.zone, row.market, row.launched, time.time()):
                    self._events.put(priced)

    async def _ask(self, request: Request) -> None:
        """Until there is an answer; or nobody asks any more."""
        while request.token in self.fleet.requests:
            try:
                answer = await self._aws.create(self._asked.template, request, self._tags(request))
                self.fleet.answered(request.token, answer.ids, self._loop.time(), answer.why)
            except AwsError as error:
                now = self._loop.time()
                if error.kind == CAPACITY:
                    self.fleet.answered(request.token, (), now, str(error))
                elif error.kind != DOUBT:
                    self.fleet.refused(request.token, str(error))
                elif self._closing:
                    return
                else:
                    self.fleet.doubtful(request.token, now)
                    await asyncio.sleep(self._look_s)
            self._changed.set()

    def _tags(self, request: Request) -> dict[str, str]:
        return {
            "Name": f"farandole {self._run}",
            template.RUN: self._run,
            template.POOL: self.name,
            template.REQUEST: request.token,
            template.STATE: "queued",
            **({template.KEEP: f"{self._keep_failed_s / 60:g}"} if self._keep_failed_s else {}),
            **({template.UNTIL: f"{self._until + AFTER_S:.0f}"} if self._until < math.inf else {}),
        }

    async def _end(self, ids: Sequence[str]) -> None:
        try:
            await self._aws.end(ids)
        except AwsError as error:  # the fleet asks again
            self._trouble(str(error))

    async def _show(self, shown: dict[str, str]) -> None:
        by_state = {state: [each for each in shown if shown[each] == state] for state in shown.values()}
        with contextlib.suppress(AwsError):  # what they show is told again, once AWS has listed them
            await self._aws.tag(by_state)
            for each, state in shown.items():
                if (known := self.fleet.instances.get(each)) and known.row:
                    known.row = replace(known.row, shown=state)

    # --- the end -------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """The run is over, or is given up: agents end, then instances. The same once more does nothing."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for task in self._tasks[1:]:
            task.cancel()
        for host in tuple(self._link.far.hosts):
            self._link.end(host)
        until = self._loop.time() + END_S
        while self._loop.time() < until and any(far.connected for far in self._link.far.hosts.values()):
            await asyncio.sleep(0.05)
        self._tasks[0].cancel()
        left = await self._end_all(self._loop.time() + CLOSE_S)
        for task in self._doing:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._doing, return_exceptions=True)
        if left:
            _log.warning(
                "AWS has not said of %s that they have ended; see `farandole pool list`, and end them with `aws ec2 "
                "terminate-instances --instance-ids %s`", ", ".join(left), " ".join(left),
            )  # fmt: skip

    async def _end_all(self, until: float) -> tuple[str, ...]:
        """Until AWS lists nobody twice in a row, and owes no answer. Returns who may be left."""
        clean, left = 0, ("an instance that was asked for",)
        secret, emptied = True, set[str]()
        while self._loop.time() < until:
            with contextlib.suppress(AwsError):
                if secret:
                    await asyncio.to_thread(self._aws.delete_secret, self._secret)
                    secret = False
                await self._look_once()
                for group in self._groups() - emptied:
                    await self._empty(group)
                    emptied.add(group)
                left = tuple(each.id for each in self.fleet.instances.values() if not self._stays(each))
                await self._aws.end(left)
                clean = 0 if left or self._doing else clean + 1
                if clean == 2:
                    return ()
            await asyncio.sleep(min(self._look_s, 1.0))
        return left

    def _groups(self) -> set[str]:
        """Auto scaling groups whose instances bear the run's tag: they would launch others in place of the ended."""
        return {i.row.group for i in self.fleet.instances.values() if i.row and i.row.group}

    async def _empty(self, group: str) -> None:
        try:
            await self._aws.empty(group)
        except AwsError as error:
            _log.warning("auto scaling group %s goes on launching: set its desired capacity to 0 (%s)", group, error)

    def _stays(self, instance: Instance) -> bool:
        """It has failed, and is kept for a look; it ends itself."""
        return instance.state == "failed" and not instance.ending and self._keep_failed_s > 0
