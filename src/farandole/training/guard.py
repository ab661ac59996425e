"""Refuses updates of replicated parameters that would be no update, or each worker's own.

    within a step    `.grad` is None until the inner loop has ended: an `optimizer.step()` there does nothing at all, or
                     decays weights before the gradient is known
    not replicated   joiners do not get an optimizer's rates and moments if it was not handed to `run.replicate`, and go
                     on with others

torch calls the hook before any optimizer's `step`, also when a `GradScaler` or a wrapper does it. A wrapper that was
handed to `run.replicate` answers for the optimizers that it holds. A scheduler holds its optimizer without its state.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole.errors import NotReplicated, UsageError
from farandole.training.progress import Progress
from farandole.training.replica import Replica

DEPTH = 3  # of attributes and containers of a wrapper


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


@functools.cache
def _watch() -> None:
    """One hook, for good: a guard's own would be removed when the guard is collected, and that may be while torch goes
    through its hooks.
    """
    register_optimizer_step_pre_hook(_before)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    for guard in tuple(_guards):
        guard.check(optimizer)


class Guard:
    """Of one run's loop, for as long as it is kept.

    `entered()`: its first step has begun; `within()`: the inner loop of the step in hand has not ended.
    """

    def __init__(
        self, replica: Replica, progress: Progress, *, entered: Callable[[], bool], within: Callable[[], bool]
    ) -> None:
        self._replica = replica
        self._progress = progress
        self._entered = entered
        self._within = within
        _guards.add(self)
        _watch()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Before its `step`.

        Raises:
            UsageError: the step's inner loop has not ended.
            NotReplicated: the optimizer was not handed to `run.replicate`, or not all of its parameters.
        """
        ours = [id(p) in self._replica.ids for group in optimizer.param_groups for p in group["params"]]
        if not any(ours) or not self._entered():
            return
        kind, step = type(optimizer).__name__, self._progress.position.step
        if self._within():
            raise UsageError(
                f"step {step}: {kind}.step() before its inner loop has ended, where no parameter has its "
                f"gradient yet; call it once a step, after `for micro_batch in step: ...`"
            )
        over = self._progress.following is None  # what the script does after its loop is its own business
        if not over and not all(ours):
            raise NotReplicated(
                f"step {step}: {kind}.step() over replicated parameters and {ours.count(False)} that are in none of "
                f"the replicated modules: they were replaced, or never handed in; put those of the modules into its "
                f"param_groups"
            )
        if not over and not any(_holds(thing, optimizer, DEPTH) for thing in self._replica.objects.values()):
            raise NotReplicated(
                f"step {step}: {kind}.step() over replicated parameters by an optimizer that is not replicated: "
                f"joining workers would not get its state; call run.replicate(..., optimizer=optimizer)"
            )


def _holds(thing: Any, optimizer: torch.optim.Optimizer, depth: int) -> bool:
    if thing is optimizer or getattr(thing, "param_groups", None) is optimizer.param_groups:
        return True
    if depth == 0 or isinstance(thing, torch.nn.Module | LRScheduler | torch.Tensor | str | bytes | int | float):
        return False
    inner: Iterable[Any]
    if isinstance(thing, list | tuple):
        inner = thing  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(thing, dict):
        inner = thing.values()  # pyright: ignore[reportUnknownVariableType]
    else:
        inner = getattr(thing, "__dict__", {}).values()
    return any(_holds(value, optimizer, depth - 1) for value in inner)  # pyright: ignore[reportUnknownVariableType]
