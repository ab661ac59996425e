"""Evaluations: rounds without an update, which sum only lanes.

The whole dataset is one window. Its micro-batches are assigned like a step's, and a crash is handled like in a step:
the other workers compute the dead worker's micro-batches again. A worker with a preemption notice stays until the end.
Joiners wait for the next training step, because they can't take part in the middle of a loop body. So each sample
counts once, and the result has the same bits on all workers and for any number of workers. `evaluation/metrics.py`
defines the lanes.

    run.evaluate(model, test_set, lambda logits, y: logits.argmax(1) == y)                     # accuracy, a float
    run.evaluate(model, test_set, {"accuracy": correct, "loss": F.cross_entropy})               # one pass, a dict
    run.evaluate(model, test_set, torchmetrics.F1Score("multiclass", num_classes=10, average="macro"))

`predict` is for batches that are not (inputs, targets). It returns the arguments of the metrics:

    # A language model, padded texts of shape (micro-batch, length), with -100 as padding. The metric returns the mean
    # over the micro-batch's tokens and their number, so the result is the mean over all tokens.
    def loss_of(logits, tokens):
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), (tokens != -100).sum()

    loss = run.evaluate(model, texts, loss_of, predict=lambda model, tokens: (model(tokens[:, :-1]), tokens[:, 1:]))

    # Detection: lists of pictures and of boxes. `match(model, batch)` returns three counts per picture.
    counts = {"hits": lambda hits, *_: hits, "boxes": lambda *all: all[1], "truths": lambda *all: all[2]}
    mean = run.evaluate(model, pictures, counts, predict=match, collate_fn=lists)
    recall, precision = mean["hits"] / mean["truths"], mean["hits"] / mean["boxes"]
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from farandole.collective.buckets import Layout, Partials
from farandole.data.loader import Key, Loader
from farandole.data.order import derive, set_random_state
from farandole.errors import UsageError
from farandole.evaluation.metrics import ListContents, contents, result, tally
from farandole.plan.batch import GlobalBatch
from farandole.plan.shards import Window
from farandole.worker.rounds import Rounds, task

Predict = Callable[[Any, Any], tuple[Any, ...]]
Make = Callable[[int, torch.Tensor], int]  # fills the zeroed lanes of one micro-batch; returns its number of samples
KEPT_LOADERS = (
    4  # datasets whose loaders are kept; a script that makes a new dataset for each evaluation does not fill memory
)
_SAMPLES, _FIRST = 0, 1  # lanes; then the metric's


class Evaluation:
    """Evaluates over the workers of `rounds`. It keeps the loaders of a few datasets, and partial sums of each size."""

    def __init__(
        self, rounds: Rounds, device: torch.device, seed: int, on_deaths: Callable[[str], None] | None = None
    ) -> None:
        self._rounds = rounds
        self._device = device
        self._seed = seed
        self._on_deaths = on_deaths
        self._loaders: dict[int, tuple[dict[str, Any], Loader]] = {}  # by the dataset's id; the last used is last
        self._sums: dict[int, Partials] = {}

    def result(
        self, model: torch.nn.Module, dataset: Any, metric: Any, step: int, *, predict: Predict | None, micro: int,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Return the result of an evaluation. See `Run.evaluate`; `step` selects the random state."""
        if options.get("drop_last"):
            raise UsageError("run.evaluate(drop_last=True): an evaluation counts every sample; pass a Subset instead")
        loader = self._loader(dataset, micro, options)
        if loader.endless:
            raise UsageError(
                f"run.evaluate({type(dataset).__name__}): it has no len(); give the number of its samples, "
                f"run.evaluate(..., samples=N)"
            )
        window = Window(start=0, stop=loader.length, micro=loader.batch.micro)
        totals = tally(metric, window.shards, self._device)

        def make(shard: int, lanes: torch.Tensor) -> int:
            start, stop = window.shard(shard)
            self._rounds.meter.enter("data")
            batch = loader.fetch(Key(epoch=0, step=0, shard=shard, start=start, stop=stop))
            self._rounds.computes(shard)
            samples = stop - start - len(loader.skipped)
            set_random_state(derive(self._seed, "evaluation", step, shard))
            if samples:
                totals.put(self._arguments(model, batch, predict), shard, samples, lanes)
            return samples

        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad():
                samples, sums = self._round(loader, window, totals.lanes, make, range(window.shards), step)
                self._gather(loader, window, contents(totals, sums, metric), totals.lanes, make, step)
        finally:
            for module, training in modes:
                module.training = training
        skips = options.get("on_bad_sample") == "skip"
        assert samples == window.samples or skips, f"{samples} samples of {window.samples} were counted"
        set_random_state(derive(self._seed, "evaluated", step))
        return result(totals, sums, samples)

    def _gather(
        self, loader: Loader, window: Window, more: ListContents | None, lanes: int, make: Make, step: int
    ) -> None:
        """Run the second round, if it is necessary: put kept contents, and compute those of lost workers again."""
        if more is None:
            return

        def put(shard: int, lanes_of_shard: torch.Tensor) -> int:
            if not more.has(shard):
                make(shard, torch.zeros(lanes, dtype=torch.float64))
            more.put(shard, lanes_of_shard)
            return 0

        lost_shards = [shard for shard in range(window.shards) if not more.has(shard)]
        more.fill(self._round(loader, window, more.lanes, put, lost_shards, step)[1])
        self._sums.pop(_FIRST + more.lanes, None)  # this size will hardly be needed again

    def _loader(self, dataset: Any, micro: int, options: dict[str, Any]) -> Loader:
        """Return the loader of the last evaluation, with its processes, if the arguments are equal; else a new one."""
        previous, loader = self._loaders.pop(id(dataset), ({}, None))
        requested = {"micro": micro, **options}
        if loader is None or loader.dataset is not dataset or previous != requested:
            if loader is not None:
                loader.close()
            policy = GlobalBatch(max(micro, 1), micro=micro)
            loader = Loader(dataset, policy, seed=0, shuffle=False, on_deaths=self._on_deaths, **options)
        self._loaders[id(dataset)] = requested, loader
        if len(self._loaders) > KEPT_LOADERS:
            self._loaders.pop(next(iter(self._loaders)))[1].close()
        return loader

    def _round(
        self, loader: Loader, window: Window, size: int, make: Make, fetched: Container[int], step: int
    ) -> tuple[int, torch.Tensor]:
        """Return the number of samples, and `size` lanes, summed over all micro-batches.

        `fetched`: the micro-batches that need data of the loader.
        """
        rounds = self._rounds
        count = _FIRST + size
        partials = self._sums.get(count) or self._sums.setdefault(count, Partials(Layout([], lanes=count)))
        lanes = torch.zeros(count, dtype=torch.float64)
        task_name = f"evaluate over {window.samples:,} samples in micro-batches of {window.micro}, {size:,} lanes"
        rounds.begin(task(partials, lambda _: window.shards, step, task_name))
        mine = ((shard, *window.shard(shard)) for shard in rounds.todo() if shard in fetched)
        loader.expect(Key(epoch=0, step=0, shard=shard, start=start, stop=stop) for shard, start, stop in mine)
        while True:
            rounds.sync()
            todo = rounds.todo()
            if not todo:
                if rounds.wait_for_round_end():
                    sums = rounds.reduced()[0]
                    return int(sums[_SAMPLES]), sums[_FIRST:count]
                continue
            lanes.zero_()
            lanes[_SAMPLES] = make(todo[0], lanes[_FIRST:])
            rounds.open(todo[0])
            partials.close(lanes)
            rounds.close(todo[0])

    def _arguments(self, model: torch.nn.Module, batch: Any, predict: Predict | None) -> tuple[Any, ...]:
        """Return the metric's arguments for one micro-batch."""
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device), batch)
        if predict is not None:
            arguments: Any = predict(model, batch)
            if not isinstance(arguments, tuple):
                raise UsageError(
                    f"run.evaluate: predict returned a {type(arguments).__name__}; it must return a tuple of the "
                    f"metric's arguments, such as (outputs, targets)"
                )
            return arguments
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            form = f"{len(batch)} parts" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
            raise UsageError(
                f"run.evaluate: a batch of this dataset is {form}, not (inputs, targets); "
                f"add predict=lambda model, batch: (outputs, targets)"
            )
        inputs, targets = batch
        return model(inputs), targets
