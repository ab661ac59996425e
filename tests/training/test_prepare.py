"""`run.prepare`: one call in place of `replicate`, `loader` and moving to the device."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import farandole
from farandole.data.loader import Loader
from farandole.errors import UsageError
from farandole.plan.batch import PerWorkerBatch
from tests.support.steps import BATCH, data, mlp, per_sample


def test_a_loop_in_the_manner_of_accelerate(run: farandole.Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given = DataLoader(data(), batch_size=BATCH, shuffle=True)
    kept = (model, optimizer, schedule)
    model, optimizer, loader, schedule = run.prepare(model, optimizer, given, schedule, micro=4, best=0.0)
    assert (model, optimizer, schedule) == kept
    assert isinstance(loader, Loader)
    assert (loader.batch, loader.device) == (farandole.GlobalBatch(BATCH, micro=4), run.device)
    for step in run.steps(loader, epochs=2):
        for x, y in step:
            assert x.device == run.device
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        schedule.step()
        run.state.best = max(run.state.best, run.evaluate(model, DataLoader(data(), batch_size=5), per_sample))
    assert set(run._loop.replica.objects) == {"model", "optimizer", "schedule", "state"}  # type: ignore[union-attr]


def test_one_object_and_a_batch_of_ones_own(run: farandole.Run) -> None:
    model = mlp()
    batch = PerWorkerBatch(8, micro=4)
    assert run.prepare(model) is model
    loader = run.loader(DataLoader(data(), batch_size=BATCH), batch)
    assert (loader.batch, loader.device) == (batch, None)


def test_what_it_refuses(run: farandole.Run) -> None:
    model = mlp()
    for wrong in (
        lambda: run.prepare(model, DataLoader(data(), batch_size=BATCH)),  # no micro
        lambda: run.prepare(model, object()),
        lambda: run.prepare(DataLoader(data(), batch_size=BATCH), micro=4),  # no module
    ):
        with pytest.raises(UsageError):
            wrong()
    run.prepare(model)
    with pytest.raises(UsageError):
        run.prepare(model)


class Encoding(UserDict[str, torch.Tensor]):
    """As of a tokenizer: no mapping that torch goes through, and it moves itself."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: tensor.to(device) for name, tensor in self.items()})


def test_batches_of_any_form_are_moved(run: farandole.Run) -> None:
    def collate(rows: list[Any]) -> dict[str, Any]:
        x, y = (torch.stack(part) for part in zip(*rows, strict=True))
        return {"words": Encoding({"x": x}), "more": [y, "text", 3, None]}

    model = mlp()
    model, loader = run.prepare(model, DataLoader(data(), batch_size=BATCH, collate_fn=collate), micro=4)
    loader.device = torch.device("meta")
    step = next(run.steps(loader, epochs=1))
    batch = next(iter(step))
    assert batch["words"]["x"].device.type == batch["more"][0].device.type == "meta"
    assert batch["more"][1:] == ["text", 3, None]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_of_a_data_loader(run: farandole.Run, workers: int) -> None:
    """Each sample once, in the dataset's order, whatever the loader does in training."""
    model, dataset = mlp(), data(40)
    run.replicate(model=model)
    for step in run.steps(run.loader(data(), farandole.GlobalBatch(BATCH, micro=BATCH)), epochs=1):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        given = DataLoader(dataset, batch_size=7, shuffle=True, drop_last=True, num_workers=workers)
        expected = run.evaluate(model, dataset, per_sample, micro=7)
        assert run.evaluate(model, given, per_sample) == expected
        assert run.evaluate(model, given, per_sample, num_workers=0) == expected
        assert expected == per_sample(model.eval()(dataset.tensors[0]), dataset.tensors[1]).double().mean()
        model.train()
