"""Several passes over one batch, `step.again`, and rows of the whole batch, `step.gather`: against plain PyTorch."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import farandole
from farandole.collective.exchange import Exchange
from farandole.control.run_folder import LEDGER, METRICS
from farandole.data.ledger import count
from farandole.errors import NotReplicated, StepAbandoned, UsageError, WorkerSuperseded
from farandole.protocol.view import Lineage
from farandole.protocol.worker.driver import Task
from farandole.run import Run
from farandole.settings import Settings
from farandole.training.gather import LANES, MOST_BYTES, MOST_TENSORS, Form, GatheredRows, partials_of
from farandole.worker.rounds import Rounds
from tests.support.mentioned import mentions
from tests.support.steps import BATCH, MICROS, N, assert_grads, data, grads, mlp, whole_batches

EPOCHS = 2


def begin(run: farandole.Run, micro: int = 4, **objects: object) -> Iterator[farandole.Step]:
    run.replicate(**objects)
    return run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro)), epochs=EPOCHS)


# --- passes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", MICROS)
def test_two_networks_against_each_other(run: farandole.Run, micro: int) -> None:
    """The second pass sees the weights that the first one's update has made."""
    maker, critic = nn.Linear(1, 6), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    plain = [copy.deepcopy(maker), copy.deepcopy(critic)]

    def judged(maker: nn.Module, critic: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = maker(y[:, None].float()).detach()
        return F.softplus(critic(made)).mean() + F.softplus(-critic(x)).mean()

    def fooled(maker: nn.Module, critic: nn.Module, y: torch.Tensor) -> torch.Tensor:
        return F.softplus(-critic(maker(y[:, None].float()))).mean()

    first, second = (torch.optim.Adam(module.parameters(), lr=0.1) for module in (critic, maker))
    run.replicate(maker=maker, critic=critic, first=first, second=second)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro))
    wholes = whole_batches(loader, EPOCHS)
    for step in run.steps(loader, epochs=EPOCHS):
        x, y = next(wholes)
        for mine, theirs in zip((maker, critic), plain, strict=True):
            theirs.load_state_dict(mine.state_dict())
        for inputs, labels in step:
            step.backward(judged(maker, critic, inputs, labels))
            step.mean(real=critic(inputs))
        for module in plain:
            module.zero_grad()
        loss = judged(*plain, x, y)
        loss.backward()
        assert_grads(grads(maker, critic), grads(*plain), exact=micro >= BATCH)
        assert step.loss == pytest.approx(loss.item(), rel=1e-5)
        real = plain[1](x).mean().item()
        assert step.means == {"real": pytest.approx(real, rel=1e-4)}
        first.step()
        plain[1].load_state_dict(critic.state_dict())
        for _, labels in step.again():
            step.backward(fooled(maker, critic, labels))
            step.mean(made=1.0)
        for module in plain:
            module.zero_grad()
        loss = fooled(*plain, y)
        loss.backward()
        assert_grads(grads(maker, critic), grads(*plain), exact=micro >= BATCH)
        assert step.loss == pytest.approx(loss.item(), rel=1e-5)
        assert step.means == {"real": pytest.approx(real, rel=1e-4), "made": 1.0}
        second.step()
    assert next(wholes, None) is None


def test_a_closure_of_lbfgs(run: farandole.Run) -> None:
    """With the batch in one micro-batch, all bits are those of plain PyTorch; the line has the first pass's loss."""
    model = mlp()
    plain = copy.deepcopy(model)
    optimizer, reference = (
        torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe") for m in (model, plain)
    )
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=BATCH))
    wholes = whole_batches(loader, EPOCHS)
    for step in run.steps(loader, epochs=EPOCHS):
        x, y = next(wholes)

        def closure(step: farandole.Step = step) -> float:
            optimizer.zero_grad()
            for inputs, labels in step.again():
                step.backward(F.cross_entropy(model(inputs), labels))
            return step.loss

        def by_hand(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            reference.zero_grad()
            loss = F.cross_entropy(plain(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        reference.step(by_hand)  # type: ignore[arg-type]
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_checked_after_it_has_run(run: farandole.Run, *, by_name: bool) -> None:
    model = mlp()
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for step in begin(run, model=model, optimizer=optimizer):
        before = [p.detach().clone() for p in model.parameters()]

        def closure(step: farandole.Step = step) -> float:
            for x, y in step.again():
                step.backward(F.cross_entropy(model(x), y))
            return step.loss

        def cleared(step: farandole.Step = step) -> float:
            loss = closure(step)
            optimizer.zero_grad()
            return loss

        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)  # type: ignore[call-overload]
        assert loss == step.loss
        assert not any(map(torch.equal, before, model.parameters()))
        if step.number == 0:
            with pytest.raises(NotReplicated):
                other.step(closure)  # type: ignore[call-overload]
        with pytest.raises(UsageError):
            optimizer.step(cleared)  # type: ignore[call-overload]


class Counted(nn.Module):
    """Counts in a buffer what it is called with, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return F.dropout(self.linear(x), 0.5)


@pytest.mark.parametrize("recompute", [False, True])
def test_buffers_and_random_numbers_of_a_pass(run: farandole.Run, *, recompute: bool) -> None:
    model = Counted()
    run.replicate(model=model, buffers={"model.seen": "sum"})
    seen = 0.0
    for step in run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=EPOCHS):
        drawn: list[list[torch.Tensor]] = []
        starts: list[set[float]] = []
        for number in range(3):
            drawn.append([])
            starts.append(set())
            for x, _ in step.again(recompute=recompute and number > 0):
                starts[-1].add(float(model.seen))
                out = model(x)
                drawn[-1].append(out.detach() != 0)
                step.backward(out.square().mean())
        one, two, three = (torch.cat(each) for each in drawn)
        assert torch.equal(one, two) is recompute
        assert torch.equal(two, three) is recompute
        assert not recompute or len({float(out.double().mean()) for out in drawn[0]}) > 1
        between = 0 if recompute else step.samples
        assert starts == [{seen}, {seen + between}, {seen + 2 * between}]
        seen += step.samples if recompute else 3 * step.samples
        assert float(model.seen) == seen


def test_a_recomputed_pass_leaves_buffers_as_they_are_with_other_weights_too(run: farandole.Run) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in begin(run, model=model, optimizer=optimizer):
        before = [buffer.clone() for buffer in model.buffers()]
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        kept = [buffer.clone() for buffer in model.buffers()]
        assert not all(map(torch.equal, before, kept))
        for x, y in step.again(recompute=True):
            step.backward(F.cross_entropy(model(x), y))
        assert all(map(torch.equal, kept, model.buffers()))


def test_values_of_passes(run: farandole.Run) -> None:
    model = mlp()
    for step in begin(run, model=model):
        for number in range(3):
            for x, _ in step.again():
                step.max(**{f"first_{number}": x.max(), f"second_{number}": -x.max()})
                step.sum(same=float(number))
                step.backward(model(x).mean())
        largest = step.maxima["first_0"]
        assert [*step.maxima] == [f"{place}_{number}" for number in range(3) for place in ("first", "second")]
        assert [step.maxima[f"first_{number}"] for number in range(3)] == [largest] * 3
        smallest = step.maxima["second_0"]
        assert [step.maxima[f"second_{number}"] for number in range(3)] == [smallest] * 3
        assert largest > 0 > smallest != -largest
        assert step.sums == {"same": 2.0 * -(-step.samples // 4)}


def test_the_ledger_has_each_sample_once(tmp_path: Path) -> None:
    run, model = Run(Settings(folder=tmp_path, ledger=True)), mlp()
    for step in begin(run, model=model):
        for _ in range(2):
            for x, _y in step.again():
                step.backward(model(x).mean())
    (file,) = (tmp_path / LEDGER).iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    samples = [(line["epoch"], sample) for line in lines for sample in line.get("samples", ())]
    assert sorted(samples) == [(epoch, sample) for epoch in range(EPOCHS) for sample in range(N)]


@pytest.mark.parametrize("gathers_first", [False, True])
def test_the_ledger_names_who_computed_in_the_first_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, gathers_first: bool
) -> None:
    """Later rounds of a step deal its shards otherwise if a worker has joined in the first one, or was lost since."""
    begun = Rounds.begin

    def begin_elsewhere(rounds: Rounds, task: Task, **options: Any) -> None:
        begun(rounds, task, **options)
        if not task.is_step:
            monkeypatch.setattr(Rounds, "lineage", property(lambda _: Lineage(sets=(("another",),))))

    lineage = Rounds.lineage
    monkeypatch.setattr(Rounds, "begin", begin_elsewhere)
    run, model = Run(Settings(folder=tmp_path, ledger=True)), mlp()
    for step in begin(run, model=model):
        for x, _y in step:
            step.gather(x=x)
            if not gathers_first:
                step.backward(model(x).mean())
        for x, _y in step.again():
            step.backward(model(x).mean())
        monkeypatch.setattr(Rounds, "lineage", lineage)
    assert count(tmp_path / LEDGER) == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(N))


def test_an_update_with_sums_that_others_have_overwritten(run: farandole.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found before the next pass begins; and after the last pass, whose sums the update has used."""
    model = mlp()
    steps = begin(run, model=model)
    step = next(steps)
    for x, _ in step:
        step.backward(model(x).mean())
    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "sums_intact", property(lambda _: False))
        with pytest.raises(WorkerSuperseded):
            next(step.again())
    run._rounds._updating = None  # the sums of the first pass are not looked at any more
    for x, _ in step.again():
        step.backward(model(x).mean())
    monkeypatch.setattr(Exchange, "sums_intact", property(lambda _: False))
    with pytest.raises(WorkerSuperseded):
        next(steps)


def test_the_update_after_each_pass_draws_numbers_of_its_own(run: farandole.Run) -> None:
    model = mlp()
    for step in begin(run, model=model):
        drawn = set()
        for _ in range(3):
            for x, _y in step.again():
                step.backward(model(x).square().mean())
            drawn.add(float(torch.rand(())))
        assert len(drawn) == 3


def test_the_line_of_a_step(tmp_path: Path) -> None:
    """The step counts once, with the loss of its first pass with a gradient; what the script logs comes after it."""
    run, losses = Run(Settings(folder=tmp_path)), list[float]()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in begin(run, model=model, optimizer=optimizer):
        run.log(place=0)
        for x, _y in step:
            step.gather(out=model(x))
        run.log(place=1)
        with pytest.raises(StepAbandoned):
            _ = step.loss
        for number in range(2):
            for x, y in step.again():
                step.backward(F.cross_entropy(model(x), y))
            losses += [step.loss][: 1 - number]
            run.log(place=2 + number)
            optimizer.step()
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()][1:]
    assert [line.get("place", -1) for line in lines] == [-1, 0, 1, 2, 3] * (len(lines) // 5)
    own = [line for line in lines if "place" not in line]
    assert [line["step"] for line in own] == list(range(math.ceil(N / BATCH) * EPOCHS))
    assert [line["loss"] for line in own] == losses
    assert len(set(losses)) == len(losses)
    assert sum(line["samples"] for line in own) == N * EPOCHS


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.failure(
    "The training loop",
    "the script calls `step.again()` before the current pass has ended, in `run.once`, or after the step",
    seen="an error at once",
    outcome="the script fails, exit code 1",
)
def test_a_pass_within_another(run: farandole.Run) -> None:
    model = mlp()
    step = next(begin(run, model=model))
    next(iter(step))
    with pytest.raises(StepAbandoned):
        next(step.again())


def test_a_pass_that_is_left(run: farandole.Run) -> None:
    model = mlp()
    steps = begin(run, model=model)
    step = next(steps)
    for x, _ in step:
        step.backward(model(x).mean())
    next(step.again())
    with pytest.raises(StepAbandoned):
        run.evaluate(model, data(), lambda out, y: out.argmax(1) == y)
    with pytest.raises(StepAbandoned):
        next(steps)


@pytest.mark.failure(
    "The training loop",
    "the script calls `step.again()` before the current pass has ended, in `run.once`, or after the step",
)
def test_places_where_no_pass_can_begin(run: farandole.Run) -> None:
    model = mlp()
    steps = begin(run, model=model)
    step = next(steps)
    with pytest.raises(UsageError):
        next(step.again(recompute=True))
    for x, _ in step:
        step.backward(model(x).mean())
    with pytest.raises(UsageError), run.once():
        next(step.again())


@pytest.mark.failure(
    "The training loop",
    "the script calls `step.again()` before the current pass has ended, in `run.once`, or after the step",
)
@pytest.mark.parametrize("last", [False, True])
def test_a_step_that_is_over(run: farandole.Run, *, last: bool) -> None:
    model = mlp()
    done: list[farandole.Step] = []
    for step in begin(run, model=model):
        if done and not last:
            break
        for x, _ in step:
            step.backward(model(x).mean())
        done.append(step)
    with pytest.raises(UsageError) as refused:
        next(done[-1 if last else 0].again())
    assert mentions(str(refused.value), done[-1 if last else 0].number)


def test_a_step_without_any_gradient(run: farandole.Run) -> None:
    model = mlp()

    def train() -> None:
        for step in begin(run, model=model):
            for x, _ in step:
                step.gather(x=x)

    with pytest.raises(UsageError):
        train()


def test_a_pass_in_which_only_some_have_a_gradient(run: farandole.Run) -> None:
    model = mlp()

    def train() -> None:
        step = next(begin(run, model=model))
        for number, (x, _) in enumerate(step):
            step.gather(x=x)
            if number:
                step.backward(model(x).mean())

    with pytest.raises(UsageError):
        train()


def test_a_loss_that_is_not_finite_in_a_later_pass(tmp_path: Path) -> None:
    run = Run(Settings(folder=tmp_path))
    model = mlp()
    for step in begin(run, model=model):
        for bad in (False, step.number == 1):
            for x, _ in step.again():
                step.backward(model(x).mean() * (math.nan if bad else 1.0))
        assert math.isnan(step.loss) is (step.number == 1)


# --- rows -------------------------------------------------------------------------------------------------------------

BITS = torch.tensor([0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 5e-324, 1e-40, -1.5, 3.0])
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


@pytest.mark.parametrize("micro", MICROS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_all_bits_in_the_order_of_the_batch(run: farandole.Run, micro: int, dtype: torch.dtype) -> None:
    width = 7
    source = BITS.double()[torch.arange(N * width) * 3 % len(BITS)].reshape(N, width)
    source = (source.nan_to_num(7, 5, -5) if not dtype.is_floating_point else source).to(dtype)
    model = nn.Linear(1, 1)
    run.replicate(model=model)
    loader = run.loader(
        TensorDataset(source, torch.arange(N)), batch=farandole.GlobalBatch(BATCH, micro=micro), drop_last=False
    )
    wholes = whole_batches(loader, 1)
    for step in run.steps(loader, epochs=1):
        whole, index = next(wholes)
        for values, labels in step:
            assert torch.equal(step.indices, labels)
            step.gather(values=values.reshape(len(values), 1, width), label=labels)
        assert set(step.gathered) == {"values", "label"}
        assert step.gathered["values"].dtype == dtype
        assert step.gathered["values"].shape == (step.samples, 1, width)
        got, wanted = (t.contiguous().reshape(-1).view(torch.uint8) for t in (step.gathered["values"], whole))
        assert torch.equal(got, wanted)
        assert torch.equal(step.gathered["label"], index)
        rows = []
        for values, labels in step.again():
            rows.append(step.rows)
            assert torch.equal(step.gathered["label"][step.rows], labels)
            step.backward(model(torch.zeros(len(values), 1)).mean())
        assert rows[0].start == 0
        assert rows[-1].stop == step.samples
        assert "values" in step.gathered
        with pytest.raises(KeyError) as missing:
            step.gathered["valves"]
        assert mentions(str(missing.value), "values")


@pytest.mark.parametrize("micro", MICROS)
def test_a_contrastive_loss_over_the_whole_batch(run: farandole.Run, micro: int) -> None:
    """Features first, then the gradient of the loss in them, then each micro-batch's part of the network's."""

    def info_nce(z: torch.Tensor) -> torch.Tensor:
        z = F.normalize(z, dim=1)
        scores = z @ z.T / 0.5 - 1e9 * torch.eye(len(z))
        return F.cross_entropy(scores, torch.arange(len(z)).roll(1))

    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro))
    wholes = whole_batches(loader, EPOCHS)
    for step in run.steps(loader, epochs=EPOCHS):
        for x, _ in step:
            with torch.no_grad():
                step.gather(z=model(x))
        z = step.gathered["z"].requires_grad_()
        loss = info_nce(z)
        (slope,) = torch.autograd.grad(loss, z)
        for x, _ in step.again(recompute=True):
            out = model(x)
            step.backward((out * slope[step.rows]).sum() * step.samples / len(x))
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        whole = info_nce(plain(next(wholes)[0]))
        whole.backward()
        assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
        assert_grads(grads(model), grads(plain), exact=False)
        optimizer.step()


def trained(monkeypatch: pytest.MonkeyPatch, lost: set[int]) -> tuple[list[list[torch.Tensor]], list[float], int]:
    """Train; the rows of the micro-batches `lost` are gone after each pass, as if a lost worker had computed them.

    Returns the gradients, buffers and rows of each step, the values, and how often micro-batches were computed.
    """
    forms = GatheredRows.forms

    def forget(rows: GatheredRows, *arguments: Any) -> list[Form]:
        found = forms(rows, *arguments)
        for shard in lost:
            rows._kept.pop(shard, None)
        return found

    monkeypatch.setattr(GatheredRows, "forms", forget)
    torch.manual_seed(2)
    run, model = Run(Settings(seed=5)), nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kept: list[list[torch.Tensor]] = []
    values, computed = list[float](), 0
    for step in begin(run, model=model, optimizer=optimizer):
        for x, y in step:
            out = model(x)
            step.gather(out=out)
            step.mean(out=out.mean())
            step.sum(samples=torch.ones(len(x)))
            step.max(out=out.max())
            step.backward(F.cross_entropy(out, y))
            computed += 1
        kept.append([*(g.clone() for g in grads(model) if g is not None), *(b.clone() for b in model.buffers())])
        kept[-1].append(step.gathered["out"])
        values += [*step.means.values(), *step.sums.values(), *step.maxima.values(), step.loss, float(torch.rand(()))]
        optimizer.step()
    return kept, values, computed


def test_rows_of_a_lost_worker_are_computed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the number of passes tells that they were."""
    kept, values, computed = trained(monkeypatch, set())
    monkeypatch.undo()
    again, same, more = trained(monkeypatch, {0, 1})
    assert more == computed + 2 * len(kept)
    assert same == values
    for one, other in zip(kept, again, strict=True):
        assert all(map(torch.equal, one, other))


class Rows(Dataset[torch.Tensor]):
    """Its samples are their own numbers; the last one can't be read."""

    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BATCH - 1:
            raise ValueError(index)
        return torch.tensor([float(index)])


def test_rows_where_bad_samples_are_left_out(run: farandole.Run) -> None:
    model = nn.Linear(1, 1)
    run.replicate(model=model)
    loader = run.loader(Rows(), batch=farandole.GlobalBatch(BATCH, micro=4), on_bad_sample="skip")
    step = next(run.steps(loader, epochs=1))
    x = next(iter(step))
    with pytest.raises(UsageError):
        step.gather(x=x)


@pytest.mark.failure(
    "The training loop",
    (
        "`step.gather` gets tensors without a row for each sample, different tensors in different micro-batches, or "
        "more than 256 MiB"
    ),
    seen="an error at that call or at the end of the pass names the tensor and its shape",
    outcome="the script fails, exit code 1",
)
@pytest.mark.parametrize(
    "tensors",
    [
        {"x": [1.0] * 4},
        {"x": torch.tensor(1.0)},
        {"x": torch.zeros(3, 2)},
        {"x": torch.zeros(4, 2).to_sparse()},
        {"x": torch.zeros(4, dtype=torch.uint16)},
        {"a name": torch.zeros(4)},
        {"x" * 90: torch.zeros(4)},
        {f"x{number}": torch.zeros(4) for number in range(MOST_TENSORS + 1)},
    ],
)
def test_rows_that_can_not_be_gathered(run: farandole.Run, tensors: dict[str, torch.Tensor]) -> None:
    model = mlp()
    step = next(begin(run, model=model))
    next(iter(step))
    with pytest.raises(UsageError) as refused:
        step.gather(**tensors)
    assert mentions(str(refused.value), [*tensors][-1])


def test_rows_outside_the_inner_loop(run: farandole.Run) -> None:
    step = next(begin(run, model=mlp()))
    with pytest.raises(UsageError):
        step.gather(x=torch.zeros(4))
    with pytest.raises(UsageError):
        _ = step.generators
    with pytest.raises(StepAbandoned):
        _ = step.gathered


@pytest.mark.failure(
    "The training loop",
    (
        "`step.gather` gets tensors without a row for each sample, different tensors in different micro-batches, or "
        "more than 256 MiB"
    ),
)
@pytest.mark.parametrize("other", [{"x": torch.zeros(4, 2)}, {"x": torch.zeros(4, 3).double()}, {"y": torch.zeros(4)}])
def test_micro_batches_that_gather_different_rows(run: farandole.Run, other: dict[str, torch.Tensor]) -> None:
    model = mlp()

    def train() -> None:
        step = next(begin(run, model=model))
        for number, _ in enumerate(step):
            step.gather(**(other if number == 2 else {"x": torch.zeros(4, 3)}))

    with pytest.raises(UsageError):
        train()


def test_workers_that_gather_different_rows() -> None:
    """Each of two has one micro-batch: what they have given is in the sums of the lanes."""
    lanes = [torch.zeros(LANES, dtype=torch.float64) for _ in range(2)]
    workers = [GatheredRows(mine, 3) for mine in lanes]
    for worker, width in zip(workers, (3, 5), strict=True):
        worker.open()
        worker.add({"x": torch.zeros(2, width)}, 2)
        worker.close(0)
    for worker in workers:
        with pytest.raises(UsageError):
            worker.forms(lanes[0] + lanes[1], 2, 4)
        assert worker.forms(2 * lanes[workers.index(worker)], 2, 4)[0].dtype == "float32"


def test_rows_of_two_workers_and_of_one_without_any() -> None:
    """The bytes of two micro-batches may meet in one lane."""
    lanes = [torch.zeros(LANES, dtype=torch.float64) for _ in range(3)]
    first, second, third = (GatheredRows(mine, 3) for mine in lanes)
    whole = torch.arange(5 * 3, dtype=torch.int8).reshape(5, 3) - 7
    for worker, rows in ((first, whole[:3]), (second, whole[3:])):
        worker.open()
        worker.add({"x": rows}, len(rows))
        worker.close(worker is second)
    forms = [worker.forms(lanes[0] + lanes[1], 2, 5) for worker in (first, second, third)]
    assert forms == [[Form("x", "int8", (3,))]] * 3
    sums = [torch.zeros(partials_of(forms[0], 5).layout.lanes, dtype=torch.float64) for _ in range(2)]
    first.write(0, 0, forms[0], 5, sums[0])
    second.write(1, 3, forms[0], 5, sums[1])
    for worker in (first, second, third):
        assert torch.equal(worker.read(forms[0], 5, sums[0] + sums[1])["x"], whole)


@pytest.mark.failure(
    "The training loop",
    (
        "`step.gather` gets tensors without a row for each sample, different tensors in different micro-batches, or "
        "more than 256 MiB"
    ),
)
def test_rows_that_are_too_large() -> None:
    lanes = torch.zeros(LANES, dtype=torch.float64)
    rows = GatheredRows(lanes, 3)
    rows.open()
    rows.add({"x": torch.zeros(1, 1024)}, 1)
    assert rows.forms(lanes, 1, MOST_BYTES // 4096)
    with pytest.raises(UsageError):
        rows.forms(lanes, 1, MOST_BYTES // 4096 + 1)


# --- random numbers of a sample ---------------------------------------------------------------------------------------


def test_the_numbers_of_a_sample_do_not_depend_on_the_micro_batch() -> None:
    def drawn(micro: int) -> dict[tuple[int, int], float]:
        run, model = Run(Settings(seed=5)), mlp()
        numbers: dict[tuple[int, int], float] = {}
        for step in begin(run, micro, model=model):
            for x, _ in step:
                values = [float(torch.rand((), generator=generator)) for generator in step.generators]
                numbers.update({(step.epoch, i): v for i, v in zip(step.indices.tolist(), values, strict=True)})
                step.backward(model(x).mean())
            for _ in step.again():
                again = [float(torch.rand((), generator=generator)) for generator in step.generators]
                assert again == [numbers[step.epoch, i] for i in step.indices.tolist()]
                step.backward(model(x).mean())
        return numbers

    numbers = drawn(4)
    assert len(set(numbers.values())) == N * EPOCHS
    assert drawn(16) == numbers
