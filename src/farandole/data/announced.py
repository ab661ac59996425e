"""What the loader has told its dataset of the order: which samples come next, wherever the loader is.

Told are the samples that all workers will take from a position on, not this one's alone: whatever a view changes, what
is near is what is wanted; and workers of one host want one another's. Told again when a good part of it is behind.
"""

from __future__ import annotations

from typing import Any

from farandole.data.hooks import hook
from farandole.data.order import Order

HORIZON = 16_384  # samples
NOWHERE = (-1, 0)


class Announced:
    """Of one loader."""

    def __init__(self, dataset: Any, order: Order) -> None:
        self._order = order
        self._expect, self._settle = hook(dataset, "expect"), hook(dataset, "settle")
        self._at = NOWHERE  # epoch and position from which it was told

    def begin(self) -> None:
        """Somebody will read, nobody knows yet where."""
        if self._at == NOWHERE:
            self.reach(0, 0)

    def reach(self, epoch: int, start: int) -> None:
        """The loader is there, or will be soon."""
        if self._expect is None:
            return
        told, first = self._at
        if epoch == told and first <= start < first + HORIZON // 2:
            return
        self._at = epoch, start
        samples = self._order.samples(epoch, start, min(start + HORIZON, self._order.length))
        self._expect(samples, shuffled=self._order.shuffle)

    def settle(self, at_most_s: float) -> None:
        """Wait until what was told is near."""
        if self._settle is not None and at_most_s:
            self._settle(at_most_s)
