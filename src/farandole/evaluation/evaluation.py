"""Evaluations: rounds without an update, in which only lanes are summed.

The whole data is one window. Its micro-batches are dealt out like a step's, a crash is handled like in a step: the dead
worker's micro-batches are computed by the others, from whatever they had in hand. Who has notice stays until the end;
joiners wait for the next training step, since they can't take part in the middle of a loop body. So each sample counts
once, and the result has the same bits on all workers and for any number of them. What is summed says
`evaluation/metrics.py`.

    run.evaluate(model, test_set, lambda logits, y: logits.argmax(1) == y)                     # accuracy, a float
    run.evaluate(model, test_set, {"accuracy": correct, "loss": F.cross_entropy})               # one pass, a dict
    run.evaluate(model, test_set, torchmetrics.F1Score("multiclass", num_classes=10, average="macro"))

`predict` is for batches that are not (inputs, targets). It gives what the metrics take, whatever that is:

    # A language model, batches of tokens, shape (micro-batch, length); `loss_of` gives a mean over all of them.
    loss = run.evaluate(model, texts, loss_of, predict=lambda model, tokens: (model(tokens[:, :-1]), tokens[:, 1:]))

    # Detection: lists of pictures and of boxes, which `match(model, batch)` turns into three counts a picture.
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
Make = Callable[[int, torch.Tensor], int]  # one micro-batch into its zeroed lanes; how many samples it had
KEPT = 4  # datasets, such as the test set, part of the training set, ...; one made for each evaluation is not gathered
_SAMPLES, _FIRST = 0, 1  # lanes; then the metric's


class Evaluation:
    """Evaluates over the workers of `rounds`. Keeps the loaders of a few datasets, and partial sums of each size."""

    def __init__(
        self, rounds: Rounds, device: torch.device, seed: int, on_deaths: Callable[[str], None] | None = None
    ) -> None:
        self._rounds = rounds
        self._device = device
        self._seed = seed
        self._on_deaths = on_deaths
        self._loaders: dict[int, tuple[dict[str, Any], Loader]] = {}  # by id; the last used is last
        self._sums: dict[int, Partials] = {}

    def result(
        self, model: torch.nn.Module, dataset: Any, metric: Any, step: int, *, predict: Predict | None, micro: int,
        **options: Any,
    ) -> Any:  # fmt: skip
        """See `Run.evaluate`; `step` names the random state."""
        if options.get("drop_last"):
            raise UsageError(
                "run.evaluate(drop_last=True): an evaluation counts every sample; hand in a Subset instead"
            )
        loader = self._loader(dataset, micro, options)
        window = Window(start=0, stop=loader.length, micro=loader.batch.micro)
        wanted = tally(metric, window.shards, self._device)

        def make(shard: int, lanes: torch.Tensor) -> int:
            start, stop = window.shard(shard)
            self._rounds.meter.enter("data")
            batch = loader.fetch(Key(epoch=0, step=0, shard=shard, start=start, stop=stop))
            self._rounds.computes(shard)
            samples = stop - start - len(loader.skipped)
            set_random_state(derive(self._seed, "evaluation", step, shard))
            if samples:
                wanted.put(self._given(model, batch, predict), shard, samples, lanes)
            return samples

        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad():
                samples, sums = self._round(loader, window, wanted.lanes, make, range(window.shards), step)
                self._gather(loader, window, contents(wanted, sums, metric), wanted.lanes, make, step)
        finally:
            for module, training in modes:
                module.training = training
        skips = options.get("on_bad_sample") == "skip"
        assert samples == window.samples or skips, f"{samples} samples of {window.samples} were counted"
        set_random_state(derive(self._seed, "evaluated", step))
        return result(wanted, sums, samples)

    def _gather(
        self, loader: Loader, window: Window, more: ListContents | None, lanes: int, make: Make, step: int
    ) -> None:
        """The second round, if there is need of one: what was kept is put, what went with a worker is made anew."""
        if more is None:
            return

        def put(shard: int, into: torch.Tensor) -> int:
            if not more.has(shard):
                make(shard, torch.zeros(lanes, dtype=torch.float64))
            more.put(shard, into)
            return 0

        lost = [shard for shard in range(window.shards) if not more.has(shard)]
        more.fill(self._round(loader, window, more.lanes, put, lost, step)[1])
        self._sums.pop(_FIRST + more.lanes, None)  # as many will hardly be wanted again

    def _loader(self, dataset: Any, micro: int, options: dict[str, Any]) -> Loader:
        """The one of the last time, with its processes, if the same is asked for."""
        known, loader = self._loaders.pop(id(dataset), ({}, None))
        asked = {"micro": micro, **options}
        if loader is None or loader.dataset is not dataset or known != asked:
            if loader is not None:
                loader.close()
            policy = GlobalBatch(max(micro, 1), micro=micro)
            loader = Loader(dataset, policy, seed=0, shuffle=False, on_deaths=self._on_deaths, **options)
        self._loaders[id(dataset)] = asked, loader
        if len(self._loaders) > KEPT:
            self._loaders.pop(next(iter(self._loaders)))[1].close()
        return loader

    def _round(
        self, loader: Loader, window: Window, size: int, make: Make, fetched: Container[int], step: int
    ) -> tuple[int, torch.Tensor]:
        """The samples, and `size` lanes, summed over all micro-batches. Of those, `fetched` will ask the loader."""
        rounds = self._rounds
        count = _FIRST + size
        partials = self._sums.get(count) or self._sums.setdefault(count, Partials(Layout([], lanes=count)))
        lanes = torch.zeros(count, dtype=torch.float64)
        what = f"evaluate over {window.samples:,} samples in micro-batches of {window.micro}, {size:,} lanes"
        rounds.begin(task(partials, lambda _: window.shards, step, what))
        mine = ((shard, *window.shard(shard)) for shard in rounds.todo() if shard in fetched)
        loader.expect(Key(epoch=0, step=0, shard=shard, start=start, stop=stop) for shard, start, stop in mine)
        while True:
            rounds.sync()
            todo = rounds.todo()
            if not todo:
                if rounds.finish():
                    sums = rounds.reduced()[0]
                    return int(sums[_SAMPLES]), sums[_FIRST:count]
                continue
            lanes.zero_()
            lanes[_SAMPLES] = make(todo[0], lanes[_FIRST:])
            rounds.open(todo[0])
            partials.close(lanes)
            rounds.close(todo[0])

    def _given(self, model: torch.nn.Module, batch: Any, predict: Predict | None) -> tuple[Any, ...]:
        """The metric's arguments for one micro-batch."""
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device), batch)
        if predict is not None:
            given: Any = predict(model, batch)
            if not isinstance(given, tuple):
                raise UsageError(
                    f"run.evaluate: predict gave a {type(given).__name__}; it must give a tuple of what the metric "
                    f"takes, such as (outputs, targets)"
                )
            return given
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            found = f"{len(batch)} parts" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
            raise UsageError(
                f"run.evaluate: a batch of this dataset is {found}, not (inputs, targets); "
                f"add predict=lambda model, batch: (outputs, targets)"
            )
        inputs, targets = batch
        return model(inputs), targets
