"""Differences in words, for whoever started the run: of a joiner from the run, and of the scripts of two workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from farandole.membership.messages import Call, Signature, Stopped
from farandole.membership.records import Finish


def first_difference(expected: Signature, got: Signature) -> str:
    """The first fact in which a joiner differs from the run, in words; empty when there is none."""
    theirs = dict(got.facts)
    for name, value in expected.facts:
        if name not in theirs:
            return f"{name}: the run has {value}, this worker has none"
        if theirs[name] != value:
            return f"{name}: the run has {value}, this worker has {theirs[name]}"
    extra = [name for name, _ in got.facts if name not in dict(expected.facts)]
    return f"{extra[0]}: the run has none, this worker has {theirs[extra[0]]}" if extra else ""


# --- what the scripts call -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two workers, and how their scripts differ, in words."""

    workers: tuple[str, str]
    reason: str


def differing(reports: Mapping[str, Stopped]) -> Difference | None:
    """Of those that answered a stop, two that have called different things in one round, if there are such."""
    first: dict[int, str] = {}
    for worker, report in reports.items():
        if report.level and report.call.number:
            other = first.setdefault(report.round, worker)
            if reports[other].call.number != report.call.number:
                return calls_differ(other, reports[other].call, worker, report.call)
    return None


def calls_differ(one: str, ones: Call, other: str, others: Call) -> Difference:
    """They have called different things in one round."""
    return Difference(
        workers=(one, other),
        reason=(
            f"the scripts of {one} and {other} go different ways: {one} called {ones.doing}, {other} {others.doing}; "
            f"all workers have to call it, at the same place, not under `if run.is_leader` or what else differs"
        ),
    )


def ended_early(early: Finish, other: str, doing: str) -> Difference:
    """One has ended, the other goes on."""
    return Difference(
        workers=(early.worker, other),
        reason=(
            f"the script of {early.worker} ended after step {early.step}, that of {other} goes on with {doing}; "
            f"all workers have to end after the same step: decide it by what is equal on all of them, such as step.loss"
        ),
    )
