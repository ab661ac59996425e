"""What a joiner has other than the run has, in words for the one who started it."""

from __future__ import annotations

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
