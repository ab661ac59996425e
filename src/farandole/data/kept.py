"""What was decoded last, kept in memory up to a limit: parts of files by their numbers. Each process has its own."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """At most `limit_bytes` together, and the newest whatever its size. What was taken out may be used on."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._values: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._bytes = 0

    def get(self, number: int) -> T | None:
        found = self._values.get(number)
        if found is None:
            return None
        self._values.move_to_end(number)
        return found[0]

    def put(self, number: int, value: T, size: int) -> T:
        """Keep `value`, of `size` bytes; the least recently used go until there is room. Returns it."""
        while self._values and self._bytes + size > self.limit_bytes:
            self._bytes -= self._values.popitem(last=False)[1][1]
        self._values[number] = value, size
        self._bytes += size
        return value
