"""Metrics as lanes: the same bits over any workers, and the values of the references.

Every metric of the table is evaluated by several workers, each with partial sums of its own, some of whom die and have
their micro-batches computed again by others. The references are scikit-learn, and torchmetrics over all data at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from farandole.errors import UsageError
from farandole.evaluation.metrics import EXACT, number
from tests.support.measures import tc, tm
from tests.support.metrics import (
    LINEAGES,
    MULTI,
    TABLE,
    Arguments,
    Lineage,
    N,
    Sloppy,
    Span,
    classes,
    drawn,
    evaluated,
    values,
)


@pytest.mark.filterwarnings("ignore:Metric .* will save all targets")
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
    with pytest.raises(UsageError, match=r"Count\b.*'count'.*\d{16}.*2\*\*53"):
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


# --- lines of metrics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5), 0.5], ids=repr)
def test_a_number_is_pythons_own(value: Any) -> None:
    assert (number("loss", value), type(number("loss", value))) == (0.5, float)
