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
from farandole.protocol.coordinator.state import CoordinatorState, Ending, Removal
from farandole.protocol.difference import first_unequal, outliers
from farandole.protocol.messages import UPDATES, Computed, Stopped

TRIAL = 512  # steps within which the step digests cover all elements
Again = tuple[tuple[str, tuple[int, ...]], ...]  # workers, with the shards that each also computes


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of comparing shards.

    Attributes:
        refused: joiners that are removed, and why.
        wrong: members that are removed, and why.
        undecided: workers that differ without a majority, and the name of the first difference.
        again: which worker also computes which shards in the redone round; None if the round is not redone.
    """

    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    wrong: Mapping[str, str] = field(default_factory=dict[str, str])
    undecided: Mapping[tuple[str, ...], str] = field(default_factory=dict[tuple[str, ...], str])
    again: Again | None = None


def judge(reports: Mapping[str, Stopped], failed: Mapping[str, int] = MappingProxyType({})) -> Verdict:
    """Return which workers are wrong, from the answers to a stop.

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
    again = list[tuple[str, tuple[int, ...]]]()
    compares = any(report.held.shards or report.checked.shards for report in at_last.values())
    differ = compares and any(_uncompared(at_last, worker) for worker in at_last)
    for holder, report in at_last.items():
        results = _digests_by_holder(at_last, holder, report)
        if len({each.number for each in results.values()}) < 2:
            continue
        differ = True
        for worker in _new(at_last, holder, results):
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
            checkers = [worker for worker in results if worker != holder]
            again += [(worker, report.held.shards) for worker in (*checkers, third)]
        else:
            undecided[tuple(results)] = _first(results[right], results[odd[0]])
    redone = tuple(again) if differ or refused or failed else None
    return Verdict(refused=refused, wrong=wrong, undecided=undecided, again=redone)


def on_trial(state: CoordinatorState, message: m.Differs) -> bool:
    """Return True if all workers that differ are joiners that entered at most `TRIAL` steps before.

    See docs/protocol.md, Recomputation 4.
    """
    entered = [state.workers[worker].entered if worker in state.workers else -1 for worker in message.workers]
    others = any(worker not in message.workers for worker in state.members())
    return others and bool(entered) and all(0 <= step <= message.step <= step + TRIAL for step in entered)


def unproven(reports: Mapping[str, Stopped], *, commit: bool) -> tuple[str, ...]:
    """Return the workers that need an admission check in the next view. `commit` means that the round has ended."""
    compared = {w for w, report in reports.items() if commit and (report.held.shards or report.checked.shards)}
    return tuple(w for w, report in reports.items() if report.unproven and w not in compared)


def record_verdict(state: CoordinatorState, verdict: Verdict) -> None:
    """Remove the refused and the wrong workers. If it is unknown which one is wrong, the run may end."""
    for worker, why in verdict.refused.items():
        removed = state.workers.pop(worker)
        state.record(events.RefusedEvent(worker=worker, host=removed.host, reason=why))
        state.send(worker, m.JoinRefused(reason=why))
        state.record_departure(removed, why, 1, started=False, refused=True)
        failures.on_refused(state, removed, why)
    for worker, why in verdict.wrong.items():
        host = state.workers[worker].host
        state.record(events.ComputesWrongEvent(worker=worker, host=host, reason=why))
        state.wrong_hosts.add(host)
        state.ban(worker)
        state.remove(worker, Removal.EVICTED, f"it computes wrong results: {why}")
    for workers, what in verdict.undecided.items():
        reason = f"the results of {' and '.join(workers)} differ, first in {what}, and it is unknown which are right"
        state.record(events.UndecidedEvent(workers=workers, reason=reason))
        if state.settings.stop_undecided and state.ending is None:
            state.ending = Ending(code=1, reason=reason, failed=True)


def carried(state: CoordinatorState, stay: Iterable[str]) -> tuple[str, ...]:
    """Return the workers in `stay` whose admission check may not have happened yet.

    See docs/protocol.md, Recomputation 8.
    """
    pending = state.view.unproven if state.view and state.proven_view != state.view.number else ()
    return tuple(worker for worker in stay if worker in pending)


def note_proof(state: CoordinatorState, beat: m.Heartbeat) -> None:
    """Record from a heartbeat that a step has ended in the view in force."""
    if state.view and beat.view == state.view.number and beat.step > state.view_began:
        state.proven_view = beat.view


def _digests_by_holder(at_last: Mapping[str, Stopped], holder: str, report: Stopped) -> dict[str, Computed]:
    """Return the results of the holder and its checkers for the same shards, the longest-standing worker first."""
    if not report.held.shards:
        return {}
    return {
        worker: other.checked if worker != holder else report.held
        for worker, other in at_last.items()
        if worker == holder or (other.checked.holder, other.checked.shards) == (holder, report.held.shards)
    }


def _uncompared(at_last: Mapping[str, Stopped], worker: str) -> bool:
    """Return True if a comparison that involves `worker` is impossible since the other side is lost.

    See docs/protocol.md, Recomputation 7.
    """
    report = at_last[worker]
    proving = report.view.unproven if report.view and report.unproven else ()
    alone = report.held.shards and not any(other.checked.holder == worker for other in at_last.values())
    return bool(alone) or report.checked.holder not in ("", *at_last) or not set(proving) <= set(at_last)


def _new(at_last: Mapping[str, Stopped], holder: str, results: Mapping[str, Computed]) -> list[str]:
    """Return the unproven workers that fail their admission check. See docs/protocol.md, Recomputation 3."""
    new = [worker for worker in results if at_last[worker].unproven]
    if holder in new:
        odd = outliers({worker: results[worker].number for worker in new})
        return [worker for worker in new if worker in odd]
    return [worker for worker in new if results[worker].number != results[holder].number]


def _third(at_last: Mapping[str, Stopped], results: Mapping[str, Computed]) -> str:
    """Return a member that has not computed these shards, "" if there is none."""
    return next((worker for worker, report in at_last.items() if worker not in results and not report.unproven), "")


def _first(expected: Computed, got: Computed) -> str:
    """Return the name of the first value that differs."""
    pairs = [tuple(zip(each.names, each.digests, strict=False)) for each in (expected, got)]
    return first_unequal(*pairs)
