"""The messages about replicas that differ, and about shards of which two workers have found different things; what
follows from them is in `replicas` and `verdicts`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from farandole.membership.values import MAX_NAMED, MAX_NAMED_BYTES, Count, Digest, Message, Name

MAX_PARTS = 8  # views of which a worker says who made which sums
# what is found to differ, in words that the reason of a refusal has
MICRO_BATCH, UPDATES = "the micro-batch", "its updates differ"


class Differs(Message):
    """The control words of a round of `step` say that `workers` hold another replica than the others: it can't end."""

    step: Count
    workers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]


class Drifts(Message):
    """Under `--bits any`: at `step` the replicas of `workers` are unlike the others', for the `times`-th time."""

    step: Count
    workers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]
    times: Count


class Unlike(Message):
    """The control words of a round of `step` say that two workers found different things of one shard: it can't end."""

    step: Count


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has computed of some of a round's shards: their holder's, or another one's who checks them.

    `digests` are those of what the shards read, found and left, by name, in order. Where there are too many for a
    message, the last one is of all that are left.
    """

    holder: Name = ""
    shards: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()

    @property
    def number(self) -> int:
        """For the control word: 63 bits, 0 where there is nothing."""
        if not self.shards:
            return 0
        digest = hashlib.sha256(repr((self.holder, self.shards, self.digests)).encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1 or 1


NOTHING = Computed()


def fitting(names: Sequence[str]) -> int:
    """How many of these names, from the first on, fit into a message; at least 1 of some."""
    size = 0
    for number, name in enumerate(names[:MAX_NAMED]):
        size += len(name.encode()) + 16  # and a digest
        if size > MAX_NAMED_BYTES:
            return max(number, 1)
    return min(len(names), MAX_NAMED)


class PartDigests(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's digests by who made the sums: for each of `members` one digest of the elements of parameters, and of
    the optimizer's tensors of their shapes, whose gradients that member sums up in `view`. `cut`: how they are cut into
    buckets.
    """

    view: Count
    cut: Digest
    members: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_NAMED)]


class Digests(Message):
    """Answer to Compare: a digest of each value and tensor of this worker's replica, by name, in order.

    `step` is the one whose beginning it was last seen whole at. `parts`: for each view that has made an update which a
    difference may come from; `rest`: a digest of what is in no part, 0 where the parts are unknown.
    """

    step: Count
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_NAMED)]
    parts: Annotated[tuple[PartDigests, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()
    rest: Digest = 0


class Compare(Message):
    """The replicas differ and nobody trains any more: answer Digests, await End or Goodbye."""
