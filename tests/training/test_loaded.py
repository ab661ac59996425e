"""What a joiner or a resumed run takes over has the dtypes and bits of what was handed on, and the same groups."""

from __future__ import annotations

import atexit
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farandole
from farandole import joining
from farandole.collective.state_transfer import Snapshot, restore
from farandole.errors import UsageError
from farandole.training import digest
from farandole.training.replica import Replica
from tests.support.harness import read_lines
from tests.support.steps import BATCH, data, mlp


def arrived(replica: Replica) -> Any:
    snapshot = Snapshot(replica.state())
    return restore(snapshot.skeleton, snapshot.stripe(0, 1))


class Mixed(torch.optim.Optimizer):
    """Keeps moments in float32 beside bfloat16 parameters, and more in other dtypes and containers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exact"] = torch.zeros_like(p, dtype=torch.float64)
                    state["coded"] = torch.zeros_like(p, dtype=torch.int8)
                    state["mask"] = torch.zeros_like(p, dtype=torch.bool)
                    state["step"] = torch.zeros((), dtype=torch.int64)
                    state["nested"] = {"pair": (torch.zeros(2, dtype=torch.float64), [torch.full((1,), 1 / 3)])}
                state["moment"].mul_(0.9).add_(torch.rand(p.shape) / 3)
                state["exact"].add_(1 / 3)
                state["coded"].add_(1)
                state["mask"].copy_(p > 0)
                state["step"] += 1
                state["nested"]["pair"][0].add_(1 / 3)
                p.sub_(state["moment"].to(p.dtype), alpha=group["lr"])


class Average:
    """An object of a script's own, with tensors of its own."""

    def __init__(self) -> None:
        self.values = [torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.int16)]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = [value.to(torch.float32) for value in state["values"]]


class Lossy(Average):
    def state_dict(self) -> dict[str, Any]:
        return {"values": [value.clone() for value in self.values], "count": len(self.values)}


def mixed(model: nn.Module) -> torch.optim.Optimizer:
    return Mixed(model.to(torch.bfloat16).parameters())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """As mixed-precision recipes do it: moments in another dtype than the parameters."""
    optimizer = torch.optim.Adam(model.to(torch.bfloat16).parameters(), foreach=False)
    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = {key: torch.rand(p.shape) / 3 for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(3.0), **moments}
    return optimizer


@pytest.mark.parametrize("make", [mixed, adam])
def test_an_optimizers_state_keeps_dtypes_and_bits(make: Any) -> None:
    model, joining = mlp(), mlp()
    optimizer, other = make(model), make(joining)
    if make is mixed:
        optimizer.step()
    replica, joiner = (Replica({"model": m, "optimizer": o}) for m, o in ((model, optimizer), (joining, other)))
    state = arrived(replica)
    joiner.load(state)
    assert joiner.fingerprint() == replica.fingerprint()
    assert digest.unlike(joiner, state) == []
    first = next(iter(other.state.values()))
    assert {key: value.dtype for key, value in first.items() if isinstance(value, torch.Tensor)} == {
        key: value.dtype for key, value in next(iter(optimizer.state.values())).items() if key != "nested"
    }


def test_an_object_of_the_scripts_own_keeps_dtypes() -> None:
    average, other, model = Average(), Average(), mlp()
    average.values[0] += 1 / 3
    replica, joiner = Replica({"model": model, "a": average}), Replica({"model": mlp(), "a": other})
    joiner.load(arrived(replica))
    assert [value.dtype for value in other.values] == [torch.float64, torch.int16]
    assert joiner.fingerprint() == replica.fingerprint()


@pytest.mark.failure(
    "The training loop",
    "the script's own `load_state_dict()` loses or changes a value",
    seen="the `resumed` event names it; a joiner is refused, with the name",
    outcome="the resumed run may have other bits; correct `load_state_dict()`",
)
def test_what_is_lost_in_loading_is_named() -> None:
    """It hands out copies, so nothing can be put back."""
    given, other = Lossy(), Lossy()
    given.values[0] += 1 / 3
    state = arrived(Replica({"model": mlp(), "a": given}))
    joiner = Replica({"model": mlp(), "a": other})
    joiner.load(state)
    assert digest.unlike(joiner, state) == ["a.values[0]", "a.values[1]"]


# --- groups that were added ------------------------------------------------------------------------------------


def head_only(model: Any) -> torch.optim.Optimizer:
    model[0].requires_grad_(False)
    return torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)


def unfreeze(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01, "weight_decay": 0.1})


def swap(model: Any, optimizer: torch.optim.Optimizer) -> None:
    unfreeze(model, optimizer)
    optimizer.param_groups.reverse()


def edit(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].append(model[0].bias)
    model[0].bias.requires_grad_(True)


def empty(model: Any, optimizer: torch.optim.Optimizer) -> None:
    del model
    optimizer.state.clear()
    optimizer.param_groups.pop()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    schedule.step()


@pytest.mark.parametrize("change", [unfreeze, swap, edit, empty])
def test_who_takes_over_has_the_groups_and_goes_on_with_the_same_bits(change: Any) -> None:
    def parts() -> tuple[Replica, tuple[nn.Module, torch.optim.Optimizer, Any]]:
        model = mlp()
        optimizer = head_only(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return Replica({"model": model, "optimizer": optimizer, "schedule": schedule}), (model, optimizer, schedule)

    (replica, mine), (joiner, theirs) = parts(), parts()
    update(*mine)
    change(*mine[:2])
    if change in (unfreeze, swap):
        mine[2].base_lrs.append(0.01)
        mine[1].param_groups[-1].setdefault("initial_lr", 0.01)
    update(*mine)
    assert not replica.look()
    state = arrived(replica)
    joiner.load(state)
    assert digest.unlike(joiner, state) == []
    for _ in range(3):
        assert joiner.fingerprint() == replica.fingerprint()
        update(*mine)
        update(*theirs)
    assert joiner.fingerprint() == replica.fingerprint()


def test_groups_belong_to_the_state_of_a_steps_beginning() -> None:
    """The loop body may add one before the inner loop; a joiner of this step does that itself."""
    model = mlp()
    optimizer = head_only(model)
    replica = Replica({"model": model, "optimizer": optimizer})
    replica.keep_buffers()
    unfreeze(model, optimizer)
    assert [len(names) for names in replica.state()["groups"]["optimizer"]] == [2]
    replica.keep_buffers()
    assert [len(names) for names in replica.state()["groups"]["optimizer"]] == [2, 2]


def trained(monkeypatch: pytest.MonkeyPatch, folder: Path, *epochs: int) -> str:
    """The fingerprint of a run in one process after another, each with so many epochs. Step 1 adds a group."""
    monkeypatch.setenv("FARANDOLE_SEED", "5")
    run = None
    for index, count in enumerate(epochs):
        place = folder / str(index) / "run"  # this process keeps the one before
        if index:
            shutil.copytree(folder / str(index - 1), folder / str(index))
        else:
            place.mkdir(parents=True)
        monkeypatch.setenv("FARANDOLE_FOLDER", str(place))
        monkeypatch.setattr(joining, "_current", None)
        run = farandole.join()
        atexit.unregister(run._context._end)  # type: ignore[attr-defined]
        model = mlp()
        optimizer = head_only(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        run.replicate(model=model, optimizer=optimizer, schedule=schedule)
        for step in run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=count):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            schedule.step()
            if step.number == 1:
                unfreeze(model, optimizer)
        assert len(optimizer.param_groups) == 2
        assert run._end_alone()
    assert run is not None
    return run.fingerprint()


def test_a_run_is_resumed_after_a_group_was_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        undisturbed = trained(monkeypatch, tmp_path / "one", 4)
        assert trained(monkeypatch, tmp_path / "two", 2, 4) == undisturbed
    finally:
        torch.set_num_threads(threads)
    events = [line for line in read_lines(tmp_path / "two" / "1" / "run") if line.get("event") == "resumed"]
    assert [event["step"] for event in events] == [4]
    [difference] = events[0]["differences"]
    assert re.findall(r"epochs|\d+", difference) == ["epochs", "2", "4"]


@pytest.mark.failure(
    "The training loop",
    "a `LambdaLR` gets another function for an added group",
    seen="an error in the next step names the schedule",
    outcome=(
        "the script fails, exit code 1; functions can't be sent to joiners: create the schedule with a function for "
        "each later group"
    ),
)
def test_a_schedule_that_gets_another_function_is_an_error() -> None:
    """Functions can't be handed on."""
    model = mlp()
    optimizer = head_only(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    replica = Replica({"model": model, "optimizer": optimizer, "schedule": schedule})
    assert not replica.look()
    unfreeze(model, optimizer)
    assert not replica.look()
    schedule.lr_lambdas.append(lambda _: 1.0)
    with pytest.raises(UsageError, match=r"schedule.*LambdaLR.*\b2\b.*\b1\b"):
        replica.look()
