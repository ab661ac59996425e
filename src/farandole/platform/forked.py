"""A child that a training script forks and lets run on: what it has of the run is of no use to it, and must do no harm.

The child has copies of the worker's sockets and none of its threads. As a worker it would speak in the middle of what
the worker says to its peers, whose processes Gloo then ends, or wait for ever. So in a child whatever a script may
have in hand (the run, the loop behind `run.steps`, a step), and all that these are made of, raise a UsageError,
whatever is asked of them, but for `run.device`. Each of them is `guarded` where it is made. What is of `data/` is left
out: loader processes are children, too. How such a child ends is in `script.py`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

from farandole.errors import UsageError

T = TypeVar("T")
_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
_PLAIN = ("device",)


class OfTheParent:
    """What the objects of a run become in a forked child."""

    def __getattribute__(self, name: str) -> Any:
        if name in _PLAIN or (name.startswith("__") and name.endswith("__")):
            return object.__getattribute__(self, name)
        raise _refusal(name)

    def __iter__(self) -> Iterator[Any]:
        raise _refusal("iteration")


def guarded(held: T) -> T:
    """`held`, which forked children can't use, nor what it is made of."""
    _guarded.add(held)
    return held


def _in_child() -> None:
    for held in list(_guarded):
        for part in (held, *vars(held).values()):
            house, *rooms = type(part).__module__.split(".")
            if house == "farandole" and rooms[:1] != ["data"]:
                with suppress(TypeError):  # a value without a __dict__, which does nothing
                    object.__setattr__(part, "__class__", OfTheParent)


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"{what}: this process ({os.getpid()}) was forked by a worker, and the run is that worker's alone; do in the "
        f"child only what needs nothing of the run, and end it there with os._exit or sys.exit"
    )


os.register_at_fork(after_in_child=_in_child)
