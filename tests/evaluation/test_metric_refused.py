"""What can't be summed over micro-batches says so, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from farandole.errors import UsageError
from farandole.evaluation.metrics import EXACT, LANES
from tests.support.measures import tm
from tests.support.metrics import (
    LINEAGES,
    evaluated,
    values,
)


class Growing(tm.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.seen = self.seen + one - other

    def compute(self) -> torch.Tensor:
        return self.seen


class Turning(Growing):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.tensor(0j), dist_reduce_fx="sum")


class Wide(Growing):
    """What is not summed needs lanes for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(3_000_000), dist_reduce_fx="max")


class Telling(tm.Metric):
    """Appends the same, whatever it sees."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what
        self.add_state("told", [], dist_reduce_fx="cat")

    def update(self, one: torch.Tensor, other: torch.Tensor) -> None:
        del one, other
        self.told.append(self.what)

    def compute(self) -> torch.Tensor:
        return torch.tensor(len(self.told))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a list of texts": (
        lambda: {"by name": Telling("text")},
        r"Telling\b.*'told'.*\bstr\b",
    ),
    "a list of complex numbers": (lambda: Telling(torch.tensor(1j)), r"Telling\b.*'told'.*torch\.complex64"),
    "a list of large numbers": (
        lambda: Telling(torch.tensor([1, -EXACT - 5])),
        rf"Telling\b.*'told'.*{EXACT + 5}.*2\*\*53",
    ),
    "a list too long": (
        lambda: Telling(torch.zeros(3_000_000)),
        rf"Telling\b.*21,000,028.*{LANES:,}",
    ),
    "complex": (Turning, r"Turning\b.*'seen'.*\bcomplex"),
    "changes its shape": (
        Growing,
        r"Growing\b.*'seen'.*\(\).*\(\d,\)",
    ),
    "a word": (lambda: "accuracy", r"metric='accuracy'"),
    "a number by name": (lambda: {"accuracy": 0.5}, r"metric=0\.5\b"),
    "nothing": (dict, r"metric=\{\}"),
    "too large": (
        Wide,
        rf"Wide\b.*21,000,000.*\b7\b.*{LANES:,}.*micro=",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_not_be_summed_says_so(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(UsageError, match=message):
        evaluated(make(), values(), 8, LINEAGES["one"])
