"""Digests of a replica by who made the sums: which member's sums a difference of the replicas may come from.

A member of a view makes the sums of a part of each bucket, for all. So the elements of parameters in that part, and of
the optimizer's tensors of the same shapes, have got their values by its sums, in each step that this view has made.
What may be found to differ has come about within the last `ROTATION` steps (`training/digest.py`): the views that have
made those are kept, with the buckets that they had. `membership/replicas.py` says what follows from the digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from farandole.collective.buckets import Layout
from farandole.collective.schedule import Levels
from farandole.membership.comparison import MAX_PARTS, PartDigests
from farandole.membership.view import View
from farandole.training.digest import ROTATION, as_bytes, content, leaves_of, number
from farandole.training.replica import Replica

Parts = tuple[tuple[PartDigests, ...], int]
UNKNOWN: Parts = ((), 0)


class PartsDigest:
    """Of one worker's replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._made: dict[tuple[int, int], tuple[View, Layout, int]] = {}  # with the last step

    def updated(self, view: View, layout: Layout, step: int) -> None:
        """The update of `step` is made from sums of `view` in the buckets of `layout`."""
        self._made[view.number, int(layout.sizes[:15], 16)] = view, layout, step
        if len(self._made) > MAX_PARTS:
            self._made = {key: made for key, made in self._made.items() if made[2] >= step - ROTATION}

    def at(self, step: int, settings: Mapping[str, str]) -> Parts:
        """The digests where `step` begins, and that of everything else; `UNKNOWN` if there were too many views, or one
        in which members of a host hand on what others have summed up.
        """
        recent = {key: made for key, made in self._made.items() if made[2] >= step - ROTATION - 1}
        if not recent or len(recent) > MAX_PARTS or any(_hands_on(view) for view, _, _ in recent.values()):
            return UNKNOWN
        tensors = list(self._tensors())
        parts = [self._of(key, view, layout, tensors) for key, (view, layout, _) in recent.items()]
        inside = {t.data_ptr() for _, layout, _ in recent.values() for each in tensors for i, t in each.items()
                  if i in layout.where and t.numel()}  # fmt: skip
        rest = hashlib.sha256()
        for name, value in (*settings.items(), *leaves_of(self._replica)):
            if not (isinstance(value, torch.Tensor) and value.data_ptr() in inside):
                rest.update(name.encode())
                rest.update(content(value))
        return tuple(parts), number(rest.digest())

    def _of(
        self, key: tuple[int, int], view: View, layout: Layout, tensors: Sequence[Mapping[int, torch.Tensor]]
    ) -> PartDigests:
        levels, digests = Levels.of(view), [hashlib.sha256() for _ in view.members]
        for bucket in layout.buckets:
            cuts = [levels.slices(bucket, member) for member in view.members]
            for index, offset in zip(bucket.params, bucket.offsets, strict=True):
                for each in tensors:
                    if index not in each:
                        continue
                    flat = layout.elements(index, each[index])
                    for digest, slices in zip(digests, cuts, strict=True):
                        for start, stop in slices:
                            digest.update(as_bytes(flat[max(start - offset, 0) : max(stop - offset, 0)]))
        return PartDigests(
            view=key[0], cut=key[1], members=view.members, digests=tuple(number(d.digest()) for d in digests)
        )

    def _tensors(self) -> Iterator[dict[int, torch.Tensor]]:
        """By the parameters' numbers: the parameters, then what each optimizer has of that shape, by its keys."""
        parameters = list(self._replica.parameters.values())
        yield dict(enumerate(parameters))
        for thing in self._replica.objects.values():
            if isinstance(thing, torch.optim.Optimizer):
                states: list[Mapping[str, Any]] = [thing.state.get(parameter, {}) for parameter in parameters]
                for key in sorted({key for state in states for key in state}):
                    found = {index: state.get(key) for index, state in enumerate(states)}
                    yield {
                        index: value
                        for index, value in found.items()
                        if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape
                    }


def _hands_on(view: View) -> bool:
    """Whether what one member has summed up reaches others by way of a third."""
    hosts = Levels.of(view).hosts
    return len(hosts) > 1 and any(len(workers) > 1 for workers in hosts)
