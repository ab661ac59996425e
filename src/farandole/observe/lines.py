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
        away_s: between them, in which the run was not on: from the last line of a start to the first of the next.
        damaged: lines that were passed over.
    """

    def __init__(self) -> None:
        self.account = Reading()
        self.pauses = Pauses()
        self.began: float | None = None
        self.ended: float | None = None
        self.away_s = 0.0
        self.damaged = 0
        self._over = False

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
        before, self.ended = self.ended, line.time
        if isinstance(line, StepLine):
            self._step(line)
            return
        again = isinstance(line, events.RunStarted) or (self._over and isinstance(line, events.Starting))
        if again and before is not None:
            self.away_s += max(0.0, line.time - before)
            self._on_again(before)
        self._over = isinstance(line, events.Over) or (self._over and not again)
        self._event(line)

    @abstractmethod
    def _on_again(self, ended: float) -> None:
        """The run has been started once more; its start before ended then, Unix time."""

    @abstractmethod
    def _step(self, line: StepLine) -> None: ...

    @abstractmethod
    def _logged(self, line: LogLine) -> None: ...

    @abstractmethod
    def _event(self, event: events.Event) -> None: ...
