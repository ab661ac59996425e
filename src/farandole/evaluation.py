"""Evaluations: rounds without an update, in which only two lanes are summed.

The whole data is one window. Its micro-batches are dealt out like a step's, a crash is handled like in a step; joiners
wait for the next training step, since they can't take part in the middle of a loop body.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from farandole.collective.buckets import Layout, Partials
from farandole.data.loader import Key, Loader
from farandole.data.seeding import derive, set_random_state
from farandole.errors import UsageError
from farandole.plan.batch import GlobalBatch
from farandole.plan.shards import Position, Window
from farandole.rounds import Rounds

Metric = Callable[[Any, Any], torch.Tensor]


class Evaluation:
    """Evaluates over the workers of `rounds`. Loaders are kept, one a dataset."""

    def __init__(self, rounds: Rounds, device: torch.device, seed: int) -> None:
        self._rounds = rounds
        self._device = device
        self._seed = seed
        self._loaders: dict[int, Loader] = {}
        self._sums = Partials(Layout([], lanes=2))

    def mean(
        self, model: torch.nn.Module, dataset: Any, metric: Metric, step: int, *, micro: int, **options: Any
    ) -> float:
        """See `Run.evaluate`; `step` names the random state."""
        loader = self._loaders.get(id(dataset))
        if loader is None or loader.dataset is not dataset:
            batch = GlobalBatch(max(micro, 1), micro=micro)
            loader = self._loaders[id(dataset)] = Loader(dataset, batch, seed=0, shuffle=False, **options)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad():
                return self._round(model, loader, metric, step)
        finally:
            for module, training in modes:
                module.training = training

    def _round(self, model: torch.nn.Module, loader: Loader, metric: Metric, step: int) -> float:
        rounds = self._rounds
        whole = Window(start=0, stop=loader.length, micro=loader.batch.micro)
        rounds.begin(self._sums, lambda _: whole.shards, Position(step=step), may_switch=False)
        mine = ((shard, *whole.shard(shard)) for shard in rounds.todo())
        loader.expect(Key(epoch=0, step=0, shard=shard, start=start, stop=stop) for shard, start, stop in mine)
        while True:
            rounds.sync()
            todo = rounds.todo()
            if not todo:
                if rounds.finish():
                    break
                continue
            start, stop = whole.shard(todo[0])
            batch = loader.fetch(Key(epoch=0, step=0, shard=todo[0], start=start, stop=stop))
            set_random_state(derive(self._seed, "evaluation", step, todo[0]))
            samples = stop - start - len(loader.skipped)
            total = self._total(model, batch, metric, samples) if samples else torch.zeros((), dtype=torch.float64)
            rounds.open(todo[0])
            self._sums.close(torch.stack([total, torch.tensor(samples, dtype=torch.float64)]))
            rounds.close(todo[0])
        total, samples = rounds.reduced()[0][:2].tolist()
        set_random_state(derive(self._seed, "evaluated", step))
        return total / samples if samples else math.nan

    def _total(self, model: torch.nn.Module, batch: Any, metric: Metric, samples: int) -> torch.Tensor:
        """The metric's sum over one micro-batch, one float64."""
        inputs, targets = (_to(part, self._device) for part in batch)
        values: Any = metric(model(inputs), targets)
        if not isinstance(values, torch.Tensor) or values.numel() not in (1, samples):
            found = tuple(values.shape) if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
            raise UsageError(
                f"run.evaluate: the metric gave {found} for {samples} samples; "
                f"it must give one value a sample, or their mean as one number, in a tensor"
            )
        values = values.detach().to("cpu")
        return values.double().sum() * (samples / values.numel())


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
