"""Lines of metrics as a worker would tell them, for tests to which the values do not matter."""

from __future__ import annotations

from typing import Any

from farandole.membership import messages as m


def stepped(step: int, **fields: Any) -> m.Line:
    """The line of a step."""
    plausible = {"epoch": 0, "samples": 10, "loss": 0.5, "seconds": 0.1, "samples_per_s": 100.0, "view": 1}
    return m.Line(step=step, index=0, fields=m.Metrics(**{**plausible, "workers": 1, "time": 9.0, **fields}))


def logged(step: int, index: int, **fields: Any) -> m.Line:
    """The line of a call of `run.log` after it."""
    return m.Line(step=step, index=index, fields=fields)
