"""Workers that err or lie: accusations, reports that contradict each other, replicas and results that differ.

An accusation (a worker reports that it has lost another, or has waited too long for it) can't be checked: a broken pair
looks the same from both sides. Invariants: no single report costs two workers, no joiner costs the run its state, and
each accusation that stops a view takes a worker out of it. The rate limits belong to this coordinator; the next one
begins with full ones.
Argument: docs/protocol.md, Accusations 1-6.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType
from typing import TypeVar

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import CoordinatorState, Corroboration, Ending, Shared, issued_views
from farandole.protocol.difference import first_unequal, outliers
from farandole.protocol.messages import UPDATES, Computed, Stopped
from farandole.protocol.values import doing_step
from farandole.protocol.view import View

# --- accusations ------------------------------------------------------------------------------------------------------

Pairs = set[tuple[str, str]]
Witnesses = Mapping[str, Collection[str]]


@dataclass(frozen=True, kw_only=True)
class Conviction:
    """`worker` is evicted. `others` are the other workers of its pairs, and those that confirm it."""

    worker: str
    others: tuple[str, ...]
    alone: bool  # one report against one other


def may_accuse(state: CoordinatorState, worker: str, view: int, peer: str) -> bool:
    """Return True if both are members of that view, and a worker may be in it. See docs/protocol.md, Accusations 6."""
    candidates = [*state.views(), *issued_views(state)]
    return worker != peer and any(each.number == view and {worker, peer} <= set(each.members) for each in candidates)


def denied(state: CoordinatorState, message: m.Suspect) -> bool:
    """Return True if the accused went on during the reported wait. Heartbeats may be late.

    The accused one's rounds deny a stall: a member that waits in a round holds its peers there, so if they have gone on
    two rounds within the wait, nobody waited.

    See docs/protocol.md, Accusations 3.
    """
    within = message.waited_s - state.settings.heartbeat_timeout_s
    return message.waited_s > 0 and state.progress.went_on(message.peer, state.clock, within)


def waited_for(state: CoordinatorState, worker: str, view: int) -> str:
    """Return the worker at the end of the chain of waits that begins at `worker`; in a circle, `worker`.

    A worker that waits for one that waits itself has found no cause, since traffic between hosts passes through others.
    So a stall is accepted only against a worker that does not report to wait for another. In a circle each is accepted:
    one in it is wrong.

    See docs/protocol.md, Accusations 3.
    """
    cause, seen = worker, set[str]()
    while cause in state.workers and cause not in seen:
        seen.add(cause)
        beat = state.workers[cause].heartbeat
        if not beat.blocked_on or beat.view != view:
            return cause
        cause = beat.blocked_on
    return worker


def give_benefit(state: CoordinatorState, worker: str) -> None:
    """Count that `worker` won against one other by its standing alone. See docs/protocol.md, Accusations 4.

    Without a limit a wrong long-standing worker would remove later ones, one after another. It has `BENEFITS`, then one
    in `BENEFIT_S` seconds. With none left it is the common factor, and goes itself.
    """
    state.benefits.draw(worker, state.clock)


def benefits_used_up(state: CoordinatorState, workers: Iterable[str]) -> set[str]:
    """Return the workers that cannot win by their standing alone any more. See docs/protocol.md, Accusations 4."""
    return {worker for worker in workers if state.benefits.spent(worker, state.clock)}


def returns_too_often(state: CoordinatorState, worker: str) -> bool:
    """Count a reconnection of `worker`. Returns True if it reconnects too often.

    A connection that breaks and returns stops the view and takes no worker out, so it has this limit: `RETURNS`, and
    one more in `RETURN_S` seconds. A worker beyond it can't keep its connection and is removed.

    See docs/protocol.md, Accusations 6.
    """
    state.returns.draw(worker, state.clock)
    return state.returns.spent(worker, state.clock)


def witnesses(state: CoordinatorState, stalls: Collection[str], answered: Collection[str]) -> dict[str, set[str]]:
    """Return, for each worker that others wait for, the workers whose heartbeats confirm it.

    For a stall all others confirm, since a round needs each of them. Where no other is there, the accused one's own
    heartbeat counts: if all others wait and it does not report a wait, they wait for it.

    See docs/protocol.md, Accusations 3.
    """
    confirmed_by: dict[str, set[str]] = defaultdict(set)
    beats = {worker: state.workers[worker].heartbeat for worker in answered}
    for worker, beat in beats.items():
        cause = waited_for(state, beat.blocked_on, beat.view)
        if cause in beats and may_accuse(state, worker, beat.view, cause):
            confirmed_by[cause].add(worker)
    for worker in [worker for worker in stalls if worker in beats and not beats[worker].waits_for_peers]:
        if all(beat.waits_for_peers for other, beat in beats.items() if other != worker):
            confirmed_by[worker].add(worker)
    return confirmed_by


def convict(
    accusations: Collection[tuple[str, str]],
    answered: tuple[str, ...],
    synced: Collection[str],
    witnesses: Witnesses | None = None,
    spent: Collection[str] = (),
) -> tuple[Conviction, ...]:
    """Return the workers to evict so that no broken pair remains. See docs/protocol.md, Accusations 2 to 5.

    Members exchange with each other, so the cause is in several pairs. A worker that accuses several that have no
    complaint about each other goes itself. Of one word against one the later worker goes, whoever reported first. The
    recorded reason of a worker that goes has all accusations in its pairs, since each of them counts.

    `accusations` are pairs of an accuser and an accused. `answered` are the workers that have answered the stop, the
    longest-standing first, and `synced` those that hold the state. `spent` cannot win by their standing any more.
    """
    pairs = {(a, b) for a, b in accusations if a in answered and b in answered and a != b}
    mixed = {pair for pair in pairs if (pair[0] in synced) != (pair[1] in synced)}
    convictions: list[Conviction] = []
    for worker in [w for w in answered if w not in synced and any(w in pair for pair in mixed)]:
        convictions.append(_convict_worker(worker, pairs, witnesses or {}, alone=False))
        pairs = {pair for pair in pairs if worker not in pair}
    while pairs:
        against = {w: _against(w, pairs, witnesses or {}) for pair in pairs for w in pair}
        worst = max(against, key=lambda w: (len(against[w]), w in spent, answered.index(w)))
        most = len(against[worst])
        tied = any(len(against[w]) == most for w in against[worst] if w in against and w != worst)
        convictions.append(_convict_worker(worst, pairs, witnesses or {}, alone=most == 1 and tied))
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(convictions)


def _against(worker: str, pairs: Pairs, witnesses: Witnesses) -> set[str]:
    """Return the other workers of the pairs of `worker`, and the witnesses against it."""
    opponents = {w for pair in pairs if worker in pair for w in pair if w != worker}
    return opponents | set(witnesses.get(worker, ()))


def _convict_worker(worker: str, pairs: Pairs, witnesses: Witnesses, *, alone: bool) -> Conviction:
    """Return the conviction of `worker` with all workers against it."""
    others = tuple(sorted(_against(worker, pairs, witnesses) - {worker}))
    return Conviction(worker=worker, others=others, alone=alone)


# --- corroboration ----------------------------------------------------------------------------------------------------
#
# What all holders of the state see in the same step (a loss that is not finite, replicas that differ, the round in
# which members switched to a view). Invariant: with three or more holders, such a report counts only once two have made
# it of the same step; until then nothing is stopped for it.
# A loss is the same number everywhere, and the commit messages of a round that differ are the same for all. Nobody ends
# a round with differing commit messages or goes on beyond a loss that is to end the run, and each holder repeats its
# report on a new connection (of shards that differ, in its answer to a stop). A round that one report names is redone
# at any other stop and compared again, or those of the round after it are compared by a worker that is ahead. The
# others that could confirm it may die: with fewer than three holders one report counts.
# Argument: docs/protocol.md, Corroboration 1-7.

KEPT_FACTS = 100  # facts whose reports are remembered
MANY = 3  # holders of the state, among which one may be outvoted


def majority(workers: int) -> int:
    """Return how many of `workers` must report the same fact before it counts."""
    return 2 if workers >= MANY else 1


def corroborate(state: CoordinatorState, worker: str, message: Shared) -> None:
    """Record the report of one worker about a fact that all holders of the state see. Enough reports confirm it."""
    claim = state.corroborations.setdefault(f"{type(message).__name__} {message.step}", Corroboration(message))
    claim.message = message
    claim.workers.add(worker)
    for oldest in list(state.corroborations)[:-KEPT_FACTS]:
        del state.corroborations[oldest]


def confirmed(state: CoordinatorState) -> list[tuple[list[str], Shared]]:
    """Return the facts that enough workers have reported, each once, with these workers."""
    holders = _holders(state)
    needed = majority(len(holders))
    facts = list[tuple[list[str], Shared]]()
    pending = [
        (key, claim.message)
        for key, claim in state.corroborations.items()
        if not isinstance(claim.message, m.NotFinite)
    ]
    passed = _passed_step(state, holders)
    disproved = [key for key, message in pending if message.step < passed]
    for key in disproved:
        del state.corroborations[key]
    for key, claim in list(state.corroborations.items()):
        reporters = [worker for worker in holders if worker in claim.workers]
        if len(reporters) >= needed and not _contradicts_longest_standing(holders, claim.message):
            facts.append((reporters, claim.message))
            del state.corroborations[key]
    return facts


def _passed_step(state: CoordinatorState, holders: list[str]) -> int:
    """Return a step that the others have reached for certain: no report about an earlier one can come true.

    One of three or more holders may report a step that it is not in. See docs/protocol.md, Corroboration 5.
    """
    if len(holders) < MANY:
        return state.reached
    return sorted(state.steps.get(worker, -1) for worker in holders)[-majority(len(holders))]


def _contradicts_longest_standing(holders: list[str], message: Shared) -> bool:
    """Return True if the report takes the side of one worker against the longest-standing one, whose replica counts.

    Of two replicas that differ, the longest-standing worker's is right.
    """
    if not isinstance(message, m.Differs):
        return False
    agreeing = [worker for worker in holders if worker not in message.workers]
    return len(agreeing) == 1 and agreeing != holders[:1]


def drop_stale_reports(state: CoordinatorState) -> None:
    """Forget reports about differing replicas and shards: the members go on and compare again."""
    state.corroborations = {
        key: claim for key, claim in state.corroborations.items() if isinstance(claim.message, m.NotFinite)
    }


def disputed(state: CoordinatorState, reports: Mapping[str, m.Stopped]) -> tuple[list[str], m.Differs] | None:
    """Return an unconfirmed report that the replicas differ in the newest round, with its reporters; None if none.

    `reports` are the answers of all holders of the state to a stop. A reporter that is behind another worker is
    disproved by it, since no worker can end such a round, and replicas of two rounds are not compared.
    """
    last = max((report.round for report in reports.values()), default=0)
    for claim in state.corroborations.values():
        reporters = sorted(w for w in claim.workers if w in reports and reports[w].round == last)
        if isinstance(claim.message, m.Differs) and reporters:
            return reporters, claim.message
    return None


def agreed_round(reported: dict[str, int], workers: Sequence[str]) -> int:
    """Return the round in which members switched to a view, as enough of the `workers` report; -1 for none yet.

    `workers`: the longest-standing first. With fewer than `MANY` its report alone counts, so a joiner does not take out
    the only worker that holds the state.
    """
    if len(workers) < MANY:
        return reported.get(workers[0], -1) if workers else -1
    if not reported:
        return -1
    round_, count = Counter(reported.values()).most_common(1)[0]
    return round_ if count >= majority(len(workers)) else -1


def _holders(state: CoordinatorState) -> list[str]:
    """Return the workers that hold the state, including leaving ones that the others may still wait for.

    Leaving workers have seen the same rounds. A restarted coordinator may not know yet that the first view is in force:
    then these are all participants.
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
    """`worker` is evicted: it contradicts `others`. `reason` describes one of the contradictions."""

    worker: str
    others: tuple[str, ...]
    reason: str


def outvoted(
    reports: Mapping[str, Stopped], proposed: View | None, spent: Collection[str] = ()
) -> tuple[Outvoted, ...]:
    """Return the workers to evict so that no two reports contradict each other.

    Those that agree outvote one, and a value that is far off contradicts everybody. A worker that is wrong by a single
    round may cost later ones their places, a few times (`give_benefit`); it never costs two at once. Not judged, since
    nobody could tell: how far all of them are (a round may take a microsecond, so time is no bound), and the bits that
    they hold.

    `reports` begin with the longest-standing worker's. `proposed` is the view that was proposed at the stop. `spent`
    cannot win by their standing any more.
    """
    synced = [worker for worker, report in reports.items() if report.synced]
    alike = _alike({worker: reports[worker] for worker in synced})
    if not any(
        contradiction(one, reports[one], other, reports[other], proposed) for one, other in combinations(alike, 2)
    ):
        return ()  # so it is nearly always, and there are fewer of these pairs than pairs of workers
    pairs = {
        (one, other): why
        for one, other in combinations(synced, 2)
        if (why := contradiction(one, reports[one], other, reports[other], proposed))
    }
    result: list[Outvoted] = []
    while pairs:
        involved = [worker for pair in pairs for worker in pair]
        worst = max(involved, key=lambda w: (involved.count(w), w in spent, synced.index(w)))
        contradictions = {pair: why for pair, why in pairs.items() if worst in pair}
        others = tuple(worker for pair in contradictions for worker in pair if worker != worst)
        result.append(Outvoted(worker=worst, others=others, reason=next(iter(contradictions.values()))))
        pairs = {pair: why for pair, why in pairs.items() if worst not in pair}
    return tuple(result)


def _alike(reports: Mapping[str, Stopped]) -> list[str]:
    """Return one worker of each kind: the reports of two of a kind say the same, and contradict the same others."""
    members = [set(view.members) for view in {report.view: None for report in reports.values()} if view]
    kinds = {
        (
            report.view, report.round, report.lineage, report.has_result, report.prepared, report.call.number,
            report.cannot_end, *(worker in each for each in members),
        ): worker
        for worker, report in reports.items()
    }  # fmt: skip
    return [*kinds.values()]


def contradiction(one: str, ones: Stopped, other: str, others: Stopped, proposed: View | None) -> str:
    """Return why two reports cannot both be true, "" if they can. Both workers hold the state.

    Only the proposed view or a decision makes a member forget that it is prepared, so one that is still in the older
    view reports it. A member enters a view and begins its round at once: no member of the older view has begun there
    the round that others entered in the newer one. If both have begun it with different calls, or a leaving worker
    entered it and left, there may be two scripts, which Same calls tells; but then the one in the older view has not
    begun a training step, since all members switch to an agreed view before their next one. A worker that is not in the
    newer view is leaving and was left behind by agreement; it never goes ahead. A worker beyond a round that cannot end
    contradicts those that have seen that. Only answers to the stop count for this: an earlier report of a difference
    may be of a round that was redone since.
    """
    if ones.view is None or others.view is None:
        return ""
    if ones.view.number > others.view.number:
        return contradiction(other, others, one, ones, proposed)
    older, newer = ones.view, others.view
    if older != newer and newer == proposed:
        if ones.prepared != newer.number:
            return f"{other} is in view {newer.number}, for which {one} was not prepared"
        calls = (ones.call.number, 0) if other in newer.members else (ones.call.number,)
        trains = ones.call.doing == doing_step(ones.step)  # then it has not switched before this round, as all do
        begun = trains or (ones.call.number != 0 and others.call.number in calls)
        if ones.round > others.round or (ones.round == others.round and begun):
            before = f"{one} in the view before it in round {ones.round}"
            return f"{other} is in view {newer.number} in round {others.round}, {before}"
    (behind, slow), (ahead, fast) = sorted(((one, ones), (other, others)), key=lambda each: each[1].round)
    if behind in newer.members and (fast.round > slow.round + 1 or (fast.round > slow.round and not slow.has_result)):
        state = "" if slow.has_result else ", which it does not hold"
        return f"{ahead} is in round {fast.round}, {behind} in round {slow.round}{state}"
    if slow.cannot_end and fast.round > slow.round:
        return f"{ahead} is in round {fast.round}, but {behind} has seen that round {slow.round} cannot end"
    if older == newer and ones.round == others.round and ones.lineage != others.lineage:
        return f"{one} and {other} report different shard assignments of round {ones.round}"
    return ""


# --- replicas that differ ---------------------------------------------------------------------------------------------
#
# All workers hold the same replica, bit for bit. A difference shows in the commit messages of a round, which then never
# ends, or in the fingerprints at the end. A `Differs` that counts makes a failed ending; then all holders of the state
# are asked for digests, the majority counts (in a tie the longest-standing worker), and suspects are named.
# `Differs` is sent on one ordered connection, and again on each new one, before the answer to a stop. A worker that
# answered before the last commit message came has not looked: then the round is redone and compared again, or it is
# committed and those of the next step are compared. What an odd worker that died has added to the gradients stays, if
# nobody had all commit messages. A worker that dies meanwhile is not waited for, and nobody trains any more once the
# ending is decided. A restarted coordinator finds the ending in its journal, or hears `Differs` again, in either case
# before the answers to its stop. The state is saved as `after-step-N`, since nobody can tell for how long it has
# differed. At the end the fingerprints of finished workers are compared in the same way.
# Argument: docs/protocol.md, Replicas that differ 1-7.
#
#     on_replicas_differ      the ending, and the event
#     compare_when_complete   asks, waits for the answers, and reports what differs

T = TypeVar("T")


def on_replicas_differ(state: CoordinatorState, odd: tuple[str, ...], where: str, told: str = "") -> None:
    """Fail the run because the replicas of `odd` differ from the others'. `told` is the only worker that reports it."""
    reason = f"{_replicas_differ(odd)} from the others' {where}"
    state.ending = Ending(
        code=1, reason=reason, failed=True, replicas_differ=True, differing=odd, where=where, reporter=told
    )
    state.record(events.ReplicasDifferEvent(workers=odd, first="", reason=reason))


def on_drifts(state: CoordinatorState, message: m.Drifts) -> None:
    """Record with `--bits any` that replicas differ. All members report it, and the first report counts.

    Unlike machines drift apart, which ends nothing. It is reported in the first such step and each time the number of
    such steps has doubled; at the end the longest-standing worker's state is saved.
    """
    if state.settings.bits == "any" and message.step > state.drifted_step:
        state.drifted_step = message.step
        state.record(events.DriftingEvent(workers=message.workers, step=message.step, times=message.times))


def compare_when_complete(state: CoordinatorState) -> bool:
    """Request missing digests from `savers`. Returns True once all have answered and the replicas are compared."""
    assert state.ending is not None
    if state.ending.compared:
        return True
    for worker in state.savers:
        if worker not in state.digests_wanted:
            ask_for_digests(state, worker)
    if any(worker not in state.digests for worker in state.savers):
        return False
    _compare(state, state.ending)
    return True


def ask_for_digests(state: CoordinatorState, worker: str) -> None:
    """Request the digests of the replica of `worker`."""
    state.digests_wanted.add(worker)
    state.send(worker, m.Compare())


def by_standing(state: CoordinatorState, values: Mapping[str, T]) -> dict[str, T]:
    """Return `values`, that of the longest-standing worker first."""
    members = state.view.members if state.view else ()
    ranks = {worker: rank for rank, worker in enumerate(members)}
    return {worker: values[worker] for worker in sorted(values, key=lambda w: (ranks.get(w, len(ranks)), w))}


def _compare(state: CoordinatorState, ending: Ending) -> None:
    """Name the replicas that differ, and leave only those equal to the counting one as savers. All have answered."""
    answers = _of_one_step(state, ending, {w: state.digests[w] for w in state.savers})
    values = by_standing(state, {w: tuple(zip(a.names, a.digests, strict=False)) for w, a in answers.items()})
    odd = outliers(values)
    suspects = suspects_of(by_standing(state, answers))
    equal_workers = [worker for worker in values if worker not in odd]
    first = first_unequal(values[equal_workers[0]], values[odd[0]]) if odd else ""
    if odd:
        others = f"{equal_workers[0]}'s" if len(equal_workers) == 1 else "the others'"
        ending.differing, ending.reason = odd, f"{_replicas_differ(odd)} from {others} {ending.where}, first in {first}"
        ending.reason += _blame(odd, suspects) if len(answers) >= MANY else ""
        state.record(events.ReplicasDifferEvent(workers=odd, first=first, reason=ending.reason, suspects=suspects))
    else:
        equal = bool(ending.reporter) and set(ending.differing) <= set(answers)
        ending.reason = f"{ending.reporter} reported that {ending.reason}" if ending.reporter else ending.reason
        ending.reason += (
            ", but all replicas are equal" if equal else ", and it was lost before the replicas were compared"
        )
    ending.compared = ending.between = True
    state.savers = equal_workers


def _of_one_step(state: CoordinatorState, ending: Ending, answers: Mapping[str, m.Digests]) -> Mapping[str, m.Digests]:
    """Return the answers that can be compared: those of the step that most workers name, in a tie the longest-standing.

    One false `Differs` also stops a view in which members are a round apart.

    A holder of the state can be behind: a leaving worker that the others go on without, or one that has not seen the
    end of the last round. Its replica is equal to theirs as it was. At the end of the scripts all are at the last step.
    """
    if ending.finished:
        return answers
    odd = outliers(by_standing(state, {worker: answer.step for worker, answer in answers.items()}))
    return {worker: answer for worker, answer in answers.items() if worker not in odd}


def suspects_of(answers: Mapping[str, m.Digests]) -> tuple[str, ...]:
    """Return the workers that explain all differences if they alone are wrong; () if there are none.

    They are a worker without which all answers are equal, and a member whose part is the only one that differs. Two
    workers explain each other's difference. With three or more, one odd replica that differs in one member's part
    leaves two suspects, and nobody can tell; two odd ones there leave the member. A worker that lies in its answer is a
    suspect itself, since all are equal without it. A difference that is elsewhere too (clipping by a norm, an optimizer
    that mixes elements, buffers, members of a host or a zone that hand on what another one sent) has no such suspect:
    only the odd ones are named. No replica is known to be right then.

    See docs/protocol.md, Replicas that differ 7.
    """
    values = {worker: (answer.names, answer.digests) for worker, answer in answers.items()}
    if len(set(values.values())) < 2:
        return ()
    alone = [w for w in values if len({value for other, value in values.items() if other != w}) == 1]
    return tuple(dict.fromkeys((*alone, *_makers(answers, values))))


def _makers(answers: Mapping[str, m.Digests], values: Mapping[str, Hashable]) -> Iterator[str]:
    """Yield, for each view in the answers, the member whose part is the only one that differs.

    Each member sums a part of the gradients for all; one that sends a wrong sum to one other makes that one odd. An
    update makes an element and its moments from the sums of that element. So the difference is in the part of the wrong
    sum's maker and nowhere else, as long as it lasts: the odd worker's own gradients go into sums that all have alike.
    It is no older than the rotation of the step digest, so the answers cover each view that has made an update since
    then.

    A worker that was not in that view has the state of one that was.
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
    """Return a clause that names the suspects if they are not just `odd`; "" otherwise."""
    if not suspects or set(suspects) == set(odd):
        return ""
    if len(suspects) == 1:
        return f", only in the elements that {suspects[0]} sums: {suspects[0]} sends wrong sums"
    makers = " or ".join(suspect for suspect in suspects if suspect not in odd)
    return f", only in the elements that {makers} sums: one of {', '.join(suspects)} is wrong, and it is unknown which"


def _replicas_differ(odd: tuple[str, ...]) -> str:
    """Return the beginning of a sentence: whose replicas differ."""
    if len(odd) == 1:
        return f"{odd[0]}'s replica differs"
    return f"the replicas of {', '.join(odd[:-1])} and {odd[-1]} differ" if odd else "a replica differs"


# --- recomputation ----------------------------------------------------------------------------------------------------
#
# Two workers with different results for one shard: which one is right, and what happens to the other.
#
# Each shard has one right result, given by the state, the data and the shard's number. Invariants: nobody ends a round
# in which two results differ; a joiner that fails its admission check has computed nothing that is in the run's state;
# of two members a third one decides, in the same round, done again.
# Argument: docs/protocol.md, Recomputation 1-8.
#
#     judge            what the answers to a stop show; `recovery.py` removes the workers that are wrong
#     unchecked         which workers have an open admission check in the view that follows
#     carried          ... in one that is planned
#     note_proof       a step has ended in this view: the admission checks of this view are done

DIGEST_CYCLE_STEPS = 512  # steps within which the step digests cover all elements
Again = tuple[tuple[str, tuple[int, ...]], ...]  # workers, with the shards that each also computes


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of comparing shards.

    Attributes:
        refused: joiners that are removed, and why.
        wrong: members that are removed, and why.
        undecided: workers that differ without a majority, and the name of the first difference.
        rechecks: which worker also computes which shards in the redone round; None if the round is not redone.
    """

    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    wrong: Mapping[str, str] = field(default_factory=dict[str, str])
    undecided: Mapping[tuple[str, ...], str] = field(default_factory=dict[tuple[str, ...], str])
    rechecks: Again | None = None


def judge(reports: Mapping[str, Stopped], failed: Mapping[str, int] = MappingProxyType({})) -> Verdict:
    """Return which workers are wrong, from the answers to a stop.

    A joiner whose replica differs is refused although a worker may have sent it wrong sums, which nobody can tell; its
    reason says so. If one side of a comparison is lost, the round is redone, since what that side computed is in the
    sum that all hold, and others compute its shards. If the checker is lost, another member checks the owner's shards,
    since the first may have found a difference before it went. If the lost one has ended the round, no result differed,
    and the redone round has the same sum. Of two members that differ, what the wrong one computed before this round
    stays, since nobody knows since when it is wrong; its host is not asked for again (`wrong_hosts`).

    `reports` are the answers of the holders of the state, that of the longest-standing worker first. `failed` are the
    joiners whose replica differs from the others', with the step in which it was seen.
    """
    last = max((report.round for report in reports.values()), default=0)
    at_last = {worker: report for worker, report in reports.items() if report.round == last}
    refused, wrong, undecided = dict[str, str](), dict[str, str](), dict[tuple[str, ...], str]()
    for worker in (worker for worker in failed if worker in reports):
        others = " or ".join(other for other in reports if other not in failed)
        difference = f"at step {failed[worker]} its replica differs from the others'"
        refused[worker] = f"{difference}: {UPDATES}, or {others} sends it wrong sums"
    reports = {worker: report for worker, report in reports.items() if worker not in refused}
    again, without_checker = list[tuple[str, tuple[int, ...]]](), list[str]()
    differ = any(_uncompared(at_last, worker) for worker in at_last)
    for owner, report in at_last.items():
        results = _digests_by_owner(at_last, owner, report)
        if len(results) == 1 and not at_last.keys() >= set(report.compared):
            without_checker.append(owner)
        if len({each.number for each in results.values()}) < 2:
            continue
        differ = True
        for worker in _new(at_last, owner, results):
            other = next(other for other, each in results.items() if each.number != results[worker].number)
            first = _first(results[other], results[worker])
            refused[worker] = f"its results differ from those of {other}, first in {first}"
        results = {worker: each for worker, each in results.items() if worker not in refused}
        odd = outliers({worker: each.number for worker, each in results.items()})
        if not odd:
            continue
        right = next(worker for worker in results if worker not in odd)
        if len(results) > 2 and len(results) - len(odd) > 1:
            others = " and ".join(worker for worker in results if worker not in odd)
            for worker in odd:
                first = _first(results[right], results[worker])
                wrong[worker] = f"its results differ from those of {others}, first in {first}"
        elif len(results) == 2 and (third := _third(at_last, results)):
            checkers = [worker for worker in results if worker != owner]
            again += [(worker, report.own_results.shards) for worker in (*checkers, third)]
        else:
            undecided[tuple(results)] = _first(results[right], results[odd[0]])
    removed = {*refused, *wrong}
    for owner in (owner for owner in without_checker if owner not in removed):
        busy = {owner, *removed, *(worker for worker, _ in again)}
        if other := _third(at_last, busy):
            again.append((other, at_last[owner].own_results.shards))
    redone = tuple(again) if differ or refused or failed else None
    return Verdict(refused=refused, wrong=wrong, undecided=undecided, rechecks=redone)


def on_trial(state: CoordinatorState, message: m.Differs) -> bool:
    """Return True if all workers that differ are joiners that entered at most `DIGEST_CYCLE_STEPS` before.

    The step digest covers what a joiner's own updates come to, a part in each step and all of it in
    `DIGEST_CYCLE_STEPS`. The round is redone without the joiner, also if it is gone already, since what it computed in
    it came from another state. What it computed in the steps just before stays, if it differed in a part not covered
    then: the price of covering a part. Later, replicas that differ end the run. If the run is to end at the same stop
    for another reason, a checkpoint of the others' state is saved: their replicas are equal as far as the digests show,
    and the run would have gone on with them.

    See docs/protocol.md, Recomputation 4.
    """
    entered = [state.workers[worker].entered if worker in state.workers else -1 for worker in message.workers]
    others = any(worker not in message.workers for worker in state.members())
    return others and bool(entered) and all(0 <= step <= message.step <= step + DIGEST_CYCLE_STEPS for step in entered)


def unchecked(reports: Mapping[str, Stopped], *, commit: bool) -> tuple[str, ...]:
    """Return the workers that need an admission check in the next view. `commit` means that the round has ended.

    A check that is open when the view is stopped is due in the next one: the round in which it was due has not ended.
    """
    compared = {
        w for w, report in reports.items() if commit and (report.own_results.shards or report.check_results.shards)
    }
    return tuple(w for w, report in reports.items() if report.unchecked and w not in compared)


def carried(state: CoordinatorState, stay: Iterable[str]) -> tuple[str, ...]:
    """Return the workers in `stay` whose admission check may not have happened yet.

    Only a step can check, so a joiner that comes while the run idles below its minimum waits for the first step. Until
    that is known to be over, each view names it again, which costs one shard.

    See docs/protocol.md, Recomputation 8.
    """
    pending = state.view.unchecked if state.view and state.view_with_step != state.view.number else ()
    return tuple(worker for worker in stay if worker in pending)


def note_proof(state: CoordinatorState, beat: m.Heartbeat) -> None:
    """Record from a heartbeat that a step has ended in the view in force."""
    if state.view and beat.view == state.view.number and beat.step > state.view_began:
        state.view_with_step = beat.view


def _digests_by_owner(at_last: Mapping[str, Stopped], owner: str, report: Stopped) -> dict[str, Computed]:
    """Return the results of the owner and its checkers for the same shards, the longest-standing worker first."""
    if not report.own_results.shards:
        return {}
    return {
        worker: other.check_results if worker != owner else report.own_results
        for worker, other in at_last.items()
        if worker == owner
        or (_checks(other, owner, report) and other.check_results.shards == report.own_results.shards)
    }


def _checks(other: Stopped, owner: str, report: Stopped) -> bool:
    """Return True if `other` has results for shards of `owner`, of the step of the owner's `report`.

    Honest workers in one round compute one step. If two report results of different steps, one of them reports a round
    that it is not in: their results say nothing about each other, and the round is redone.

    See docs/protocol.md, Recomputation 7.
    """
    return other.check_results.owner == owner and other.step == report.step


def _uncompared(at_last: Mapping[str, Stopped], worker: str) -> bool:
    """Return True if a comparison that `worker` knows of is impossible, because a side of it is lost.

    Both sides may be gone while a third worker holds the sum. So each answer names all workers that are compared in its
    round, which every member knows.

    `worker` need not be one of the two. See docs/protocol.md, Recomputation 7.
    """
    report = at_last[worker]
    alone = report.own_results.shards and not any(_checks(other, worker, report) for other in at_last.values())
    return bool(alone) or not at_last.keys() >= set(report.compared)


def _new(at_last: Mapping[str, Stopped], owner: str, results: Mapping[str, Computed]) -> list[str]:
    """Return the unchecked workers that fail their admission check. See docs/protocol.md, Recomputation 3."""
    new = [worker for worker in results if at_last[worker].unchecked]
    if owner in new:
        odd = outliers({worker: results[worker].number for worker in new})
        return [worker for worker in new if worker in odd]
    return [worker for worker in new if results[worker].number != results[owner].number]


def _third(at_last: Mapping[str, Stopped], others: Collection[str]) -> str:
    """Return a member that is none of the others, "" if there is none."""
    return next((worker for worker, report in at_last.items() if worker not in others and not report.unchecked), "")


def _first(expected: Computed, got: Computed) -> str:
    """Return the name of the first value that differs."""
    pairs = [tuple(zip(each.names, each.digests, strict=False)) for each in (expected, got)]
    return first_unequal(*pairs)
