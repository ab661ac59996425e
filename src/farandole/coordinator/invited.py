"""What the tickets say (`tickets.py`), done to connections: who is not heard, and who has to go.

A worker that the run knows is heard whatever its ticket is by now: it is told by the coordinator what becomes of it,
and the others learn that it is gone. Nobody else's Hello is looked at by the run if its ticket is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from farandole.control.security import Tickets
from farandole.coordinator.connection import Connection
from farandole.errors import UsageError
from farandole.membership import events
from farandole.membership import messages as m
from farandole.membership.coordinator import Coordinator


def why_not(tickets: Tickets, coordinator: Coordinator, ticket: str, hello: m.Hello) -> str:
    """Why who has shown `ticket` is not heard, "" if it is."""
    if hello.kind in ("pool", "agent", "agents") and not tickets.owners(ticket):
        return "a pool and its hosts need the owner's ticket, FOLDER/ticket"
    return "" if hello.kind == "worker" and coordinator.knows(hello) else tickets.over(ticket)


def reread(tickets: Tickets, record: Callable[[events.Event], None]) -> None:
    """`record` what has become of them. A file that is damaged is an event, and changes nothing."""
    try:
        for event in tickets.reread():
            record(event)
    except UsageError as error:
        record(events.TicketsDamaged(reason=str(error)))


def turn_out(
    tickets: Tickets,
    coordinator: Coordinator,
    workers: Mapping[str, Connection],
    others: Iterable[Connection],
    now: float,
) -> None:
    """Those whose tickets have been revoked; to be flushed."""
    for worker, connection in tuple(workers.items()):
        if why := tickets.revoked(connection.ticket):
            coordinator.put_out(worker, why, now)
    for connection in tuple(others):
        if tickets.revoked(connection.ticket):
            connection.close()
