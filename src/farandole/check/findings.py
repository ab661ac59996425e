"""What the records of `farandole check` say: where bits differ first, and the likely cause. Pure.

A comparison takes the records of its steps in the order of computation: the state at a step's beginning, the shards,
the state at the next step's beginning. Its result is the first digest that differs from the leg `alone`.

The cause of different bits is looked for in the script's own state (`script_state.py`) at that place. Suspect is what
differs from the leg `alone` there and has changed in the course of that leg. What already differs in the first shard of
all is no state of the training (a clock, a path), unless it is a random generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from farandole.check.records import (
    DATASET,
    JOIN,
    LOSS,
    STEPS,
    ComputedShard,
    Kind,
    Leaves,
    Record,
    StateRecord,
    shards,
    states,
)
from farandole.protocol.messages import MICRO_BATCH

Comparison = Literal["workers", "join", "loss", "values", "resume", "micro"]
Outcome = Literal["agrees", "differs", "not compared"]
Cause = Literal[
    "", "generator", "not replicated", "script state", "first state", "samples", "update", "unknown",
    "own part", "sum", "weights", "batch norm", "batch", "random numbers",
]  # fmt: skip
Compared = StateRecord | ComputedShard
OF_THE_RUN: tuple[tuple[Comparison, int], ...] = (("workers", 0), ("join", JOIN), ("loss", LOSS))  # and their steps
MOST_SUSPECTS = 3
RANKS: tuple[Kind, ...] = ("generator", "object", "tensor", "value")


class FirstDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first digest that differs. `shard`: None if it is of the state at the beginning of `step`."""

    step: int
    shard: int | None
    name: str
    worker: str


class ScriptSuspect(msgspec.Struct, frozen=True, kw_only=True):
    """State of the script that has probably caused a difference."""

    name: str
    kind: Kind


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one comparison. `names`: modules of batch normalization, or why it was not compared."""

    comparison: Comparison
    outcome: Outcome
    first: FirstDifference | None = None
    cause: Cause = ""
    suspects: tuple[ScriptSuspect, ...] = ()
    names: tuple[str, ...] = ()


# --- the same bits ----------------------------------------------------------------------------------------------------


def findings_of_bits(alone: Sequence[Record], workers: Sequence[Record], resume: Sequence[Record]) -> list[Finding]:
    """Return the results of all comparisons with the leg `alone`."""
    reference = Reference(alone, workers)
    results, broken = list[Finding](), False
    for comparison, step in OF_THE_RUN:
        part = () if broken else _part(workers, step)
        results.append(reference.compare(comparison, part, range(step, step + 1)))
        broken = results[-1].outcome != "agrees"
    return [*results, reference.compare_values(workers), reference.compare("resume", resume, range(JOIN, STEPS))]


def is_complete(workers: Sequence[Record], expected: int) -> bool:
    """Return True if `expected` workers have the state after the last step."""
    return len({each.worker for each in states(workers) if each.step == STEPS}) >= expected


class Reference:
    """The leg `alone`. `workers`: the records of the run, by which state of the training is known from clocks."""

    def __init__(self, alone: Sequence[Record], workers: Sequence[Record]) -> None:
        self._states = {each.step: each for each in states(alone)}
        self._shards = {(each.step, each.over, each.shard): each for each in shards(alone)}
        self._changing = _changing([each.script for each in (*states(alone), *shards(alone))])
        self._fresh = self._differing_at_first(workers)

    def compare(self, comparison: Comparison, leg: Iterable[Record], steps: range) -> Finding:
        """Return the result for the records of a leg in `steps`. They agree if all shards of these steps are there."""
        compared = sorted((each for each in leg if isinstance(each, Compared)), key=_place)
        for each in compared:
            other = self._states.get(each.step) if isinstance(each, StateRecord) else self._shards.get(_key(each))
            name = "" if other is None else _first_unlike(each, other)
            if other is not None and name:
                return self._explained(comparison, each, other, name)
        missing = {key for key in self._shards if key[0] in steps} - {_key(each) for each in shards(compared)}
        is_whole = not missing and any(each.step == steps.stop for each in states(compared))
        return Finding(comparison=comparison, outcome="agrees" if is_whole else "not compared")

    def compare_values(self, workers: Sequence[Record]) -> Finding:
        """Return which values of the script differ in the first workers after step 0: each has only its own part.

        Such a value, as a sum over the inner loop, changes no bit of the training. So the outcome is "agrees".
        """
        began = {each.worker for each in states(workers) if each.step == 0}
        after = [each for each in states(workers) if each.step == 1 and each.worker in began]
        alone = self._states.get(1)
        if alone is None or not after:
            return Finding(comparison="values", outcome="not compared")
        suspects = {
            suspect.name: suspect
            for each in after
            for suspect in self._suspects(each.script, alone.script)
            if suspect.kind in ("value", "tensor")
        }
        own = tuple(suspects.values())
        return Finding(comparison="values", outcome="agrees", cause="own part" if own else "", suspects=own)

    def _explained(self, comparison: Comparison, one: Compared, other: Compared, name: str) -> Finding:
        shard = one.shard if isinstance(one, ComputedShard) else None
        first = FirstDifference(step=one.step, shard=shard, name=name, worker=one.worker)
        suspects = self._suspects(one.script, other.script)
        if name == MICRO_BATCH:
            suspects = suspects or _constant_generators(one.script)
        cause: Cause = "unknown"
        if shard is None and one.step == 0:
            cause, suspects = "first state", ()
        elif suspects:
            kinds: Mapping[Kind, Cause] = {"generator": "generator", "object": "not replicated"}
            cause = kinds.get(suspects[0].kind, "script state")
        elif shard is None:
            cause = "update"
        elif name == MICRO_BATCH:
            cause = "samples"
        return Finding(comparison=comparison, outcome="differs", first=first, cause=cause, suspects=suspects)

    def _suspects(self, one: Leaves, other: Leaves) -> tuple[ScriptSuspect, ...]:
        suspects = [
            ScriptSuspect(name=name, kind=kind)
            for name, (kind, digest) in one.items()
            if name in self._changing and name in other and other[name][1] != digest
            and (kind == "generator" or name not in self._fresh)
        ]  # fmt: skip
        return tuple(sorted(suspects, key=lambda each: RANKS.index(each.kind))[:MOST_SUSPECTS])

    def _differing_at_first(self, workers: Iterable[Record]) -> set[str]:
        """Return the names of what differs in the first shard of all, before which both legs have done the same.

        A worker that computes this shard once more, to check it, has done other shards before. So all must differ.
        """
        mine = self._shards.get((0, 0, 0))
        theirs = [each.script for each in shards(workers) if _key(each) == (0, 0, 0)]
        if mine is None or not theirs:
            return set()
        return {name for name in theirs[0] if all(mine.script.get(name) != leaves.get(name) for leaves in theirs)}


def _part(workers: Sequence[Record], step: int) -> list[Record]:
    """Return the records of the run in `step`, and the states that it leads to, and that who joins in it begins with.

    Without a worker that joins or is lost in it, where one should, there are none.
    """
    begun, ended = ({each.worker for each in states(workers) if each.step == at} for at in (step, step + 1))
    earlier = {each.worker for each in states(workers) if each.step < step}
    if (step == JOIN and not begun - earlier) or (step == LOSS and not begun - ended):
        return []
    compared = [each for each in workers if isinstance(each, Compared)]
    now = [each for each in compared if each.step == step]
    after = [each for each in states(compared) if each.step == step + 1 and each.worker in begun]
    return [*(each for each in now if isinstance(each, ComputedShard) or each.worker not in earlier), *after]


def _constant_generators(script: Leaves) -> tuple[ScriptSuspect, ...]:
    """Return the generators of which loader processes may have copies. Those of a dataset are seeded."""
    names = [name for name, (kind, _) in script.items() if kind == "generator" and name.partition(".")[0] != DATASET]
    return tuple(ScriptSuspect(name=name, kind="generator") for name in names[:MOST_SUSPECTS])


def _key(shard: ComputedShard) -> tuple[int, int, int]:
    return shard.step, shard.over, shard.shard


def _place(record: Compared) -> tuple[int, bool, int, int, str]:
    if isinstance(record, StateRecord):
        return record.step, False, 0, 0, record.worker
    return record.step, True, record.over, record.shard, record.worker


def _first_unlike(one: Compared, other: Compared) -> str:
    """Return the first name whose digest differs, "" if there is none."""
    mine, theirs = _pairs(one), _pairs(other)
    return next((name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)), "")


def _pairs(record: Compared) -> dict[str, int]:
    return record.digests if isinstance(record, StateRecord) else dict(zip(record.names, record.digests, strict=True))


def _changing(course: Sequence[Leaves]) -> set[str]:
    """Return the names of what has had several values."""
    values: dict[str, set[str]] = {}
    for leaves in course:
        for name, (_, digest) in leaves.items():
            values.setdefault(name, set()).add(digest)
    return {name for name, digests in values.items() if len(digests) > 1}
