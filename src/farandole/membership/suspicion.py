"""Who goes when workers say that they have lost each other, and how often one of them may be right by itself.

A worker that says of another that it has lost it, or has waited too long, can't be checked: a broken pair looks the
same whoever broke it, and a false report looks like a broken pair. Who knows what when:

1. Silence confirms. Who is dead, frozen or cut off does not answer the stop, and is given up for that: of the
   accusations only those are left here in which both sides have answered.
2. A broken pair can't share a view, so one of it has to go. Members each exchange with each, so one that is the cause
   is in several pairs, whether it accuses or is accused: who has most against it goes first, until no pair is left. So
   one that accuses several, who have no complaint of one another, goes itself: no single word costs two workers.
3. A third one confirms by its heartbeats, which say whom it has waited for too long; for a stall that is all others,
   since a round needs each of them. Where nobody else is there to say so, the accused one's own do: if all others wait
   and it does not say so, it is what they wait for. A stall is denied by the accused one's rounds: who waits in a round
   holds its peers there, so if they have gone on two rounds within the wait, nobody waited.
   Who waits for somebody that waits itself has found no cause: what goes from host to host goes through others. So
   a stall is heard only of who does not say that it waits for another one, and waits are followed to their end. Where
   they go round in a circle, each is heard: somebody in it is wrong.
4. What is left is one word against one other. Then the one that has come later goes: it has more often brought what
   was not there before, whoever of the two has spoken first, and nobody can come anew under other names to put out who
   was there. But a long-standing one that is wrong would so put out one after the other. So each such benefit is drawn
   from a rate limit, `BENEFITS` and then one in `BENEFIT_S`; without any left it is the common factor, and goes.
5. A pair of which one side does not hold the state costs that side: a joiner can't cost the run its state.
6. Only those accuse each other who are in one view, or are about to enter it. So each accusation that stops a view
   takes somebody out of it, and there are no more of them than workers. A connection that breaks and comes back stops
   the view as well and takes nobody out, so that too has a rate limit: beyond `RETURNS` and one more each second the
   worker is put out that can't keep its connection.

The rate limits are this coordinator's; the next one begins with full ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from farandole.membership import issued
from farandole.membership import messages as m
from farandole.membership.books import Books

Pairs = set[tuple[str, str]]
Witnesses = Mapping[str, Collection[str]]


@dataclass(frozen=True, kw_only=True)
class Conviction:
    """`worker` goes. `against` are the others of its pairs, and whoever confirms it."""

    worker: str
    others: tuple[str, ...]
    alone: bool  # one word against one other


def may_accuse(books: Books, worker: str, view: int, peer: str) -> bool:
    """Whether both are of that view, which somebody may be in. See 6."""
    known = [*books.views(), *issued.views(books)]
    return worker != peer and any(each.number == view and {worker, peer} <= set(each.members) for each in known)


def denied(books: Books, message: m.Suspect) -> bool:
    """Whether the accused has gone on while it is said to have been waited for. See 3; heartbeats may be late."""
    within = message.waited_s - books.settings.heartbeat_timeout_s
    return message.waited_s > 0 and books.movement.went_on(message.peer, books.clock, within)


def waited_for(books: Books, worker: str, view: int) -> str:
    """Whom those who wait for `worker` really wait for, as heartbeats say: the end of the waits, or itself. See 3."""
    cause, passed = worker, set[str]()
    while cause in books.workers and cause not in passed:
        passed.add(cause)
        beat = books.workers[cause].beat
        if not beat.waits_for or beat.view != view:
            return cause
        cause = beat.waits_for
    return worker


def benefits(books: Books, worker: str) -> None:
    """It was right against one other, by its standing alone. See 4."""
    books.benefits.draw(worker, books.clock)


def spent(books: Books, workers: Iterable[str]) -> set[str]:
    """Those of whom it can't be said any more."""
    return {worker for worker in workers if books.benefits.spent(worker, books.clock)}


def returns_too_often(books: Books, worker: str) -> bool:
    """Its connection has come back once more. See 6."""
    books.returns.draw(worker, books.clock)
    return books.returns.spent(worker, books.clock)


def witnesses(books: Books, stalls: Collection[str], answered: Collection[str]) -> dict[str, set[str]]:
    """Who confirms that somebody is waited for: the others' heartbeats, or its own. See 3."""
    found: dict[str, set[str]] = defaultdict(set)
    beats = {worker: books.workers[worker].beat for worker in answered}
    for worker, beat in beats.items():
        cause = waited_for(books, beat.waits_for, beat.view)
        if cause in beats and may_accuse(books, worker, beat.view, cause):
            found[cause].add(worker)
    for worker in [worker for worker in stalls if worker in beats and not beats[worker].waits]:
        if all(beat.waits for other, beat in beats.items() if other != worker):
            found[worker].add(worker)
    return found


def convict(
    accusations: Collection[tuple[str, str]],
    answered: tuple[str, ...],
    synced: Collection[str],
    witnesses: Witnesses | None = None,
    spent: Collection[str] = (),
) -> tuple[Conviction, ...]:
    """Who goes, so that no pair is left: see 2 to 5. `accusations` are pairs of an accuser and an accused.

    `answered` are those who have, in the order of their standing; `synced` those that hold the state; `spent` those
    without any left.
    """
    pairs = {(a, b) for a, b in accusations if a in answered and b in answered and a != b}
    mixed = {pair for pair in pairs if (pair[0] in synced) != (pair[1] in synced)}
    gone: list[Conviction] = []
    for worker in [w for w in answered if w not in synced and any(w in pair for pair in mixed)]:
        gone.append(_gone(worker, pairs, witnesses or {}, alone=False))
        pairs = {pair for pair in pairs if worker not in pair}
    while pairs:
        against = {w: _against(w, pairs, witnesses or {}) for pair in pairs for w in pair}
        worst = max(against, key=lambda w: (len(against[w]), w in spent, answered.index(w)))
        most = len(against[worst])
        tied = any(len(against[w]) == most for w in against[worst] if w in against and w != worst)
        gone.append(_gone(worst, pairs, witnesses or {}, alone=most == 1 and tied))
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(gone)


def _against(worker: str, pairs: Pairs, witnesses: Witnesses) -> set[str]:
    opponents = {w for pair in pairs if worker in pair for w in pair if w != worker}
    return opponents | set(witnesses.get(worker, ()))


def _gone(worker: str, pairs: Pairs, witnesses: Witnesses, *, alone: bool) -> Conviction:
    others = tuple(sorted(_against(worker, pairs, witnesses) - {worker}))
    return Conviction(worker=worker, others=others, alone=alone)
