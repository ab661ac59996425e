"""A step of the user's own loop without farandole: plain accumulation of the same micro-batches.

It has the interface of `Step`. Its gradient is that of this worker alone, or the one of DistributedDataParallel. There
is no seeding, restoring, ordered sum, digest or agreement. It belongs to a bench and is not a step of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from farandole.bench.stopwatch import Stopwatch
from farandole.data.loader import Key, Loader
from farandole.errors import UsageError
from farandole.training.step import Step


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """The data of a step: this worker's micro-batches, and the number of samples of all workers."""

    keys: tuple[Key, ...]
    samples: int


class Way(Protocol):
    """A way to do the backward passes of steps.

    `reason`: why it can't do them, "" if it can.
    """

    reason: str

    def around(self) -> AbstractContextManager[None]:
        """Return a context for a block of steps."""
        ...

    def opens(self, *, last: bool) -> None:
        """The script gets a micro-batch. `last`: it is this worker's last one in the step."""
        ...

    def backward(self, loss: torch.Tensor, weight: float, *, last: bool) -> None:
        """Add `weight` times the gradient of `loss` to `.grad`. `last`: it is the micro-batch's last backward pass."""
        ...


class Plain:
    """Backward passes as in a script that runs in a single process."""

    reason = ""

    def around(self) -> AbstractContextManager[None]:
        return nullcontext()

    def opens(self, *, last: bool) -> None:
        del last

    def backward(self, loss: torch.Tensor, weight: float, *, last: bool) -> None:
        del last
        loss.backward(torch.full_like(loss, weight))


class PlainStep:
    """A step with the interface of `Step`. Its facts are those of the step `before`, except that it ends no epoch."""

    def __init__(
        self, before: Step, ahead: Ahead, way: Way, *, loader: Loader, parameters: Sequence[torch.nn.Parameter],
        watch: Stopwatch,
    ) -> None:  # fmt: skip
        self.number, self.epoch, self.view = before.number, before.epoch, before.view
        self.base_steps = before.base_steps
        self.samples = ahead.samples
        self.ends_epoch, self.ended = False, False
        self.left_out = self.skipped = 0
        self._ahead, self._way, self._loader, self._watch = ahead, way, loader, watch
        self._parameters = parameters
        self._own_samples = sum(key.stop - key.start for key in ahead.keys)
        self._used = 0  # samples of the current micro-batch
        self._losses: list[tuple[torch.Tensor, int]] = []

    @property
    def loss(self) -> float:
        """The mean loss over this worker's micro-batches alone."""
        used = sum(samples for _, samples in self._losses)
        return sum(float(loss) * samples for loss, samples in self._losses) / max(used, 1)

    @property
    def rows(self) -> slice:
        """A slice with as many rows as the current micro-batch. Which rows these are does not matter in a bench."""
        return slice(0, self._used)

    def __iter__(self) -> Iterator[Any]:
        for parameter in self._parameters:
            parameter.grad = None
        for key in self._ahead.keys:
            batch = self._loader.fetch(key)
            self._used = key.stop - key.start - len(self._loader.skipped)
            if self._used == 0:
                continue
            self._way.opens(last=key == self._ahead.keys[-1])
            self._watch.open()
            yield batch
            if self._used:
                raise UsageError(
                    f"step {self.number}: a micro-batch was taken but not finished; call step.backward(loss) once for "
                    f"each micro-batch (with last=False for all but the last of several)"
                )
        self.ended = True

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        self._way.backward(loss, self._used / self._own_samples, last=last)
        if last:
            self._losses.append((loss.detach(), self._used))
            self._used = 0
            self._watch.close()
