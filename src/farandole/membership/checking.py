"""What a worker finds of shards that two compute, round by round, and what its control word says of it.

What has been found stays for as long as the round is in hand, whatever becomes of the view: who checks whom is settled
each time that the round starts (`plan.checks`), and what is missing then is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from farandole.membership.comparison import NOTHING, Computed, fitting
from farandole.membership.member import Member
from farandole.membership.terms import RunTerms
from farandole.membership.view import Lineage
from farandole.plan.shards import audit, due, of_checker, of_holder

Found = dict[int, tuple[tuple[str, ...], tuple[int, ...]]]  # names and digests of a shard


class Checking:
    """Of one worker. Its `Member` has the checks of the round in hand, and what the word will say."""

    def __init__(self, member: Member, terms: RunTerms) -> None:
        self._member = member
        self._terms = terms
        self._mine: Found = {}
        self._others: Found = {}

    def begin(self) -> None:
        """A round: nothing of it has been computed."""
        self._mine, self._others = {}, {}

    def arrange(self, lineage: Lineage, shards: int, step: int) -> None:
        """The round starts, perhaps anew, as a step's of so many `shards`; 0: it is none."""
        member, terms = self._member, self._terms
        member.checks = ()
        if shards and terms.bits != "any":
            held, workers = lineage.assign(shards), lineage.sets[-1]
            fraction = 0.0 if member.view is None or member.view.undecided else terms.audit
            audited = audit(held, workers, fraction, terms.seed, step)
            member.checks = due(held, member.unproven, lineage.again, audited)
        self._settle()

    def concerns(self, shard: int) -> bool:
        """Whether somebody checks `shard`, which is this worker's."""
        return shard in of_holder(self._member.checks, self._member.worker)

    def owed(self) -> tuple[int, ...]:
        """The shards of another's that this worker has yet to compute, before it gives its word."""
        mine = of_checker(self._member.checks, self._member.worker)
        return tuple(shard for shard in mine.shards if shard not in self._others) if mine else ()

    def found(self, shard: int, names: Sequence[str], digests: Sequence[int]) -> None:
        """In one of its own. To be told before the last of it is handed in, since the word may follow at once."""
        self._mine[shard] = (tuple(names), tuple(digests))
        self._settle()

    def checked(self, shard: int, names: Sequence[str], digests: Sequence[int]) -> None:
        """In another's."""
        self._others[shard] = (tuple(names), tuple(digests))
        self._settle()

    def _settle(self) -> None:
        member, mine = self._member, of_checker(self._member.checks, self._member.worker)
        member.held = _computed(member.worker, of_holder(member.checks, member.worker), self._mine)
        member.checked = _computed(mine.holder, mine.shards, self._others) if mine else NOTHING


def _computed(holder: str, shards: Sequence[int], found: Found) -> Computed:
    """Nothing until all of it is there."""
    if not shards or any(shard not in found for shard in shards):
        return NOTHING
    pairs = [(f"shard {shard}: {name}", digest) for shard in shards for name, digest in zip(*found[shard], strict=True)]
    names, digests = tuple(name for name, _ in pairs), tuple(digest for _, digest in pairs)
    most = fitting(names)
    if most < len(digests):
        rest = hashlib.sha256(repr(digests[most - 1 :]).encode()).digest()
        names, digests = names[:most], (*digests[: most - 1], int.from_bytes(rest[:8], "little") >> 1 or 1)
    return Computed(holder=holder, shards=tuple(shards), names=names, digests=digests)
