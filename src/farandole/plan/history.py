"""A history: how many workers began each step. With the seed, all that the weights depend on under any batch policy.

    # step workers
    0      1
    300    12
    450    4

Each line holds from its step on. It is what `farandole rehearse` is given and what `farandole replay` reads off a run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_WORKERS, whole


@dataclass(frozen=True)
class History:
    """`changes`: (step, workers) pairs, from step 0 on, in the order of the steps."""

    changes: tuple[tuple[int, int], ...]

    def workers(self, step: int) -> int:
        return self.changes[bisect_right(self.changes, (step, 1 << 62)) - 1][1]

    def text(self) -> str:
        return "# step workers\n" + "".join(f"{step} {workers}\n" for step, workers in self.changes)

    @staticmethod
    def parse(text: str, name: str) -> History:
        """The history in `text`; `name` is what errors call it.

        Raises:
            UsageError: a line that is no change; names the line.
        """
        changes: list[tuple[int, int]] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split("#")[0].split()
            if words:
                changes.append(_change(words, f"{name}, line {number}: {line.strip()!r}", changes))
        if not changes:
            raise UsageError(f"{name}: no line says how many workers there are; write `0 4` for four from step 0 on")
        return History(tuple(changes))

    @property
    def peak(self) -> int:
        return max(workers for _, workers in self.changes)

    @staticmethod
    def of(steps: Iterable[tuple[int, int]]) -> History:
        """From each step's workers, as (step, workers) in order."""
        changes: list[tuple[int, int]] = []
        for step, workers in steps:
            if not changes or changes[-1][1] != workers:
                changes.append((step, workers))
        return History(tuple(changes))


def _change(words: list[str], where: str, before: list[tuple[int, int]]) -> tuple[int, int]:
    try:
        step, workers = map(int, words)
    except ValueError:
        raise UsageError(f"{where}: two whole numbers, the step and the workers from there on") from None
    whole(f"{where}: step {{}}", step)
    whole(f"{where}: {{}} workers", workers, 1, MAX_WORKERS, why="at least one worker trains")
    if not before and step != 0:
        raise UsageError(f"{where}: the first line is that of step 0")
    if before and step <= before[-1][0]:
        raise UsageError(f"{where}: steps go up, and the line before is that of step {before[-1][0]}")
    return step, workers
