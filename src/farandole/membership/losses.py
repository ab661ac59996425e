"""Losses that repeat themselves: a run that dies for ever at the same place, joiners that die as soon as they are in.

A worker that dies is replaced, and where all have died the next ones begin with the newest checkpoint. That is right
for accidents, and goes round in circles where the script, the data or the host is the cause. What tells them apart:

1. Accidents don't wait for a step. So a loss counts if nobody has got beyond the step of the last one that counted;
   whoever gets beyond sets the count to nothing. `FATAL` in a row without a new furthest step end the run.
2. What counts is everyone's loss, whatever brought it about, and that of one member while others live if its process
   ended by its own doing. SIGKILL is not that: it may be a person, a spot market or the kernel. If memory is what the
   step lacks, the survivors inherit it and die as well, until it is everyone's loss. Who had notice or was evicted was
   asked to go.
3. One cause may strike many within moments. So losses within `TOGETHER_S` of the one that counted are the same loss,
   if who is lost was there then: one that takes everybody is counted once, not once a worker, and so with joiners. Who
   has come since was not struck by it, however soon it dies: a replacement may take less than that to start and die.
4. The furthest step is known from heartbeats, Switched and Stopped, so it may be a heartbeat old where nobody was left
   to report. Where steps are much shorter than that it may seem to grow although the run dies in the same place; but
   that place does not move, so it can't seem so for ever.
5. A joiner that dies in the first `TRIAL` steps after it has entered costs the others a recovery and no more: they
   have progress in between, and the first rule never speaks. `FATAL` of those in a row, none surviving among them, and
   no more are started: what kills them is where they come from. `farandole scale` begins to count anew.
6. A joiner that is refused costs the others the same recovery, and the script that made it unlike the run makes its
   replacement so. So a refusal counts in the row of rule 5. Two things are different. An accident may take several at
   once, but it refuses nobody: refusals are counted one by one. A proof fails in the first step, a digest perhaps 300
   steps later: a refusal counts however long the joiner was in. Before there is a view the row ends the run, which
   could never begin. Numerics that differ when a worker asks in are its host's: the pool leaves that host alone, and
   other hosts may well have what the run needs; they count as any end before the first step does.
7. The rows of 5 and 6 are about replacements, so they count workers of pools. Nobody replaces a guest: its end counts
   in neither, and a guest that survives says nothing of what the pools start.

8. A worker that dies before it is let in gets to no step, so none of this counts it. As many in a row of one pool as
   the settings say, none of that pool's joining in between, and that pool starts no more: a broken image of one pool
   says nothing of the others. The run's own pool is the one that a run can't begin without, so it ends a run that has
   no view. Another pool ends it only where fewer than the minimum would be wanted of all of them. `farandole scale`
   begins to count anew.

All of it is in the journal, but for when the last loss that counted was, and who was there: to a coordinator that
comes back, the next one is a new one. Who goes because its host can't get it the data is in none of these rows
(`feeding`, 7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import msgspec

from farandole.membership import ending, events, names, requests, testimony
from farandole.membership.books import EVICTED, UNFED, Books
from farandole.membership.comparison import MICRO_BATCH, UPDATES
from farandole.membership.records import Ending, Losses, Strike, Worker

FATAL = 5  # losses without progress, or joiners, in a row
TOGETHER_S = 2.0
TRIAL = 10  # steps
# by what was found to differ; each names what a script does to be unlike the run
LIKELY = {
    MICRO_BATCH: "a generator of the data set's own, or data that was drawn before farandole.join()",
    UPDATES: "a scheduler, or another object that changes the optimizer, that was not replicated",
}
ANY = (
    "a data set's own generator, a scheduler or a training mode that was not replicated, or data that was drawn before "
    "farandole.join()"
)
NOT_ITS_OWN = (
    "killed by signal 9", "killed by signal 15", f"exited with code {EVICTED}", f"exited with code {UNFED}"
)  # fmt: skip


def reached(books: Books, worker: str, step: int) -> None:
    """A member is in `step`, as it says. Where there are three or more, another has to be about as far."""
    books.steps[worker] = max(step, books.steps.get(worker, -1))
    members = books.members()
    said = sorted(books.steps.get(member, -1) for member in members)
    if len(members) >= testimony.MANY:
        step = min(step, said[-2] + 1)
    books.reached = max(books.reached, step)
    if books.losses.count and step > books.losses.step:
        books.losses = msgspec.structs.replace(books.losses, count=0)


def ended(books: Books, worker: str, reason: str, *, entered: int) -> None:
    """The process of `worker`, who had been let in, and was not asked to go, has ended. `entered`: the step in which it
    did, as a joiner of a pool; -1 for one of the first, and for guests.
    """
    if books.ending or books.over:
        return
    books.losses = msgspec.structs.replace(books.losses, reason=reason)
    if reason not in NOT_ITS_OWN:
        _count(books, [worker], reason)
    if entered >= 0:
        _joiner_ended(books, worker, reason, entered)


def found_out(books: Books, worker: str, reason: str, *, entered: int) -> None:
    """... and the others had gone on without it before anybody knew of what it died."""
    if reason not in NOT_ITS_OWN:
        books.record(events.Died(worker=worker, reason=reason))
    ended(books, worker, reason, entered=entered)


def everyone(books: Books, cause: str) -> None:
    """Nobody is left of the view who holds the state: the next ones begin behind the step in hand."""
    assert books.view is not None
    if not books.ending:
        _count(books, books.view.members, books.losses.reason or cause)
    books.reached, books.steps = -1, {}


def startup_failed(books: Books, worker: str, pool: str) -> None:
    """`worker` has died before it was let in, as the next one may: its pool must not try for ever. See 8."""
    if books.ending or books.over:
        return
    mark = names.mark(books, pool)
    count = books.startup_failures[mark] = books.startup_failures.get(mark, 0) + 1
    if count < books.settings.startup_failures:
        return
    reason = f"{count} workers in a row died before they could join; see their log files"
    if mark:
        _no_more_of(books, worker, pool, reason)
    elif books.view is None:
        books.ending = Ending(code=1, reason=reason, failed=True)
        ending.end(books)
    else:
        _no_replacements(books, reason)


def joined(books: Books, workers: Collection[str]) -> None:
    """`workers` are in the view, with its state: their pools' next start that fails is the first of a row."""
    for worker in workers:
        if (known := books.workers.get(worker)) and known.pool:
            books.startup_failures.pop(names.mark(books, known.pool), None)


def refused(books: Books, worker: Worker, reason: str) -> None:
    """`worker` is not let in, or is put out as a joiner that is unlike the run, for `reason`. See 6."""
    if not worker.pool or books.ending or books.over:
        return
    _in_a_row(books, worker.entered if worker.entered >= 0 else books.reached, 1, refused=1)
    if books.losses.joiners < FATAL:
        return
    likely = next((cause for found, cause in LIKELY.items() if found in reason), ANY)
    sentence = f"{_row(books.losses)} ({reason}); the likely cause is {likely}"
    if books.view is None:
        books.ending = Ending(code=1, reason=sentence, failed=True)
        ending.end(books)
    else:
        _no_replacements(books, sentence)


def _strike(books: Books, workers: Collection[str]) -> Strike:
    """That of now, which took `workers`."""
    return Strike(at=books.clock, there=frozenset([*workers, *books.workers, *books.departed]))


def _together(books: Books, strike: Strike, workers: Collection[str]) -> bool:
    """Whether `workers`, who are lost now, may be lost to what has struck then."""
    return books.clock - strike.at < TOGETHER_S and not strike.there.isdisjoint(workers)


def _count(books: Books, workers: Collection[str], reason: str) -> None:
    known, step = books.losses, max(books.losses.step, books.reached)
    count = known.count if known.count and _together(books, books.strike, workers) else known.count + 1
    if count != known.count:
        books.strike = _strike(books, workers)
    books.losses = msgspec.structs.replace(known, count=count, step=step)
    if count >= FATAL:
        why = reason.removeprefix("killed by ")
        sentence = f"died {count} times at step {step} ({why}), and never got further; see the workers' log files"
        books.ending = Ending(code=1, reason=sentence, failed=True)


def _joiner_ended(books: Books, worker: str, reason: str, entered: int) -> None:
    if books.reached - entered > TRIAL:
        books.losses = msgspec.structs.replace(books.losses, joiners=0)
        return
    together = _together(books, books.joiner_strike, [worker])
    if not together:
        books.joiner_strike = _strike(books, [worker])
    _in_a_row(books, entered, 0 if together else 1)
    if books.losses.joiners >= FATAL:
        why = reason.removeprefix("killed by ")
        _no_replacements(books, f"{_row(books.losses)} ({why})")


def _row(losses: Losses) -> str:
    """The row of joiners as a sentence."""
    died = f"died within {TRIAL} steps of entering"
    if not losses.refusals:
        return f"{losses.joiners} joiners in a row {died}"
    if losses.refusals == losses.joiners:
        return f"{losses.joiners} joiners in a row were refused"
    return f"{losses.joiners} joiners in a row {died}, or were refused ({losses.refusals} of them)"


def _in_a_row(books: Books, entered: int, more: int, *, refused: int = 0) -> None:
    """Count `more` joiners into the row; a pool's worker that has survived since it began ends the row before."""
    known = books.losses
    joined = [books.workers[w].entered for w in books.participants() if books.workers[w].pool]
    survived = any(known.since <= step < books.reached - TRIAL for step in joined if step >= 0)
    joiners = 1 if survived or not known.joiners else known.joiners + more
    anew = survived or not known.joiners
    books.losses = msgspec.structs.replace(
        known,
        joiners=joiners,
        refusals=refused if anew else known.refusals + refused,
        since=entered if joiners == 1 else known.since,
    )


def _no_more_of(books: Books, worker: str, pool: str, reason: str) -> None:
    """`pool`, whose `worker` has just died, keeps those who are there. The run goes on if enough are wanted."""
    mark, before = names.mark(books, pool), books.wanted
    wanted = requests.targets(books).get(mark, 0)
    there = sum(1 for w in books.workers.values() if w.pool == pool and w.id != worker and not w.leaving)
    left = min(there, wanted)
    requests.fix(books, mark, left, left)  # of what pools share, the others are asked for the rest
    reason = f"{reason}; pool {pool} starts no more"
    begun = any(map(books.let_in, books.workers))
    if before >= books.settings.minimum > books.wanted and not begun:
        few = f"{books.wanted} of at least {books.settings.minimum} workers can come"
        books.ending = Ending(code=1, reason=f"{reason}, and {few}", failed=True)
        if books.view is None:
            ending.end(books)
    else:
        books.record(events.NoReplacements(wanted=books.wanted, reason=reason))


def _no_replacements(books: Books, reason: str) -> None:
    """The run goes on with those who are there, if they are enough."""
    assert books.view is not None
    members = [books.workers[w] for w in books.view.members if w in books.workers]
    if len(members) < books.settings.minimum:
        few = f"{len(members)} of at least {books.settings.minimum} workers are left"
        books.ending = Ending(code=1, reason=f"{reason}, and {few}", failed=True)
        return
    books.wants = dict.fromkeys((names.mark(books, pool.name) for pool in books.settings.pools), 0)
    books.wants |= Counter(names.mark(books, worker.pool) for worker in members if worker.pool)
    books.shared = 0
    books.record(events.NoReplacements(wanted=books.wanted, reason=reason))
