"""What an evaluation refuses: data, predictions and metrics that are not what they must be, and the wrong time for one.

Each error names what was given and what it must be.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import farandole
from farandole.errors import StepAbandoned, UsageError
from tests.support.steps import BATCH, begun, data, mlp, per_sample


@pytest.mark.parametrize(
    ("metric", "shape"),
    [(lambda logits, _: logits, r"\(8, 3\)"), (lambda logits, _: logits[:5, 0], r"\(5,\)")],
)
def test_a_metric_of_the_wrong_shape(run: farandole.Run, metric: Any, shape: str) -> None:
    model = mlp()
    begun(run, model)
    with pytest.raises(UsageError, match=rf"{shape}.*\b8\b"):
        run.evaluate(model, data(8), metric)


@pytest.mark.parametrize("metric", [lambda _, x, y: x - y, lambda x: x, lambda x, *, y: x - y])
def test_a_metric_with_other_parameters(run: farandole.Run, metric: Any) -> None:
    model = mlp()
    begun(run, model)
    with pytest.raises(UsageError, match="predict="):
        run.evaluate(model, data(8), metric)


def test_a_metric_that_gives_no_tensor(run: farandole.Run) -> None:
    model = mlp()
    begun(run, model)
    with pytest.raises(UsageError, match=r"\bfloat\b"):
        run.evaluate(model, data(8), lambda *_: 0.5)  # type: ignore[arg-type,return-value]


def test_an_evaluation_of_what_has_no_length_or_is_empty(run: farandole.Run) -> None:
    model = mlp()
    begun(run, model)
    with pytest.raises(UsageError, match=r"\bgenerator\b"):
        run.evaluate(model, (x for x in ()), per_sample)
    with pytest.raises(UsageError, match=r"\bTensorDataset\b"):
        run.evaluate(model, data(0), per_sample)


def test_an_evaluation_at_the_wrong_time(run: farandole.Run) -> None:
    model = mlp()
    with pytest.raises(UsageError, match=r"run\.evaluate.*run\.steps"):
        run.evaluate(model, data(8), per_sample)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=model)
    step = next(run.steps(loader, epochs=1))
    next(iter(step))
    with pytest.raises(StepAbandoned, match=r"run\.evaluate.*step 0"):
        run.evaluate(model, data(8), per_sample)


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.ones(6), "y": index % 3}


BATCHES: dict[str, tuple[Any, str]] = {
    "one tensor": (
        torch.ones(8, 6),
        r"\bTensor\b.*predict=",
    ),
    "three": (TensorDataset(*[torch.ones(8, 6)] * 3), r"\b3\b.*predict="),
    "named": (Named(), r"\bdict\b.*predict="),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_that_is_no_pair_needs_predict(run: farandole.Run, kind: str) -> None:
    dataset, message = BATCHES[kind]
    model = mlp()
    begun(run, model)
    with pytest.raises(UsageError, match=message):
        run.evaluate(model, dataset, per_sample)


def test_a_prediction_that_is_no_tuple(run: farandole.Run) -> None:
    model = mlp()
    begun(run, model)
    with pytest.raises(UsageError, match=r"\bpredict\b.*\bTensor\b.*\btuple\b"):
        run.evaluate(model, Named(), per_sample, predict=lambda model, batch: model(batch["x"]))
    accuracy = run.evaluate(model, Named(), per_sample, predict=lambda model, batch: (model(batch["x"]), batch["y"]))
    assert accuracy in (2 / 8, 3 / 8)
