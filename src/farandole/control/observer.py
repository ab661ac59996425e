"""The seam of everything that watches a run by its lines: TensorBoard, Prometheus, Weights & Biases, one of yours.

An observer is handed the lines of metrics.jsonl, each with the place from which on the file has it: a *cursor*, by
which it says where it goes on when it begins again. Invariant: it only watches. Whatever it raises is told once, costs
nobody else anything, and is never an error of the run's; whoever hands it lines sees to that (`observe/exports/feed.py`
from the file, `coordinator/observers.py` as they come).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from farandole.membership.metrics import Line


class Observer(ABC):
    """Called from one thread. `name` is what people are told of it by."""

    name: str

    def begin(self) -> int:
        """Get ready, and say from which byte of metrics.jsonl on lines are wanted. Called again after an error."""
        return 0

    @abstractmethod
    def take(self, line: Line, at: int = 0) -> None:
        """The next line, which begins at byte `at`."""

    def flush(self) -> None:
        """No more lines for now: what was taken is to be seen."""
        return

    def close(self) -> None:
        """No more at all."""
        return


class Kept(Observer):
    """Keeps what it is handed, for tests."""

    name = "kept"

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def take(self, line: Line, at: int = 0) -> None:
        del at
        self.lines.append(line)
