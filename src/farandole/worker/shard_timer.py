"""How long this worker's shards take: what the heartbeats tell the coordinator, so that it can deal them by speed.

Counted is the wall time from when a micro-batch is in hand to the end of its backward pass: a worker that gets half a
core shows twice the time. Waiting for data and for peers is not in it: more or fewer shards would not change that.
"""

from __future__ import annotations

import threading
import time


class ShardTimer:
    """Written by the training thread, read by that of the connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = 0.0
        self._seconds = 0.0
        self._count = 0
        self._part = (0, 0)

    def open(self) -> None:
        """A shard's micro-batch is in hand."""
        self._began = time.monotonic()

    def close(self) -> None:
        """... and is computed."""
        with self._lock:
            self._seconds += time.monotonic() - self._began
            self._count += 1

    def step_ended(self, shards: int, of: int) -> None:
        """A training step has ended, `shards` of its `of` shards computed here."""
        self._part = (shards, of)

    def take(self) -> tuple[int, int, int]:
        """The mean time of a shard since this was last asked, in µs, 0 for none; shards and `of` of the newest step."""
        with self._lock:
            mean_us = max(1, round(1e6 * self._seconds / self._count)) if self._count else 0
            self._seconds, self._count = 0.0, 0
        return mean_us, self._part[0], self._part[1]
