"""A worker's notice may have a deadline: its machine goes then. The worker ends itself before, and first saves.

Who knows what when. A worker with notice asks to leave, or its pool says so; the coordinator leaves it out of the next
view, and that takes two steps. Two cases take longer: an evaluation, through which a leaver stays, and a view all of
whose members leave, which waits for a joiner. What becomes of these is decided by the deadline, and by the worker
alone, since it is its machine that goes; the coordinator may be out of reach, or go with the same machine.

1. The worker knows its deadline from where the notice came to it: it has read it itself (`Leaving`), or the pool has
   told the coordinator, which passes it on (`Deadline`), again on a new connection. Of several the earliest counts, and
   one that was told stays: nothing is known of a machine that was to go and is still there.
2. A `PART` of the notice before the deadline, the worker's lease ends (`Session.lapsed`). From then on it gives no word
   and ends no round, as an orphan (`reconnection`, 2 and 3): so what it saves then is the state as of the beginning
   of the step in hand, and nobody who has ended that step with its help is without the result (R1). If others stay,
   their recovery is that from a crash: they redo its part of the round. If nobody does, the newest state is in the
   store: of members that lapse in different rounds, at most one apart, each saves its own.
3. It saves while its connection stands, then says `Lapsed`, and goes. So a first view that begins afterwards finds
   what was saved; and the coordinator need not wait for the end of a lease that only the worker knows of.
4. If the training thread is busy, another one saves, by the argument of `worker/exit.py`: no round ends, so the state
   is whole for as long as it was. In an evaluation it is not, and nothing is saved: the machine's end costs what a
   crash does. The process ends at half of the time that is left, whatever happens.
5. A notice shorter than `SHORTEST_S` is left to the machine: the worker leaves if it still can. To end it at once would
   be a crash too, and a certain one, where a clock that is a little off has made two minutes into nothing.
"""

from __future__ import annotations

import math

from farandole.membership.values import Message, Seconds, Text

PART, LONGEST_S = 0.25, 30.0  # how much of a notice is kept for saving, at most
SHORTEST_S = 4.0
LEFT = 0  # the exit code of who has gone by its notice


class Leaving(Message):
    """The worker has had notice (SIGTERM, SIGINT, spot interruption) and wants to leave gracefully.

    `within_s`: its machine goes then; None: it has time.
    """

    reason: Text
    within_s: Seconds | None = None


class Deadline(Message):
    """To a worker: its machine goes within so many seconds."""

    within_s: float


class Lapsed(Message):
    """This worker's time is over before it could leave: it gives no word any more, and has saved what it could."""


class Ends:
    """When a worker's notice ends its lease. Times are the caller's, in seconds."""

    def __init__(self) -> None:
        self.at = math.inf
        self.left_s = 0.0  # from then to the deadline

    def within(self, seconds: float, now: float) -> None:
        """Its machine goes then."""
        left_s = min(PART * seconds, LONGEST_S)
        if seconds >= SHORTEST_S and now + seconds - left_s < self.at:
            self.at, self.left_s = now + seconds - left_s, left_s

    def over(self, now: float) -> bool:
        return now > self.at
