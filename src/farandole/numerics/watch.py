"""Names the operators that are not known to be portable, when they first run.

Operators are seen by a mode of torch's, which costs 10 us each. So it is on from the beginning to a worker's second
step, and in its first evaluation: what a script runs later only, or in another thread, is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode  # pyright: ignore

from farandole.numerics.known import KNOWN

T = TypeVar("T")


class Seeing(TorchDispatchMode):
    """Calls `see` with each operator that runs: its name, and the types of its floating operands but for float32."""

    def __init__(self, see: Callable[[str], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "profiler":
            self._see(" ".join((str(func), *sorted({name_of_type(x) for x in _types((*args, *kwargs.values()))}))))
        return func(*args, **kwargs)


class Watch:
    """Of one worker, in the thread that begins it. `tell` is called with what is not known, once for each.

    One that has never begun does nothing.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._seen = tell, set[str]()
        self._mode: Seeing | None = None
        self._first: set[str] | None = None  # what has been done

    def begin(self) -> None:
        if self._mode is None:
            self._first = self._first or set()
            self._mode = Seeing(self._see)
            self._mode.__enter__()

    def end(self) -> None:
        """Not yet, where a mode of the script's is within ours."""
        if self._mode is not None and _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._mode = None

    def until_the_second(self, steps: Iterator[T]) -> Iterator[T]:
        """The same steps; it ends when the second one has."""
        for number, step in enumerate(steps):
            if number > 1:
                self.end()
            yield step
        self.end()

    @contextmanager
    def first(self, what: str) -> Generator[None]:
        """On within, if it has begun before, and this is the first time that `what` is done."""
        if self._first is None or what in self._first or self._mode is not None:
            yield
            return
        self._first.add(what)
        self.begin()
        try:
            yield
        finally:
            self.end()

    def _see(self, operator: str) -> None:
        if operator not in self._seen:
            self._seen.add(operator)
            if operator not in KNOWN:
                self._tell(operator)


def name_of_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _types(operands: tuple[Any, ...]) -> Iterator[torch.dtype]:
    for x in operands:
        if isinstance(x, Tensor):
            if x.dtype is not torch.float32 and (x.is_floating_point() or x.is_complex()):
                yield x.dtype
        elif isinstance(x, list | tuple):
            yield from _types(tuple(x))  # pyright: ignore
