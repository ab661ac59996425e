"""Numeric facts: which machines may compute for one run, and what differences of their numerics mean.

A worker computes the bits of its run where the fingerprint (`numerics/fingerprint.py`) agrees, operation by operation,
with the settings that affect it. Version names are reported, and decide nothing where all operations agree; so a long
run can be moved to another image host by host. Decoded data is compared where both have loaded a decoder. The libraries
by which a dataset decodes are compared by name and version, for no fixed picture stands for all.

    same, portable    a worker that differs is refused, with the name of what differs
    any               it is admitted, and an event marks the step from which results are not reproducible

Code, data and shapes are not numerics: they are compared whatever `--bits` is (`difference.py`).
See docs/protocol.md, Admission.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from farandole.protocol.messages import Signature

OPERATION, DECODER, SETTING, DECODING = "operation ", "decoder ", "setting ", "decoding "
DEVICE, THREADS, TORCH, NUMPY = "device", "intra-op threads", "torch version", "numpy version"
VERSIONS = (TORCH, NUMPY)
Facts = Iterable[tuple[str, str]]


class Phrasing(NamedTuple):
    """Templates for a difference: of a fact with its name and both values, of operations with the first one's name."""

    fact: str
    operation: str


AMONG_WORKERS = Phrasing("{}: the run has {}, this worker has {}", "{}: this worker computes other bits than the run")
SINCE_THEN = Phrasing("{}: {} then, {} now", "{}: other bits are computed now than then")
ELSEWHERE = Phrasing("{}: {} there, {} here", "{}: other bits here than there")
REPLAYED = Phrasing("{}: the run had {}, here it is {}", "{}: other bits are computed here than in the run")


@dataclass(frozen=True, kw_only=True)
class NumericDifferences:
    """The differences of one side's numerics from the run's: in settings and the device, in operations, in versions.

    Versions are listed apart only if operations could be compared. Each difference is (name of the fact, value of the
    run, value of the other side), "" for no value.
    """

    settings: tuple[tuple[str, str, str], ...] = ()
    operations: tuple[tuple[str, str, str], ...] = ()
    versions: tuple[tuple[str, str, str], ...] = ()
    compared: int = 0  # operations that both sides have

    @property
    def bits(self) -> bool:
        """True if the results differ in bits, or may differ."""
        return bool(self.settings or self.operations)

    def words(self, phrasing: Phrasing = AMONG_WORKERS) -> tuple[str, ...]:
        """Return a text for each setting and version, and one for all operations; the likely cause comes first."""
        settings = [
            phrasing.fact.format(name, ours or "none", theirs or "none") for name, ours, theirs in self.settings
        ]
        versions = [
            phrasing.fact.format(name, ours or "none", theirs or "none") for name, ours, theirs in self.versions
        ]
        for first, _, _ in self.operations[:1]:
            more = len(self.operations) - 1
            settings.append(
                phrasing.operation.format(first) + (f", as in {more} more of {self.compared}" if more else "")
            )
        return *settings, *versions


def of_numerics(name: str) -> bool:
    """Return True if the fact of this name is one of numerics."""
    return name.startswith((OPERATION, DECODER, SETTING, DECODING)) or name in (DEVICE, THREADS, *VERSIONS)


def without_numerics(signature: Signature) -> Signature:
    """Return the signature without the facts of numerics."""
    return Signature(facts=tuple((name, value) for name, value in signature.facts if not of_numerics(name)))


def numerics(facts: Facts) -> dict[str, str]:
    """Return the facts of numerics, by name."""
    return {name: value for name, value in facts if of_numerics(name)}


def numeric_differences(expected: Facts, got: Facts) -> NumericDifferences:
    """Return how the numerics of `got` differ from those of `expected`."""
    ours, theirs = numerics(expected), numerics(got)
    differ = [(name, ours.get(name, ""), theirs.get(name, "")) for name in dict.fromkeys((*ours, *theirs))
              if ours.get(name) != theirs.get(name) and not _on_one_side(name, ours, theirs)]  # fmt: skip
    computed = [each for each in differ if each[0].startswith((OPERATION, DECODER))]
    compared = sum(name.startswith(OPERATION) for name in ours if name in theirs)
    versions = [each for each in differ if compared and each[0] in VERSIONS]
    return NumericDifferences(
        settings=tuple(each for each in differ if each not in computed and each not in versions),
        operations=tuple(computed),
        versions=tuple(versions),
        compared=compared,
    )


def unlike_then(then: Facts, now: Facts) -> NumericDifferences:
    """Return the same for a record that may be older than some facts: a fact that one side lacks is ignored."""
    before, after = dict(then), dict(now)
    return numeric_differences(
        [f for f in before.items() if f[0] in after], [f for f in after.items() if f[0] in before]
    )


def numerics_refusal(differences: NumericDifferences, bits: str) -> str:
    """Return why a worker with these differences may not join the run; "" if it may."""
    if not differences.bits or bits == "any":
        return ""
    causes = differences.words()
    also = f" ({'; '.join(causes[1:])})" if differences.operations and causes[1:] else ""
    if not differences.operations:
        remedy = "; install what the run has, or give it --bits any" if causes[0].startswith(DECODING) else ""
        return f"{causes[0]}{remedy}"
    return f"{causes[0]}{also}; see `farandole numerics --against TICKET`, or give the run --bits any"


def verdict(differences: NumericDifferences, whose: str, bits: str) -> str:
    """Return a sentence: under which `--bits` a worker of this machine may join `whose`, whose bits are compared."""
    what = "; ".join(differences.words(ELSEWHERE))
    if not differences.bits:
        also = f", with an event: {what}" if what else ""
        return f"The same bits as {whose}, under --bits {bits}: a worker of this machine may join{also}"
    portable = "" if bits == "portable" else "; with `--bits portable` on both sides this command tells about that one"
    return f"Other bits than {whose}: a worker of this machine may join under --bits any only{portable}. {what}"


def _on_one_side(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Return True for a decoder that one side has not loaded, or decoding that one side does not do: no difference."""
    return name.startswith((DECODER, DECODING)) and (name not in ours or name not in theirs)
