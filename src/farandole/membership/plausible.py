"""Reports that can't all be true, and who is outvoted then.

The answers to a stop describe a state that stands still, and each has been found possible by itself (`issued`). What
two honest workers that hold the state say, fits together, however late anybody's messages are:

1. Rounds go in lockstep (`recovery`, 1 and 2). If the one behind is a member of the newer of their views, the other is
   one round ahead at most, and the one behind holds the round that the other has ended: without its word that could not
   end. (If it is not, it is a leaver, whom the others have left behind by agreement; a leaver never goes ahead.)
2. A view that was proposed is applied after a round all of whose words named it (R2), so by then each member of the one
   before was prepared for it. Nothing but that view, or a decision, makes it forget that: so who is still in an older
   view reports that it is prepared. Whoever says that the proposed view is in force, and others are not even prepared,
   contradicts each of them.
   Nor has anybody begun in the older view the round that others have entered in the newer one, or gone further there.
   (A member enters a view and begins its round at once. Where both have begun it, with something else each, or a leaver
   entered it and left, there may be two scripts, which `calls` tells.)
3. In one view and round the shards are dealt in one way (`issued`, 3).
4. Nobody ends a round whose words differ, and all see that they do (`replicas`, 2). So who is beyond a round in which
   several have seen it contradicts each of them.

So honest workers never contradict each other, and each contradiction has at least one wrong side. Which one?
Those who agree with one another outvote one: whoever contradicts most goes first, until no contradiction is left. A
value that is far off contradicts everybody. Where it is one word against one other, and all others' fit with both,
nothing here can tell: then the longest-standing worker is right, as with replicas, unless it has had that benefit too
often lately (`suspicion`). So one that is wrong by a single round may cost one that came later its place, a few times;
it never costs two at once, and as long as one honest worker is there the run goes on from an honest report.

Not judged here, as nobody could tell: how far all of them are (time is no bound: a round may take a microsecond), and
the bits that they hold; wrong ones are what replicas that differ are about.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations

from farandole.membership.messages import Stopped
from farandole.membership.view import View


@dataclass(frozen=True, kw_only=True)
class Outvoted:
    """`worker` goes; it contradicts `others`, one of whom says `reason` of it."""

    worker: str
    others: tuple[str, ...]
    reason: str


def outvoted(
    reports: Mapping[str, Stopped], proposed: View | None, spent: Collection[str] = (), apart: Collection[str] = ()
) -> tuple[Outvoted, ...]:
    """Without these, no two reports contradict each other. `reports` are in the order of their standing.

    `proposed`: the view that was on its way when they were stopped. `spent`: whose word counts less than another's.
    `apart`: several who have seen the words of their round differ.
    """
    synced = [worker for worker, report in reports.items() if report.synced]
    pairs = {
        (one, other): why
        for one, other in combinations(synced, 2)
        if (why := contradiction(one, reports[one], other, reports[other], proposed, apart))
    }
    out: list[Outvoted] = []
    while pairs:
        involved = [worker for pair in pairs for worker in pair]
        worst = max(involved, key=lambda w: (involved.count(w), w in spent, synced.index(w)))
        mine = {pair: why for pair, why in pairs.items() if worst in pair}
        others = tuple(worker for pair in mine for worker in pair if worker != worst)
        out.append(Outvoted(worker=worst, others=others, reason=next(iter(mine.values()))))
        pairs = {pair: why for pair, why in pairs.items() if worst not in pair}
    return tuple(out)


def contradiction(
    one: str, ones: Stopped, other: str, others: Stopped, proposed: View | None, apart: Collection[str] = ()
) -> str:
    """Why not both can be true, in words; "" if they can. Both hold the state."""
    if ones.view is None or others.view is None:
        return ""
    if ones.view.number > others.view.number:
        return contradiction(other, others, one, ones, proposed, apart)
    older, newer = ones.view, others.view
    if older != newer and newer == proposed:
        if ones.prepared != newer.number:
            return f"{other} has gone on in view {newer.number}, for which {one} was not prepared"
        its = (ones.call.number, 0) if other in newer.members else (ones.call.number,)
        begun = ones.call.number != 0 and others.call.number in its
        if ones.round > others.round or (ones.round == others.round and begun):
            return f"{other} is in view {newer.number} in round {others.round}, {one} before it in round {ones.round}"
    (behind, slow), (ahead, fast) = sorted(((one, ones), (other, others)), key=lambda each: each[1].round)
    if behind in newer.members and (fast.round > slow.round + 1 or (fast.round > slow.round and not slow.holds)):
        does = "" if slow.holds else ", which it does not hold"
        return f"{ahead} is in round {fast.round}, {behind} in round {slow.round}{does}"
    if behind in apart and fast.round > slow.round:
        return f"{ahead} is in round {fast.round}, and {behind} has seen that round {slow.round} can't end"
    if older == newer and ones.round == others.round and ones.lineage != others.lineage:
        return f"{one} and {other} say of round {ones.round} that it is dealt in different ways"
    return ""
