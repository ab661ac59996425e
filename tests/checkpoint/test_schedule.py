"""When a checkpoint is due."""

from __future__ import annotations

import re

import pytest

from farandole.checkpoint.schedule import Every
from farandole.errors import UsageError

DUE = [
    # period, step, now, last step, last time, due
    ("10m", 50, 599.0, 0, 0.0, False),
    ("10m", 50, 600.0, 0, 0.0, True),
    ("30s", 50, 100.0, 0, 71.0, False),
    ("1.5h", 50, 5400.0, 0, 0.0, True),
    ("never", 10**9, 1e9, 0, 0.0, False),
    ("50steps", 50, 0.0, 49, 0.0, True),
    ("50steps", 50, 0.0, 50, 0.0, False),
    ("50steps", 99, 1e9, 50, 0.0, False),
    ("50steps", 103, 0.0, 99, 0.0, True),
    ("1step", 1, 0.0, 0, 0.0, True),
]


@pytest.mark.parametrize(("text", "step", "now", "last_step", "last_time", "due"), DUE)
def test_due(text: str, step: int, now: float, last_step: int, last_time: float, due: bool) -> None:
    assert Every.parse(text).is_due(step, now, last_step=last_step, last_time=last_time) is due


@pytest.mark.parametrize("text", ["", "10", "m", "0s", "0steps", "-5m", "10 m", "5days", "nan"])
def test_a_period_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=rf"{re.escape(repr(text))}.*\b10m\b.*\b500steps\b.*\bnever\b"):
        Every.parse(text)
