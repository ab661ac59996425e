"""What the generators of `driver` and `entering` yield: what comes next without the worker's lock."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """Wait until something has changed, `at_most_s` seconds if that is given."""

    at_most_s: float | None = None


Script = Generator["Change | Callable[[], Any]", Any, T]


def do(work: Callable[..., T], *args: Any) -> Script[T]:
    """Have `work` done without the lock."""
    return (yield partial(work, *args))
