"""What one worker has other than others have: a joiner's signature, and replicas that should be equal."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import zip_longest

from farandole.membership.messages import Signature


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


def outliers(found: Mapping[str, Hashable]) -> tuple[str, ...]:
    """Those whose value is not that of most; of two sides of one size the first worker's counts.

    `found`: in the order of their standing, so that the longest-standing worker is right where nothing else decides.
    """
    sides: dict[Hashable, list[str]] = {}
    for worker, value in found.items():
        sides.setdefault(value, []).append(worker)
    reference = max(sides.values(), key=len, default=[])
    return tuple(worker for worker in found if worker not in reference)


def first_unequal(expected: Sequence[tuple[str, int]], got: Sequence[tuple[str, int]]) -> str:
    """The name of the first of `expected`, pairs of a name and a digest, that is another in `got`; "" for none."""
    for theirs, ours in zip_longest(expected, got):
        if theirs != ours:
            return (theirs or ours)[0]
    return ""
