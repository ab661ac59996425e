"""Disputes between workers: accusations, corroboration, reports that contradict each other, replicas that differ.

An accusation (a worker reports that it has lost another, or has waited too long for it) can't be checked: a broken pair
looks the same from both sides. Invariants: no single report costs two workers, no joiner costs the run its state, and
each accusation that stops a view takes a worker out of it. The rate limits belong to this coordinator; the next one
begins with full ones.
Argument: docs/protocol.md, Accusations 1-6.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import CoordinatorState, Corroboration, Ending, Shared, issued_views
from farandole.protocol.difference import first_unequal, outliers
from farandole.protocol.messages import Stopped
from farandole.protocol.view import View

# --- accusations ------------------------------------------------------------------------------------------------------

Pairs = set[tuple[str, str]]
Witnesses = Mapping[str, Collection[str]]


@dataclass(frozen=True, kw_only=True)
class Conviction:
    """`worker` goes. `against` are the others of its pairs, and whoever confirms it."""

    worker: str
    others: tuple[str, ...]
    alone: bool  # one word against one other


def may_accuse(state: CoordinatorState, worker: str, view: int, peer: str) -> bool:
    """Whether both are of that view, which somebody may be in. See 6."""
    known = [*state.views(), *issued_views(state)]
    return worker != peer and any(each.number == view and {worker, peer} <= set(each.members) for each in known)


def denied(state: CoordinatorState, message: m.Suspect) -> bool:
    """Whether the accused has gone on while it is said to have been waited for. See 3; heartbeats may be late."""
    within = message.waited_s - state.settings.heartbeat_timeout_s
    return message.waited_s > 0 and state.progress.went_on(message.peer, state.clock, within)


def waited_for(state: CoordinatorState, worker: str, view: int) -> str:
    """Whom those who wait for `worker` really wait for, as heartbeats say: the end of the waits, or itself. See 3."""
    cause, passed = worker, set[str]()
    while cause in state.workers and cause not in passed:
        passed.add(cause)
        beat = state.workers[cause].heartbeat
        if not beat.waits_for or beat.view != view:
            return cause
        cause = beat.waits_for
    return worker


def give_benefit(state: CoordinatorState, worker: str) -> None:
    """It was right against one other, by its standing alone. See 4."""
    state.benefits.draw(worker, state.clock)


def benefits_used_up(state: CoordinatorState, workers: Iterable[str]) -> set[str]:
    """Those of whom it can't be said any more."""
    return {worker for worker in workers if state.benefits.spent(worker, state.clock)}


def returns_too_often(state: CoordinatorState, worker: str) -> bool:
    """Its connection has come back once more. See 6."""
    state.returns.draw(worker, state.clock)
    return state.returns.spent(worker, state.clock)


def witnesses(state: CoordinatorState, stalls: Collection[str], answered: Collection[str]) -> dict[str, set[str]]:
    """Who confirms that somebody is waited for: the others' heartbeats, or its own. See 3."""
    found: dict[str, set[str]] = defaultdict(set)
    beats = {worker: state.workers[worker].heartbeat for worker in answered}
    for worker, beat in beats.items():
        cause = waited_for(state, beat.waits_for, beat.view)
        if cause in beats and may_accuse(state, worker, beat.view, cause):
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


# --- corroboration ----------------------------------------------------------------------------------------------------
#
# What all holders of the state see in the same step (a loss that is not finite, replicas that differ, the round in
# which a view took effect). Invariant: with three or more holders, such a report counts only once two have made it of
# the same step; until then nothing is stopped for it.
# Argument: docs/protocol.md, Corroboration 1-6.

KEPT = 100
MANY = 3  # of whom one may be outvoted


def majority(workers: int) -> int:
    """How many of so many have to say the same."""
    return 2 if workers >= MANY else 1


def corroborate(state: CoordinatorState, worker: str, message: Shared) -> None:
    """One of those who could see it says so."""
    claim = state.corroborations.setdefault(f"{type(message).__name__} {message.step}", Corroboration(message))
    claim.message = message
    claim.workers.add(worker)
    for oldest in list(state.corroborations)[:-KEPT]:
        del state.corroborations[oldest]


def confirmed(state: CoordinatorState) -> list[tuple[list[str], Shared]]:
    """What has been said by enough, each once, with those who have said it."""
    holders = _holders(state)
    needed = majority(len(holders))
    found = list[tuple[list[str], Shared]]()
    seen = [
        (key, claim.message)
        for key, claim in state.corroborations.items()
        if not isinstance(claim.message, m.NotFinite)
    ]
    denied = [key for key, message in seen if message.step < state.reached]
    for key in denied:
        del state.corroborations[key]
    for key, claim in list(state.corroborations.items()):
        said = [worker for worker in holders if worker in claim.workers]
        if len(said) >= needed and not _against_the_first(holders, claim.message):
            found.append((said, claim.message))
            del state.corroborations[key]
    return found


def _against_the_first(holders: list[str], message: Shared) -> bool:
    """Whether the replica of the longest-standing is said to be unlike that of one other: then the other's is odd."""
    if not isinstance(message, m.Differs):
        return False
    like = [worker for worker in holders if worker not in message.workers]
    return len(like) == 1 and like != holders[:1]


def drop_stale_reports(state: CoordinatorState) -> None:
    """Those who have stood still go on, and compare their words anew."""
    state.corroborations = {
        key: claim for key, claim in state.corroborations.items() if isinstance(claim.message, m.NotFinite)
    }


def disputed(state: CoordinatorState, reports: Mapping[str, m.Stopped]) -> tuple[list[str], m.Differs] | None:
    """What some of these say of a round whose words differ, if others have not said it yet. `reports`: the answers to a
    stop of all who hold the state. Of those who say so, whoever is behind another has been proved wrong by it.
    """
    last = max((report.round for report in reports.values()), default=0)
    for claim in state.corroborations.values():
        said = sorted(w for w in claim.workers if w in reports and reports[w].round == last)
        if isinstance(claim.message, m.Differs) and said:
            return said, claim.message
    return None


def agreed_round(said: dict[str, int], workers: int) -> int:
    """The round in which enough of `workers` say that a view took effect; -1 for none yet."""
    if not said:
        return -1
    round_, count = Counter(said.values()).most_common(1)[0]
    return round_ if count >= majority(workers) else -1


def _holders(state: CoordinatorState) -> list[str]:
    """Leavers that the others may still wait for among them: they have seen the same rounds. A coordinator that is back
    may not have heard that the first view is in force.
    """
    before = state.previous.members if state.previous else ()
    inside = dict.fromkeys([*state.members(), *(worker for worker in before if worker in state.workers)])
    return [worker for worker in inside or state.participants() if worker not in state.unsynced]


# --- consistency check ------------------------------------------------------------------------------------------------
#
# Reports that can't all be true, and which worker is outvoted then. Each was found possible by itself (`issued_denial`
# in state.py). Invariant: honest workers never contradict each other, so each contradiction has at least one wrong
# side. The worker with most contradictions goes first; of one word against one, the longest-standing worker is right.
# Argument: docs/protocol.md, Consistency check 1-4.


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


# --- replicas that differ ---------------------------------------------------------------------------------------------
#
# All workers hold the same replica, bit for bit. A difference shows in the commit messages of a round, which then never
# ends, or in the fingerprints at the end. The first `Differs` makes a failed ending; then all holders of the state are
# asked for digests, the majority counts (in a tie the longest-standing worker), and suspects are named.
# Argument: docs/protocol.md, Replicas that differ 1-7.
#
#     on_replicas_differ      the ending, and the event
#     compare_when_complete   asks, waits for the answers, and reports what differs

T = TypeVar("T")


def on_replicas_differ(state: CoordinatorState, odd: tuple[str, ...], where: str, told: str = "") -> None:
    """The replicas of `odd` are unlike the others', as `told` says, or all can see."""
    reason = f"{_whose(odd)} from the others' {where}"
    state.ending = Ending(code=1, reason=reason, failed=True, apart=True, odd=odd, where=where, told=told)
    state.record(events.ReplicasDifferEvent(workers=odd, first="", reason=reason))


def on_drifts(state: CoordinatorState, message: m.Drifts) -> None:
    """Under `--bits any`; all members say so, and the first counts."""
    if state.settings.bits == "any" and message.step > state.drifted_step:
        state.drifted_step = message.step
        state.record(events.DriftingEvent(workers=message.workers, step=message.step, times=message.times))


def compare_when_complete(state: CoordinatorState) -> bool:
    """Whether it is known what differs; if not, those of `savers` who have not been asked are."""
    assert state.ending is not None
    if state.ending.compared:
        return True
    for worker in state.savers:
        if worker not in state.digests_wanted:
            ask_for_digests(state, worker)
    if any(worker not in state.digests for worker in state.savers):
        return False
    _tell(state, state.ending)
    return True


def ask_for_digests(state: CoordinatorState, worker: str) -> None:
    state.digests_wanted.add(worker)
    state.send(worker, m.Compare())


def by_standing(state: CoordinatorState, found: Mapping[str, T]) -> dict[str, T]:
    """`found`, the longest-standing worker first."""
    members = state.view.members if state.view else ()
    ranks = {worker: rank for rank, worker in enumerate(members)}
    return {worker: found[worker] for worker in sorted(found, key=lambda w: (ranks.get(w, len(ranks)), w))}


def _tell(state: CoordinatorState, ending: Ending) -> None:
    """Everyone who is left has answered."""
    answers = {w: state.digests[w] for w in state.savers}
    found = by_standing(state, {w: tuple(zip(a.names, a.digests, strict=False)) for w, a in answers.items()})
    odd = outliers(found)
    suspects = suspects_of(by_standing(state, answers))
    like = [worker for worker in found if worker not in odd]
    first = first_unequal(found[like[0]], found[odd[0]]) if odd else ""
    if odd:
        others = f"{like[0]}'s" if len(like) == 1 else "the others'"
        ending.odd, ending.reason = odd, f"{_whose(odd)} from {others} {ending.where}, first in {first}"
        ending.reason += _blame(odd, suspects) if len(answers) >= MANY else ""
        state.record(events.ReplicasDifferEvent(workers=odd, first=first, reason=ending.reason, suspects=suspects))
    else:
        equal = bool(ending.told) and set(ending.odd) <= set(answers)
        ending.reason = f"{ending.told} said that {ending.reason}" if ending.told else ending.reason
        ending.reason += ", and they are all equal" if equal else ", and it was gone before it could be asked in what"
    ending.compared = ending.between = True
    state.savers = like


def suspects_of(answers: Mapping[str, m.Digests]) -> tuple[str, ...]:
    """Those who explain all that differs if they alone are wrong; empty if nobody does. See 7."""
    values = {worker: (answer.names, answer.digests) for worker, answer in answers.items()}
    if len(set(values.values())) < 2:
        return ()
    alone = [w for w in values if len({value for other, value in values.items() if other != w}) == 1]
    return tuple(dict.fromkeys((*alone, *_makers(answers, values))))


def _makers(answers: Mapping[str, m.Digests], values: Mapping[str, Hashable]) -> Iterator[str]:
    """The members whose part is the only one that differs, of each view that the answers are about.

    Who was not in that view has the state of somebody who was.
    """
    rests = {answer.rest for answer in answers.values()}
    if len(rests) > 1 or 0 in rests:
        return
    of_view: dict[tuple[int, int, tuple[str, ...]], dict[str, tuple[int, ...]]] = {}
    for worker, answer in answers.items():
        for part in answer.parts:
            of_view.setdefault((part.view, part.cut, part.members), {})[worker] = part.digests
    for (_, _, members), digests in of_view.items():
        inside = {values[worker] for worker in digests}
        if all(value in inside for value in values.values()):
            unequal = [member for member, *each in zip(members, *digests.values(), strict=False) if len(set(each)) > 1]
            if len(unequal) == 1:
                yield unequal[0]


def _blame(odd: tuple[str, ...], suspects: tuple[str, ...]) -> str:
    """Who is wrong, where it need not be `odd`; "" where nothing else is known."""
    if not suspects or set(suspects) == set(odd):
        return ""
    if len(suspects) == 1:
        return f", only in what {suspects[0]} sums up: {suspects[0]} sends wrong sums"
    makers = " or ".join(suspect for suspect in suspects if suspect not in odd)
    return f", only in what {makers} sums up: one of {', '.join(suspects)} is wrong, and nobody can tell which"


def _whose(odd: tuple[str, ...]) -> str:
    if len(odd) == 1:
        return f"{odd[0]}'s replica differs"
    return f"the replicas of {', '.join(odd[:-1])} and {odd[-1]} differ" if odd else "a replica differs"
