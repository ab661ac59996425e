"""`run.state`: plain values that belong to the run's state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import farandole
from farandole.errors import UsageError
from farandole.training.plain_state import PlainState
from tests.support.steps import BATCH, data, mlp


def test_values_are_those_of_the_state(run: farandole.Run) -> None:
    model = mlp()
    run.replicate(model=model, best=0.0, seen=[], name=None, flags={"a": 1})
    before = run.fingerprint()
    assert (run.state.best, run.state.seen, run.state.name, run.state.flags) == (0.0, [], None, {"a": 1})
    for step in run.steps(run.loader(data(), farandole.GlobalBatch(BATCH, micro=4)), epochs=1):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        run.state.best = torch.tensor(step.loss)
        run.state.seen = [*run.state.seen, step.number]
        run.state.name = np.float32(0.5)
    assert run.state.best == pytest.approx(step.loss)
    assert (type(run.state.best), run.state.name, run.state.seen) == (float, 0.5, [0, 1])
    assert run.fingerprint() != before
    other = PlainState({"best": 0.0, "seen": [], "later": 3})
    other.load_state_dict({**run.state.state_dict(), "gone": 1})
    assert not hasattr(other, "gone")
    assert (other.best, other.seen, other.later) == (run.state.best, [0, 1], 3)


@pytest.mark.parametrize("value", [torch.ones(2), object(), {1, 2}, 1 << 70, [object()]])
def test_values_that_can_not_travel(run: farandole.Run, value: object) -> None:
    run.replicate(model=mlp(), best=0.0)
    with pytest.raises(UsageError):
        run.state.best = value
    assert run.state.best == 0.0


def test_names_that_do_not_exist_or_are_taken(run: farandole.Run) -> None:
    with pytest.raises(UsageError):
        _ = run.state
    model = mlp()
    for names in ({"state": model, "best": 0.0}, {"model": model, "load_state_dict": 1}, {"model": model, "_x": 1}):
        with pytest.raises(UsageError):
            run.replicate(**names)
    run.replicate(model=model, best=0.0)
    with pytest.raises(AttributeError):
        _ = run.state.worst
    with pytest.raises(AttributeError):
        run.state.worst = 1


def test_an_object_of_that_name_without_plain_values(run: farandole.Run) -> None:
    run.replicate(state=mlp())
    with pytest.raises(UsageError):
        _ = run.state


def test_the_samples_of_a_micro_batch(run: farandole.Run) -> None:
    dataset, model = data(), mlp()
    run.replicate(model=model)
    seen: list[int] = []
    for step in run.steps(run.loader(dataset, farandole.GlobalBatch(BATCH, micro=5)), epochs=1):
        with pytest.raises(UsageError):
            _ = step.indices
        for x, y in step:
            assert torch.equal(dataset.tensors[0][step.indices], x)
            seen += step.indices.tolist()
            step.backward(F.cross_entropy(model(x), y))
    assert sorted(seen) == list(range(len(dataset)))
