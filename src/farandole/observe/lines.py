"""What everybody does who sums up a run from the lines of its metrics.jsonl. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod

from farandole.membership import events
from farandole.membership.account import Reading
from farandole.membership.metrics import LogLine, StepLine, parse_line
from farandole.observe.pauses import Pauses


class Lines(ABC):
    """`take` the whole lines, oldest first.

    Attributes:
        account, pauses: fed as this is.
        began, ended: Unix times of the first and the newest line, None: there is none.
        damaged: lines that were passed over.
    """

    def __init__(self) -> None:
        self.account = Reading()
        self.pauses = Pauses()
        self.began: float | None = None
        self.ended: float | None = None
        self.damaged = 0

    def take(self, raw: bytes) -> None:
        """A whole line."""
        self.account.take(raw)
        line = parse_line(raw)
        if line is None:
            self.damaged += 1
            return
        self.pauses.take(line)
        if isinstance(line, LogLine):  # which has no time
            self._logged(line)
            return
        self.began = line.time if self.began is None else self.began
        self.ended = line.time
        if isinstance(line, StepLine):
            self._step(line)
        else:
            self._event(line)

    @abstractmethod
    def _step(self, line: StepLine) -> None: ...

    @abstractmethod
    def _logged(self, line: LogLine) -> None: ...

    @abstractmethod
    def _event(self, event: events.Event) -> None: ...
