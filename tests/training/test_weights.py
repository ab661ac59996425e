"""Weights of micro-batches, and values over the batch: against plain PyTorch over the whole batch at once."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from farandole.errors import StepAbandoned, UsageError
from farandole.plan.rules import Noise
from farandole.plan.shards import root
from farandole.training import step as step_module
from farandole.training.gradients import Gradients, ShardTotals
from farandole.training.replica import Replica
from farandole.training.values import MAXIMA, MOST_SHARDS, NAME_BYTES, SLOTS, BatchValues, count_lanes
from tests.support.steps import BATCH, MICROS, data, entropy, mlp, whole_batches

IGNORED, WORDS, LONGEST = -100, 7, 5


def texts(length: int = 22) -> TensorDataset:
    """Texts of 0 to 5 tokens, padded: inputs, shape (length, 5), and targets, which are IGNORED after a text's end."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (length, LONGEST), generator=generator)
    targets = torch.randint(0, WORDS, (length, LONGEST), generator=generator)
    lengths = torch.randint(0, LONGEST + 1, (length,), generator=generator)
    lengths[:3] = 0
    targets[torch.arange(LONGEST) >= lengths[:, None]] = IGNORED
    return TensorDataset(tokens, targets)


def tagger() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Embedding(WORDS, 6), nn.Tanh(), nn.Linear(6, WORDS))


def mean_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens; NaN if there is none."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def right(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of the tokens that the model tells, and their number."""
    there = targets != IGNORED
    return (model(tokens).argmax(2) == targets)[there].double().mean(), there.sum()


def assert_equal_gradients(model: nn.Module, plain: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("micro", MICROS)
def test_the_gradient_is_that_of_the_mean_over_all_tokens(run: farandole.Run, micro: int, *, scaled: bool) -> None:
    model = tagger()
    plain, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(texts(), batch=farandole.GlobalBatch(BATCH, micro=micro))
    wholes = whole_batches(loader, 2)
    for step in run.steps(loader, epochs=2):
        for tokens, targets in step:
            weight = (targets != IGNORED).sum()
            step.mean(accuracy=right(model, tokens, targets)[0], weight=weight)
            step.backward(mean_loss(model, tokens, targets), weight=weight, scaler=scaler)
            step.sum(tokens=weight, texts=torch.ones(len(tokens)))
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        tokens, targets = next(wholes)
        loss = mean_loss(plain, tokens, targets)
        loss.backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        assert_equal_gradients(model, plain)
        assert step.loss == pytest.approx(loss.item(), rel=1e-5)
        accuracy, count = right(plain, tokens, targets)
        assert step.means == {"accuracy": pytest.approx(accuracy.item())}
        assert step.sums == {"tokens": count.item(), "texts": len(tokens)}
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    dataset = texts(200)
    value = run.evaluate(model, dataset, right, predict=lambda model, batch: (model, *batch), micro=micro)
    assert value == pytest.approx(right(model, *dataset.tensors)[0].item())


def test_a_weight_that_is_the_number_of_samples_changes_no_bit(run: farandole.Run) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    run.replicate(model=model, other=other)
    for step in run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=5)), epochs=1):
        for x, y in step:
            (loss,), (same,) = entropy([model], x, y), entropy([other], x, y)
            step.backward(loss + same, weight=len(x))
        weighed = [(m.grad, o.grad) for m, o in zip(model.parameters(), other.parameters(), strict=True)]
        assert all(torch.equal(mine, its) for mine, its in weighed if mine is not None and its is not None)


def begin(run: farandole.Run, model: nn.Module, micro: int = 4) -> Iterator[farandole.Step]:
    run.replicate(model=model)
    return run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro)), epochs=2)


@pytest.mark.failure(
    "The training loop",
    "a weight is negative or not finite, all weights of a step are 0, or some micro-batches have no `weight=`",
    seen="an error at that call or at the end of the step says which",
    outcome="the script fails, exit code 1",
)
@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "3", torch.ones(2)])
def test_a_weight_that_is_none(run: farandole.Run, weight: object) -> None:
    model = mlp()
    step = next(begin(run, model))
    x, y = next(iter(step))
    with pytest.raises(UsageError):
        step.backward(F.cross_entropy(model(x), y), weight=weight)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        step.mean(accuracy=0.5, weight=weight)  # type: ignore[arg-type]


@pytest.mark.failure(
    "The training loop",
    "a weight is negative or not finite, all weights of a step are 0, or some micro-batches have no `weight=`",
)
@pytest.mark.parametrize("weights", [(0, 0, 0, 0), (2, None, 2, 2), (None, None, None, 2)])
def test_a_step_whose_weights_are_all_0_or_not_all_given(run: farandole.Run, weights: tuple[int | None, ...]) -> None:
    model = mlp()

    def train() -> None:
        step = next(begin(run, model))
        for (x, y), weight in zip(step, [*weights, None], strict=False):
            step.backward(F.cross_entropy(model(x), y), weight=weight)

    with pytest.raises(UsageError):
        train()


@pytest.mark.parametrize("units", [1.0, 7.0])
def test_the_noise_of_the_gradient_is_that_of_a_sample_whatever_the_weights_count(units: float) -> None:
    model = mlp()
    gradients = Gradients(Replica({"model": model}), measures_noise=True)
    gradients.partials.begin(2)
    dataset, samples = data(), 4
    for shard in range(2):
        x, y = (part[shard * samples : (shard + 1) * samples] for part in dataset.tensors)
        gradients.partials.open(shard)
        scale = units * samples / (2 * samples)
        gradients.backward(F.cross_entropy(model(x), y), scale, last=True)
        gradients.fill(ShardTotals(loss=0.0, weight=units * samples, samples=samples, scale=scale))
        gradients.close(lambda *_: None)
    gradients.publish([nodes[root(2)].flat for nodes in gradients.partials.nodes], 2 * samples)
    each = [
        torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()])])
        for x, y in ((dataset.tensors[0][at : at + 4], dataset.tensors[1][at : at + 4]) for at in (0, 4))
    ]
    expected = Noise.estimate(
        sum(samples * float(g.square().sum()) for g in each), float(torch.stack(each).mean(0).square().sum()),
        2 * samples, 2,
    )  # fmt: skip
    assert gradients.noise is not None
    assert gradients.noise.samples == 2 * samples
    assert gradients.noise.variance == pytest.approx(expected.variance, rel=1e-4)
    assert gradients.noise.square == pytest.approx(expected.square, rel=1e-4)


def test_passes_of_one_micro_batch_have_one_weight(run: farandole.Run) -> None:
    model = mlp()
    step = next(begin(run, model))
    x, y = next(iter(step))
    step.backward(F.cross_entropy(model(x), y), weight=2, last=False)
    with pytest.raises(UsageError):
        step.backward(F.cross_entropy(model(x), y), weight=3)


def test_a_micro_batch_of_weight_0_uses_no_parameter(run: farandole.Run) -> None:
    """Its loss is NaN, and what only it uses has no gradient."""
    model = nn.ModuleList([mlp(), mlp()])
    step = next(begin(run, model))
    for shard, (x, y) in enumerate(step):
        if shard:
            step.backward(F.cross_entropy(model[0](x), y), weight=1)
        else:
            step.backward(F.cross_entropy(model[1](x), y) * math.nan, weight=0)
    assert all(p.grad is None for p in model[1].parameters())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model[0].parameters())
    assert math.isfinite(step.loss)


SUMS = {
    "cross entropy": lambda logits, y: F.cross_entropy(logits, y, reduction="sum"),
    "a sum": lambda logits, y: F.cross_entropy(logits, y, reduction="none").sum(),
    "minus a sum": lambda logits, y: -logits.log_softmax(1)[torch.arange(len(y)), y].sum(),
}


@pytest.mark.failure(
    "The training loop",
    'the loss is a sum over the micro-batch (`reduction="sum"`, `.sum()`)',
    seen="one warning, by the worker of the step's first micro-batch; none after `torch.compile`",
    outcome="the gradient depends on `micro`; divide the sum and pass the number of samples as `weight=`",
)
@pytest.mark.parametrize("loss", [*SUMS, "mean", "weighted", "a sum with a weight"])
def test_a_loss_that_is_a_sum_is_warned_of(run: farandole.Run, loss: str) -> None:
    step_module._warn_of_sum.cache_clear()
    model = mlp()
    step = next(begin(run, model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in step:
            logits = model(x)
            if loss == "weighted":
                step.backward(SUMS["a sum"](logits, y) / len(x), weight=len(x))
            elif loss == "a sum with a weight":  # the script says what it is a mean over
                step.backward(SUMS["a sum"](logits, y), weight=1)
            else:
                step.backward(SUMS.get(loss, F.cross_entropy)(logits, y))
    assert len([w for w in caught if "weight=" in str(w.message)]) == (loss in SUMS)


def test_values_are_those_of_the_batch_and_exact(run: farandole.Run) -> None:
    """After `backward` as well as before it, one number or one for each sample."""
    model = mlp()
    for step in begin(run, model, micro=3):
        count, total = 0, 0.0
        for x, y in step:
            step.mean(class_=y, mean=y.double().mean(), weight=None)
            step.backward(F.cross_entropy(model(x), y))
            step.sum(class_=y, one=1)
            with pytest.raises(StepAbandoned):
                _ = step.means
            count, total = count + 1, total + float(y.sum())
        assert step.sums == {"class_": total, "one": count}
        assert step.means == {
            "class_": pytest.approx(total / step.samples),
            "mean": pytest.approx(total / step.samples),
        }
        assert list(step.means) == ["class_", "mean"]
        assert "one" not in step.means
        with pytest.raises(KeyError):
            _ = step.means["one"]


def test_a_mean_over_nothing_does_not_count(run: farandole.Run) -> None:
    model = mlp()
    step = next(begin(run, model))
    for shard, (x, y) in enumerate(step):
        step.mean(some=1.5 if shard == 2 else math.nan, weight=float(shard == 2))
        step.mean(none=math.nan, weight=0)
        step.backward(F.cross_entropy(model(x), y))
    assert step.means["some"] == 1.5
    assert math.isnan(step.means["none"])


@pytest.mark.parametrize(
    "values",
    [
        {"x" * NAME_BYTES: 1.0},
        {"ä" * (NAME_BYTES // 2): 1.0},
        {"a\nb": 1.0},
        {"value": torch.ones(2)},
        {"value": "good"},
        {"value": None},
        {f"v{number}": 1.0 for number in range(SLOTS + 1)},
    ],
)
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_values_that_are_refused(run: farandole.Run, kind: str, values: dict[str, object]) -> None:
    step = next(begin(run, mlp()))
    next(iter(step))
    with pytest.raises(UsageError):
        getattr(step, kind)(**values)


def test_all_names_that_fit_come_back(run: farandole.Run) -> None:
    model, names = mlp(), ["y" * (NAME_BYTES - 1), "ü", *(f"v{number}" for number in range(SLOTS - 2))]
    step = next(begin(run, model))
    for x, y in step:
        step.mean(**{name: number for number, name in enumerate(names)})
        step.backward(F.cross_entropy(model(x), y))
    assert step.means == {name: number for number, name in enumerate(names)}


def test_a_value_is_given_once_and_in_the_inner_loop(run: farandole.Run) -> None:
    model = mlp()
    step = next(begin(run, model, micro=BATCH))
    with pytest.raises(UsageError):
        step.mean(accuracy=1)
    for x, y in step:
        step.mean(accuracy=1)
        with pytest.raises(UsageError):
            step.mean(accuracy=1)
        step.sum(accuracy=2)
        step.backward(F.cross_entropy(model(x), y))
    with pytest.raises(UsageError):
        step.sum(accuracy=1)
    assert (step.means, step.sums) == ({"accuracy": 1}, {"accuracy": 2})


@pytest.mark.failure(
    "The training loop",
    "`step.mean` or `step.sum` gets other names in one micro-batch than in another, here or on another worker",
    seen="an error at the end of the micro-batch or the step",
    outcome="the script fails, exit code 1; pass the same names in each, with `weight=0` where a mean must not count",
)
@pytest.mark.parametrize("names", [("a", "b", "a", "a"), ("a", "a", "a", ""), ("", "a", "", "")])
def test_micro_batches_give_the_same_names(run: farandole.Run, names: tuple[str, ...]) -> None:
    model = mlp()

    def train() -> None:
        step = next(begin(run, model))
        for (x, y), name in zip(step, [*names, ""], strict=False):
            if name:
                step.mean(**{name: 1.0})
            step.backward(F.cross_entropy(model(x), y))

    with pytest.raises(UsageError):
        train()


def of_worker(name: str) -> tuple[BatchValues, torch.Tensor]:
    """The values of a worker that has computed one micro-batch, and their lanes."""
    lanes = torch.zeros(count_lanes(2), dtype=torch.float64)
    values = BatchValues(lanes, 2)
    values.open(0)
    values.add("mean", {name: 1.0}, 2, None)
    return values, lanes


@pytest.mark.failure(
    "The training loop",
    "`step.mean` or `step.sum` gets other names in one micro-batch than in another, here or on another worker",
)
@pytest.mark.parametrize("other", ["aa", "cc", "bd"])
def test_two_workers_that_give_different_names(other: str) -> None:
    """Also where half the sum of both names is a third one."""
    (mine, lanes), (theirs, more) = of_worker("aa"), of_worker(other)
    if other == "aa":
        none = BatchValues(torch.zeros(count_lanes(2), dtype=torch.float64), 2)  # a worker without a micro-batch
        for each in (mine, theirs, none):
            each.end(lanes + more, 2, 0)
            assert each.of("mean", 0) == {"aa": 1.0}
        return
    for each in (mine, theirs):
        with pytest.raises(UsageError):
            each.end(lanes + more, 2, 0)


@pytest.mark.parametrize("micro", MICROS)
def test_maxima_are_those_of_the_batch(run: farandole.Run, micro: int) -> None:
    model, most = mlp(), torch.tensor(-math.inf)
    for step in begin(run, model, micro=micro):
        seen: list[torch.Tensor] = []
        for x, y in step:
            step.max(below=-x.abs().amin(1), one=x[:, 0].max(), nothing=math.nan if 0 in step.indices else 1.0)
            step.backward(F.cross_entropy(model(x), y))
            seen.append(x)
        rows = torch.cat(seen)
        assert step.maxima["below"] == -rows.abs().min().item()
        assert step.maxima["one"] == rows[:, 0].max().item()
        most = torch.maximum(most, torch.tensor(step.maxima["nothing"]))
        assert not step.means
    assert most.isnan(), "the one of the step with sample 0"


@pytest.mark.parametrize("many", [False, True])
def test_maxima_that_are_refused(run: farandole.Run, *, many: bool) -> None:
    model = mlp()
    run.replicate(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batch = farandole.GlobalBatch(MOST_SHARDS + 1, micro=1) if many else farandole.PerWorkerBatch(8, micro=4)
    step = next(run.steps(run.loader(data(), batch), epochs=1))
    next(iter(step))
    step.mean(value=1.0)
    with pytest.raises(UsageError):
        step.max(value=1.0)


def test_too_many_maxima(run: farandole.Run) -> None:
    step = next(begin(run, mlp()))
    next(iter(step))
    with pytest.raises(UsageError):
        step.max(**{f"v{number}": 1.0 for number in range(MAXIMA + 1)})


def test_names_are_exact_over_many_micro_batches() -> None:
    values, lanes = of_worker("\x7e" * (NAME_BYTES - 1))
    shards = 2_000_003
    values.end(lanes * shards, shards, 0)
    assert list(values.of("mean", 0)) == ["\x7e" * (NAME_BYTES - 1)]


def test_a_worker_without_a_micro_batch_finds_names_that_differ() -> None:
    """The sums of both names are twice the first one, but for a rest."""
    (_, lanes), (_, more) = of_worker("abcX"), of_worker("abcY")
    with pytest.raises(UsageError):
        BatchValues(torch.zeros_like(lanes), 2).end(lanes + more, 2, 0)
