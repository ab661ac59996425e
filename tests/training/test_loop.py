"""What the loop does at a step's beginning and end, in which order: a world of one, in the tests' own process."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import farandole
from farandole.checkpoint import restore
from farandole.collective.exchange import Exchange
from farandole.control.run_folder import CHECKPOINTS, LEDGER
from farandole.data.ledger import count
from farandole.data.order import derive, set_random_state
from farandole.errors import StepAbandoned, UsageError, WorkerSuperseded
from farandole.plan.shards import Position
from farandole.protocol.messages import Line, Metrics, NotFinite
from farandole.protocol.worker.state_machine import Exit
from tests.support.harness import read_lines
from tests.support.steps import BATCH, SEED, N, begun, data, mlp, train


def test_a_checkpoint_is_the_state_of_a_steps_beginning(kept: farandole.Run, tmp_path: Path) -> None:
    model = mlp()
    steps = train(kept, model)
    next(steps)
    before = model[0].weight.detach().clone()
    next(steps)
    found = restore.find([str(tmp_path / CHECKPOINTS)])
    while found.state is None:  # it is written in the background
        found = restore.find([str(tmp_path / CHECKPOINTS)])
    assert found.position == Position(epoch=0, offset=BATCH, step=1)
    assert torch.equal(torch.as_tensor(found.state["objects"]["model"]["0.weight"]), before)
    assert found.state["history"] == [[0, 1]]
    assert len(found.state["origin"]) == 16, "the ledger tells runs apart by it"


def test_each_step_and_each_sample_is_counted_once(kept: farandole.Run, tmp_path: Path) -> None:
    for _ in train(kept, mlp()):
        pass
    assert kept._end_alone()
    assert count(tmp_path / LEDGER) == {(epoch, sample): 1 for epoch in range(2) for sample in range(N)}
    lines = read_lines(tmp_path)
    assert [line["step"] for line in lines if "loss" in line] == [0, 1, 2, 3]
    assert [line["event"] for line in lines if line.get("event") in ("finished", "saved")] == ["finished", "saved"]
    found = restore.find([str(tmp_path / CHECKPOINTS)])
    assert found.position == Position(epoch=2, offset=0, step=4), "the final state is that after the last step"


def test_the_state_is_whole_from_a_steps_beginning_to_its_inner_loops_end(run: farandole.Run) -> None:
    model = mlp()
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=model)
    whole = []
    for step in run.steps(loader, epochs=2):
        assert run._loop is not None
        assert run._loop.state.position.step == step.number
        assert run._context.epoch == step.epoch
        whole.append((run._context.at_step_start, run._loop.phase))
        for x, y in step:
            whole.append((run._context.at_step_start, run._loop.phase))
            step.backward(F.cross_entropy(model(x), y))
        whole.append((run._context.at_step_start, run._loop.phase))
    assert set(whole[:5]) == {(True, "within")}
    assert whole[5] == (False, "between")
    assert whole.count((False, "between")) == 4
    assert run._loop is not None
    assert run._loop.phase == "over"
    run._loop.end()
    assert run._context.at_step_start
    assert run._loop.state.position == Position(epoch=2, offset=0, step=4)


def test_a_loss_that_is_not_finite_ends_the_run_before_the_update(run: farandole.Run) -> None:
    """All hold the state of the step's beginning then, which is whole, and is what is saved."""
    told: list[Any] = []

    def tell(message: Any) -> None:
        if isinstance(message, NotFinite):
            told.append((message, run._context.at_step_start))
            run._context.instructions.exit = Exit("the loss is not finite", 1)

    run._terms = msgspec.structs.replace(run._terms, stop_on_nan=True)
    run._context.tell = tell  # type: ignore[method-assign]
    model = mlp()
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=model)
    step = next(run.steps(loader, epochs=2))
    batches = iter(step)
    for _ in range(4):
        x, y = next(batches)
        step.backward(F.cross_entropy(model(x), y) * math.nan)
    with pytest.raises(SystemExit):
        next(batches)
    assert told == [(NotFinite(step=0, loss="nan"), True)]
    assert run._context.at_step_start


def test_who_enters_takes_over_which_parameters_are_frozen(run: farandole.Run) -> None:
    """Else the buckets would be others than the others'."""
    model = mlp()
    run.replicate(model=model)
    steps = run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=2)
    next(steps)
    assert run._loop is not None
    loop, before = run._loop, run._rounds.layout
    flags = [False, True, True, True]
    with pytest.raises(ValueError, match="shorter"):
        loop._first(Position(), flags[1:])
    task = loop._first(Position(epoch=1, step=2), flags)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert task.content is loop.gradients.partials
    assert task.sizes == run._rounds.layout.sizes == loop.gradients.layout.sizes, "those of the others' buckets"
    assert run._rounds.layout is not before
    assert loop.state.position.step == 2


def test_the_script_finds_no_gradient_of_its_own_in_a_step(run: farandole.Run) -> None:
    model = mlp()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    run.replicate(model=model)
    next(run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=1))
    assert model[0].weight.grad is None


def test_lines_stand_in_the_order_in_which_they_are_sent(run: farandole.Run) -> None:
    """Whatever is logged before a step's own line would hold that one back, since it is not beyond what was sent."""
    lines: list[Line] = []
    run._context.add_line = lines.append  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"run\.log.*run\.steps"):
        run.log(early=1)
    model = mlp()
    run.replicate(model=model)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    for step in run.steps(loader, epochs=1):
        run.log(first=step.number)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        run.log(second=step.number)
    run.log(third=2)
    keys = [(line.step, line.index) for line in lines]
    assert keys == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert [isinstance(line.fields, Metrics) for line in lines] == [i == 0 for _, i in keys]
    assert [[*line.fields] for line in lines if not isinstance(line.fields, Metrics)] == [
        ["first"], ["second"], ["first"], ["second"], ["third"],
    ]  # fmt: skip


def test_a_step_is_timed_and_described(run: farandole.Run) -> None:
    lines: list[Line] = []
    run._context.add_line = lines.append  # type: ignore[method-assign]
    step, _ = begun(run, mlp())
    (line,) = lines
    assert isinstance(line.fields, Metrics)
    assert line.fields.loss == step.loss
    assert (line.fields.samples, line.fields.workers, line.fields.view, line.fields.total) == (BATCH, 1, 1, 4)
    assert 0 < line.fields.seconds < 600
    assert line.fields.samples_per_s == pytest.approx(BATCH / line.fields.seconds, rel=0.05)


def test_a_script_that_leaves_its_loop_after_an_update_has_ended(kept: farandole.Run, tmp_path: Path) -> None:
    steps = train(kept, mlp())
    next(steps)
    assert kept._end_alone()
    finished, saved = [line for line in read_lines(tmp_path) if line.get("event") in ("finished", "saved")]
    assert (finished["event"], saved["event"], saved["whole"]) == ("finished", "saved", True)
    assert restore.find([str(tmp_path / CHECKPOINTS)]).position == Position(epoch=0, offset=BATCH, step=1)


def test_a_script_that_ends_within_a_step_is_refused(run: farandole.Run) -> None:
    model = mlp()
    run.replicate(model=model)
    with pytest.raises(UsageError, match=r"run\.steps"):
        run.finish()
    step = next(run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=1))
    next(iter(step))
    with pytest.raises(StepAbandoned, match=r"step 0\b"):
        run.finish()


class Bad(TensorDataset):
    """The first batch can't be read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if index < BATCH:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


def test_a_step_without_any_sample_has_no_loss_to_judge(run: farandole.Run) -> None:
    """And one whose loss is not finite is told once, and known to the state from then on."""
    told: list[NotFinite] = []
    run._context.tell = lambda m: told.append(m) if isinstance(m, NotFinite) else None  # type: ignore[method-assign]
    model, bad = mlp(), Bad(*data(4 * BATCH).tensors)
    run.replicate(model=model)
    loader = run.loader(bad, batch=farandole.GlobalBatch(BATCH, micro=4), shuffle=False, on_bad_sample="skip")
    finite = []
    for step in run.steps(loader, epochs=1):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y) * (math.nan if step.number in (1, 2) else 1))
        assert run._loop is not None
        finite.append(run._loop.state.snapshot()["finite"])
    assert finite == [True, False, False, True]
    assert told == [NotFinite(step=1, loss="nan")]


def test_what_a_script_draws_between_two_steps_is_the_steps_own(run: farandole.Run) -> None:
    """Not what is left of the shards, which others may have computed."""
    model = mlp()
    run.replicate(model=model)
    drawn = []
    for step in run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
            torch.rand(step.number + 1)
        drawn.append(torch.rand(1).item())
        set_random_state(derive(SEED, "update", step.number))
        assert torch.rand(1).item() == drawn[-1]
    assert len(set(drawn)) == 4


def test_a_loop_body_begins_with_the_steps_random_state(run: farandole.Run) -> None:
    """A function of (seed, step), whatever was drawn before: also the first one, after all that made the model."""
    model = mlp()
    run.replicate(model=model)

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    drawn = []
    for step in run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=2):
        drawn.append(draw())
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        torch.rand(step.number + 1)
        random.random()
    expected = []
    for number in range(4):
        set_random_state(derive(SEED, "step", number))
        expected.append(draw())
    assert drawn == expected
    assert len(set(drawn)) == 4


def test_a_run_begins_with_its_seeds_random_state(run: farandole.Run) -> None:
    drawn = torch.rand(1).item()
    set_random_state(derive(SEED, "start"))
    assert torch.rand(1).item() == drawn
    assert run.device.type in ("cpu", "cuda")


def test_an_update_from_sums_that_others_have_used_again_is_no_state(
    kept: farandole.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds that is out of the run, and saves nothing. In a world of one nobody does it."""
    steps = train(kept, mlp())
    next(steps)
    monkeypatch.setattr(Exchange, "sums_intact", property(lambda _: False))
    with pytest.raises(WorkerSuperseded):
        next(steps)
    assert kept._loop is not None
    assert not kept._loop.state.at_step_start
    with pytest.raises(WorkerSuperseded):
        kept._loop.end()
    assert not kept._loop.state.at_step_start
