"""The messages about replicas that differ; what follows from them is in `replicas`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from farandole.membership.values import MAX_NAMED, Count, Digest, Message, Name


class Differs(Message):
    """The control words of a round of `step` say that `workers` hold another replica than the others: it can't end."""

    step: Count
    workers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]


class Digests(Message):
    """Answer to Compare: a digest of each value and tensor of this worker's replica, by name, in order.

    `step` is the one whose beginning it was last seen whole at.
    """

    step: Count
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMED)]
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_NAMED)]


class Compare(Message):
    """The replicas differ and nobody trains any more: answer Digests, await End or Goodbye."""
