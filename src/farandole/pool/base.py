"""The narrow seam between a run and whatever starts its workers.

A pool starts processes, kills processes that it started, and tells which have exited. What to do is decided here, by
a pure function of the coordinator's roster; `keep` connects the two. Invariant: `wanted` processes of the pool's own
are running that are neither on their way out nor evicted; an id is never used twice.

A worker on its way out is replaced before it is gone, so that the view never runs short; it is given `GRACE_S` to
exit once the coordinator has let it go, and once the run is over. A lost one is replaced after `QUIET_S`, so that the
others' recovery has the cores to itself, and at once if there are none. Where losses have brought the run nowhere, as
the roster says, each further one doubles the wait, up to `LONGEST_S`.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from farandole.control.subscription import Subscription, subscribe
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable, Refused
from farandole.membership import messages as m
from farandole.membership.messages import Exited, Hello, Roster
from farandole.membership.names import worker_id

GRACE_S = 10.0
QUIET_S, LONGEST_S = 1.0, 60.0
WAKE_S = 1.0  # graces are looked at this often
AGAIN_S = 0.2  # between two tries to reach a coordinator that has gone
KEPT_EXITS = 1000


@dataclass(frozen=True)
class Exit:
    """A process has ended: `reason` in words, as "exited with code 1" or "killed by signal 9"."""

    worker: str
    reason: str


class Pool(Protocol):
    """A source of worker processes. Ids come from `Keeper`."""

    @property
    def name(self) -> str:
        """What the workers say in their Hello's `pool`."""
        ...

    def start(self, worker: str) -> None:
        """Start a process that joins the run as `worker`; returns at once."""
        ...

    def kill(self, worker: str) -> None:
        """SIGKILL, with everything that it started. No error where it has exited already."""
        ...

    async def exited(self) -> Exit:
        """The next process to have exited, each told once."""
        ...


@dataclass(frozen=True, kw_only=True)
class Decision:
    """`start` new processes, `kill` these."""

    start: int = 0
    kill: tuple[str, ...] = ()


def decide(roster: Roster, running: Collection[str], out: Collection[str] = ()) -> Decision:
    """What a pool does about a roster. `out`: workers of earlier rosters' `leaving`, which may be gone from it."""
    kill = tuple(worker for worker in running if worker in roster.evicted)
    if roster.over >= 0:  # those who are only starting have nothing to end, and would find nobody to tell them
        heard = {*roster.present, *roster.released}
        return Decision(kill=tuple(worker for worker in running if worker in kill or worker not in heard))
    staying = [w for w in running if w not in roster.leaving and w not in roster.evicted and w not in out]
    return Decision(start=max(roster.wanted - len(staying), 0), kill=kill)


def pause(losses: int, *, others: bool) -> float:
    """How long after an exit a replacement is started, in s. `losses` in a row were in vain; `others` are running, who
    recover first: a replacement's start-up would take their cores.
    """
    if losses == 0:
        return QUIET_S if others else 0.0
    return min(QUIET_S * 2.0 ** (losses - 1), LONGEST_S)


class Keeper:
    """Carries rosters out on a pool. Times are the caller's, in seconds. `count` workers were started earlier."""

    def __init__(self, pool: Pool, count: int = 0) -> None:
        self.pool = pool
        self.running: list[str] = []
        self.roster: Roster | None = None
        self._count = count
        self._out: dict[str, float | None] = {}  # leavers, and since when they have been let go
        self._over_at: float | None = None
        self._exited_at = -math.inf

    @property
    def done(self) -> bool:
        """The run is over and all processes have exited."""
        return self.roster is not None and self.roster.over >= 0 and not self.running

    def update(self, roster: Roster, now: float) -> None:
        self.roster = roster
        for worker in roster.leaving:
            self._out.setdefault(worker, None)
        for worker in set(roster.released).intersection(self.running):
            self._out[worker] = self._out.get(worker) or now
        if roster.over >= 0 and self._over_at is None:
            self._over_at = now
        self.act(now)

    def exited(self, worker: str, now: float) -> None:
        if worker in self.running:
            self.running.remove(worker)
            self._out.pop(worker, None)
        self._exited_at = now

    def act(self, now: float) -> None:
        """Do what is due. Call it from time to time as well: graces end."""
        if self.roster is None:
            return
        late = [w for w in self.running if self._late(self._over_at, now) or self._late(self._out.get(w), now)]
        decision = decide(self.roster, self.running, self._out)
        for worker in dict.fromkeys((*decision.kill, *late)):
            self.pool.kill(worker)
        waits = now - self._exited_at < pause(self.roster.losses, others=bool(self.running))
        for _ in range(0 if waits else decision.start):
            self._count += 1
            worker = worker_id(self.roster.mark, self._count)
            self.running.append(worker)
            self.pool.start(worker)

    def kill_all(self) -> None:
        for worker in self.running:
            self.pool.kill(worker)

    @staticmethod
    def _late(since: float | None, now: float) -> bool:
        return since is not None and now - since > GRACE_S


async def keep(pool: Pool, ticket: Ticket, seen: Callable[[Roster], None] | None = None, count: int = 0) -> Roster:
    """Serve the run with this pool until it is over and all of its processes have exited. Returns the last roster.

    A coordinator that goes is waited for, for as long as this is not cancelled: its workers train on meanwhile. It is
    told all exits again when it is back. `seen` is called with every roster, for whoever shows it.
    `count` workers were started when the run was on before.

    Raises:
        CoordinatorUnreachable: the coordinator was never there.
        Refused: another pool of the run has the same name.
    """
    hello = Hello(kind="pool", host=socket.gethostname(), pid=os.getpid(), pool=pool.name)
    service = _Service(Keeper(pool, count), seen)
    try:
        while not service.keeper.done:
            try:
                async with subscribe(ticket, hello) as subscription:
                    await service.follow(subscription)
            except CoordinatorUnreachable:
                if service.keeper.roster is None:
                    raise
            await service.pause(AGAIN_S)
        assert service.keeper.roster is not None
        return service.keeper.roster
    finally:
        await service.end()


class _Service:
    """A keeper between its pool and one connection after the other."""

    def __init__(self, keeper: Keeper, seen: Callable[[Roster], None] | None) -> None:
        self.keeper = keeper
        self._seen = seen
        self._exits: deque[Exited] = deque(maxlen=KEPT_EXITS)
        self._exiting = asyncio.ensure_future(keeper.pool.exited())

    async def follow(self, subscription: Subscription) -> None:
        """Until the connection ends or the work is done."""
        for exited in tuple(self._exits):
            await subscription.send(exited)
        received = asyncio.ensure_future(subscription.receive())
        try:
            while not self.keeper.done:
                await asyncio.wait({self._exiting, received}, timeout=WAKE_S, return_when=asyncio.FIRST_COMPLETED)
                if exited := self._exited():
                    await subscription.send(exited)
                if received.done():
                    message = received.result()
                    if message is None:
                        return
                    if isinstance(message, m.Refused):
                        raise Refused(message.reason)
                    if isinstance(message, Roster):
                        self._update(message)
                    received = asyncio.ensure_future(subscription.receive())
                self.keeper.act(self._now())
        finally:
            received.cancel()

    async def pause(self, seconds: float) -> None:
        """Without a coordinator: exits are noted. Once the run is over, until all have exited."""
        if not self.keeper.done:
            await asyncio.wait({self._exiting}, timeout=seconds)
            self._exited()
            if self.keeper.roster is not None and self.keeper.roster.over >= 0:
                self.keeper.act(self._now())

    async def end(self) -> None:
        """Nothing of the pool's is left when this returns."""
        self.keeper.kill_all()
        while self.keeper.running:
            await asyncio.wait({self._exiting})
            self._exited()
        self._exiting.cancel()

    def _exited(self) -> Exited | None:
        if not self._exiting.done():
            return None
        gone = self._exiting.result()
        self._exiting = asyncio.ensure_future(self.keeper.pool.exited())
        message = Exited(worker=gone.worker, reason=gone.reason)
        self._exits.append(message)
        self.keeper.exited(gone.worker, self._now())
        return message

    def _update(self, roster: Roster) -> None:
        self.keeper.update(roster, self._now())
        if self._seen is not None:
            self._seen(roster)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
