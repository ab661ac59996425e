"""Tensors that are replaced, added or assigned anew after `run.replicate`: followed bit for bit, or an error by name.

The reference is plain PyTorch, with a whole batch in each step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import farandole
from farandole.collective.state_transfer import Snapshot, restore
from farandole.errors import UsageError
from farandole.training.replica import LARGEST_LANE_BUFFER, Replica, TensorListing
from tests.support.steps import BATCH, data, mlp, whole_batches

Change = Callable[[nn.Module, torch.optim.Optimizer], object]
AT = 2  # the step


class Averaging(nn.Module):
    """Assigns its buffer anew in each forward pass, as many programs do."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean()
        return out - self.mean.mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def train(run: farandole.Run, model: nn.Module, change: Change, where: str, *, micro: int = BATCH) -> nn.Module:
    """Trains in the run, with the change in step `AT`: `top` of the loop's body, `inner` loop, or `end` of the body.

    Returns the same model trained by plain PyTorch.
    """
    plain = copy.deepcopy(model)
    optimizer, reference = sgd(model), sgd(plain)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro))
    run.replicate(model=model, optimizer=optimizer)
    batches = whole_batches(loader, 4)
    for step in run.steps(loader, epochs=4):
        for place, make in (("top", False), ("end", True)):
            if make:
                for index, (x, y) in enumerate(step):
                    if step.number == AT and where == "inner" and index == 1:
                        change(model, optimizer)
                    step.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                update(plain, reference, *next(batches))
            if step.number == AT and where == place:
                torch.manual_seed(7)
                change(model, optimizer)
                torch.manual_seed(7)
                change(plain, reference)
    return plain


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def new_head(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model[2].parameters():
        optimizer.state.pop(parameter, None)
    model[2] = nn.Linear(8, 3)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def new_norm(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model[1].parameters():
        optimizer.state.pop(parameter, None)
    model[1] = nn.BatchNorm1d(8)
    optimizer.param_groups[0]["params"] = list(model.parameters())


@pytest.mark.parametrize("where", ["top", "end"])
@pytest.mark.parametrize("change", [new_head, new_norm], ids=["a layer", "with buffers"])
def test_a_layer_that_is_replaced_by_an_equal_one_is_trained_on(run: farandole.Run, change: Change, where: str) -> None:
    model = mlp() if change is new_head else nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    assert_equal(model, train(run, model, change, where))


def test_a_joiner_takes_over_what_was_replaced(run: farandole.Run) -> None:
    model = mlp()
    train(run, model, new_head, "end")
    assert run._loop is not None
    snapshot = Snapshot(run._loop.replica.state())
    joining = mlp()
    joiner = Replica({"model": joining, "optimizer": sgd(joining)})
    joiner.load(restore(snapshot.skeleton, snapshot.stripe(0, 1)))
    assert joiner.fingerprint() == run.fingerprint()


def test_what_is_changed_between_replicate_and_steps_is_listed_anew(run: farandole.Run) -> None:
    model = mlp()
    run.replicate(model=model)
    model.append(nn.Linear(3, 3))
    next(run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=1))
    assert run._loop is not None
    assert list(run._loop.replica.parameters) == [f"model.{name}" for name, _ in model.named_parameters()]


def without_list(model: Any, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    model[2] = nn.Linear(8, 3)


def with_momentum_left(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[2] = nn.Linear(8, 3)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def tied(model: Any, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    model[0].bias = model[0].weight


def data_of_another_shape(model: Any, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    model[2].weight.data = torch.zeros(5, 8)


def foreign_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    del model
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def low_rank(model: Any, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    model[2].low = nn.Parameter(torch.zeros(1, 8))


def renamed(model: Any, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    model._modules["last"] = model._modules.pop("2")


REFUSED: dict[str, tuple[Change, str]] = {
    "larger layer": (lambda m, _: m.__setitem__(2, nn.Linear(8, 4)), "model.2.weight"),
    "optimizer has the old one": (without_list, "optimizer"),
    "optimizer has the old one's momentum": (with_momentum_left, "optimizer"),
    "optimizer has another's": (foreign_group, "optimizer"),
    "added": (low_rank, "model.2.low"),
    "appended": (lambda m, _: m.append(nn.Linear(3, 3)), "model.3.weight"),
    "renamed": (renamed, "model.2.weight"),
    "removed": (lambda m, _: setattr(m[2], "bias", None), "model.2.bias"),
    "tied": (tied, "model.0.bias"),
    "half": (lambda m, _: m.half(), "model.0.weight"),
    "data of another shape": (data_of_another_shape, "model.2.weight"),
    "buffer added": (lambda m, _: m[0].register_buffer("late", torch.zeros(2)), "model.0.late"),
    "pruned": (lambda m, _: prune.l1_unstructured(m[2], "weight", 0.5), "model.2.weight"),
    "weight_norm": (lambda m, _: parametrizations.weight_norm(m[2]), "model.2.weight"),
}  # fmt: skip


@pytest.mark.failure(
    "The training loop",
    "the script replaces a layer, but the optimizer keeps the old parameters or their momentum",
    seen="an error in the next step names the optimizer, also in a single-process run",
    outcome=(
        "the script fails, exit code 1; put the new parameters into its groups, and remove the old ones from its state"
    ),
)
@pytest.mark.failure(
    "The training loop",
    (
        "a parameter or buffer is added, removed, tied, renamed, or changes shape, dtype or device after `run.steps` "
        "began (LoRA, pruning, `model.half()`)"
    ),
    seen=(
        "an error in the next step names the tensor, also in a single-process run; after the last step, at the end of "
        "the script"
    ),
    outcome="the script fails, exit code 1; do it before `run.replicate`, or on a copy for an export",
)
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_joiner_could_take_over_is_an_error_by_name_in_the_next_step(run: farandole.Run, name: str) -> None:
    change, tensor = REFUSED[name]
    with pytest.raises(UsageError) as error:
        train(run, mlp(), change, "end")
    assert tensor in str(error.value)
    assert run._loop is not None
    assert run._loop.number in (AT, AT + 1)


@pytest.mark.failure(
    "The training loop",
    "the script replaces a parameter in the inner loop of a step",
    seen="an error at the end of the inner loop names the parameter",
    outcome="the script fails, exit code 1; replace it after the inner loop",
)
@pytest.mark.parametrize("change", [without_list, new_head, low_rank], ids=["replaced", "with its list", "added"])
def test_a_parameter_replaced_within_the_inner_loop_is_an_error(run: farandole.Run, change: Change) -> None:
    with pytest.raises(UsageError) as error:
        train(run, mlp(), change, "inner", micro=4)
    assert "model.2." in str(error.value)
    assert run._loop is not None
    assert run._loop.number == AT


@pytest.mark.failure(
    "The training loop",
    (
        "a parameter or buffer is added, removed, tied, renamed, or changes shape, dtype or device after `run.steps` "
        "began (LoRA, pruning, `model.half()`)"
    ),
)
def test_after_the_last_step_too(run: farandole.Run) -> None:
    """The state that is saved then is to be one that a run with more epochs goes on from."""
    model = mlp()
    train(run, model, lambda *_: None, "end")
    model.half()
    assert run._loop is not None
    with pytest.raises(UsageError, match=r"model\.0\.weight"):
        run._loop.end()


# --- buffers ---------------------------------------------------------------------------------------------------


def test_a_buffer_that_a_forward_pass_assigns_anew_is_the_buffer(run: farandole.Run) -> None:
    model = Averaging()
    listed = model.mean
    assert_equal(model, train(run, model, lambda *_: None, "end"))
    assert model.mean is listed, "optimizers, digests and copies of the state refer to it"
    assert model.mean.any()


@pytest.mark.parametrize("where", ["top", "end"])
def test_a_buffer_that_the_loop_body_assigns_anew(run: farandole.Run, where: str) -> None:
    model = Averaging()

    def change(model: Any, optimizer: torch.optim.Optimizer) -> None:
        del optimizer
        model.mean = model.mean * 0.5 + 1

    assert_equal(model, train(run, model, change, where))


def test_the_state_has_the_beginnings_value_of_a_buffer_that_was_assigned_anew() -> None:
    model = Averaging()
    replica = Replica({"model": model})
    replica.keep_buffers()
    replica.begin_shards()
    model(torch.ones(2, 6))
    assert model.mean.any()
    assert not replica.state()["objects"]["model"]["mean"].any()
    replica.reset_buffers()
    assert not model.mean.any(), "the next shard begins with what the first one had"


@pytest.mark.failure(
    "The training loop",
    "a forward pass, or the loop body before the inner loop, changes a buffer of more than 65,536 elements",
)
def test_a_large_buffer_may_be_assigned_between_steps_but_not_within_one() -> None:
    model = Averaging(LARGEST_LANE_BUFFER + 1)
    replica = Replica({"model": model})
    listed = model.mean
    model.mean = torch.ones_like(listed)
    replica.keep_buffers()
    replica.begin_shards()
    assert replica.state()["objects"]["model"]["mean"].all()
    assert model.mean is listed
    model.mean.add_(1)
    with pytest.raises(UsageError, match=rf"model\.mean\b.*\b{LARGEST_LANE_BUFFER + 1}\b"):
        replica.begin_shards()
    replica.keep_buffers()
    replica.begin_shards()
    model.mean = torch.zeros_like(listed)
    with pytest.raises(UsageError, match=rf"model\.mean\b.*\b{LARGEST_LANE_BUFFER + 1}\b"):
        replica.buffers_to(torch.zeros(0, dtype=torch.float64))


@pytest.mark.parametrize(
    "value", [torch.zeros(4), torch.zeros(3, dtype=torch.float64)], ids=["another shape", "another dtype"]
)
def test_a_buffer_of_another_form_is_an_error(value: torch.Tensor) -> None:
    model = Averaging()
    replica = Replica({"model": model})
    model.mean = value
    with pytest.raises(UsageError, match=r"model\.mean\b.*\[3\] float32"):
        replica.keep_buffers()


def test_a_shared_buffer_that_is_assigned_in_one_place_is_an_error() -> None:
    one, other = Averaging(), Averaging()
    other.mean = one.mean
    replica = Replica({"model": nn.ModuleList([one, other])})
    other.mean = torch.ones(3)
    with pytest.raises(UsageError, match=r"model\.0\.mean"):
        replica.keep_buffers()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_keep_no_dicts_of_their_own_are_listed() -> None:
    """Those of torch.jit."""
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    listing = TensorListing({"model": model})
    assert list(listing.parameters) == ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]
    assert len(listing.buffers) == 3
    listing.adopt()
    assert listing.holds()


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.weight"):
        Replica({"model": nn.LazyLinear(3)})
