"""How a worker computes under each of `--bits`: with torch's kernels as they are, or with others in their place.

`MODES` has a function for each mode that replaces kernels. The function imports the module of the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch

from farandole.numerics import settings

T = TypeVar("T")


class Mode(Protocol):
    """What a mode does in the thread of the training script."""

    def begin(self, threads: int, device: torch.device) -> None:
        """Replace kernels, for this process. Raises UsageError where that is not possible."""

    def watch(self) -> None:
        """From now on look at the operators that run."""

    def until_the_second(self, steps: Iterator[T]) -> Iterator[T]:
        """The same steps. The watch ends when the second one has ended."""
        ...

    def first(self, what: str) -> AbstractContextManager[None]:
        """Watch while this context is open, if `what` is done for the first time."""
        ...


class PlainMode:
    """torch's kernels as they are."""

    def begin(self, threads: int, device: torch.device) -> None: ...

    def watch(self) -> None: ...

    def until_the_second(self, steps: Iterator[T]) -> Iterator[T]:
        return steps

    def first(self, what: str) -> AbstractContextManager[None]:
        del what
        return nullcontext()


def _portable(report: Callable[[str], None]) -> Mode:
    from farandole.numerics.portable import KernelMode

    return KernelMode(report)


MODES: dict[str, Callable[[Callable[[str], None]], Mode]] = {"portable": _portable}


def _nobody(operator: str) -> None:
    del operator


def begin(bits: str, threads: int, device: torch.device, report: Callable[[str], None] = _nobody) -> Mode:
    """Prepare this process for `bits`, before the script's first work on `device`.

    `report` is called with the name of each operator for which the mode can't promise its results, once each.

    Raises:
        UsageError: work has begun without what `bits` needs, or this machine can't compute so.
    """
    mode = MODES[bits](report) if bits in MODES else PlainMode()
    mode.begin(threads, device)
    settings.begin(device, bits)
    return mode
