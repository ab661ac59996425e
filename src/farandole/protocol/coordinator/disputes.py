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
        if not beat.blocked_on or beat.view != view:
            return cause
        cause = beat.blocked_on
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
        cause = waited_for(state, beat.blocked_on, beat.view)
        if cause in beats and may_accuse(state, worker, beat.view, cause):
            found[cause].add(worker)
    for worker in [worker for worker in stalls if worker in beats and not beats[worker].idle]:
        if all(beat.idle for other, beat in beats.items() if other != worker):
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
