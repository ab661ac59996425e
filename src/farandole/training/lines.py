"""The lines of metrics that a worker writes: in which order they stand, and by what the copies of one are known.

Every worker makes every line, and one of them is heard. Lines stand in the order of (step, index), and the coordinator
leaves out what is not beyond the newest that it has. So a step's own line, index 0, goes before whatever is logged
between the step's beginning and the next one's: what is logged before the exchange is over waits for it here.
"""

from __future__ import annotations

from collections.abc import Mapping

from farandole.membership.messages import Line, Metrics
from farandole.worker.participant import Participant


class Lines:
    """Of one worker, on the thread of its script."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._logged = 0  # since the step in hand began
        self._early: list[Line] = []

    def begin(self) -> None:
        """A step begins."""
        self._logged = 0
        self._early.clear()

    def log(self, step: int, fields: Mapping[str, float | int | bool | str], *, early: bool) -> None:
        """`early`: the step's exchange is not over yet.

        Raises:
            UsageError: what can't be a line of metrics.
        """
        line = Line(step=step, index=self._logged + 1, fields=fields)
        self._logged += 1
        if early:
            self._early.append(line)
        else:
            self._participant.add_line(line)

    def step_ended(self, step: int, fields: Metrics) -> None:
        for line in (Line(step=step, index=0, fields=fields), *self._early):
            self._participant.add_line(line)
        self._early.clear()
