"""Metrics of every kind with arguments to give them, and their evaluation by several workers, of whom some die."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from farandole.collective.buckets import Layout, Partials
from farandole.evaluation.metrics import contents, result, tally
from farandole.plan.shards import Node, Window, assign, combine
from tests.support.measures import tc, td, tm

CPU = torch.device("cpu")
N, CLASSES = 53, 4
Arguments = tuple[Sequence[Any], ...]  # of each sample an entry: tensors, or lists
Lineage = tuple[tuple[str, ...], ...]
LINEAGES: dict[str, Lineage] = {
    "one": (("a",),),
    "three": (("a", "b", "c"),),
    "more than micro-batches": (tuple(f"w{k}" for k in range(60)),),
    "five, then two die, then two": (("a", "b", "c", "d", "e"), ("a", "c", "e"), ("c",)),
}


def evaluated(metric: Any, arguments: Arguments, micro: int, lineage: Lineage, seed: int = 0) -> tuple[bytes, Any]:
    """The bits of the sums, and the result. The dead computed what was theirs, and it is lost; `seed`: in which order
    the others come to their micro-batches. Between the two rounds that lists take, one more dies."""
    window = Window(start=0, stop=len(arguments[0]), micro=micro)
    tallies = {worker: tally(metric, window.shards, CPU) for worker in lineage[-1]}
    size = tally(metric, window.shards, CPU).lanes

    def make(worker: str, shard: int, lanes: torch.Tensor) -> None:
        start, stop = window.shard(shard)
        tallies[worker].put(tuple(argument[start:stop] for argument in arguments), shard, stop - start, lanes)

    sums = summed(window.shards, lineage, size, make, seed)
    survivors = (lineage[-1][1:],) if len(lineage[-1]) > 1 else ()
    more = {worker: contents(tallies[worker], sums, metric) for worker in (*lineage, *survivors)[-1]}
    bits = sums.numpy().tobytes()
    for worker, one in more.items():
        if one is None:
            break

        def again(worker: str, shard: int, lanes: torch.Tensor) -> None:
            one = more[worker]
            assert one is not None
            if not one.has(shard):
                make(worker, shard, torch.zeros(size, dtype=torch.float64))
            one.put(shard, lanes)

        told = summed(window.shards, (*lineage, *survivors), one.lanes, again, seed + 1)
        one.fill(told)
        bits += told.numpy().tobytes()
        return bits, result(tallies[worker], sums, window.samples)
    return bits, result(tally(metric, window.shards, CPU), sums, window.samples)


def summed(
    shards: int, lineage: Lineage, size: int, make: Callable[[str, int, torch.Tensor], None], seed: int
) -> torch.Tensor:
    """One round: `size` lanes, added up as the workers of the last view would."""
    nodes: dict[Node, torch.Tensor] = {}
    for worker, mine in assign(shards, lineage).items():
        partials = Partials(Layout([], lanes=size))
        partials.begin(shards)
        for shard in random.Random(seed).sample(mine, len(mine)):
            lanes = torch.zeros(size, dtype=torch.float64)
            make(worker, shard, lanes)
            partials.open(shard)
            partials.close(lanes)
        assert not nodes.keys() & partials.nodes[0].keys()
        nodes |= {node: slot.flat for node, slot in partials.nodes[0].items()}
    return combine(nodes, shards, lambda left, right, _last: left + right)[:size]


# --- what is evaluated ------------------------------------------------------------------------------------------------


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes(samples: int = N) -> Arguments:
    """Logits and targets, of which the logits are right more often than not."""
    targets = torch.randint(0, CLASSES, (samples,), generator=drawn(1))
    return torch.randn(samples, CLASSES, generator=drawn(2)) + F.one_hot(targets, CLASSES), targets


def probabilities() -> Arguments:
    """For metrics that take a batch for logits by its values, and might take one micro-batch so and another not."""
    logits, targets = classes()
    return logits.softmax(1), targets


def values() -> Arguments:
    truth = torch.randn(N, generator=drawn(3))
    return truth + 0.3 * torch.randn(N, generator=drawn(4)), truth


def pictures() -> Arguments:
    truth = torch.rand(N, 1, 6, 6, generator=drawn(5))
    return (truth + 0.1 * torch.rand(N, 1, 6, 6, generator=drawn(6))).clamp(0, 1), truth


def chances() -> Arguments:
    return torch.rand(N, generator=drawn(14)), torch.randint(0, 2, (N,), generator=drawn(15))


def boxes() -> Arguments:
    """Of each picture, what a detector of two classes found, and what is there."""
    found, there = [], []
    for k in range(N):
        corner = 10 * torch.rand(k % 4, 2, generator=drawn(k))
        truth = torch.cat([corner, corner + 10], 1)
        moved = torch.cat([truth + 3 * torch.rand(len(truth), 4, generator=drawn(100 + k)), truth[:1] + 50])
        scores = torch.rand(len(moved), generator=drawn(200 + k))
        found.append({"boxes": moved, "scores": scores, "labels": torch.arange(len(moved)) % 2})
        there.append({"boxes": truth, "labels": torch.arange(len(truth)) % 2})
    return found, there


def masks() -> Arguments:
    return torch.randn(N, 3, 5, 5, generator=drawn(7)), torch.randint(0, 3, (N, 5, 5), generator=drawn(8))


def texts() -> Arguments:
    return torch.randn(N, 7, 11, generator=drawn(9)), torch.randint(0, 11, (N, 7), generator=drawn(10))


class Span(tm.Metric):
    """States of every reduction that torchmetrics knows for tensors, its own and the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("high", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("low", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("most", torch.tensor(0), dist_reduce_fx=lambda stacked: stacked.sum(0))
        self.updates = 0

    def update(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.updates += 1
        assert self.updates == 1, "what is no state must not reach the next micro-batch"
        self.high = torch.maximum(self.high, one.max())
        self.low = torch.minimum(self.low, one.min())
        self.mean = torch.tensor(2.5)
        self.most = self.most + other.numel()

    def compute(self) -> torch.Tensor:
        return torch.stack([self.high, self.low, self.mean, self.most])


class Kinds(tm.Metric):
    """Lists of several types and shapes, of which one stays empty."""

    TYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.int64)

    def __init__(self) -> None:
        super().__init__()
        for name in ("rows", "types", "none"):
            self.add_state(name, [], dist_reduce_fx=None)

    def update(self, one: torch.Tensor, other: torch.Tensor) -> None:
        for a, b in zip(one, other, strict=True):
            self.rows.append(torch.stack([a, b]).expand(int(a.abs() * 3), 2))
        self.types += [(100 * one).to(kind) for kind in self.TYPES]

    def compute(self) -> torch.Tensor:
        assert not self.none
        assert [each.dtype for each in self.types[: len(self.TYPES)]] == list(self.TYPES)
        assert all(row.shape[1:] == (2,) for row in self.rows)
        both = [each.double().sum() for each in (*self.rows, *self.types)]
        return torch.stack([torch.cat(self.rows).double().sum() / len(self.rows), torch.stack(both).sum()])


class Sloppy(tm.Metric):
    """Begins with a whole number and goes on with fractions, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.total = self.total + (one - other).abs().sum()

    def compute(self) -> torch.Tensor:
        return self.total


MULTI: dict[str, Any] = {"num_classes": CLASSES}
TABLE: dict[str, tuple[Callable[[], Any], Callable[[], Arguments]]] = {
    "accuracy": (lambda: tc.MulticlassAccuracy(**MULTI, average="micro"), classes),
    "macro F1": (lambda: tc.MulticlassF1Score(**MULTI, average="macro"), classes),
    "top 2": (lambda: tc.MulticlassAccuracy(**MULTI, top_k=2), classes),
    "confusion matrix": (lambda: tc.MulticlassConfusionMatrix(**MULTI), classes),
    "binned AUROC": (lambda: tc.MulticlassAUROC(**MULTI, thresholds=50), probabilities),
    "binned ROC, a tuple": (lambda: tc.MulticlassROC(**MULTI, thresholds=5), probabilities),
    "a number a class": (lambda: tm.ClasswiseWrapper(tc.MulticlassRecall(**MULTI, average=None)), classes),
    "an expression": (
        lambda: tc.MulticlassPrecision(**MULTI) * 2 + tc.MulticlassRecall(**MULTI),
        classes,
    ),
    "collection": (
        lambda: tm.MetricCollection(
            {"f1": tc.MulticlassF1Score(**MULTI), "rate": tc.MulticlassPrecision(**MULTI)}, prefix="test_"
        ),
        classes,
    ),
    "collection without groups": (
        lambda: tm.MetricCollection([tm.MeanSquaredError(), tm.MeanAbsoluteError()], compute_groups=False),
        values,
    ),
    "mean squared error": (tm.MeanSquaredError, values),
    "R2": (tm.R2Score, values),
    "Pearson, states that are not reduced": (tm.PearsonCorrCoef, values),
    "concordance": (tm.ConcordanceCorrCoef, values),
    "PSNR, a constant averaged": (lambda: tm.image.PeakSignalNoiseRatio(data_range=1.0), pictures),
    "intersection over union": (lambda: tm.JaccardIndex(task="multiclass", num_classes=3), masks),
    "perplexity": (tm.text.Perplexity, texts),
    "whole number that became a fraction": (Sloppy, values),
    "exact AUROC": (lambda: tc.MulticlassAUROC(**MULTI), probabilities),
    "exact curve": (lambda: tc.BinaryPrecisionRecallCurve(), chances),
    "a list in a wrapper": (lambda: tm.ClasswiseWrapper(tc.MulticlassAUROC(**MULTI, average=None)), probabilities),
    "a list beside sums": (lambda: tm.MetricCollection([tm.MeanSquaredError(), tm.SpearmanCorrCoef()]), values),
    "mean average precision": (td.MeanAveragePrecision, boxes),
    "lists of every kind": (Kinds, values),
}
