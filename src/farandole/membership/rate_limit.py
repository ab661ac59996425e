"""How often a worker may do what costs the others something: some at once, then one every so many seconds."""

from __future__ import annotations


class RateLimit:
    """`burst` at first, and one more every `seconds`, for each worker. Times are the caller's, in seconds."""

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst = burst
        self._seconds = seconds
        self._used: dict[str, tuple[float, float]] = {}  # how much, and when that was

    def draw(self, worker: str, now: float) -> None:
        self._used[worker] = (self._left_over(worker, now) + 1, now)

    def spent(self, worker: str, now: float) -> bool:
        """Whether there is none left."""
        return self._left_over(worker, now) > self._burst - 1

    def forget(self, worker: str) -> None:
        self._used.pop(worker, None)

    def _left_over(self, worker: str, now: float) -> float:
        used, at = self._used.get(worker, (0.0, now))
        return max(0.0, used - (now - at) / self._seconds)
