"""A pool serves a run: the keeper decides, the pool does it, and the coordinator is told, over one connection after the
other.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from farandole.control.client import Subscription, subscribe
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable, Refused
from farandole.membership import messages as m
from farandole.membership.messages import Hello, Roster
from farandole.pool.base import Pool
from farandole.pool.keeper import GRACE_S, Keeper

WAKE_S = 1.0  # graces are looked at this often
AGAIN_S = 0.2  # between two tries to reach a coordinator that has gone
KEPT = 1000  # messages
WITH_IT = "its `farandole run` was killed"
AGAIN = (m.Exited, m.Noticed, m.Capacity, m.HostPriced)  # is told again to a coordinator that is back


async def keep(
    pool: Pool, ticket: Ticket, seen: Callable[[Roster], None] | None = None, count: int = 0, ended: Iterable[str] = ()
) -> Roster:
    """Serve the run with this pool until it is over and all of its processes have exited. Returns the last roster.

    A coordinator that goes is waited for, for as long as this is not cancelled: its workers train on meanwhile. It is
    told all exits again when it is back. `seen` is called with every roster, for whoever shows it.
    `count` workers were started when the run was on before, of which these have `ended` with an earlier process.

    Raises:
        CoordinatorUnreachable: the coordinator was never there.
        Refused: another pool of the run has the same name.
    """
    hello = Hello(kind="pool", host=socket.gethostname(), pid=os.getpid(), pool=pool.name)
    service = _Service(pool, Keeper(count), seen, [m.Exited(worker=worker, reason=WITH_IT) for worker in ended])
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

    def __init__(
        self, pool: Pool, keeper: Keeper, seen: Callable[[Roster], None] | None, ended: Sequence[m.Exited]
    ) -> None:
        self.keeper = keeper
        self._pool = pool
        self._seen = seen
        self._again: deque[m.FromPool] = deque(ended, maxlen=KEPT)  # was told, or is to be
        self._untold: deque[m.FromPool] = deque(maxlen=KEPT)
        self._events = asyncio.ensure_future(pool.events())

    async def follow(self, subscription: Subscription) -> None:
        """Until the connection ends or the work is done."""
        for message in tuple(self._again):
            await subscription.send(message)
        received = asyncio.ensure_future(subscription.receive())
        try:
            while not self.keeper.done:
                await self._tell(subscription)
                await asyncio.wait({self._events, received}, timeout=WAKE_S, return_when=asyncio.FIRST_COMPLETED)
                self._hear()
                await self._tell(subscription)
                if received.done():
                    message = received.result()
                    if message is None:
                        return
                    if isinstance(message, m.Refused):
                        raise Refused(message.reason)
                    if isinstance(message, Roster):
                        self._update(message)
                    received = asyncio.ensure_future(subscription.receive())
                self._act()
        finally:
            received.cancel()

    async def pause(self, seconds: float) -> None:
        """Without a coordinator: the pool is heard. Once the run is over, until all have exited."""
        if not self.keeper.done:
            await asyncio.wait({self._events}, timeout=seconds)
            self._hear()
            if self.keeper.roster is not None and self.keeper.roster.over >= 0:
                self._act()

    async def end(self) -> None:
        """Nothing of the pool's is left when this returns; but for starts of which the pool has never said anything."""
        until = self._now() + GRACE_S
        for worker in self.keeper.stop_all(self._now()):
            self._pool.stop(worker)
        while self.keeper.running and (self.keeper.started or self._now() < until):
            await asyncio.wait({self._events}, timeout=WAKE_S)
            self._hear()
        self._events.cancel()

    def _hear(self) -> None:
        if self._events.done():
            for event in self._events.result():
                self.keeper.heard(event, self._now())
            self._events = asyncio.ensure_future(self._pool.events())

    async def _tell(self, subscription: Subscription) -> None:
        said = self.keeper.said()
        self._again.extend(message for message in said if isinstance(message, AGAIN))
        self._untold.extend(said)
        while self._untold:
            await subscription.send(self._untold[0])
            self._untold.popleft()

    def _act(self) -> None:
        due = self.keeper.due(self._pool.list(), self._now())
        for worker in due.stop:
            self._pool.stop(worker)
        for worker, host in due.start:
            self._pool.start(worker, host)

    def _update(self, roster: Roster) -> None:
        self.keeper.update(roster, self._now())
        if self._seen is not None:
            self._seen(roster)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
