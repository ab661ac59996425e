"""States of metrics that grow with the samples, such as all scores for an exact AUROC, all boxes for a mean precision.

How many lanes they need is known only when every micro-batch was seen, so they take two rounds. The first sums how many
numbers each micro-batch has to say, with a lane for each micro-batch, and its worker keeps them. The second has as
many lanes as there are numbers: each micro-batch fills its own, to which all others add zero. Who is lost in between
loses what it kept: whoever inherits such a micro-batch computes it again.

A list is told as float64: the number of its tensors, and of each its type, its shape, its values. Whole numbers are
exact up to 2**53. What is not a tensor is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from farandole.errors import UsageError

LANES = 1 << 24  # 128 MB for one partial sum
EXACT = 1 << 53  # float64 holds every whole number up to here
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class Lists:
    """The list states of one metric over one evaluation. `names` are for errors."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.states: list[list[torch.Tensor]] = [[] for _ in names]  # over all samples, once `fill` was called
        self._names = names
        self._device = device
        self._kept: dict[int, torch.Tensor] = {}
        self._ends: list[int] = []

    @property
    def length(self) -> int:
        """Numbers over all micro-batches, once `measure` was called."""
        return self._ends[-1]

    def keep(self, states: Sequence[Any], shard: int) -> int:
        """What one micro-batch left in the states; how many numbers that is."""
        told = [number for name, state in zip(self._names, states, strict=True) for number in _told(name, state)]
        self._kept[shard] = torch.cat(told)
        return len(self._kept[shard])

    def measure(self, lengths: torch.Tensor) -> None:
        """The first round's sums: the numbers of each micro-batch, shape (shards,)."""
        self._ends = list(accumulate(int(length) for length in lengths))

    def has(self, shard: int) -> bool:
        return shard in self._kept

    def put(self, shard: int, lanes: torch.Tensor) -> None:
        """Into zeroed lanes, what was kept of one micro-batch."""
        if (kept := self._kept.get(shard)) is not None:  # else all its samples were bad
            stop = self._ends[shard]
            lanes[stop - len(kept) : stop] = kept

    def fill(self, sums: torch.Tensor) -> None:
        """The second round's sums."""
        at = 0
        while at < len(sums):  # a micro-batch each
            for state in self.states:
                count, at = int(sums[at]), at + 1
                for _ in range(count):
                    tensor, at = self._read(sums, at)
                    state.append(tensor)

    def _read(self, sums: torch.Tensor, at: int) -> tuple[torch.Tensor, int]:
        dtype, dimensions = _DTYPES[int(sums[at])], int(sums[at + 1])
        start = at + 2 + dimensions
        shape = [int(size) for size in sums[at + 2 : start]]
        stop = start + torch.Size(shape).numel()
        return sums[start:stop].reshape(shape).to(self._device, dtype), stop


class Contents:
    """The second round: the numbers themselves. Raises `UsageError` if they are too many."""

    def __init__(self, lists: Sequence[Lists], kind: str) -> None:
        self._lists = lists
        self._sizes = [one.length for one in lists]
        self.lanes = sum(self._sizes)
        if self.lanes > LANES:
            raise UsageError(
                f"run.evaluate: the list states of {kind} have come to {self.lanes:,} numbers, at most {LANES:,} "
                f"can be gathered; use a metric of a fixed size, such as AUROC(thresholds=200)"
            )

    def has(self, shard: int) -> bool:
        return all(one.has(shard) for one in self._lists)

    def put(self, shard: int, lanes: torch.Tensor) -> None:
        for one, place in zip(self._lists, lanes.split(self._sizes), strict=True):
            one.put(shard, place)

    def fill(self, sums: torch.Tensor) -> None:
        for one, place in zip(self._lists, sums[: self.lanes].split(self._sizes), strict=True):
            one.fill(place)


def _told(name: str, state: Any) -> Iterator[torch.Tensor]:
    tensors = [state] if isinstance(state, torch.Tensor) else state
    yield torch.tensor([len(tensors)], dtype=torch.float64)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise UsageError(
                f"run.evaluate: {name} holds a {found}, which can't be gathered; lists of real tensors can, or use a "
                f"function with a value a sample"
            )
        values = tensor.detach().to("cpu")
        most = max(int(values.max()), -int(values.min())) if values.dtype == torch.int64 and values.numel() else 0
        if most > EXACT:
            raise UsageError(
                f"run.evaluate: {name} holds {most}, and whole numbers are exact up to 2**53 = {EXACT}; "
                f"keep it in a floating-point type"
            )
        head = [_DTYPES.index(values.dtype), values.dim(), *values.shape]
        yield torch.tensor(head, dtype=torch.float64)
        yield values.reshape(-1).double()
