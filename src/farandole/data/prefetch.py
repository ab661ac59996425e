"""Which micro-batches to request ahead of the plan: the pure half of the loader, a sampler for torch's DataLoader.

The pipeline that it feeds has a fixed number of places and gives results in the order of requests. For each result
taken out it asks for one more request. What is kept to:

- **It never ends.** An iterator that ended would lose the place for good. When nothing is to be requested the answer is
  None, and the pipeline's answer to None comes at once: the loader trades such Nones for requests when there are some.
- **Memory is bounded.** At most `limit` micro-batches are under way or waiting, and the one asked for. What a new plan
  does not name among its first 256 is dropped, on arrival if it is under way, and so is what lies in a step passed.
- **Nothing is made twice that is still there**, and a key asked for without having been expected goes first.

Left out: doing anything. No I/O, no clock, no torch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

_NEAR = 256  # keys; enough for a lost peer's whole share to come before what is already under way


class Key(NamedTuple):
    """One micro-batch: positions [start, stop) of an epoch's order, which are `shard` of `step`."""

    epoch: int
    step: int
    shard: int
    start: int
    stop: int


class Prefetch:
    """What to request next, what is under way, what waits to be fetched; an iterator over requests, None for idle."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        self._asked: Key | None = None  # to be requested before anything else
        self._near: deque[Key] = deque()  # what has been read of `_upcoming` and not requested
        self._upcoming: Iterator[Key] = iter(())
        self._wanted: dict[Key, bool] = {}  # under way -> keep on arrival?
        self._step = (-1, -1)
        self.under_way: deque[Key | None] = deque()  # in the order in which results will come
        self.waiting: dict[Key, Any] = {}

    def __iter__(self) -> Iterator[Key | None]:
        return self

    def __next__(self) -> Key | None:
        key, self._asked = self._asked, None
        if key is None and (key := self.next_expected()) is not None:
            self._near.popleft()
        if key is not None:
            self._wanted[key] = True
        self.under_way.append(key)
        return key

    def next_expected(self) -> Key | None:
        """The next key that is expected and not yet requested, if there is one and memory for it."""
        if len(self._wanted) + len(self.waiting) >= self._limit:
            return None
        while True:
            if not self._near:
                self._near.extend(islice(self._upcoming, 1))
            if not self._near:
                return None
            key = self._near[0]
            if key in self._wanted:
                self._wanted[key] = True
            elif key not in self.waiting:
                return key
            self._near.popleft()

    def replace(self, upcoming: Iterable[Key]) -> None:
        self._upcoming = iter(upcoming)
        self._near = deque(islice(self._upcoming, _NEAR))
        kept = set(self._near)
        self.waiting = {key: found for key, found in self.waiting.items() if key in kept}
        self._wanted = {key: key in kept for key in self._wanted}

    def ask(self, key: Key) -> None:
        """`key` is wanted now, and nothing of an earlier step ever again."""
        if self._step != key[:2]:
            self._step = key[:2]
            self.waiting = {other: found for other, found in self.waiting.items() if other[:2] >= self._step}
            self._wanted = {other: wanted and other[:2] >= self._step for other, wanted in self._wanted.items()}
        if key in self._wanted:
            self._wanted[key] = True
        elif key not in self.waiting:
            self._asked = key
            with contextlib.suppress(ValueError):
                self._near.remove(key)

    def begin_again(self) -> None:
        """The pipeline is a new one: what was under way in the old one and is wanted goes first, in the same order."""
        lost = [key for key in self.under_way if key is not None and self._wanted[key]]
        self._near = deque([*lost, *(key for key in self._near if key not in lost)])
        self._wanted = {}
        self.under_way.clear()

    def receive(self, key: Key | None, found: Any) -> None:
        self.under_way.popleft()
        if key is not None and self._wanted.pop(key):
            self.waiting[key] = found
