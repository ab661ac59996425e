"""The modes of `--bits`: a worker computes with torch's own kernels, or with other kernels in their place.

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
    """The actions of a mode in the thread of the training script."""

    def begin(self, threads: int, device: torch.device) -> None:
        """Replace kernels for this process. Raises UsageError if that is not possible."""

    def watch(self) -> None:
        """Check the operators that run, from now on."""

    def end(self) -> None:
        """Stop the check."""

    def until_the_second(self, steps: Iterator[T]) -> Iterator[T]:
        """Return the same steps. The check of operators ends when the second step has ended."""
        ...

    def first(self, operation: str) -> AbstractContextManager[None]:
        """Check the operators while this context is open, if it is the first one for `operation`."""
        ...


class PlainMode:
    """The mode with torch's own kernels."""

    def begin(self, threads: int, device: torch.device) -> None: ...

    def watch(self) -> None: ...

    def end(self) -> None: ...

    def until_the_second(self, steps: Iterator[T]) -> Iterator[T]:
        return steps

    def first(self, operation: str) -> AbstractContextManager[None]:
        del operation
        return nullcontext()


def _portable(report: Callable[[str], None]) -> Mode:
    from farandole.numerics.portable import KernelMode

    return KernelMode(report)


MODES: dict[str, Callable[[Callable[[str], None]], Mode]] = {"portable": _portable}


def _no_report(operator: str) -> None:
    del operator


def begin(bits: str, threads: int, device: torch.device, report: Callable[[str], None] = _no_report) -> Mode:
    """Prepare this process for `bits`, before the script's first work on `device`.

    `report` is called once with the name of each operator whose results the mode can't guarantee.

    Raises:
        UsageError: work has begun without the settings that `bits` needs, or this machine does not support the mode.
    """
    mode = MODES[bits](report) if bits in MODES else PlainMode()
    mode.begin(threads, device)
    settings.begin(device, bits)
    return mode
