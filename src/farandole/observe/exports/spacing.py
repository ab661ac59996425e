"""Which steps an export has, where they are so fast that to write each would cost more than may be: pure.

A step is left out that comes sooner after the last one that was not than `least_s`, by the times in the lines. Never
left out: a step whose loss is not finite, the first with another number of workers, one whose number is no greater. It
goes by the lines alone, so who reads them again from a step that it has finds the same ones. metrics.jsonl has all.
"""

from __future__ import annotations

from farandole.membership.metrics import StepLine


class Spacing:
    """Of one export, in seconds."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._last: StepLine | None = None

    def admits(self, line: StepLine) -> bool:
        """Whether the export has this step, the next in the file."""
        last = self._last
        out = (
            last is not None
            and line.loss is not None
            and line.workers == last.workers
            and line.step > last.step
            and 0.0 <= line.time - last.time < self._least_s  # also where the clock went back
        )
        self._last = last if out else line
        return not out
