"""Rules of the study's own: controls, each a rule of the product's without one of its parts. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from farandole.plan.rules import Facts, Memory, MomentumCompensation, Rule


@dataclass(frozen=True)
class WholeWindow(Rule):
    """`MomentumCompensation`, but an epoch's short last window takes the factor of a full one.

    It answers as for the largest k that it has been told, so it is for histories in which the batch never shrinks.
    """

    def begin(self) -> Memory:
        return {**MomentumCompensation().begin(), "largest": 0.0}

    def factor(self, memory: Memory, facts: Facts) -> tuple[float, Memory]:
        largest = max(memory["largest"], facts.k)
        within = {name: value for name, value in memory.items() if name != "largest"}
        factor, within = MomentumCompensation().factor(within, replace(facts, k=largest))
        return factor, {**within, "largest": largest}


@dataclass(frozen=True)
class RootOfRate(Rule):
    """Half of `SquareRoot`: the rate takes sqrt(k), and betas, epsilon, moments and weight decay stay the user's."""

    def factor(self, memory: Memory, facts: Facts) -> tuple[float, Memory]:
        return math.sqrt(facts.k), memory
