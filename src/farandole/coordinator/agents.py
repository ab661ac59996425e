"""Passes on what pools and the agents of their hosts say to each other. Nothing of it is the coordinator's business.

A pool has at most one connection for this, and each of its hosts at most one agent: who comes again has lost the older
connection, and takes its place. Whoever connects gets a whole picture: a pool the newest report of each of its hosts
that are there, an agent the newest order that was made for it. Each report is answered, so that an agent sees when
nobody is there any more: the coordinator's machine may be lost. An agent that is silent for `SILENT_S` is taken to be
gone: its host may have lost its power, or its network.
"""

from __future__ import annotations

import asyncio
import contextlib

from farandole.coordinator.connection import Connection
from farandole.membership import hosts
from farandole.membership import messages as m

SILENT_S = 5.0  # an agent says something each second
HEARD = m.encode(m.Heard())


class _Pool:
    """`orders` and `reports` are the newest, by host."""

    def __init__(self) -> None:
        self.link: Connection | None = None
        self.agents: dict[str, Connection] = {}
        self.orders: dict[str, bytes] = {}
        self.reports: dict[str, bytes] = {}


class Agents:
    """One connection each: `serve_agent`, `serve_pool`, to its end."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    @property
    def there(self) -> bool:
        """Some agent is connected."""
        return any(pool.agents for pool in self._pools.values())

    def _of(self, hello: m.Hello) -> _Pool:
        if not hello.pool:
            raise ValueError(f"{hello.kind} without the name of its pool")
        return self._pools.setdefault(hello.pool, _Pool())

    async def serve_agent(self, connection: Connection, hello: m.Hello) -> None:
        """Raises ValueError: it says what no agent says."""
        pool, host = self._of(hello), hello.host
        if not host:
            raise ValueError("an agent without the name of its host")
        if before := pool.agents.get(host):
            before.abort()
        pool.agents[host] = connection
        if order := pool.orders.get(host):
            connection.send(order)
        try:
            while (data := await _heard(connection)) is not None:
                said = m.decode_from_worker(data)
                if not isinstance(said, hosts.Report | hosts.Output):
                    raise ValueError(f"unexpected message {type(said).__name__} from an agent")
                if pool.agents.get(host) is not connection:
                    continue
                passed = m.encode(hosts.FromHost(host=host, said=said))
                if isinstance(said, hosts.Report):
                    connection.send(HEARD)
                    if pool.reports.get(host) == passed:
                        continue
                    pool.reports[host] = passed
                if pool.link:
                    pool.link.send(passed)
        finally:
            if pool.agents.get(host) is connection:
                del pool.agents[host]
                pool.reports.pop(host, None)
                if pool.link:
                    pool.link.send(m.encode(hosts.FromHost(host=host)))

    async def serve_pool(self, connection: Connection, hello: m.Hello) -> None:
        """Raises ValueError: it says what no pool says here."""
        pool = self._of(hello)
        if pool.link:
            pool.link.abort()
        pool.link = connection
        pool.orders.clear()  # a pool that has begun anew makes others, once it has heard of the host
        for report in pool.reports.values():
            connection.send(report)
        try:
            while (data := await connection.receive()) is not None:
                said = m.decode_from_worker(data)
                if not isinstance(said, hosts.ToHost):
                    raise ValueError(f"unexpected message {type(said).__name__} from a pool")
                if pool.link is not connection:
                    continue
                order = pool.orders[said.host] = m.encode(said.order)
                if agent := pool.agents.get(said.host):
                    agent.send(order)
        finally:
            if pool.link is connection:
                pool.link = None


async def _heard(agent: Connection) -> bytes | None:
    """What it says next, None where it is gone."""
    with contextlib.suppress(asyncio.TimeoutError):
        return await agent.receive(SILENT_S)
    agent.abort()
    return None
