"""The pools' connections: each is told its roster, whenever that changes, and says what has become of its workers.

What a pool says again after a break is no news to the coordinator, and does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from farandole.coordinator.connection import Connection
from farandole.membership import events, names
from farandole.membership import messages as m
from farandole.membership.coordinator import Coordinator

UNKNOWN_S = 0.5  # for the Hello of a process that has exited to come in


class Pools:
    """`flush` carries out what the coordinator decides, `now` is its clock, `record` writes an event of ours down."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        flush: Callable[[], None],
        now: Callable[[], float],
        record: Callable[[events.Event], None],
    ) -> None:
        self._coordinator = coordinator
        self._flush, self._now, self._record = flush, now, record
        self._there: dict[Connection, m.Hello] = {}
        self._told: dict[Connection, m.Roster] = {}

    @property
    def names(self) -> list[str]:
        """Of those that are connected."""
        return [hello.pool for hello in self._there.values()]

    def tell(self) -> None:
        """Rosters that are not what was told last."""
        for connection, hello in self._there.items():
            roster = self._coordinator.roster(hello.pool)
            if roster != self._told.get(connection):
                self._told[connection] = roster
                connection.send(m.encode(roster))

    async def serve(self, connection: Connection, hello: m.Hello) -> None:
        """Until the connection ends.

        Raises:
            ValueError: it says what no pool says.
        """
        if reason := names.refusal(self._coordinator, hello, self._there.values()):
            self._record(events.Refused(worker=f"pool {hello.pool}", host=hello.host, reason=reason))
            connection.send(m.encode(m.Refused(reason=reason)))
            connection.close()
            return
        self._there[connection] = hello
        try:
            self.tell()
            while (data := await connection.receive()) is not None:
                self._hear(hello, m.decode_from_worker(data))
        finally:
            del self._there[connection]
            self._told.pop(connection, None)

    def _hear(self, pool: m.Hello, message: m.Message) -> None:
        if not isinstance(message, m.FromPool):
            raise ValueError(f"unexpected message {type(message).__name__} from a pool")
        early = isinstance(message, m.Exited) and not self._coordinator.has_met(message.worker)
        asyncio.get_running_loop().call_later(UNKNOWN_S if early else 0.0, self._decide, pool, message)

    def _decide(self, pool: m.Hello, message: m.FromPool) -> None:
        self._coordinator.from_pool(pool.pool, pool.host, message, self._now())
        self._flush()
