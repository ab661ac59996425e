"""A stopwatch for the parts of a worker's step, attached at existing interfaces.

    waiting for data      `Loader.measure`, between a loader and its callers
    forward and backward  the worker's shard timer, replaced by this one; without the time of adding up
    adding up, landing    the loop's gradients, replaced by `TimedGradients`
    waiting for the sum   from the last backward pass to the end of the round, which the loop reports to the shard timer
    the update            hooks on the replicated optimizers

Without a bench none of this exists, and no code checks for it. It reads the clock twice for each parameter and
micro-batch. On an accelerator it measures the thread that launches the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from farandole.bench.terms import StepSeconds
from farandole.collective.arena import Memory
from farandole.collective.codec import NONE, Codec
from farandole.data.loader import Key, Loader
from farandole.training.gradients import Gradients, ShardTotals, StepTotals, Tell
from farandole.training.replica import Replica
from farandole.worker.timing import ShardTimer

clock = time.perf_counter


class Stopwatch(ShardTimer):
    """Times the steps of one worker, one after the other. Their micro-batches come from `loader`. In seconds."""

    def __init__(self, loader: Loader, objects: Iterable[object]) -> None:
        super().__init__()
        loader.measure(self)
        for thing in objects:
            if isinstance(thing, torch.optim.Optimizer):
                thing.register_step_pre_hook(self._update_begins)
                thing.register_step_post_hook(self._update_ends)
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._data = self._inner = self._waiting = self._update = self.folding = self.landing = 0.0
        self._step_began = self._opened = self._closed = self._updates = clock()

    def end(self) -> StepSeconds:
        """Return the times of the step, which has ended."""
        return StepSeconds(
            step=clock() - self._step_began, data=self._data, compute=self._inner - self.folding, folding=self.folding,
            waiting=self._waiting, landing=self.landing, update=self._update,
        )  # fmt: skip

    def fetch(self, key: Key, direct: Callable[[Key], Any]) -> Any:
        began = clock()
        batch = direct(key)
        self._data += clock() - began
        return batch

    def open(self) -> None:
        super().open()
        self._opened = clock()

    def close(self) -> None:
        super().close()
        self._closed = clock()
        self._inner += self._closed - self._opened

    def step_ended(self, shards: int, of: int) -> None:
        super().step_ended(shards, of)
        self._waiting += clock() - self._closed

    def _update_begins(self, *_: Any) -> None:
        self._updates = clock()

    def _update_ends(self, *_: Any) -> None:
        self._update += clock() - self._updates


class TimedGradients(Gradients):
    """`Gradients` that report the times of their parts to `watch`."""

    def __init__(
        self, replica: Replica, *, watch: Stopwatch, memory: Memory | None = None, measures_noise: bool = False,
        codec: Codec = NONE,
    ) -> None:  # fmt: skip
        super().__init__(replica, memory=memory, measures_noise=measures_noise, codec=codec)
        self._watch = watch

    def fill(self, totals: ShardTotals) -> None:
        began, folded = clock(), self._watch.folding
        super().fill(totals)
        self._watch.folding = folded + clock() - began  # `fill` may add a gradient: its time is included once

    def close(self, tell: Tell) -> None:
        began = clock()
        super().close(tell)
        self._watch.folding += clock() - began

    def publish(self, reduced: list[torch.Tensor], window_samples: int) -> StepTotals:
        began = clock()
        result = super().publish(reduced, window_samples)
        self._watch.landing += clock() - began
        return result

    def _add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        began = clock()
        super()._add_gradient(index, gradient)
        self._watch.folding += clock() - began
