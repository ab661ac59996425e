"""What a joiner has other than the run has, in words for the one who started it.

Facts of code are the script, the modules of its folder, and farandole itself (`sources.py`). A script is compared
whatever its name is, a module only where both sides have imported it: not all workers import the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from farandole.membership.messages import Signature

Facts = Sequence[tuple[str, str]]
_SCRIPT = "script "
_CODE = (_SCRIPT, "module ", "farandole's code")
NAMED = 5


def first_difference(expected: Signature, got: Signature) -> str:
    """The first fact in which a joiner differs from the run, code left out, in words; empty when there is none."""
    ours, theirs = dict(without_code(expected).facts), dict(without_code(got).facts)
    for name, value in ours.items():
        if name not in theirs:
            return f"{name}: the run has {value}, this worker has none"
        if theirs[name] != value:
            return f"{name}: the run has {value}, this worker has {theirs[name]}"
    extra = [name for name in theirs if name not in ours]
    return f"{extra[0]}: the run has none, this worker has {theirs[extra[0]]}" if extra else ""


def of_code(name: str) -> bool:
    """Whether the fact of this name is one of code."""
    return name.startswith(_CODE)


def other_code(expected: Facts, got: Facts) -> list[str]:
    """The facts of code in which two sides differ, by the names that `expected` has for them."""
    theirs = dict(_comparable(got))
    return [name for key, name, value in _keyed(expected) if theirs.get(key, value) != value]


def without_code(signature: Signature) -> Signature:
    """The signature without those facts."""
    return Signature(facts=tuple((name, value) for name, value in signature.facts if not of_code(name)))


def in_words(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _comparable(facts: Facts) -> Iterator[tuple[str, str]]:
    for key, _, value in _keyed(facts):
        yield key, value


def _keyed(facts: Facts) -> Iterator[tuple[str, str, str]]:
    for name, value in facts:
        if of_code(name):
            yield _SCRIPT if name.startswith(_SCRIPT) else name, name, value
