"""The rule's factor around `optimizer.step()`, through the public API in a world of one that stands for a history.

The reference is plain PyTorch that is told each step's batch and rate.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from farandole.errors import UsageError
from farandole.plan.batch import GlobalBatch, PerWorkerBatch
from farandole.plan.rules import (
    AdaScale,
    Facts,
    LinearScaling,
    MomentumCompensation,
    Noise,
    RateInBuffer,
    Rule,
    SquareRoot,
)
from farandole.plan.shards import Window
from farandole.training.learning_rate import LearningRate, learning_rate_of
from tests.support.rehearsed import EPOCHS, HISTORY, SAMPLES, SIZE, Join, data, join, net, sgd, train

__all__ = ["join"]  # a fixture


def plain(order: Any, seen: list[tuple[int, float, float, int]], stretched: list[float]) -> nn.Module:
    """The same in plain PyTorch. A short window's gradient is weighed for the whole window's rate."""
    model = net()
    optimizer = sgd(model)
    inputs, targets = data().tensors
    epoch = offset = 0
    for (samples, factor, rate, _), stretch in zip(seen, stretched, strict=True):
        index = torch.from_numpy(order.samples(epoch, offset, offset + samples))
        offset += samples
        if offset == SAMPLES:
            epoch, offset = epoch + 1, 0
        optimizer.zero_grad()
        F.mse_loss(model(inputs[index]), targets[index]).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= stretch
        optimizer.param_groups[0]["lr"] = rate * factor * stretch
        optimizer.step()
    return model


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("rule", [LinearScaling(), MomentumCompensation(steps=2), AdaScale()], ids=repr)
def test_an_update_is_torchs_own_with_the_rate_times_the_factor(join: Join, rule: Rule) -> None:
    done = train(join(HISTORY), rule)
    assert {factor for _, factor, _, _ in done["seen"]} != {1.0}
    assert_close(done["model"], plain(done["order"], done["seen"], done["stretched"]))


def test_a_short_windows_gradient_has_the_weight_of_its_samples_for_good() -> None:
    """By hand, with momentum 0.5 and weight decay 0.1: w <- w - eta (4 mu u + g), u <- mu u + g / 4."""
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5, weight_decay=0.1)
    scaled = LearningRate(PerWorkerBatch(4, micro=4, rule=LinearScaling()), {"o": optimizer})
    buffer, hand = 0.0, 1.0
    for samples, gradient in [(16, 1.0), (16, -0.5), (4, 2.0), (16, 1.0), (12, 3.0), (16, 1.0)]:
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        scaled.step_ended(samples, 16, None)
        optimizer.step()
        gradient += 0.1 * hand
        hand -= 0.1 * (4 * 0.5 * buffer + samples / 4 * gradient)
        buffer = 0.5 * buffer + samples / 16 * gradient
        assert float(weight.detach()) == pytest.approx(hand, rel=1e-12)
        assert float(optimizer.state[weight]["momentum_buffer"]) == pytest.approx(buffer, rel=1e-12)


@pytest.mark.parametrize("loops", [(6,), (2, 2, 2), (3, 3)])
def test_the_rate_inside_the_buffer_is_mxnets_form_of_momentum(loops: tuple[int, ...]) -> None:
    """v <- mu v - k eta g, w <- w + v, on one weight, in one loop or in several."""
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    policy = PerWorkerBatch(4, micro=4, rule=RateInBuffer())
    scaled = LearningRate(policy, {"o": optimizer})
    velocity, expected = 0.0, 1.0
    for number, (workers, gradient) in enumerate([(1, 1.0), (1, -0.5), (4, 2.0), (4, 1.0), (2, 3.0), (1, 1.0)]):
        if number in accumulate(loops):
            scaled.end()
            scaled = LearningRate(policy, {"o": optimizer}, scaled)
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        scaled.step_ended(4 * workers, 4 * workers, None)
        optimizer.step()
        velocity = 0.5 * velocity - 0.1 * workers * gradient
        expected += velocity
        assert float(weight.detach()) == pytest.approx(expected, rel=1e-12)


def test_after_a_loop_its_factor_is_gone() -> None:
    """The next loop has a factor of its own, or a constant batch, with the same optimizer."""
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer, expected = torch.optim.SGD([weight], lr=0.1), 1.0
    before = None
    for policy, workers, factor in (
        (PerWorkerBatch(4, micro=4, rule=LinearScaling()), 4, 4),
        (PerWorkerBatch(8, micro=4, rule=LinearScaling()), 2, 2),
        (GlobalBatch(8, micro=4), 1, 1),
        (PerWorkerBatch(4, micro=4, rule=LinearScaling()), 3, 3),
    ):
        scaled = LearningRate(policy, {"o": optimizer}, before)
        samples = policy.base * workers if isinstance(policy, PerWorkerBatch) else 8
        for _ in range(2):
            weight.grad = torch.tensor([1.0], dtype=torch.float64)
            scaled.step_ended(samples, samples, None)
            optimizer.step()
            expected -= 0.1 * factor
            assert float(weight.detach()) == pytest.approx(expected, rel=1e-12)
        scaled.end()
        before = scaled


def expected(rule: Rule, whole: list[float], windows: list[float], momentum: float = 0.9) -> list[float]:
    """The factors of steps whose whole window would be `whole` base batches, and is `windows`: what a rule remembers
    of a short one is dropped.
    """
    memory, found = rule.begin(), []
    for k, taken in zip(whole, windows, strict=True):
        factor, after = rule.factor(memory, Facts(k=taken, base=SIZE, momentum=momentum))
        found.append(factor)
        memory = after if taken == k else memory
    return found


@pytest.mark.parametrize("rule", [LinearScaling(), MomentumCompensation(), MomentumCompensation(steps=1)], ids=repr)
def test_a_short_last_window_gets_the_factor_of_its_samples(join: Join, rule: Rule) -> None:
    """90 samples in windows of 32, which are 4 base batches, leave 26; in windows of 8 they leave 2, less than one."""
    seen = train(join("0 4\n"), rule)["seen"]
    assert [samples for samples, *_ in seen] == [32, 32, 26] * EPOCHS
    assert [factor for _, factor, _, _ in seen] == expected(rule, [4] * 9, [4, 4, 26 / 8] * EPOCHS)
    seen = train(join("0 1\n"), rule)["seen"]
    assert seen[11][0] == 2
    assert {factor for _, factor, _, _ in seen} == {1.0}, "never below 1 where a whole window's is not"


def test_below_the_base_a_short_window_counts_as_what_it_is(join: Join) -> None:
    seen = train(join("0 4\n"), LinearScaling(), base=64)["seen"]
    assert [factor for _, factor, _, _ in seen] == [0.5, 0.5, 26 / 64] * EPOCHS


def test_where_an_epoch_is_less_than_a_batch_it_is_the_whole_window(join: Join) -> None:
    """Twelve workers would take 96 samples and there are 90: the ramp goes on nevertheless."""
    seen = train(join("0 12\n"), MomentumCompensation(steps=0.1))["seen"]
    assert [factor for _, factor, _, _ in seen] == expected(MomentumCompensation(steps=0.1), [11.25] * 3, [11.25] * 3)
    assert seen[2][1] == 11.25


def test_a_beginning_with_many_workers_is_a_ramp_from_1(join: Join) -> None:
    seen = train(join("0 4\n"), MomentumCompensation(steps=1))["seen"]
    assert [factor for _, factor, _, _ in seen][:2] == [1.0, 1.75]


def test_the_largest_momentum_decides_on_the_ramp() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": weights[:1], "momentum": 0.5}, {"params": weights[1:], "momentum": 0.95}]
    scaled = LearningRate(PerWorkerBatch(4, micro=4), {"o": torch.optim.SGD(groups, lr=0.1)})
    for _ in range(2):
        scaled.step_ended(8, 8, None)
    assert scaled.factor == pytest.approx(1 + 1 / (0.8 / 0.05 * 2))


def test_schedules_logs_and_checkpoints_never_see_a_factor(join: Join) -> None:
    done = train(join(HISTORY), LinearScaling())
    ticks = 0
    for _, _, rate, base_steps in done["seen"]:
        assert rate == pytest.approx(0.1 * 0.99**ticks)
        ticks += base_steps


@pytest.mark.parametrize("history", ["", HISTORY, "0 3\n", "0 12\n1 1\n2 5\n"])
def test_a_schedule_gets_to_the_same_end_whatever_the_sizes(join: Join, history: str) -> None:
    assert train(join(history), LinearScaling())["ticks"] == EPOCHS * math.ceil(SAMPLES / SIZE)


def test_a_history_of_one_changes_no_bit(join: Join) -> None:
    prints = []
    for rule in (LinearScaling(), MomentumCompensation(), RateInBuffer(), AdaScale()):
        model = train(join(""), rule)["model"]
        prints.append([p.detach().clone() for p in model.parameters()])
    for other in prints[1:]:
        assert all(map(torch.equal, prints[0], other))


def test_the_batch_and_the_rate_are_bounded(join: Join) -> None:
    seen = train(join("0 1\n3 12\n"), LinearScaling(), max_batch=32, max_factor=3.0)["seen"]
    assert [samples for samples, *_ in seen][:4] == [8, 8, 8, 32]
    assert max(factor for _, factor, _, _ in seen) == 3.0


def test_adascale_measures_what_the_shards_tell(join: Join) -> None:
    """Against the per-shard gradients of plain PyTorch, in a step of four shards."""
    run = join("0 4\n")
    model, micro = net(), 4
    loader = run.loader(data(), batch=PerWorkerBatch(4, micro=micro, rule=AdaScale()))
    run.replicate(model=model, optimizer=sgd(model))
    for step in run.steps(loader, epochs=1):
        for inputs, targets in step:
            step.backward(F.mse_loss(model(inputs), targets))
        assert run._loop is not None
        noise = run._loop.gradients.noise
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
    one = LearningRate(policy, {"o": torch.optim.SGD([weight], lr=0.1)})
    for workers in (1, 4, 4, 4):
        one.step_ended(4 * workers, 4 * workers, None)
    other = LearningRate(policy, {"o": torch.optim.SGD([weight], lr=0.1)})
    other.load(one.state())
    for rates_ in (one, other):
        rates_.step_ended(16, 16, None)
    assert one.factor == other.factor
    assert one.state() == other.state()


def test_the_sum_of_gains_is_of_the_bounded_ones_and_is_handed_on() -> None:
    weight = nn.Parameter(torch.ones(2))
    policy = PerWorkerBatch(4, micro=4, rule=AdaScale(), max_factor=2.5)
    one = LearningRate(policy, {"o": torch.optim.SGD([weight], lr=0.1)})
    for _ in range(3):
        one.step_ended(16, 16, Noise(variance=1e9, square=1e9 / 16, samples=16))
    assert one.gains == 7.5
    other = LearningRate(policy, {"o": torch.optim.SGD([weight], lr=0.1)})
    other.load(one.state())
    assert other.gains == 7.5


def test_an_update_that_raised_leaves_no_factor_behind() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaled = LearningRate(PerWorkerBatch(4, micro=4, rule=LinearScaling()), {"o": optimizer})
    scaled.step_ended(12, 12, None)

    def breaks() -> float:
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="own"):
        optimizer.step(breaks)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert float(weight.detach()) == pytest.approx(1 - 3 * 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_rate_that_is_a_tensor_stays_the_users_own() -> None:
    weight, rate = nn.Parameter(torch.ones(1)), torch.tensor(0.5)
    optimizer = torch.optim.SGD([weight], lr=rate)
    scaled = LearningRate(PerWorkerBatch(4, micro=4, rule=LinearScaling()), {"o": optimizer})
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


@pytest.mark.failure(
    "The training loop",
    "the batch follows the workers, and no learning-rate rule fits the optimizer (Muon, NAdam, Rprop, your own class)",
    seen="an error names the optimizer and the rules that fit, or the optimizers that have rules",
    outcome="training does not start",
)
@pytest.mark.parametrize(
    ("rule", "make", "values"),
    [
        (MomentumCompensation(), torch.optim.AdamW, "MomentumCompensation.* o, AdamW.*SquareRoot"),
        (AdaScale(), torch.optim.RMSprop, "AdaScale.* o, RMSprop.*SquareRoot"),
        (SquareRoot(), torch.optim.SGD, "SquareRoot.* o, SGD.*MomentumCompensation.*LinearScaling"),
        (SquareRoot(), torch.optim.NAdam, " o, NAdam.*Adam, AdamW, RMSprop, SGD"),
        (SquareRoot(), torch.optim.Adadelta, " o, Adadelta"),
        (SquareRoot(), torch.optim.Rprop, " o, Rprop"),
        (SquareRoot(), Foreign, " o, Foreign"),
        (LinearScaling(), Foreign, " o, .*Foreign"),
        (MomentumCompensation(), lambda _: torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]), " o, Muon"),
        (SquareRoot(), lambda p: torch.optim.RMSprop(p, momentum=0.5), "RMSprop.*momentum"),
        (SquareRoot(), lambda p: torch.optim.RMSprop(p, centered=True), "RMSprop.*centered"),
    ],
)
def test_a_rule_that_does_not_fit_the_optimizer(rule: Rule, make: Any, values: str) -> None:
    with pytest.raises(UsageError, match=values):
        LearningRate(PerWorkerBatch(4, micro=4, rule=rule), {"o": make([nn.Parameter(torch.ones(1))])})


def test_without_an_optimizer_no_rate_can_follow() -> None:
    with pytest.raises(UsageError, match="PerWorkerBatch"):
        learning_rate_of(PerWorkerBatch(4, micro=4), {"model": net()})


def test_a_history_that_does_not_parse_names_the_line(join: Join) -> None:
    with pytest.raises(UsageError, match="line 2: 'x'"):
        join("0 1\nx\n")
