"""Batch policies: how many samples a step takes, and how they are cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.errors import UsageError


@dataclass(frozen=True)
class GlobalBatch:
    """A constant batch of `size` samples a step, whatever the number of workers, in micro-batches of `micro` samples.

    The weights then depend on nothing but the seed: not on how many workers there are, nor on who comes and goes.

    Raises:
        UsageError: `micro` or `size` below 1, or `micro` above `size`.
    """

    size: int
    micro: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"GlobalBatch(size={self.size}): a step needs at least one sample; use size >= 1")
        if self.micro < 1:
            raise UsageError(
                f"GlobalBatch(micro={self.micro}): a micro-batch needs at least one sample; use micro >= 1"
            )
        if self.micro > self.size:
            raise UsageError(
                f"GlobalBatch(size={self.size}, micro={self.micro}): the micro-batch exceeds the batch; "
                f"use micro <= {self.size}"
            )
