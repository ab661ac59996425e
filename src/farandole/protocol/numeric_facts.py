"""Who may compute for one run: the facts of numerics in a signature, and what their differences mean.

A worker computes the bits of its run where the fingerprint agrees (`numerics/fingerprint.py`), operation by
operation, with the settings that bear on it. Names of versions are told and decide nothing where all operations
agree, so a long run can be moved to another image host by host. What is decoded is compared where both have loaded
a decoder. The libraries by which a dataset decodes are compared by name and version, for no fixed picture stands
for all.

    same    who differs is refused, by the name of what differs
    any     it is let in, and it is said from which step on the bits are not promised

Code, data and shapes are not numerics: they are compared whatever `--bits` says (`difference.py`).
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
    """How a difference is told: of a fact by its name and both values, of operations by the first one's name."""

    fact: str
    operation: str


AMONG_WORKERS = Phrasing("{}: the run has {}, this worker has {}", "{}: this worker computes other bits than the run")
SINCE_THEN = Phrasing("{}: {} then, {} now", "{}: other bits are computed now than then")
ELSEWHERE = Phrasing("{}: {} there, {} here", "{}: other bits here than there")
REPLAYED = Phrasing("{}: the run had {}, here it is {}", "{}: other bits are computed here than in the run")


@dataclass(frozen=True, kw_only=True)
class NumericDifferences:
    """How one side's numerics differ from the run's: in settings and the device; in operations; in versions, where it
    could be computed what they come to. Each is a fact's name, what the run has, and what the other has, "" for none.
    """

    settings: tuple[tuple[str, str, str], ...] = ()
    operations: tuple[tuple[str, str, str], ...] = ()
    versions: tuple[tuple[str, str, str], ...] = ()
    compared: int = 0  # operations that both have

    @property
    def bits(self) -> bool:
        """Whether the bits are others, or may be."""
        return bool(self.settings or self.operations)

    def words(self, phrasing: Phrasing = AMONG_WORKERS) -> tuple[str, ...]:
        """Each setting and version, and all operations in one; what is the likely cause first."""
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
    """Whether the fact of this name is one of numerics."""
    return name.startswith((OPERATION, DECODER, SETTING, DECODING)) or name in (DEVICE, THREADS, *VERSIONS)


def without_numerics(signature: Signature) -> Signature:
    """The signature without those facts."""
    return Signature(facts=tuple((name, value) for name, value in signature.facts if not of_numerics(name)))


def numerics(facts: Facts) -> dict[str, str]:
    """Those facts alone."""
    return {name: value for name, value in facts if of_numerics(name)}


def numeric_differences(expected: Facts, got: Facts) -> NumericDifferences:
    """How the numerics of `got` differ from those of `expected`."""
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
    """The same for a record, which may be older than some of the facts: what one side lacks is passed over."""
    before, after = dict(then), dict(now)
    return numeric_differences(
        [f for f in before.items() if f[0] in after], [f for f in after.items() if f[0] in before]
    )


def numerics_refusal(differences: NumericDifferences, bits: str) -> str:
    """Why a worker that is so unlike the run may not take part in it; "" if it may."""
    if not differences.bits or bits == "any":
        return ""
    causes = differences.words()
    also = f" ({'; '.join(causes[1:])})" if differences.operations and causes[1:] else ""
    if not differences.operations:
        remedy = "; install what the run has, or give it --bits any" if causes[0].startswith(DECODING) else ""
        return f"{causes[0]}{remedy}"
    return f"{causes[0]}{also}; see `farandole numerics --against TICKET`, or give the run --bits any"


def verdict(differences: NumericDifferences, whose: str, bits: str) -> str:
    """In a sentence, under which `--bits` a worker of this machine may join `whose`, whose bits are compared."""
    what = "; ".join(differences.words(ELSEWHERE))
    if not differences.bits:
        also = f", with an event: {what}" if what else ""
        return f"The same bits as {whose}, under --bits {bits}: a worker of this machine may join{also}"
    portable = "" if bits == "portable" else "; with `--bits portable` on both sides this command tells about that one"
    return f"Other bits than {whose}: a worker of this machine may join under --bits any only{portable}. {what}"


def _on_one_side(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Who has not loaded a decoder has not decoded yet; who has no dataset in hand decodes by nothing."""
    return name.startswith((DECODER, DECODING)) and (name not in ours or name not in theirs)
