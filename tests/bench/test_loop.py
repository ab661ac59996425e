"""The loop as a bench has it: a world of one, in the tests' own process. Two workers are in `tests/system`."""

from __future__ import annotations

import atexit
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import farandole
from farandole import joining
from farandole.bench.loop import begin
from farandole.bench.plain_step import Plain, PlainStep
from farandole.bench.terms import (
    ALONE,
    DDP,
    FARANDOLE,
    BenchFinished,
    BenchReports,
    BenchTerms,
    Block,
    Record,
    RunFacts,
    Unfit,
    environment,
)
from farandole.errors import UsageError
from farandole.training import loop
from farandole.training.step import Step
from farandole.worker.rounds import Rounds
from tests.support.bench_log import log_of
from tests.support.steps import BATCH, SEED, data

TERMS = BenchTerms(workers=1, steps=2, rounds=2, warmup=1)
LONG = 3 * BATCH + 6  # an epoch of three whole steps and a short one


class Over(Exception):
    """All has been measured."""


Joined = Callable[..., farandole.Run]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Joined]:
    """A run: a bench's, unless it is to be none; of a world of one that stands for so many workers."""
    monkeypatch.setenv("FARANDOLE_SEED", str(SEED))
    monkeypatch.setenv("FARANDOLE_CHECKPOINT_EVERY", "never")
    for name in ("TICKET", "WORKER", "POOL", "THREADS", "FOLDER", "BENCH"):
        monkeypatch.delenv(f"FARANDOLE_{name}", raising=False)
    threads, files = torch.get_num_threads(), ExitStack()

    def join(terms: BenchTerms | None = TERMS, *, stands_for: int = 1) -> farandole.Run:
        monkeypatch.setattr(joining, "_current", None)
        monkeypatch.setattr(loop, "_new_loop", loop.Loop)
        (tmp_path / "history").write_text(f"0 {stands_for}\n")
        monkeypatch.setenv("FARANDOLE_HISTORY", str(tmp_path / "history"))
        if terms is None:
            return farandole.join()
        monkeypatch.setenv("FARANDOLE_FOLDER", str(tmp_path))
        for name, value in environment(terms).items():
            monkeypatch.setenv(name, value)
            begin(value)  # as a worker of the bench does
        run = farandole.join()
        atexit.unregister(run._context._end)  # type: ignore[attr-defined]
        monkeypatch.setattr(Rounds, "obey_until_goodbye", over)
        files.callback(run._context._file.close)  # type: ignore[attr-defined]
        return run

    def over(rounds: Rounds) -> None:
        del rounds
        raise Over

    with files, log_of(tmp_path, "w1"):
        yield join
    torch.set_num_threads(threads)


def told(folder: Path) -> list[Record]:
    found = BenchReports(folder)
    found.read()
    [records] = found.records.values()
    return records


class Net(nn.Sequential):
    """With all that a step may leave a trace in."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


ONE = farandole.GlobalBatch(BATCH, micro=4)
Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def noisy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model(x * (1 + 0.1 * random.random()))
    return outputs


def train(
    run: farandole.Run, model: nn.Module, *, epochs: int = 100, forward: Forward = noisy, backwards: int = 1,
    batch: Any = ONE, adam: bool = False, **more: nn.Module,
) -> Iterator[farandole.Step]:  # fmt: skip
    """Gives each step after its inner loop, and makes its update then."""
    parameters = [p for m in (model, *more.values()) for p in m.parameters()]
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer = torch.optim.AdamW(parameters, lr=0.01) if adam else sgd
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = run.loader(data(LONG), batch=batch)
    run.replicate(model=model, optimizer=optimizer, schedule=schedule, **more)
    for step in run.steps(loader, epochs=epochs):
        drawn = random.random()
        for x, y in step:
            for left in reversed(range(backwards)):
                outputs = forward(model, x) + sum(each(x) for each in more.values())
                step.backward(drawn * F.cross_entropy(outputs, y), last=not left)
        yield step
        optimizer.step()
        schedule.step()


def all_of(steps: Iterator[farandole.Step], each: Callable[[farandole.Step], object]) -> list[Any]:
    """What `each` gives for the steps, until all has been measured."""
    found: list[Any] = []

    def go_on() -> None:
        for step in steps:
            found.append(each(step))

    with pytest.raises(Over):
        go_on()
    return found


def test_each_contestant_has_its_blocks_in_turn(joined: Joined, tmp_path: Path) -> None:
    steps = all_of(train(joined(), Net()), type)
    ready, aside, own = [Step, PlainStep], 3 * [PlainStep], 4 * [Step]  # one of the run's is short, and not counted
    assert steps == ready + aside + own + aside + own + aside + aside
    blocks = [record for record in told(tmp_path) if isinstance(record, Block)]
    order = (ALONE, FARANDOLE, DDP), (FARANDOLE, DDP, ALONE)
    assert [(b.round, b.contestant) for b in blocks] == [(r, name) for r, names in enumerate(order) for name in names]
    assert all(len(block.spent) == TERMS.steps and block.samples == BATCH for block in blocks)
    assert isinstance(told(tmp_path)[-1], BenchFinished)


def test_a_steps_parts_are_within_it_and_of_its_kind(joined: Joined, tmp_path: Path) -> None:
    all_of(train(joined(), Net()), type)
    for block in told(tmp_path):
        for spent in block.spent if isinstance(block, Block) else ():
            assert spent.rest >= 0, "no part is counted twice"
            assert min(spent.data, spent.compute, spent.update) > 0
            ours = (spent.folding, spent.waiting, spent.landing)
            assert min(ours) > 0 if isinstance(block, Block) and block.contestant == FARANDOLE else ours == (0, 0, 0)


@pytest.mark.parametrize(
    "how", [{}, {"adam": True, "batch": farandole.PerWorkerBatch(BATCH, micro=4, rule=farandole.SquareRoot())}]
)
def test_what_happens_aside_leaves_no_trace_in_the_run(joined: Joined, how: dict[str, Any]) -> None:
    """Weights, moments, rates, running statistics, and what is drawn: as without a bench."""

    def prints(run: farandole.Run) -> Callable[[farandole.Step], tuple[int, str] | None]:
        return lambda step: (step.number, run.fingerprint()) if isinstance(step, Step) else None

    plain = joined(None, stands_for=2)
    wanted = [*map(prints(plain), islice(train(plain, Net(), **how), 10))]
    run = joined(stands_for=2)
    found = [*filter(None, all_of(train(run, Net(), **how), prints(run)))]
    assert len(found) >= 7
    assert found == wanted[: len(found)]


def test_all_contestants_compute_the_same_micro_batches(joined: Joined) -> None:
    """Those of the round's beginning, though the run has gone on when others come after it."""
    read: list[list[torch.Tensor]] = [[]]

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        read[-1].append(x)
        return noisy(model, x)

    all_of(train(joined(), Net(), forward=forward), lambda _: read.append([]))
    micro_batches = [torch.cat(step) for step in read if step]
    alone, ours, ddp = micro_batches[2:5], [*micro_batches[5:7], micro_batches[8]], micro_batches[9:12]
    assert alone[0].shape == (BATCH, 6)
    for mine, theirs, others in zip(alone, ours, ddp, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, others)
    assert not torch.equal(alone[0], alone[1])


def test_alone_a_step_has_the_gradient_that_it_has_in_the_run(joined: Joined) -> None:
    """As the run's own step has it from the same weights, but for what each of them has drawn."""
    model, gradients = nn.Linear(6, 3), []

    def keep(step: farandole.Step) -> None:
        del step
        gradients.append(F.normalize(model.weight.grad.reshape(1, -1)))  # type: ignore[union-attr]

    all_of(train(joined(), model, forward=lambda model, x: model(x)), keep)
    torch.testing.assert_close(gradients[2], gradients[5])  # of the blocks that begin with the same state
    assert not torch.allclose(gradients[2], gradients[3])


def test_it_is_told_which_micro_batch_is_a_steps_last(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it DistributedDataParallel exchanges, and with no other."""
    lasts: list[bool] = []
    monkeypatch.setattr(Plain, "opens", lambda _, *, last: lasts.append(last))
    all_of(train(joined(), Net()), type)
    assert lasts == TERMS.rounds * 3 * [False, False, False, True]


def hooks(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())  # type: ignore[attr-defined]


def test_aside_nothing_of_ours_hangs_on_the_gradients(joined: Joined) -> None:
    model = Net()
    found = all_of(train(joined(), model), lambda step: (isinstance(step, Step), hooks(model)))
    assert {*found} == {(True, len([*model.parameters()])), (False, 0)}


def test_a_plain_step_has_the_face_of_a_step(joined: Joined) -> None:
    steps = train(joined(), Net())
    step, plain = next(steps), next(steps)
    face = {name for name in dir(step) if not name.startswith("_")}
    assert {name for name in dir(plain) if not name.startswith("_")} == face
    for name in ("number", "epoch", "samples", "view", "base_steps", "ended", "skipped"):
        assert getattr(plain, name) == getattr(step, name), name
    assert plain.loss == pytest.approx(step.loss, rel=0.5), "of other micro-batches"


def test_weights_and_values_of_a_plain_step_are_those_of_this_worker(joined: Joined) -> None:
    """The script is the same in all steps of a bench."""
    run, model = joined(), nn.Linear(6, 3)
    dataset = data()
    model, loader = run.prepare(model, DataLoader(dataset, batch_size=8), micro=2)
    kinds: set[str] = set()
    for step in run.steps(loader, epochs=400):
        rows: list[int] = []
        for x, y in step:
            assert torch.equal(dataset.tensors[0][step.indices], x)
            rows += step.indices.tolist()
            step.mean(y=y.double(), n=1.0, weight=len(x))
            step.backward(F.cross_entropy(model(x), y), weight=len(x))
            step.sum(y=y)
            step.max(y=y)
        targets = dataset.tensors[1][rows].double()
        assert step.means == {"y": pytest.approx(targets.mean().item()), "n": 1.0}
        assert (step.sums, step.maxima) == ({"y": targets.sum().item()}, {"y": targets.max().item()})
        assert step.loss > 0
        kinds.add(type(step).__name__)
        if len(kinds) == 2:
            break
    assert kinds == {"Step", "PlainStep"}


class Odd(Net):
    """Its forward is one of several, and there is a layer that none of them uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Sequential(*[*self][:5])(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self[4](x.new_ones(len(x), 8)) + sum(p.sum() for p in self.parameters())


@pytest.mark.failure("Command line", "a script for `farandole bench` can't train under DistributedDataParallel")
@pytest.mark.parametrize(
    ("model", "how", "values"),
    [
        (Net, {"other": nn.Linear(6, 3)}, "2 .*model, other"),
        (Odd, {}, r"spare\.weight, spare\.bias"),
        (Odd, {"forward": lambda model, x: model.encode(x)}, r"model\(inputs\)"),
        (Net, {"forward": lambda model, x: model(x) + model(-x)}, r"\b2\b"),
        (Net, {"backwards": 2}, r"\b2\b"),
    ],
)
def test_where_ddp_can_not_be_had_it_says_why_and_the_others_go_on(
    joined: Joined, tmp_path: Path, model: Callable[[], nn.Module], how: dict[str, object], values: str
) -> None:
    all_of(train(joined(), model(), **how), type)  # type: ignore[arg-type]
    records = told(tmp_path)
    [reason] = [record.reason for record in records if isinstance(record, Unfit)]
    assert re.search(values, reason)
    contestants = [record.contestant for record in records if isinstance(record, Block)]
    assert contestants == [ALONE, FARANDOLE, FARANDOLE, ALONE]


@pytest.mark.failure("Command line", "a script for `farandole bench` can't train under DistributedDataParallel")
def test_where_ddp_fails_later_the_others_go_on(
    joined: Joined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farandole.bench import ddp

    class Failing(ddp.DistributedDataParallel):
        def forward(self, *_: object, **__: object) -> object:
            raise RuntimeError("it would not\nat all")

    monkeypatch.setattr(ddp, "DistributedDataParallel", Failing)
    all_of(train(joined(), Net()), type)
    records = told(tmp_path)
    assert [record.reason for record in records if isinstance(record, Unfit)] == ["it would not"]
    contestants = [record.contestant for record in records if isinstance(record, Block)]
    assert contestants == [ALONE, FARANDOLE, DDP, FARANDOLE, ALONE]


@pytest.mark.failure(
    "Command line", "a script for `farandole bench` has a loop that is too short, leaves it early, or raises"
)
def test_a_loop_that_is_too_short_says_how_long_it_is(joined: Joined) -> None:
    with pytest.raises(UsageError, match=r"\b4\b.*\b7\b.*--steps 2\b.*--rounds 2\b"):
        next(train(joined(), Net(), epochs=1))


def test_a_script_that_leaves_its_loop_says_after_how_many_steps(joined: Joined) -> None:
    run = joined()
    steps = train(run, Net())
    while not (isinstance(step := next(steps), Step) and step.number == 2):
        pass
    steps.close()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"\b3\b.*--steps.*--rounds"):
        run.finish()


SCALED = msgspec.structs.replace(TERMS, rounds=1, contestants=(FARANDOLE,), mode="weak")


def test_of_scaling_only_the_runs_own_steps_are_measured_and_its_facts(joined: Joined, tmp_path: Path) -> None:
    assert {*all_of(train(joined(SCALED), Net(), epochs=4), type)} == {Step}
    facts, block, end = told(tmp_path)
    assert isinstance(facts, RunFacts)
    assert (facts.shards, facts.samples, facts.sent_bytes) == (4, 4 * LONG, 0)
    assert isinstance(block, Block)
    assert (block.contestant, block.samples, len(block.spent)) == (FARANDOLE, BATCH, SCALED.steps)
    assert isinstance(end, BenchFinished)


def test_of_strong_scaling_the_batch_of_a_policy_is_that_of_one_worker(joined: Joined, tmp_path: Path) -> None:
    policy = farandole.PerWorkerBatch(BATCH, micro=4, rule=farandole.SquareRoot())
    run = joined(msgspec.structs.replace(SCALED, mode="strong"), stands_for=2)
    all_of(train(run, Net(), batch=policy), type)
    assert [record.samples for record in told(tmp_path) if isinstance(record, Block)] == [BATCH]


def test_weak_scaling_beyond_the_dataset_is_refused(joined: Joined) -> None:
    terms = msgspec.structs.replace(SCALED, workers=4)
    with pytest.raises(UsageError, match=rf"\b4\b.*\b{4 * BATCH}\b.*\b{LONG}\b.*--workers"):
        next(train(joined(terms), Net()))
