"""Describes differences for the user: of a joiner from the run, of the scripts of two workers, and of replicas that
should be equal.

Facts of code are the script, the modules of its folder, and farandole itself (`code/snapshot.py`). Scripts are compared
whatever their names are. A module is compared only where both sides have imported it, since not all workers import the
same ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from farandole.protocol.messages import Signature, Stopped
from farandole.protocol.values import Call

Facts = Sequence[tuple[str, str]]
_SCRIPT = "script "
_CODE = (_SCRIPT, "module ", "farandole's code", "code pack")
NAMED = 5


def first_difference(expected: Signature, got: Signature) -> str:
    """Return as text the first fact, other than code, in which a joiner differs from the run; "" if there is none."""
    ours, theirs = dict(without_code(expected).facts), dict(without_code(got).facts)
    for name, value in ours.items():
        if name not in theirs:
            return f"{name}: the run has {value}, this worker has none"
        if theirs[name] != value:
            return f"{name}: the run has {value}, this worker has {theirs[name]}"
    extra = [name for name in theirs if name not in ours]
    return f"{extra[0]}: the run has none, this worker has {theirs[extra[0]]}" if extra else ""


def of_code(name: str) -> bool:
    """Return True if the fact of this name is one of code."""
    return name.startswith(_CODE)


def other_code(expected: Facts, got: Facts) -> list[str]:
    """Return the names of the facts of code in which two sides differ, as `expected` has them."""
    theirs = dict(_comparable(got))
    return [name for key, name, value in _keyed(expected) if theirs.get(key, value) != value]


def without_code(signature: Signature) -> Signature:
    """Return the signature without the facts of code."""
    return Signature(facts=tuple((name, value) for name, value in signature.facts if not of_code(name)))


def in_words(names: Sequence[str]) -> str:
    """Return the first `NAMED` names as text, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _comparable(facts: Facts) -> Iterator[tuple[str, str]]:
    for key, _, value in _keyed(facts):
        yield key, value


def _keyed(facts: Facts) -> Iterator[tuple[str, str, str]]:
    for name, value in facts:
        if of_code(name):
            yield _SCRIPT if name.startswith(_SCRIPT) else name, name, value


# --- what the scripts call -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two workers, and how their scripts differ, as text."""

    workers: tuple[str, str]
    reason: str


def differing(reports: Mapping[str, Stopped]) -> Difference | None:
    """Return two workers that called different things in one round, from their answers to a stop; None without any."""
    first: dict[int, str] = {}
    for worker, report in reports.items():
        if report.synced and report.call.number:
            other = first.setdefault(report.round, worker)
            if reports[other].call.number != report.call.number:
                return calls_differ(other, reports[other].call, worker, report.call)
    return None


def calls_differ(one: str, ones: Call, other: str, others: Call) -> Difference:
    """Return the difference of two workers that called different things in one round."""
    return Difference(
        workers=(one, other),
        reason=(
            f"the scripts of {one} and {other} go different ways: "
            f"{one} called {ones.doing}; {other} called {others.doing}; all workers have to call it, "
            f"at the same place, not under `if run.is_leader` or what else differs"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The end of a worker's script, after `step` and before `round` began."""

    worker: str
    round: int
    step: int


def ended_early(early: Finish, other: str, doing: str) -> Difference:
    """Return the difference of a worker whose script has ended and an `other` that continues with `doing`."""
    return Difference(
        workers=(early.worker, other),
        reason=(
            f"the script of {early.worker} ended after step {early.step}, that of {other} goes on with {doing}; "
            f"all workers have to end after the same step: decide it by what is equal on all of them, such as step.loss"
        ),
    )


# --- replicas --------------------------------------------------------------------------------------------------


def outliers(values: Mapping[str, Hashable]) -> tuple[str, ...]:
    """Return the workers whose value is not that of the largest group; of equal groups, the first worker's counts.

    `values` is ordered by seniority, so the longest-standing worker is right if nothing else decides.
    """
    sides: dict[Hashable, list[str]] = {}
    for worker, value in values.items():
        sides.setdefault(value, []).append(worker)
    reference = max(sides.values(), key=len, default=[])
    return tuple(worker for worker in values if worker not in reference)


def first_unequal(expected: Sequence[tuple[str, int]], got: Sequence[tuple[str, int]]) -> str:
    """Return the name of the first (name, digest) of `expected` that differs in `got`; "" if there is none."""
    for theirs, ours in zip_longest(expected, got):
        if theirs != ours:
            return (theirs or ours)[0]
    return ""
