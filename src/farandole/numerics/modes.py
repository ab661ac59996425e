"""How a worker computes under each of `--bits`: with torch's kernels as they are, or with others in their place.

`MODES` names the module of each mode that replaces kernels. It is imported only by a run that asks for that mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TypeVar

import torch

from farandole.numerics import settings

T = TypeVar("T")
MODES = {"portable": "farandole.numerics.portable"}  # each has a class `KernelMode`


class Mode:
    """torch's kernels as they are. The base class of all modes.

    `report` is called with the name of each operator for which the mode can't promise its results, once each.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def begin(self, threads: int, device: torch.device) -> None:
        """Replace kernels, for this process. Raises UsageError where that is not possible."""

    def watch(self) -> None:
        """From now on look at the operators that run."""

    def until_the_second(self, steps: Iterator[T]) -> Iterator[T]:
        """The same steps. The watch ends when the second one has ended."""
        return steps

    def first(self, what: str) -> AbstractContextManager[None]:
        """Watch while this context is open, if `what` is done for the first time."""
        del what
        return nullcontext()


def begin(bits: str, threads: int, device: torch.device, report: Callable[[str], None] = str) -> Mode:
    """Prepare this process for `bits`, before the script's first work on `device`.

    Raises:
        UsageError: work has begun without what `bits` needs, or this machine can't compute so.
    """
    home = MODES.get(bits)
    mode: Mode = import_module(home).KernelMode(report) if home else Mode(report)
    mode.begin(threads, device)
    settings.begin(device, bits)
    return mode
