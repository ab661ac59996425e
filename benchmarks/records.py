"""Reads what the workers wrote down (`contestants/recorder.py`) and makes gaps, medians and windows of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median


@dataclass(frozen=True, kw_only=True)
class Record:
    """One worker process's file. `times`, `numbers` and `sizes` have an entry a step, in the order of the steps' ends.

    times: Unix times; numbers: the steps' numbers by the contestant's own count; sizes: workers that took part;
    marks: (time, name, value).
    """

    label: str
    pid: int
    times: tuple[float, ...]
    numbers: tuple[int, ...]
    sizes: tuple[int, ...]
    marks: tuple[tuple[float, str, int], ...]

    def mark(self, name: str) -> int:
        """The latest value under that name, 0 if there is none."""
        return next((value for _, found, value in reversed(self.marks) if found == name), 0)

    def marked_at(self, name: str) -> float | None:
        """When that mark was first made."""
        return next((time for time, found, _ in self.marks if found == name), None)

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Seconds between consecutive step ends, both of them within `[begin, end]`."""
        inside = [time for time in self.times if begin <= time <= end]
        return [later - earlier for earlier, later in pairwise(inside)]

    def discarded(self, begin: float, end: float) -> int:
        """Rounds of work within `(begin, end]` after which the step's number had not grown, and numbers left out."""
        lost = 0
        for index in range(1, len(self.times)):
            if begin < self.times[index] <= end:
                lost += abs(self.numbers[index] - self.numbers[index - 1] - 1)
        return lost

    def switch(self, size: int, after: float) -> int | None:
        """The index of the first step that ended after that time with that many workers."""
        found = (i for i, time in enumerate(self.times) if time > after and self.sizes[i] == size)
        return next(found, None)


def read(folder: Path) -> list[Record]:
    """The records under a run's folder, in the order of their first step."""
    records = [parse(path) for path in sorted((folder / "steps").glob("*"))]
    return sorted(records, key=lambda record: record.times[:1] or (float("inf"),))


def parse(path: Path) -> Record:
    """One file; a last line that is still being written is left out."""
    label, _, pid = path.name.rpartition(".")
    steps: list[tuple[float, int, int]] = []
    marks: list[tuple[float, str, int]] = []
    for line in path.read_text().split("\n")[:-1]:
        kind, time, first, second = line.split(" ")
        if kind == "step":
            steps.append((float(time), int(first), int(second)))
        else:
            marks.append((float(time), first, int(second)))
    return Record(
        label=label,
        pid=int(pid),
        times=tuple(time for time, _, _ in steps),
        numbers=tuple(number for _, number, _ in steps),
        sizes=tuple(size for _, _, size in steps),
        marks=tuple(marks),
    )


def middle(values: list[float]) -> float:
    """The median; not-a-number of nothing, so that a table shows the hole."""
    return median(values) if values else float("nan")
