"""Metrics as lanes: the same bits over any workers, and the values of the references.

Every metric of the table is evaluated by several workers, each with partial sums of its own, some of whom die and have
their micro-batches computed again by others. The references are scikit-learn, and torchmetrics over all data at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measures import tc, tm
from sklearn import metrics as sk
from torch.nn import functional as F

from farandole.collective.buckets import Layout, Partials
from farandole.errors import UsageError
from farandole.metric import EXACT, LANES, number, tally
from farandole.plan.shards import Window, assign
from farandole.plan.tree import Node, combine

CPU = torch.device("cpu")
N, CLASSES = 53, 4
Arguments = tuple[torch.Tensor, ...]
Lineage = tuple[tuple[str, ...], ...]
LINEAGES: dict[str, Lineage] = {
    "one": (("a",),),
    "three": (("a", "b", "c"),),
    "more than micro-batches": (tuple(f"w{k}" for k in range(60)),),
    "five, then two die, then two": (("a", "b", "c", "d", "e"), ("a", "c", "e"), ("c",)),
}


def evaluated(metric: Any, arguments: Arguments, micro: int, lineage: Lineage, seed: int = 0) -> tuple[bytes, Any]:
    """The bits of the sums, and the result. The dead computed what was theirs, and it is lost; `seed`: in which order
    the others come to their micro-batches."""
    window = Window(start=0, stop=len(arguments[0]), micro=micro)
    nodes: dict[Node, torch.Tensor] = {}
    for mine in assign(window.shards, lineage).values():
        one = tally(metric, window.shards, CPU)
        partials = Partials(Layout([], lanes=one.lanes))
        partials.begin(window.shards)
        for shard in random.Random(seed).sample(mine, len(mine)):
            start, stop = window.shard(shard)
            lanes = torch.zeros(one.lanes, dtype=torch.float64)
            one.put(tuple(argument[start:stop] for argument in arguments), shard, stop - start, lanes)
            partials.open(shard)
            partials.close(lanes)
        assert not nodes.keys() & partials.nodes[0].keys()
        nodes |= {node: slot.flat for node, slot in partials.nodes[0].items()}
    one = tally(metric, window.shards, CPU)
    sums = combine(nodes, window.shards, lambda left, right, _last: left + right)[: one.lanes]
    return sums.numpy().tobytes(), one.result(sums, window.samples)


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
}


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("micro", [3, 8, 100])
def test_the_table(row: str, micro: int) -> None:
    make, arguments = TABLE[row]
    whole = make()
    whole.update(*arguments())
    results = {name: evaluated(make(), arguments(), micro, lineage) for name, lineage in LINEAGES.items()}
    wanted_bits, result = results["one"]
    assert {name for name, (bits, _) in results.items() if bits == wanted_bits} == set(LINEAGES)
    assert {str(value) for _, value in results.values()} == {str(result)}, "from the same sums the same result"
    torch.testing.assert_close(floats(result), floats(whole.compute()), rtol=2e-5, atol=1e-6)


def floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: floats(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [floats(one) for one in value]
    return torch.as_tensor(value).double()


def test_scikit_learn_counts_the_same() -> None:
    logits, targets = classes()
    predicted = logits.argmax(1)
    metric = tm.MetricCollection(
        {
            "accuracy": tc.MulticlassAccuracy(**MULTI, average="micro"),
            "f1": tc.MulticlassF1Score(**MULTI, average="macro"),
            "matrix": tc.MulticlassConfusionMatrix(**MULTI),
        }
    )
    _, result = evaluated(metric, (logits, targets), 5, LINEAGES["five, then two die, then two"])
    assert result["accuracy"] == pytest.approx(sk.accuracy_score(targets, predicted), rel=1e-6)
    assert result["f1"] == pytest.approx(sk.f1_score(targets, predicted, average="macro"), rel=1e-6)
    assert result["matrix"].dtype == torch.int64
    assert result["matrix"].tolist() == sk.confusion_matrix(targets, predicted).tolist()


def test_every_kind_of_reduction_follows_at_the_end() -> None:
    one, other = values()
    _, result = evaluated(Span(), (one, other), 4, LINEAGES["three"])
    assert result.tolist() == [one.max().item(), one.min().item(), 2.5, N]


# --- the same bits ----------------------------------------------------------------------------------------------------


def rough(samples: int) -> Arguments:
    """Over 20 binary orders of magnitude so that another order of additions gives other bits."""
    magnitude = torch.randint(-10, 10, (samples,), generator=drawn(11)).double().exp2()
    one = torch.randn(samples, generator=drawn(12), dtype=torch.float64) * magnitude
    return one, one + torch.randn(samples, generator=drawn(13), dtype=torch.float64)


def first(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    del other
    return one


@st.composite
def histories(draw: st.DrawFn) -> Lineage:
    workers = tuple(f"w{k}" for k in range(draw(st.integers(1, 6))))
    lineage = [workers]
    while len(lineage[-1]) > 1 and draw(st.booleans()):
        dead = draw(st.sampled_from(lineage[-1]))
        lineage.append(tuple(worker for worker in lineage[-1] if worker != dead))
    return tuple(lineage)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 24), st.integers(1, 30), histories(), st.integers(0, 99))
def test_any_history_gives_the_bits_of_a_world_of_one(samples: int, micro: int, lineage: Lineage, seed: int) -> None:
    metric = {
        "function": first,
        "errors": tm.MeanAbsoluteError(),
        "pair": tm.MetricCollection([tm.MeanAbsoluteError(), tm.MeanSquaredError()]),
        "span": Span(),
    }
    alone, _ = evaluated(metric, rough(samples), micro, LINEAGES["one"])
    assert evaluated(metric, rough(samples), micro, lineage, seed)[0] == alone


def test_rough_values_do_tell_orders_apart() -> None:
    """The evidence above is worth something only if another order of the micro-batches gives other bits."""
    turned = tuple(argument.flip(0) for argument in rough(40))
    straight = evaluated(first, rough(40), 1, LINEAGES["one"])[0]
    assert evaluated(first, turned, 1, LINEAGES["one"])[0] != straight


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_counts_are_exact_where_float32_has_long_stopped_counting() -> None:
    class Count(tm.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

        def update(self, one: torch.Tensor) -> None:
            self.count += one.sum()

        def compute(self) -> torch.Tensor:
            return self.count

    big = torch.full((4,), (1 << 50) + 1)
    assert evaluated(Count(), (big,), 1, LINEAGES["three"])[1] == 4 * ((1 << 50) + 1)
    assert evaluated(Count(), (torch.tensor([EXACT]),), 1, LINEAGES["three"])[1] == EXACT
    with pytest.raises(UsageError, match=r"Count's state 'count' has come to \d+, .* exact up to 2\*\*53.*floating"):
        evaluated(Count(), (big * 4,), 1, LINEAGES["three"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(bad: float) -> None:
    one, other = values()
    one[7] = bad
    _, result = evaluated({"f": lambda a, b: a - b, "t": tm.MeanSquaredError(), "s": Sloppy()}, (one, other), 4,
                          LINEAGES["three"])  # fmt: skip
    assert [str(value) for value in result.values()] == [str(abs(bad))] * 3


def test_the_users_metric_stays_as_it_is_and_what_it_has_seen_does_not_count() -> None:
    metric = tm.MeanSquaredError()
    metric.update(torch.zeros(3), torch.full((3,), 100.0))
    before = metric.compute()
    fresh = evaluated(tm.MeanSquaredError(), values(), 4, LINEAGES["three"])
    assert evaluated(metric, values(), 4, LINEAGES["three"]) == fresh
    assert (metric.update_count, metric.total.item(), metric.compute()) == (1, 3, before)


def test_metrics_that_agree_on_one_micro_batch_stay_two() -> None:
    """A collection lets metrics whose states come close share one from then on."""
    groups = tm.MetricCollection({"a": Nearly(1.0), "b": Nearly(1.0 + 1e-9)})
    _, result = evaluated(groups, values(), 1, LINEAGES["one"])
    assert result["b"] > result["a"]


class Nearly(tm.Metric):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.total += self.factor * (one.double() - other.double()).abs().sum()

    def compute(self) -> torch.Tensor:
        return self.total


# --- what can't be evaluated ------------------------------------------------------------------------------------------


class Growing(tm.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.seen = self.seen + one - other

    def compute(self) -> torch.Tensor:
        return self.seen


class Turning(Growing):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.tensor(0j), dist_reduce_fx="sum")


class Wide(Growing):
    """What is not summed needs lanes for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(3_000_000), dist_reduce_fx="max")


LISTS = (
    r"can't be summed over workers: its state '{}' is a list of {}; use a metric of a fixed size, such as AUROC\(thr"
)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: tc.BinaryAUROC(), "BinaryAUROC " + LISTS.format("preds", "preds")),
    "a list in a collection": (
        lambda: tm.MetricCollection([tm.MeanSquaredError(), tc.BinaryAveragePrecision()]),
        "BinaryAveragePrecision " + LISTS.format("preds", "preds"),
    ),
    "a list in a wrapper, by name": (
        lambda: {"by class": tm.ClasswiseWrapper(tc.MulticlassAUROC(**MULTI, average=None))},
        "MulticlassAUROC " + LISTS.format("preds", "preds"),
    ),
    "complex": (Turning, r"Turning can't be summed over workers: its state 'seen' is complex"),
    "changes its shape": (
        Growing,
        r"Growing's state 'seen' from \(\) to \(\d,\).*tell the metric its number of outputs",
    ),
    "a word": (lambda: "accuracy", r"metric='accuracy'\): give a function of \(outputs, targets\), a torchmetrics"),
    "a number by name": (lambda: {"accuracy": 0.5}, r"metric=0\.5\): give a function"),
    "nothing": (dict, r"metric=\{\}\): give a function"),
    "too large": (
        Wide,
        rf"Wide has 21,000,000 numbers to sum over 7 micro-batches, at most {LANES:,} can be; use a larger micro=",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_not_be_summed_says_so(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(UsageError, match=message):
        evaluated(make(), values(), 8, LINEAGES["one"])


# --- lines of metrics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5), 0.5], ids=repr)
def test_a_number_is_pythons_own(value: Any) -> None:
    assert (number("loss", value), type(number("loss", value))) == (0.5, float)
