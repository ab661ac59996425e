"""Standing still: heartbeats come, and the training does not move.

Whoever keeps its peers waiting is reported by them. But the last or only member has no peers, and where the script
hangs in all of them nobody waits for anybody. So the coordinator looks as well:

1. Anything counts as moving that a heartbeat tells: a round, a step, a shard computed, of anybody in the view. So
   evaluations and steps of many shards move, and a compilation, a validation in the loop body or a hang do not.
2. Nothing has moved for `standstill_s`, or for `SLOW` median steps if that is longer: that is an event, and again after
   twice as long, and so on. It names the members that do not say of themselves that they wait for others. Nobody is
   evicted for it: it may be honest work, and without that member there may be no state left.
3. They are asked for the stacks of their threads. The connection's thread writes them, whatever the others do.
4. A planned stop needs the step in hand to end (R2), which it does not if somebody hangs in it. So where nothing has
   moved for `stop_s` since it was asked for, or for `SHORT` median steps, it becomes an unplanned one: the view is
   stopped, which the connections' threads answer, and whoever holds the state of a whole step saves it, those first
   who do not hang. What makes that safe on a worker that does is argued in `worker/exit.py`.
5. The last checkpoint is watched alike: who has been at it for long is named, and asked for its stacks.
6. Is everyone between two steps, by what the heartbeats say, then what could be saved is of neither, and nothing could
   go on from it. It may be a validation that ends: so that takes `PATIENCE` times as long.
"""

from __future__ import annotations

import math

from farandole.membership import events
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.movement import SHORT, SLOW
from farandole.membership.records import Ending

PATIENCE = 10


def watch(books: Books, now: float) -> None:
    """The clock's part."""
    still, settings = books.movement, books.settings
    busy = books.stopping or books.savers or books.over
    if books.ending and not books.ending.failed and not busy and (books.view or books.proposed):
        _cut_short(books, books.ending, now)
    if books.savers and books.ending and books.ending.saver:
        _watch_saver(books, books.ending.saver, now)
        return
    if busy or books.view is None or not books.view.members:
        still.moved(None)
        return
    if still.since is None:
        still.moved(now)
        still.forget(books.view.members)
    if still.due(now, settings.standstill_s):
        told = f"step {books.reached} has stood for {still.stands(now):.0f} s"
        _stalled(books, hung(books), told, now)
        ask_for_stacks(books, told)


def _watch_saver(books: Books, saver: str, now: float) -> None:
    """The run's end waits for the last checkpoint, which a store that hangs may never take."""
    still = books.movement
    if still.saver != saver:
        still.saver = saver
        still.moved(now)
    if still.due(now, books.settings.standstill_s):
        told = f"{saver} has been at the last checkpoint for {still.stands(now):.0f} s"
        _stalled(books, (saver,), told, now)
        books.send(saver, m.Stacks(reason=told))


def _stalled(books: Books, workers: tuple[str, ...], reason: str, now: float) -> None:
    seconds = round(books.movement.stands(now), 1)
    books.record(events.Stalled(step=books.reached, seconds=seconds, workers=workers, reason=reason))


def hung(books: Books) -> tuple[str, ...]:
    """The members that do not say of themselves that they wait for others."""
    known = [books.workers[w] for w in (books.view.members if books.view else ()) if w in books.workers]
    return tuple(w.id for w in known if not w.beat.waits and w.state != "finished")


def stalled_s(books: Books, now: float) -> float | None:
    """For how long the training has stood still, if that is longer than it should."""
    still = books.movement
    stands = still.stands(now)
    return stands if stands > still.limit(books.settings.standstill_s, SLOW) else None


def ask_for_stacks(books: Books, reason: str) -> None:
    for worker in hung(books):
        books.send(worker, m.Stacks(reason=reason))


def _cut_short(books: Books, asked: Ending, now: float) -> None:
    still = books.movement
    stands = now - books.ending_at
    limit = still.limit(books.settings.stop_s, SHORT)
    if books.view is not None:
        stands = min(stands, still.stands(now))
        whole = any(books.workers[w].beat.whole for w in books.view.members if w in books.workers)
        limit *= 1 if whole else PATIENCE
    if stands <= limit:
        return
    names = hung(books)
    told = f"step {books.reached} has not ended for {math.floor(stands)} s"
    books.record(events.CutShort(step=books.reached, workers=names, reason=told))
    ask_for_stacks(books, told)
    who = f"{', '.join(names)} hung in step {books.reached}" if names else told
    where = ", ".join(f"logs/{name}.log" for name in names)
    stacks = f" (its stacks: {where})" if names else ""
    books.ending = Ending(code=asked.code, reason=f"{asked.reason}; {who}{stacks}", failed=True)
