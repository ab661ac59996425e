"""Optimizers that would do nothing, or something on each worker alone, are refused; in a world of one too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

import farandole
from farandole.errors import NotReplicated, UsageError
from farandole.run import Run
from farandole.settings import Settings
from farandole.training.replica import names_of
from farandole.training.step import PATIENCE, Guard
from tests.support.mentioned import mentions

Rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))


class Wrapper:
    """Holds an optimizer, as LARC or Lookahead do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = {"one": optimizer}

    def step(self) -> None:
        self.inner["one"].step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner["one"].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner["one"].load_state_dict(state["inner"])


def train(
    replicated: Callable[[torch.optim.Optimizer], dict[str, Any]],
    update: Callable[[torch.optim.Optimizer], object],
    *,
    within: Callable[[torch.optim.Optimizer], object] = lambda _: None,
) -> nn.Module:
    torch.manual_seed(0)
    run = Run(Settings())
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()  # before the loop that is the script's own business
    run.replicate(model=model, **replicated(optimizer))
    loader = run.loader(TensorDataset(Rows), batch=farandole.GlobalBatch(8, micro=4))
    for step in run.steps(loader, epochs=1):
        for (rows,) in step:
            step.backward(model(rows).square().mean())
            within(optimizer)
        update(optimizer)
    return model


@pytest.mark.failure(
    "The training loop",
    "the script does not pass an optimizer of replicated parameters to `run.replicate`",
    seen="`NotReplicated` at its first step, also in a single-process run",
    outcome="the script fails, exit code 1; pass the optimizer to `run.replicate`",
)
def test_one_that_is_not_replicated() -> None:
    def scheduled(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3)}  # which holds it, but not its state

    for replicated in (lambda _: {}, scheduled):
        with pytest.raises(NotReplicated, match=r"step 0\b.*SGD\.step\(\).*run\.replicate\(.*optimizer="):
            train(replicated, lambda optimizer: optimizer.step())


@pytest.mark.failure(
    "The training loop",
    "the script calls `optimizer.step()` in the inner loop",
    seen="`UsageError` at the first call",
    outcome="the script fails, exit code 1; call it after the inner loop",
)
def test_a_step_within_the_inner_loop() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for within in (lambda optimizer: optimizer.step(), scaler.step):
        with pytest.raises(UsageError, match=r"step 0\b.*SGD\.step\(\).*for micro_batch in step"):
            train(lambda optimizer: {"optimizer": optimizer}, lambda _: None, within=within)


def test_what_is_as_it_should_be() -> None:
    """Replicated itself or through a wrapper, by a scaler, several times, and over parameters that are nobody's."""
    plain = train(lambda optimizer: {"optimizer": optimizer}, lambda optimizer: optimizer.step())
    wrapped = train(lambda optimizer: {"wrapper": Wrapper(optimizer)}, lambda optimizer: optimizer.step())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaled = train(lambda optimizer: {"optimizer": optimizer, "scaler": scaler}, scaler.step)
    assert all(torch.equal(one.weight, plain.weight) for one in (wrapped, scaled))
    own = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    train(lambda o: {"optimizer": o}, lambda o: (o.step(), o.step()), within=lambda _: own.step())


def test_after_the_loop_it_is_the_scripts_own_business() -> None:
    model = train(lambda optimizer: {"optimizer": optimizer}, lambda optimizer: optimizer.step())
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_guard_that_is_collected_while_an_optimizer_steps_disturbs_nobody() -> None:
    """torch goes through its hooks then, and must not find one of them removed."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    nothing: Any = SimpleNamespace(ids=frozenset(), objects={})
    kept = list[Guard]()
    handle = register_optimizer_step_pre_hook(lambda *_: kept.clear())
    kept += [Guard(nothing, nothing, entered=lambda: False, within=lambda: False, gave=bool) for _ in range(2)]
    try:
        optimizer.step()
    finally:
        handle.remove()
    assert not kept


@pytest.mark.failure(
    "The training loop",
    "the script calls `optimizer.zero_grad()` between the inner loop and `optimizer.step()`",
    seen="an error in the first step",
    outcome="the script fails, exit code 1; remove the call",
)
def test_gradients_that_were_cleared_before_the_update() -> None:
    def clear(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        optimizer.step()

    with pytest.raises(UsageError):
        train(lambda optimizer: {"optimizer": optimizer}, clear)


def test_gradients_that_are_cleared_after_an_update() -> None:
    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()

    train(lambda optimizer: {"optimizer": optimizer}, step)


def test_an_optimizer_whose_parameters_had_no_gradient_in_the_step() -> None:
    """It does nothing, and nothing was cleared."""
    run, used, other = Run(Settings()), nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    run.replicate(used=used, other=other, optimizer=optimizer)
    for step in run.steps(run.loader(TensorDataset(Rows), farandole.GlobalBatch(8, micro=4)), epochs=1):
        for (rows,) in step:
            step.backward(used(rows).square().mean())
        optimizer.step()


@pytest.mark.failure(
    "The training loop",
    "the script never calls `optimizer.step()`",
    seen="a warning after ten steps that changed no parameter",
    outcome="nothing is trained",
)
@pytest.mark.parametrize(("update", "warned"), [("none", True), ("by hand", False), ("late", False)])
def test_no_update_at_all_is_warned_of(update: str, *, warned: bool) -> None:
    run, model = Run(Settings()), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model=model, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in run.steps(run.loader(TensorDataset(Rows), farandole.GlobalBatch(8, micro=4)), epochs=4):
            for (rows,) in step:
                step.backward(model(rows).square().mean())
            if update == "by hand":
                with torch.no_grad():
                    model.weight -= 0.1 * model.weight.grad
            elif update == "late" and step.number == PATIENCE - 1:  # a GradScaler skips the first few
                optimizer.step()
    assert len([w for w in caught if "optimizer.step()" in str(w.message)]) == warned


@pytest.mark.failure(
    "The training loop",
    (
        "a wrong argument: a DataLoader to `run.steps`, `batch_size=` to `run.loader`, objects without names to "
        "`run.replicate`"
    ),
)
@pytest.mark.failure(
    "The training loop",
    "the model is a `DistributedDataParallel` or FSDP module",
    seen="an error at `run.replicate` names it",
    outcome="nothing is trained; pass the model itself",
)
def test_objects_without_a_name_and_modules_that_exchange_gradients_themselves() -> None:
    run, model = Run(Settings()), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError) as raised:
        run.replicate(model, optimizer)
    assert mentions(str(raised.value), "model=model", "optimizer=optimizer")
    assert names_of([model, model, nn.ReLU()], {"net": model}) == ["net", "net1", "relu"]
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    for module in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(UsageError):
            run.replicate(model=module)


@pytest.mark.failure(
    "The training loop",
    (
        "a wrong argument: a DataLoader to `run.steps`, `batch_size=` to `run.loader`, objects without names to "
        "`run.replicate`"
    ),
    seen="an error with the line to write",
    outcome="the script fails, exit code 1",
)
def test_what_is_iterated_over_in_the_wrong_place() -> None:
    run, model = Run(Settings()), nn.Linear(4, 1)
    run.replicate(model=model)
    with pytest.raises(UsageError):
        next(iter(run.loader(TensorDataset(Rows), farandole.GlobalBatch(8, micro=4))))
    with pytest.raises(UsageError):
        run.steps(DataLoader(TensorDataset(Rows), batch_size=8), epochs=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        run.steps(TensorDataset(Rows), epochs=1)  # type: ignore[arg-type]
