"""A stranger in the connections of a proposed view: it is given up, and another one proposed, over new connections.

A member whose peer has not proved itself (`collective/gloo.py`) drops the group, says so, and never says that it is
prepared. So the view would come to nothing; instead of waiting for its limit it is stopped, as for a connection that
broke: whoever was in force goes on, joiners stay candidates, and the next proposal has a number, a group and a key of
its own. Nobody is held guilty, neither the peer nor who speaks of it: the event names the address that was in between.

Each time in a row the next new connections wait twice as long. So whoever can always get in between (or a member that
always says so) keeps joiners out, which the events tell, and costs the others a stop every `LONGEST_S`, no more. Who
leaves, and what needs no new connections, does not wait.
"""

from __future__ import annotations

from farandole.membership import events, unplanned
from farandole.membership import messages as m
from farandole.membership.books import Books

SHORTEST_S = 1.0
LONGEST_S = 300.0
DOUBLINGS = 9  # more than it takes to get there


def unproved(books: Books, worker: str, message: m.Unproved) -> None:
    view = books.proposed
    if (
        view is None
        or books.stopping
        or message.view != view.number
        or view.group != view.number
        or worker not in view.members
    ):
        return
    again_s = min(SHORTEST_S * 2 ** min(books.strangers, DOUBLINGS), LONGEST_S)
    books.strangers += 1
    books.meet_at = books.clock + again_s
    books.record(events.StrangerInGroup(worker=worker, peer=message.peer, address=message.address, view=view.number,
        again_s=again_s))  # fmt: skip
    unplanned.stop(books, f"strangers at {message.address}, between {worker} and the others")
