"""The rule's factor around `optimizer.step()`, through the public API in a world of one that stands for a history.

The reference is plain PyTorch that is told each step's batch and rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from farandole import joining
from farandole.errors import UsageError
from farandole.plan.batch import PerWorkerBatch
from farandole.plan.rules import AdaScale, LinearScaling, MomentumCompensation, RateInBuffer, Rule, SquareRoot
from farandole.plan.shards import Window
from farandole.rates import Rates, rates

SAMPLES, SIZE, EPOCHS = 90, 8, 3
HISTORY = "0 1\n5 4\n14 2\n"


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], farandole.Run]]:
    """A world of one that stands for a history."""
    for name in ("TICKET", "WORKER", "POOL", "FOLDER", "LEDGER", "THREADS", "HISTORY", "SEED"):
        monkeypatch.delenv(f"FARANDOLE_{name}", raising=False)
    threads = torch.get_num_threads()

    def joined(history: str) -> farandole.Run:
        if history:
            (tmp_path / "history").write_text(history)
            monkeypatch.setenv("FARANDOLE_HISTORY", str(tmp_path / "history"))
        monkeypatch.setattr(joining, "_current", None)
        return farandole.join()

    yield joined
    torch.set_num_threads(threads)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 1, generator=generator))


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(run: farandole.Run, rule: Rule, make: Callable[[nn.Module], Any] = sgd, **bounds: Any) -> dict[str, Any]:
    """Three epochs of one shard a step, so that plain PyTorch gives the same bits."""
    model = net()
    optimizer = make(model)
    loader = run.loader(data(), batch=PerWorkerBatch(SIZE, micro=SIZE, rule=rule, **bounds))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    run.replicate(model=model, optimizer=optimizer, schedule=schedule)
    seen: list[tuple[int, float, float, int]] = []
    for step in run.steps(loader, epochs=EPOCHS):
        for inputs, targets in step:
            step.backward(F.mse_loss(model(inputs), targets))
        assert run._rates is not None
        optimizer.step()
        seen.append((step.samples, run._rates.factor, float(optimizer.param_groups[0]["lr"]), step.base_steps))
        for _ in range(step.base_steps):
            schedule.step()
    return {"model": model, "seen": seen, "ticks": schedule.last_epoch, "order": loader.order}


def plain(order: Any, seen: list[tuple[int, float, float, int]]) -> nn.Module:
    """The same in plain PyTorch."""
    model = net()
    optimizer = sgd(model)
    inputs, targets = data().tensors
    epoch = offset = 0
    for samples, factor, rate, _ in seen:
        index = torch.from_numpy(order.samples(epoch, offset, offset + samples))
        offset += samples
        if offset == SAMPLES:
            epoch, offset = epoch + 1, 0
        optimizer.zero_grad()
        F.mse_loss(model(inputs[index]), targets[index]).backward()
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.step()
    return model


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("rule", [LinearScaling(), MomentumCompensation(steps=2), AdaScale()], ids=repr)
def test_an_update_is_torchs_own_with_the_rate_times_the_factor(
    join: Callable[[str], farandole.Run], rule: Rule
) -> None:
    done = train(join(HISTORY), rule)
    assert {factor for _, factor, _, _ in done["seen"]} != {1.0}
    assert_close(done["model"], plain(done["order"], done["seen"]))


def test_the_rate_inside_the_buffer_is_mxnets_form_of_momentum() -> None:
    """v <- mu v - k eta g, w <- w + v, on one weight."""
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    scaled = Rates(PerWorkerBatch(4, micro=4, rule=RateInBuffer()), {"o": optimizer})
    velocity, expected = 0.0, 1.0
    for workers, gradient in [(1, 1.0), (1, -0.5), (4, 2.0), (4, 1.0), (2, 3.0), (1, 1.0)]:
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        scaled.step_ended(4 * workers, 4 * workers, None)
        optimizer.step()
        velocity = 0.5 * velocity - 0.1 * workers * gradient
        expected += velocity
        assert float(weight.detach()) == pytest.approx(expected, rel=1e-12)


def test_schedules_logs_and_checkpoints_never_see_a_factor(join: Callable[[str], farandole.Run]) -> None:
    done = train(join(HISTORY), LinearScaling())
    ticks = 0
    for _, _, rate, base_steps in done["seen"]:
        assert rate == pytest.approx(0.1 * 0.99**ticks)
        ticks += base_steps


@pytest.mark.parametrize("history", ["", HISTORY, "0 3\n", "0 12\n1 1\n2 5\n"])
def test_a_schedule_gets_to_the_same_end_whatever_the_sizes(join: Callable[[str], farandole.Run], history: str) -> None:
    assert train(join(history), LinearScaling())["ticks"] == EPOCHS * math.ceil(SAMPLES / SIZE)


def test_a_history_of_one_changes_no_bit(join: Callable[[str], farandole.Run]) -> None:
    prints = []
    for rule in (LinearScaling(), MomentumCompensation(), RateInBuffer(), AdaScale()):
        model = train(join(""), rule)["model"]
        prints.append([p.detach().clone() for p in model.parameters()])
    for other in prints[1:]:
        assert all(map(torch.equal, prints[0], other))


def test_the_batch_and_the_rate_are_bounded(join: Callable[[str], farandole.Run]) -> None:
    seen = train(join("0 1\n3 12\n"), LinearScaling(), max_batch=32, max_factor=3.0)["seen"]
    assert [samples for samples, *_ in seen][:4] == [8, 8, 8, 32]
    assert max(factor for _, factor, _, _ in seen) == 3.0


def test_adascale_measures_what_the_shards_tell(join: Callable[[str], farandole.Run]) -> None:
    """Against the per-shard gradients of plain PyTorch, in a step of four shards."""
    run = join("0 4\n")
    model, micro = net(), 4
    loader = run.loader(data(), batch=PerWorkerBatch(4, micro=micro, rule=AdaScale()))
    run.replicate(model=model, optimizer=sgd(model))
    for step in run.steps(loader, epochs=1):
        for inputs, targets in step:
            step.backward(F.mse_loss(model(inputs), targets))
        break_down = run._gradients
        assert break_down is not None
        noise = break_down.noise
        assert noise is not None
        gradients = []
        inputs, targets = data().tensors
        index = loader.order.samples(0, 16 * step.number, min(16 * step.number + 16, SAMPLES))
        taken = Window(start=0, stop=len(index), micro=micro)
        edges = [taken.shard(number) for number in range(taken.shards)]
        sizes = [stop - start for start, stop in edges]
        for start, stop in edges:
            part = torch.from_numpy(index[start:stop])
            twin = net()
            F.mse_loss(twin(inputs[part]), targets[part]).backward()
            gradients.append(torch.cat([p.grad.reshape(-1).double() for p in twin.parameters()]))  # type: ignore[union-attr]
        mean = sum(n * g for n, g in zip(sizes, gradients, strict=True)) / len(index)
        squares = sum(n * float(g @ g) for n, g in zip(sizes, gradients, strict=True))
        assert noise.square == pytest.approx(float(mean @ mean), rel=1e-5)
        assert noise.variance == pytest.approx((squares - len(index) * float(mean @ mean)) / (len(sizes) - 1), rel=1e-4)
        assert noise.samples == len(index)
    assert step.number == math.ceil(SAMPLES / 16) - 1


def test_what_is_remembered_is_handed_on() -> None:
    weight = nn.Parameter(torch.ones(2))
    policy = PerWorkerBatch(4, micro=4)
    one = Rates(policy, {"o": torch.optim.SGD([weight], lr=0.1)})
    for workers in (1, 4, 4, 4):
        one.step_ended(4 * workers, 4 * workers, None)
    other = Rates(policy, {"o": torch.optim.SGD([weight], lr=0.1)})
    other.load(one.state())
    for rates_ in (one, other):
        rates_.step_ended(16, 16, None)
    assert one.factor == other.factor
    assert one.state() == other.state()


def test_a_rate_that_is_a_tensor_stays_the_users_own() -> None:
    weight, rate = nn.Parameter(torch.ones(1)), torch.tensor(0.5)
    optimizer = torch.optim.SGD([weight], lr=rate)
    scaled = Rates(PerWorkerBatch(4, micro=4, rule=LinearScaling()), {"o": optimizer})
    weight.grad = torch.ones(1)
    scaled.step_ended(12, 12, None)
    optimizer.step()
    assert float(weight.detach()) == pytest.approx(-0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


class Foreign(torch.optim.Optimizer):
    """Of Adam's kind, by its settings."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99)})


@pytest.mark.parametrize(
    ("rule", "make", "message"),
    [
        (MomentumCompensation(), torch.optim.AdamW, r"MomentumCompensation.*does not fit o, AdamW.*use SquareRoot"),
        (AdaScale(), torch.optim.RMSprop, "does not fit o, RMSprop.*use SquareRoot"),
        (SquareRoot(), torch.optim.SGD, "does not fit o, SGD; use MomentumCompensation or LinearScaling or"),
        (SquareRoot(), torch.optim.NAdam, "no rule has a source for o, NAdam, only for Adam, AdamW, RMSprop, SGD; use"),
        (SquareRoot(), torch.optim.Adadelta, "no rule has a source for o, Adadelta"),
        (SquareRoot(), torch.optim.Rprop, "no rule has a source for o, Rprop"),
        (SquareRoot(), Foreign, "no rule has a source for o, Foreign"),
        (LinearScaling(), Foreign, "a rule of your own"),
        (MomentumCompensation(), lambda _: torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]), "no rule .* o, Muon"),
        (SquareRoot(), lambda p: torch.optim.RMSprop(p, momentum=0.5), "RMSprop with momentum or centered"),
        (SquareRoot(), lambda p: torch.optim.RMSprop(p, centered=True), "RMSprop with momentum or centered"),
    ],
)
def test_a_rule_that_does_not_fit_the_optimizer(rule: Rule, make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Rates(PerWorkerBatch(4, micro=4, rule=rule), {"o": make([nn.Parameter(torch.ones(1))])})


def test_without_an_optimizer_no_rate_can_follow() -> None:
    with pytest.raises(UsageError, match="no optimizer is replicated"):
        rates(PerWorkerBatch(4, micro=4), {"model": net()})


def test_a_history_that_does_not_parse_names_the_line(join: Callable[[str], farandole.Run]) -> None:
    with pytest.raises(UsageError, match="line 2: 'x'"):
        join("0 1\nx\n")
