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

# --- suspicion --------------------------------------------------------------------------------------------------------

Pairs = set[tuple[str, str]]
Witnesses = Mapping[str, Collection[str]]


@dataclass(frozen=True, kw_only=True)
class Conviction:
    """`worker` is evicted. `others` are the other workers of its pairs, and those that confirm it."""

    worker: str
    others: tuple[str, ...]
    alone: bool  # one report against one other


def may_accuse(state: CoordinatorState, worker: str, view: int, peer: str) -> bool:
    """Return True if both are members of that view, and a worker may be in it. See 6."""
    candidates = [*state.views(), *issued_views(state)]
    return worker != peer and any(each.number == view and {worker, peer} <= set(each.members) for each in candidates)


def denied(state: CoordinatorState, message: m.Suspect) -> bool:
    """Return True if the accused went on during the reported wait. Heartbeats may be late. See 3."""
    within = message.waited_s - state.settings.heartbeat_timeout_s
    return message.waited_s > 0 and state.progress.went_on(message.peer, state.clock, within)


def waited_for(state: CoordinatorState, worker: str, view: int) -> str:
    """Return the worker at the end of the chain of waits that begins at `worker`; in a circle, `worker`. See 3."""
    cause, seen = worker, set[str]()
    while cause in state.workers and cause not in seen:
        seen.add(cause)
        beat = state.workers[cause].heartbeat
        if not beat.waits_for or beat.view != view:
            return cause
        cause = beat.waits_for
    return worker


def give_benefit(state: CoordinatorState, worker: str) -> None:
    """Count that `worker` won against one other by its standing alone. See 4."""
    state.benefits.draw(worker, state.clock)


def benefits_used_up(state: CoordinatorState, workers: Iterable[str]) -> set[str]:
    """Return the workers that cannot win by their standing alone any more. See 4."""
    return {worker for worker in workers if state.benefits.spent(worker, state.clock)}


def returns_too_often(state: CoordinatorState, worker: str) -> bool:
    """Count a reconnection of `worker`. Returns True if it reconnects too often. See 6."""
    state.returns.draw(worker, state.clock)
    return state.returns.spent(worker, state.clock)


def witnesses(state: CoordinatorState, stalls: Collection[str], answered: Collection[str]) -> dict[str, set[str]]:
    """Return, for each worker that others wait for, the workers whose heartbeats confirm it. See 3."""
    confirmed_by: dict[str, set[str]] = defaultdict(set)
    beats = {worker: state.workers[worker].heartbeat for worker in answered}
    for worker, beat in beats.items():
        cause = waited_for(state, beat.waits_for, beat.view)
        if cause in beats and may_accuse(state, worker, beat.view, cause):
            confirmed_by[cause].add(worker)
    for worker in [worker for worker in stalls if worker in beats and not beats[worker].waits]:
        if all(beat.waits for other, beat in beats.items() if other != worker):
            confirmed_by[worker].add(worker)
    return confirmed_by


def convict(
    accusations: Collection[tuple[str, str]],
    answered: tuple[str, ...],
    synced: Collection[str],
    witnesses: Witnesses | None = None,
    spent: Collection[str] = (),
) -> tuple[Conviction, ...]:
    """Return the workers to evict so that no broken pair remains. See 2 to 5.

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


# --- testimony --------------------------------------------------------------------------------------------------------
#
# What all who hold the state see in the same step, so that one of several that says so alone is not believed.
#
# Who knows what when: a loss is the same number everywhere, and words of a round that differ are the same words for
# all. So what one honest worker says here, all say: nobody ends a round whose words differ (`replicas`, 2), nor goes
# on beyond a loss that is to end the run, and each says so again on every new connection. Where three or more hold
# the state, it therefore counts once two have said it of the same step. Until then
#
# - nothing is stopped for it: a stop would keep the others from seeing what they are about to see;
# - a round whose words differ, as one says, is not committed by any other stop: it is done again, and its words are
#   compared again, or those of the round after it by whoever is ahead;
# - a decision to go on forgets it: whoever sees it in the round that is done again says so again;
# - where the run is to end anyway it counts: what differs is never saved as a checkpoint, and they are compared first;
# - once the others are beyond that step it was wrong: nobody could have ended its round. So it was once one of them has
#   answered a stop from beyond that round, and replicas of two rounds are not compared;
# - whoever else could have said it may die: with fewer than three there is no majority to ask, and one word counts, but
#   for one against the longest-standing: of two replicas that differ its own is right (`replicas`, 5).
#
# The round in which a view took effect is such a thing too (R2), with the difference that whoever says another one than
# two others have has contradicted both.

KEPT = 100  # facts whose reports are remembered
MANY = 3  # holders of the state, among which one may be outvoted


def majority(workers: int) -> int:
    """Return how many of `workers` must report the same fact before it counts."""
    return 2 if workers >= MANY else 1


def corroborate(state: CoordinatorState, worker: str, message: Shared) -> None:
    """Record the report of one worker about a fact that all holders of the state see. Enough reports confirm it."""
    claim = state.corroborations.setdefault(f"{type(message).__name__} {message.step}", Corroboration(message))
    claim.message = message
    claim.workers.add(worker)
    for oldest in list(state.corroborations)[:-KEPT]:
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
    disproved = [key for key, message in pending if message.step < state.reached]
    for key in disproved:
        del state.corroborations[key]
    for key, claim in list(state.corroborations.items()):
        reporters = [worker for worker in holders if worker in claim.workers]
        if len(reporters) >= needed and not _contradicts_longest_standing(holders, claim.message):
            facts.append((reporters, claim.message))
            del state.corroborations[key]
    return facts


def _contradicts_longest_standing(holders: list[str], message: Shared) -> bool:
    """Return True if the report takes the side of one worker against the longest-standing one, whose replica counts."""
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
    disproved by it, since no worker can end such a round.
    """
    last = max((report.round for report in reports.values()), default=0)
    for claim in state.corroborations.values():
        reporters = sorted(w for w in claim.workers if w in reports and reports[w].round == last)
        if isinstance(claim.message, m.Differs) and reporters:
            return reporters, claim.message
    return None


def agreed_round(reported: dict[str, int], workers: int) -> int:
    """Return the round in which a view took effect, as enough of the `workers` report; -1 for none yet."""
    if not reported:
        return -1
    round_, count = Counter(reported.values()).most_common(1)[0]
    return round_ if count >= majority(workers) else -1


def _holders(state: CoordinatorState) -> list[str]:
    """Return the workers that hold the state, including leaving ones that the others may still wait for.

    Leaving workers have seen the same rounds. A restarted coordinator may not know yet that the first view is in force:
    then these are all participants.
    """
    before = state.previous.members if state.previous else ()
    inside = dict.fromkeys([*state.members(), *(worker for worker in before if worker in state.workers)])
    return [worker for worker in inside or state.participants() if worker not in state.unsynced]


# --- plausible --------------------------------------------------------------------------------------------------------
#
# Reports that can't all be true, and who is outvoted then.
#
# The answers to a stop describe a state that stands still, and each has been found possible by itself (`issued`). What
# two honest workers that hold the state say, fits together, however late anybody's messages are:
#
# 1. Rounds go in lockstep (`recovery`, 1 and 2). If the one behind is a member of the newer of their views, the other
#    is one round ahead at most, and the one behind holds the round that the other has ended: without its word that
#    could not end. (If it is not, it is a leaver, whom the others have left behind by agreement; a leaver never goes
#    ahead.)
# 2. A view that was proposed is applied after a round all of whose words named it (R2), so by then each member of the
#    one before was prepared for it. Nothing but that view, or a decision, makes it forget that: so who is still in an
#    older view reports that it is prepared. Whoever says that the proposed view is in force, and others are not even
#    prepared, contradicts each of them. Nor has anybody begun in the older view the round that others have entered in
#    the newer one, or gone further there. (A member enters a view and begins its round at once. Where both have begun
#    it, with something else each, or a leaver entered it and left, there may be two scripts, which `calls` tells.)
# 3. In one view and round the shards are dealt in one way (`issued`, 3).
# 4. Nobody ends a round whose words differ, and all see that they do (`replicas`, 2). So who is beyond a round in which
#    several have seen it contradicts each of them.
#
# So honest workers never contradict each other, and each contradiction has at least one wrong side. Which one? Those
# who agree with one another outvote one: whoever contradicts most goes first, until no contradiction is left. A value
# that is far off contradicts everybody. Where it is one word against one other, and all others' fit with both,
# nothing here can tell: then the longest-standing worker is right, as with replicas, unless it has had that benefit
# too often lately (`suspicion`). So one that is wrong by a single round may cost one that came later its place, a few
# times; it never costs two at once, and as long as one honest worker is there the run goes on from an honest report.
#
# Not judged here, as nobody could tell: how far all of them are (time is no bound: a round may take a microsecond), and
# the bits that they hold; wrong ones are what replicas that differ are about.


@dataclass(frozen=True, kw_only=True)
class Outvoted:
    """`worker` is evicted: it contradicts `others`. `reason` describes one of the contradictions."""

    worker: str
    others: tuple[str, ...]
    reason: str


def outvoted(
    reports: Mapping[str, Stopped], proposed: View | None, spent: Collection[str] = (), apart: Collection[str] = ()
) -> tuple[Outvoted, ...]:
    """Return the workers to evict so that no two reports contradict each other.

    `reports` begin with the longest-standing worker's. `proposed` is the view that was proposed at the stop. `spent`
    cannot win by their standing any more. `apart` are several workers that have seen the commit messages of their round
    differ.
    """
    synced = [worker for worker, report in reports.items() if report.synced]
    pairs = {
        (one, other): why
        for one, other in combinations(synced, 2)
        if (why := contradiction(one, reports[one], other, reports[other], proposed, apart))
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


def contradiction(
    one: str, ones: Stopped, other: str, others: Stopped, proposed: View | None, apart: Collection[str] = ()
) -> str:
    """Return why two reports cannot both be true, "" if they can. Both workers hold the state."""
    if ones.view is None or others.view is None:
        return ""
    if ones.view.number > others.view.number:
        return contradiction(other, others, one, ones, proposed, apart)
    older, newer = ones.view, others.view
    if older != newer and newer == proposed:
        if ones.prepared != newer.number:
            return f"{other} is in view {newer.number}, for which {one} was not prepared"
        calls = (ones.call.number, 0) if other in newer.members else (ones.call.number,)
        begun = ones.call.number != 0 and others.call.number in calls
        if ones.round > others.round or (ones.round == others.round and begun):
            before = f"{one} in the view before it in round {ones.round}"
            return f"{other} is in view {newer.number} in round {others.round}, {before}"
    (behind, slow), (ahead, fast) = sorted(((one, ones), (other, others)), key=lambda each: each[1].round)
    if behind in newer.members and (fast.round > slow.round + 1 or (fast.round > slow.round and not slow.holds)):
        state = "" if slow.holds else ", which it does not hold"
        return f"{ahead} is in round {fast.round}, {behind} in round {slow.round}{state}"
    if behind in apart and fast.round > slow.round:
        return f"{ahead} is in round {fast.round}, but {behind} has seen that round {slow.round} cannot end"
    if older == newer and ones.round == others.round and ones.lineage != others.lineage:
        return f"{one} and {other} report different shard assignments of round {ones.round}"
    return ""


# --- replicas ---------------------------------------------------------------------------------------------------------
#
# Replicas that differ: seen in the control words or at the end, told apart, and the run's end.
#
# All workers hold the same replica bit for bit; what a script does on one of them alone is not in any gradient, and
# so in nobody's but this one's bits. Who knows what when:
#
# 1. Who holds the state digests it when a training step begins, before anything of the step, and a joiner when it has
#    loaded the state of that moment. The digest goes with the round's control word. Nothing writes to a replica before
#    the step's update, which comes after the round's end.
# 2. Whoever can end a round has all its words (R1), so everyone sees the same difference, in the same round, and nobody
#    ends it (`Member.end_round`): they stand still, with what they have digested, and say `Differs`.
# 3. `Differs` is told before the answer to any later Stop, on one ordered connection, and said again on every new one
#    before that answer. So when a stop is decided, nobody who has answered it has seen a difference that is not known
#    here. Who had answered before the last word came has not looked: then the round is done again and its words are
#    compared again, or it is committed and those of the next step are. What an odd one that died has added to the
#    gradients stays, if nobody had all words.
# 4. The first `Differs` makes a failed ending, which the journal holds before anything is sent, and stops the view like
#    any failure: who dies meanwhile is not waited for, and nobody trains any more once it is decided. A coordinator
#    that comes back finds the ending, or hears `Differs` again, in either case before the answers to its stop.
# 5. Then everyone who holds the state is asked for digests of each value and tensor (`Compare`). What most have counts,
#    in a tie what the longest-standing has. It names workers and tensors; and one of those with what counts saves it,
#    as what was left between two steps, since nobody can tell for how long it has differed.
#
# 6. Whose replica is unlike the others' need not be the cause: the sums of a step are made by its members, each a
#    part of them for all, and one that sends a wrong sum to one other makes that one the odd one. So each answer also
#    has, for each member of a view, a digest of the elements whose gradients that member sums up (`PartDigests`), and
#    one of all else. An update makes an element, and its moments, from the sums of that element. A difference that a
#    wrong sum has made is therefore in the parts of who made it and nowhere else, for as long as it lasts: the
#    differing worker's own gradients go into sums that all have alike. It is no older than the step digest's
#    rotation, so the answers are about each view that has made an update since then.
# 7. The suspects are those who explain all that differs if they alone are wrong: a worker without which all answers
#    are equal, and a member whose part is the only one that differs. Two workers explain each other's difference.
#    With three or more, one odd replica that differs in one member's part leaves two suspects, and nobody can tell
#    which is wrong; two that differ there leave the member. All suspects are named, with the odd ones, and the run
#    ends: no replica is known to be right, and the checkpoints from before stay. Who lies in its answer is one of the
#    suspects itself, since without it all are equal. A difference that is elsewhere too (clipping by a norm, an
#    optimizer that mixes elements, buffers, members of a host that hand on what another host has sent) has no such
#    suspect: the odd ones are named.
#
# At the end the fingerprints of the finished workers are compared; if they differ, all is as in 5.
#
# Under `--bits any` unlike machines are let in, and their replicas drift apart: nothing of this ends the run then. It
# is told in the first step and each time that their number has doubled, and what the longest-standing worker has is
# saved.
#
#     differ      the ending, and the event
#     compared    asks, waits for the answers, and says once they are there what differs

T = TypeVar("T")


def on_replicas_differ(state: CoordinatorState, odd: tuple[str, ...], where: str, told: str = "") -> None:
    """Fail the run because the replicas of `odd` differ from the others'. `told` is the only worker that reports it."""
    reason = f"{_replicas_differ(odd)} from the others' {where}"
    state.ending = Ending(code=1, reason=reason, failed=True, apart=True, odd=odd, where=where, told=told)
    state.record(events.ReplicasDifferEvent(workers=odd, first="", reason=reason))


def on_drifts(state: CoordinatorState, message: m.Drifts) -> None:
    """Record with `--bits any` that replicas differ. All members report it, and the first report counts."""
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
    """Name the replicas that differ, and leave only the others as savers. All savers have answered."""
    answers = {w: state.digests[w] for w in state.savers}
    values = by_standing(state, {w: tuple(zip(a.names, a.digests, strict=False)) for w, a in answers.items()})
    odd = outliers(values)
    suspects = suspects_of(by_standing(state, answers))
    equal_workers = [worker for worker in values if worker not in odd]
    first = first_unequal(values[equal_workers[0]], values[odd[0]]) if odd else ""
    if odd:
        others = f"{equal_workers[0]}'s" if len(equal_workers) == 1 else "the others'"
        ending.odd, ending.reason = odd, f"{_replicas_differ(odd)} from {others} {ending.where}, first in {first}"
        ending.reason += _blame(odd, suspects) if len(answers) >= MANY else ""
        state.record(events.ReplicasDifferEvent(workers=odd, first=first, reason=ending.reason, suspects=suspects))
    else:
        equal = bool(ending.told) and set(ending.odd) <= set(answers)
        ending.reason = f"{ending.told} reported that {ending.reason}" if ending.told else ending.reason
        ending.reason += (
            ", but all replicas are equal" if equal else ", and it was lost before the replicas were compared"
        )
    ending.compared = ending.between = True
    state.savers = equal_workers


def suspects_of(answers: Mapping[str, m.Digests]) -> tuple[str, ...]:
    """Return the workers that explain all differences if they alone are wrong; () if there are none. See 7."""
    values = {worker: (answer.names, answer.digests) for worker, answer in answers.items()}
    if len(set(values.values())) < 2:
        return ()
    alone = [w for w in values if len({value for other, value in values.items() if other != w}) == 1]
    return tuple(dict.fromkeys((*alone, *_makers(answers, values))))


def _makers(answers: Mapping[str, m.Digests], values: Mapping[str, Hashable]) -> Iterator[str]:
    """Yield, for each view in the answers, the member whose part is the only one that differs.

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
