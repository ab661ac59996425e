"""Two workers with different results for one shard: which one is right, and what happens to the other.

Each shard has one right result, given by the state, the data and the shard's number. Invariants: nobody ends a round in
which two results differ; a refused joiner has computed nothing that is in the run's state; of two members a third one
decides, in the same round, done again.
Argument: docs/protocol.md, Recomputation 1-8.

    judge            what the answers to a stop show
    record_verdict   ... and what follows for those that are wrong
    unproven         which workers have an open admission check in the view that follows
    carried          ... in one that is planned
    note_proof       a step has ended in this view: the admission checks of this view are done
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import failures
from farandole.protocol.coordinator.state import CoordinatorState, Ending
from farandole.protocol.difference import first_unequal, outliers
from farandole.protocol.messages import UPDATES, Computed, Stopped

TRIAL = 512  # steps, in which the digests of steps have looked at everything
Again = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`refused` are joiners, `wrong` members, each with why. `again`: who computes what too when the round is redone,
    None if it need not be. `undecided`: of whom nobody can tell who is right, and in what they differ.
    """

    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    wrong: Mapping[str, str] = field(default_factory=dict[str, str])
    undecided: Mapping[tuple[str, ...], str] = field(default_factory=dict[tuple[str, ...], str])
    again: Again | None = None


def judge(reports: Mapping[str, Stopped], failed: Mapping[str, int] = MappingProxyType({})) -> Verdict:
    """`reports`: of those who hold the state, the longest-standing worker's first. `failed`: joiners whose replica has
    come apart from the others' in that step.
    """
    last = max((report.round for report in reports.values()), default=0)
    here = {worker: report for worker, report in reports.items() if report.round == last}
    refused, wrong, undecided = dict[str, str](), dict[str, str](), dict[tuple[str, ...], str]()
    for worker in (worker for worker in failed if worker in reports):
        others = " or ".join(other for other in reports if other not in failed)
        found_at = f"at step {failed[worker]} its replica is not what the others' is"
        refused[worker] = f"{found_at}: {UPDATES}, or {others} sends it wrong sums"
    reports = {worker: report for worker, report in reports.items() if worker not in refused}
    again = list[tuple[str, tuple[int, ...]]]()
    compares = any(report.held.shards or report.checked.shards for report in here.values())
    differ = compares and any(_uncompared(here, worker) for worker in here)
    for holder, report in here.items():
        found = _digests_by_holder(here, holder, report)
        if len({each.number for each in found.values()}) < 2:
            continue
        differ = True
        for worker in _new(here, holder, found):
            other = next(other for other, each in found.items() if each.number != found[worker].number)
            first = _first(found[other], found[worker])
            refused[worker] = f"what it computes is not what {other} does, first in {first}"
        found = {worker: each for worker, each in found.items() if worker not in refused}
        odd = outliers({worker: each.number for worker, each in found.items()})
        if not odd:
            continue
        right = next(worker for worker in found if worker not in odd)
        if len(found) > 2 and len(found) - len(odd) > 1:
            others = " and ".join(worker for worker in found if worker not in odd)
            for worker in odd:
                wrong[worker] = f"it is not what {others} compute, first in {_first(found[right], found[worker])}"
        elif len(found) == 2 and (third := _third(here, found)):
            checkers = [worker for worker in found if worker != holder]
            again += [(worker, report.held.shards) for worker in (*checkers, third)]
        else:
            undecided[tuple(found)] = _first(found[right], found[odd[0]])
    redone = tuple(again) if differ or refused or failed else None
    return Verdict(refused=refused, wrong=wrong, undecided=undecided, again=redone)


def on_trial(state: CoordinatorState, message: m.Differs) -> bool:
    """Whether those who are unlike the others are joiners whose updates nobody has looked at long enough. See 4."""
    entered = [state.workers[worker].entered if worker in state.workers else -1 for worker in message.workers]
    others = any(worker not in message.workers for worker in state.members())
    return others and bool(entered) and all(0 <= step <= message.step <= step + TRIAL for step in entered)


def unproven(reports: Mapping[str, Stopped], *, commit: bool) -> tuple[str, ...]:
    """Who has to prove itself in the view that follows; `commit`: the round in hand has ended for all."""
    compared = {w for w, report in reports.items() if commit and (report.held.shards or report.checked.shards)}
    return tuple(w for w, report in reports.items() if report.unproven and w not in compared)


def record_verdict(state: CoordinatorState, verdict: Verdict) -> None:
    """Who is refused, or wrong, is out of the state; where nobody can tell, the run may end."""
    for worker, why in verdict.refused.items():
        gone = state.workers.pop(worker)
        state.record(events.RefusedEvent(worker=worker, host=gone.host, reason=why))
        state.send(worker, m.JoinRefused(reason=why))
        state.record_departure(gone, why, 1, started=False, refused=True)
        failures.on_refused(state, gone, why)
    for worker, why in verdict.wrong.items():
        host = state.workers[worker].host
        state.record(events.ComputesWrongEvent(worker=worker, host=host, reason=why))
        state.wrong_hosts.add(host)
        state.ban(worker)
        state.evict(worker, f"it computes wrong: {why}")
    for workers, what in verdict.undecided.items():
        reason = f"{' and '.join(workers)} do not compute the same, first in {what}, and nobody can tell who is right"
        state.record(events.UndecidedEvent(workers=workers, reason=reason))
        if state.settings.stop_undecided and state.ending is None:
            state.ending = Ending(code=1, reason=reason, failed=True)


def carried(state: CoordinatorState, stay: Iterable[str]) -> tuple[str, ...]:
    """Of those who stay, who may have had no step to prove itself in. See 8."""
    known = state.view.unproven if state.view and state.proven_view != state.view.number else ()
    return tuple(worker for worker in stay if worker in known)


def note_proof(state: CoordinatorState, beat: m.Heartbeat) -> None:
    """A member is beyond the step with which its view began."""
    if state.view and beat.view == state.view.number and beat.step > state.view_began:
        state.proven_view = beat.view


def _digests_by_holder(here: Mapping[str, Stopped], holder: str, report: Stopped) -> dict[str, Computed]:
    """What the holder and those who have checked it have found of the same shards, in the order of their standing."""
    if not report.held.shards:
        return {}
    return {
        worker: other.checked if worker != holder else report.held
        for worker, other in here.items()
        if worker == holder or (other.checked.holder, other.checked.shards) == (holder, report.held.shards)
    }


def _uncompared(here: Mapping[str, Stopped], worker: str) -> bool:
    """Whether one that was to be compared in the round, as far as `worker` has to do with it, is gone. See 7."""
    report = here[worker]
    proving = report.view.unproven if report.view and report.unproven else ()
    alone = report.held.shards and not any(other.checked.holder == worker for other in here.values())
    return bool(alone) or report.checked.holder not in ("", *here) or not set(proving) <= set(here)


def _new(here: Mapping[str, Stopped], holder: str, found: Mapping[str, Computed]) -> list[str]:
    """Those who have not proved themselves, and do not. See 3."""
    new = [worker for worker in found if here[worker].unproven]
    if holder in new:
        odd = outliers({worker: found[worker].number for worker in new})
        return [worker for worker in new if worker in odd]
    return [worker for worker in new if found[worker].number != found[holder].number]


def _third(here: Mapping[str, Stopped], found: Mapping[str, Computed]) -> str:
    """A member that has not computed it."""
    return next((worker for worker, report in here.items() if worker not in found and not report.unproven), "")


def _first(expected: Computed, got: Computed) -> str:
    """The name of the first thing that differs."""
    pairs = [tuple(zip(each.names, each.digests, strict=False)) for each in (expected, got)]
    return first_unequal(*pairs)
