"""Several loops in one script: a world of one, and what a worker does that joins in a later loop."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import farandole
from farandole.checkpoint import restore
from farandole.control.run_folder import CHECKPOINTS, LEDGER
from farandole.data.ledger import count
from farandole.errors import ShardError, StepAbandoned, UsageError, WorkerSuperseded
from farandole.plan.shards import LoopStart, Position
from farandole.protocol.messages import Line
from farandole.training.loop import digest_of
from farandole.training.progress import Length
from tests.support.harness import read_lines
from tests.support.steps import BATCH, N, data, mlp, per_sample
from tests.training.conftest import Interrupted, Join

OTHER_N, OTHER_BATCH = 14, 6


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.standard_normal()), float(torch.rand(()))


class Script:
    """Pretrains, evaluates, resets the last layer, and trains that one on other data, with another batch."""

    def __init__(self, run: farandole.Run, micros: tuple[int, int] = (4, 3)) -> None:
        self.run, self.model = run, nn.Sequential(mlp(), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.other = torch.optim.Adam(self.model[3].parameters(), lr=0.01)
        run.replicate(model=self.model, optimizer=self.optimizer, other=self.other, seen=0)
        self.first = run.loader(data(), farandole.GlobalBatch(BATCH, micro=micros[0]))
        self.second = run.loader(data(OTHER_N), farandole.GlobalBatch(OTHER_BATCH, micro=micros[1]))
        self.steps: list[tuple[int, int, int]] = []
        self.between: list[Any] = []

    def train(self, step: farandole.Step, optimizer: torch.optim.Optimizer) -> None:
        for x, y in step:
            step.backward(F.cross_entropy(self.model(x), y))
        self.steps.append((step.number, step.epoch, step.samples))
        optimizer.step()

    def main(self, stops: Callable[[int], bool] = lambda _: False) -> str:
        for step in self.run.steps(self.first, epochs=2):
            self.model[2].p = 0.2 + step.number / 100
            self.train(step, self.optimizer)
        self.between.append(self.run.evaluate(self.model, data(), per_sample))
        self.between.append(self.run.evaluate(self.model, data(), {"hits": per_sample, "loss": F.cross_entropy}))
        with self.run.once() as mine:
            if mine:
                mine.result = [self.between[0], "kept"]
        self.between += [mine.result, torch.rand(2).tolist()]
        self.model[3].reset_parameters()
        self.model[0].requires_grad_(False)
        for step in self.run.steps(self.second, base_steps=7):
            if stops(step.number):
                raise Interrupted
            self.train(step, self.other)
            self.run.state.seen += self.between[1]["hits"]
        return self.run.fingerprint()


def test_it_trains_like_plain_torch(run: farandole.Run) -> None:
    model, plain = mlp(), mlp()
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    run.replicate(model=model, optimizer=optimizer)
    first = run.loader(data(), farandole.GlobalBatch(BATCH, micro=BATCH))
    second = run.loader(data(OTHER_N), farandole.GlobalBatch(OTHER_BATCH, micro=OTHER_BATCH))
    epochs = ((first, (0, 1)), (second, (2, 3, 4)), (first, (5,)))
    seen = []
    for loader, numbers in epochs:
        for step in run.steps(loader, epochs=len(numbers)):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            seen.append((step.number, step.epoch, step.samples))
            optimizer.step()
        assert (step.epoch, step.ends_epoch) == (numbers[-1], True)
        for epoch in numbers:
            for start in range(0, loader.length, loader.batch.size):
                stop = min(start + loader.batch.size, loader.length)
                step_of(plain, reference, *loader.dataset[torch.from_numpy(loader.order.samples(epoch, start, stop))])
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert [number for number, _, _ in seen] == list(range(2 * 2 + 3 * 3 + 2))
    assert [epoch for _, epoch, _ in seen] == [0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5]
    assert [samples for _, _, samples in seen[-5:]] == [6, 6, 2, 16, 6]


def test_lines_total_and_ledger_go_on(kept: farandole.Run, tmp_path: Path) -> None:
    script = Script(kept)
    script.main()
    assert kept._end_alone()
    steps = [line for line in read_lines(tmp_path) if "samples_per_s" in line]
    assert [line["step"] for line in steps] == list(range(11))
    assert [line["total"] for line in steps] == [4] * 4 + [11] * 7
    assert [line["epoch"] for line in steps] == [0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    wanted = Counter({(epoch, sample): 1 for epoch in range(2) for sample in range(N)})
    wanted += Counter({(epoch, sample): 1 for epoch in (2, 3) for sample in range(OTHER_N)})
    counted = count(tmp_path / LEDGER)
    assert {each: n for each, n in counted.items() if each[0] < 4} == wanted
    assert sum(n for (epoch, _), n in counted.items() if epoch == 4) == OTHER_BATCH
    found = restore.find([str(tmp_path / CHECKPOINTS)])
    assert found.position == Position(epoch=4, offset=6, step=11, loop=LoopStart(number=1, step=4, epoch=2))
    assert found.manifest is not None
    assert dict(found.manifest.facts)["samples in the data"] == str(OTHER_N), "the facts of its own loop"


def test_a_loop_that_is_left_early_ends_its_epoch(run: farandole.Run) -> None:
    script = Script(run)
    for step in run.steps(script.first, epochs=5):
        script.train(step, script.optimizer)
        if step.number == 2:  # in the middle of epoch 1
            break
    for step in run.steps(script.first, base_steps=3):
        script.train(step, script.optimizer)
    assert script.steps == [(0, 0, 16), (1, 0, 6), (2, 1, 16), (3, 2, 16), (4, 2, 6), (5, 3, 16)]


@pytest.mark.parametrize("at", [4, 6, 9])
def test_it_is_resumed_in_a_later_loop(join: Join, at: int) -> None:
    """The loop before yields nothing, and the calls after it return what they have returned."""
    whole = Script(join("whole"))
    wanted = whole.main()
    begun = Script(join("interrupted"))
    with pytest.raises(Interrupted):
        begun.main(lambda number: number == at)
    assert begun.run._end_alone()
    found = restore.find([str(begun.run._folder / CHECKPOINTS)])  # type: ignore[operator]
    assert found.position.loop == LoopStart(number=1, step=4, epoch=2)
    assert found.position.step == at
    again = Script(join("interrupted"))
    assert again.run.state.seen == 0
    assert again.main() == wanted
    assert again.between == whole.between
    assert again.steps == [each for each in whole.steps if each[0] >= at]
    assert all(map(torch.equal, again.model.state_dict().values(), whole.model.state_dict().values()))


def test_what_is_written_between_two_loops_is_written_once(join: Join, tmp_path: Path) -> None:
    file, lines = tmp_path / "pretrained.pt", list[int]()

    def main(run: farandole.Run, *, stops: bool) -> None:
        script = Script(run)
        for step in run.steps(script.first, epochs=1):
            script.train(step, script.optimizer)
        run.save(file)
        run.log(pretrained=1)
        assert run.view.members == ("alone",)
        lines.append(int(run.is_leader))
        for step in run.steps(script.second, epochs=1):
            for x, y in step:
                step.backward(F.cross_entropy(script.model(x), y))
                if stops and step.number == 3:
                    raise Interrupted
            script.other.step()

    run = join("some")
    with pytest.raises(Interrupted):
        main(run, stops=True)
    assert run._end_alone()
    file.unlink()
    main(join("some"), stops=False)
    assert not file.exists(), "the resumed run is beyond that"
    assert lines == [1, 0], "and prints nothing there"
    assert len([line for line in read_lines(tmp_path / "some") if "pretrained" in line]) == 1


def test_what_is_drawn_between_two_loops_does_not_depend_on_the_loop_before(run: farandole.Run) -> None:
    script, drawn = Script(run), []
    for length in (1, 3):
        for step in run.steps(script.first, epochs=length):
            script.train(step, script.optimizer)
        drawn.append(draws())
        run.evaluate(script.model, data(), per_sample)
    other = Script(farandole_again(run))
    for length in (2, 1):
        for step in other.run.steps(other.first, epochs=length):
            other.train(step, other.optimizer)
            if length == 2:
                break
        drawn.append(draws())
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


def farandole_again(run: farandole.Run) -> farandole.Run:
    """A second run in this process, after `run`."""
    again = farandole.join()
    assert again is not run
    return again


# --- what is refused --------------------------------------------------------------------------------------------------


def ended(run: farandole.Run) -> Script:
    """A script whose first loop has ended."""
    script = Script(run)
    for step in run.steps(script.first, epochs=1):
        script.train(step, script.optimizer)
    return script


@pytest.mark.parametrize("change", ["larger", "added", "buffer"])
def test_tensors_of_another_shape(run: farandole.Run, change: str) -> None:
    script = ended(run)
    if change == "larger":
        script.model[3].weight.data = torch.zeros(4, 3)
    elif change == "added":
        script.model[3].register_parameter("more", nn.Parameter(torch.zeros(2)))
    else:
        script.model[1].register_buffer("more", torch.zeros(2))
    with pytest.raises(UsageError, match=r"model\.(3|1)\."):
        run.steps(script.second, epochs=1)


def test_a_loop_that_was_left_within_a_step(run: farandole.Run) -> None:
    script = Script(run)
    for step in run.steps(script.first, epochs=1):
        for x, y in step:
            step.backward(F.cross_entropy(script.model(x), y))
            break
        break
    with pytest.raises(StepAbandoned, match=r"step 0\b"):
        run.steps(script.second, epochs=1)


def test_what_a_later_worker_can_not_know(run: farandole.Run) -> None:
    script = ended(run)
    run.fingerprint()
    with pytest.raises(UsageError, match=r"run\.fingerprint"):
        run.steps(script.second, epochs=1)


def test_a_result_that_can_not_be_sent(run: farandole.Run) -> None:
    script = ended(run)

    class Odd:
        pass

    run._keep("run.evaluate", Odd())
    with pytest.raises(UsageError, match=r"run\.evaluate"):
        run.steps(script.second, epochs=1)


@pytest.mark.parametrize("call", ["log", "once", "evaluate"])
def test_calls_before_the_second_loop_has_begun(run: farandole.Run, call: str) -> None:
    script = ended(run)
    run.steps(script.second, epochs=1)
    with pytest.raises(UsageError, match=rf"run\.{call}\b"):
        {
            "log": lambda: run.log(a=1),
            "once": lambda: run.once().__enter__(),
            "evaluate": lambda: run.evaluate(script.model, data(), per_sample),
        }[call]()


# --- a worker that joins ----------------------------------------------------------------------------------------------


def test_a_position_of_another_loop(run: farandole.Run) -> None:
    script = ended(run)
    run.steps(script.second, epochs=3)
    assert run._loop is not None
    facts = digest_of(script.second, Length(epochs=3))
    assert not run._loop._is_later(Position(loop=LoopStart(number=1, facts=facts)))
    assert run._loop._is_later(Position(loop=LoopStart(number=2, facts=1)))
    with pytest.raises(WorkerSuperseded):
        run._loop._is_later(Position())
    others = {
        digest_of(script.second, Length(epochs=2)),
        digest_of(script.second, Length(base_steps=3)),
        digest_of(script.first, Length(epochs=3)),
        digest_of(run.loader(data(OTHER_N + 1), farandole.GlobalBatch(OTHER_BATCH, micro=3)), Length(epochs=3)),
        digest_of(run.loader(data(OTHER_N), farandole.GlobalBatch(OTHER_BATCH, micro=1)), Length(epochs=3)),
        digest_of(
            run.loader(data(OTHER_N), farandole.GlobalBatch(OTHER_BATCH, micro=3), shuffle=False), Length(epochs=3)
        ),
    }
    assert len(others | {facts}) == 7
    for other in others:
        with pytest.raises(ShardError, match=r"loop 1\b"):
            run._loop._is_later(Position(loop=LoopStart(number=1, facts=other)))


def test_calls_that_the_others_have_not_made(run: farandole.Run) -> None:
    script = ended(run)
    assert run._loop is not None
    run._loop.state.between = [[("run.evaluate", 0.5)]]
    run._loop.passed = (run.view, 1)
    with pytest.raises(UsageError, match=r"run\.once.*run\.evaluate"):
        run.once()
    assert run.evaluate(script.model, data(), per_sample) == 0.5
    with pytest.raises(UsageError, match=r"run\.evaluate.*loop 0\b"):
        run.evaluate(script.model, data(), per_sample)


def test_a_batch_sampler_in_a_later_loop(run: farandole.Run) -> None:
    """Its steps are counted from the loop's beginning, also where epochs differ in their number of batches."""
    script = ended(run)

    class Batches:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 2 + self.epoch % 2

        def __iter__(self) -> Any:
            return iter([[number, number + 1] for number in range(len(self))])

    loader = run.loader(DataLoader(data(), batch_sampler=Batches()), micro=2)  # type: ignore[arg-type]
    script.steps.clear()
    for step in run.steps(loader, base_steps=6):
        script.train(step, script.optimizer)
    assert [(number, epoch) for number, epoch, _ in script.steps] == [(2, 1), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)]


def test_lines_between_two_loops_come_before_the_next_step(run: farandole.Run) -> None:
    lines: list[Line] = []
    run._context.add_line = lines.append  # type: ignore[method-assign]
    script = ended(run)
    run.log(between=1)
    for step in run.steps(script.second, base_steps=1):
        script.train(step, script.other)
    assert [(line.step, line.index) for line in lines] == [(0, 0), (1, 0), (1, 1), (2, 0)]


# --- another run in the same process ----------------------------------------------------------------------------------


def test_a_second_run_of_a_process(run: farandole.Run) -> None:
    """It begins anew: the same bits, and nothing of the first run acts on the objects that both have."""
    first = Script(run)
    wanted = first.main()
    second = Script(farandole_again(run))
    assert second.main() == wanted
    assert second.between == first.between
    third = farandole_again(second.run)
    model, optimizer = first.model.requires_grad_(True), torch.optim.SGD(first.model[3].parameters(), lr=0.1)
    third.replicate(model=model, optimizer=optimizer)
    loader = third.loader(data(), farandole.GlobalBatch(BATCH, micro=4))
    for step in third.steps(loader, epochs=1):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    assert (step.number, third.view.members) == (1, ("alone",))


def test_a_second_run_begins_when_the_first_one_has_saved(
    kept: farandole.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(kept).main()
    monkeypatch.setenv("FARANDOLE_FOLDER", str(tmp_path / "second"))
    again = farandole_again(kept)
    assert [line["event"] for line in read_lines(tmp_path) if line.get("event") in ("finished", "saved", "over")] == [
        "finished", "saved", "over",
    ]  # fmt: skip
    assert restore.find([str(tmp_path / CHECKPOINTS)]).position.step == 11
    script = Script(again)
    script.main()
    assert script.steps[0][0] == 0
    monkeypatch.setenv("FARANDOLE_FOLDER", str(tmp_path))
    third = Script(farandole_again(again))  # the folder of the first run is free again
    with pytest.raises(SystemExit):  # and nothing is left to train there
        third.main()
    assert third.run._context.end()  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", ["nowhere", "entered", "within"])
def test_a_run_that_has_not_ended(run: farandole.Run, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "ps1", raising=False)
    script = Script(run)
    if place != "nowhere":
        steps = run.steps(script.first, epochs=1)
        step = next(steps)
        if place == "within":
            next(iter(step))
    with pytest.raises(UsageError, match=r"farandole\.join"):
        farandole.join()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # as in a notebook, where a cell may be interrupted anywhere
    other = Script(farandole.join())
    for step in other.run.steps(other.first, epochs=1):
        other.train(step, other.optimizer)
    assert other.steps == [(0, 0, 16), (1, 0, 6)]
