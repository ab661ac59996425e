"""A simulated coordinator's speed measurements: random shares need not be sensible, and must do no harm."""

from __future__ import annotations

import random

from farandole.protocol.coordinator.state import Speeds
from farandole.protocol.view import View

WINDOW = 2  # measurements


class RandomShares(Speeds):
    """Speeds that propose random shares with probability `often` at each call; otherwise measured ones."""

    def __init__(self, rng: random.Random, often: float) -> None:
        super().__init__(WINDOW)
        self._rng = rng
        self._often = often

    def due(self, view: View) -> tuple[int, ...] | None:
        shares = super().due(view)
        if view.members and self._rng.random() < self._often:
            return tuple(self._rng.choice((1, 300, 700, 1000)) for _ in view.members)
        return shares
