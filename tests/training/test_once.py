"""Work that one worker does while the others wait, `run.once`."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import farandole
from farandole.errors import StepAbandoned, UsageError
from tests.support.harness import Elastic, alone
from tests.support.steps import BATCH, data

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
SIZES = ("--epochs", "1", "--samples", "72", "--batch", "12", "--micro", "4")
STALL_S, WORK_S = 2.0, 5.0


# --- alone ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(run: farandole.Run) -> Iterator[tuple[farandole.Run, nn.Module, farandole.Step]]:
    """A run whose first step's inner loop has ended."""
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.BatchNorm1d(3))
    rows = data()
    run.replicate(model=model)
    steps = run.steps(run.loader(rows, batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=1)
    step = next(steps)
    for inputs, _ in step:
        step.backward(model(inputs).mean())
    yield run, model, step
    steps.close()  # type: ignore[attr-defined]


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.standard_normal()), float(torch.rand(()))


def test_a_world_of_one_does_it_every_time(trained: tuple[farandole.Run, nn.Module, farandole.Step]) -> None:
    run, _, _ = trained
    done = []
    for _ in range(3):
        with run.once() as mine:
            done.append(bool(mine))
    assert done == [True, True, True]


@pytest.mark.failure("The training loop", "the work of `run.once()` takes longer than the stall limit")
def test_it_leaves_random_state_buffers_and_modes_as_they_were(
    trained: tuple[farandole.Run, nn.Module, farandole.Step],
) -> None:
    run, model, _ = trained
    model[2].eval()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    wanted = draws()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with run.once() as mine:
        assert mine
        model.train()
        model(torch.randn(4, 6))
        draws()
    assert draws() == wanted
    assert not model[2].training
    assert model[0].training
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    model.train()


@pytest.mark.failure(
    "The training loop",
    "the script calls `run.log`, `run.evaluate` or `run.once` in `run.once()`",
    seen="an error at once names both",
    outcome="the script fails, exit code 1",
)
def test_what_all_must_call_is_refused_within_it(trained: tuple[farandole.Run, nn.Module, farandole.Step]) -> None:
    run, model, _ = trained
    with run.once():
        with pytest.raises(UsageError, match=r"run\.log\b.*run\.once"):
            run.log(accuracy=1.0)
        with pytest.raises(UsageError, match=r"run\.evaluate\b.*run\.once"):
            run.evaluate(model, data(), lambda *_: 1.0)
        with pytest.raises(UsageError, match=r"run\.once\b.*run\.once"):
            run.once()
    run.log(accuracy=1.0)


@pytest.mark.failure(
    "The training loop",
    "the script calls `run.once()` before the loop, or in the inner loop of a step",
    seen="an error at once says where the call works",
    outcome="the script fails, exit code 1",
)
def test_before_the_loop_and_within_a_step(run: farandole.Run) -> None:
    with pytest.raises(UsageError, match=r"run\.once\b.*run\.steps"):
        run.once()
    with pytest.raises(UsageError, match=r"\.is_leader\b.*run\.steps"):
        _ = run.is_leader
    model = nn.Linear(6, 3)
    run.replicate(model=model)
    for step in run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=BATCH)), epochs=1):
        with pytest.raises(StepAbandoned, match=r"run\.once\b.*step 0\b"):
            run.once()
        for inputs, _ in step:
            step.backward(model(inputs).mean())
        break


# --- several workers --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.failure(
    "The training loop",
    "the worker that does the work of `run.once()` dies before it has finished",
    seen="the worker is lost, as in any crash",
    outcome="another worker starts the work again; incomplete files keep their temporary names; nothing is lost",
)
@pytest.mark.failure(
    "The training loop",
    "the work of `run.once()` takes longer than the stall limit",
    seen="the others wait; after 60 s without a micro-batch: `STALLED`",
    outcome="the work is done once; random state, buffers and training modes stay as they were",
)
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc")
def test_who_dies_at_it_is_followed_by_another_and_nobody_who_takes_long_is_replaced(tmp_path: Path) -> None:
    out, single = tmp_path / "out", tmp_path / "single"
    arguments = (str(out), *SIZES, "--once", f"{WORK_S:g}")
    options = ["--min", "3", "--stall", f"{STALL_S:g}"]
    with Elastic(tmp_path / "run", JOB, *arguments, workers=3, options=options) as run:
        run.until(lambda: any(tmp_path.glob("out.began-*")), "the work")
        pids = {event["worker"]: event["pid"] for event in run.events("ready")}
        first = int(next(tmp_path.glob("out.began-*")).name.partition("-")[2])
        [dead] = [worker for worker, pid in pids.items() if pid == first]
        assert dead == run.members[0], "the longest-standing does it"
        run.signal(dead, signal.SIGKILL)
        run.until(lambda: len(list(tmp_path.glob("out.began-*"))) == 2, "another at the work")
        run.finish()
        assert [event["worker"] for event in run.events("lost")] == [dead], run.report()
        assert [event["equal"] for event in run.events("finished")] == [True]
        done = int((tmp_path / "out.done").read_text())
        learned = {path.name.partition("-")[2]: path.read_text() for path in tmp_path.glob("out.learned-*")}
        assert learned.pop(str(first)) == learned.pop(str(done)) == "True"
        assert done != first
        assert {path.read_text() for path in tmp_path.glob("out.result-*")} == {str(done)}
        assert set(learned.values()) == {"False"}, "who waited learned that it was done, the replacement nothing"
    alone(tmp_path / "alone", JOB, str(single), *SIZES)
    assert out.read_text() == single.read_text(), "as if nobody had done it"


@pytest.mark.parametrize(
    "result", [None, 0.25, "text", {"score": 1, "names": ["a", "b"]}, [1 << 62, -1.5], "x" * 32_000]
)
def test_the_result_of_the_work_is_there_after_it(
    trained: tuple[farandole.Run, nn.Module, farandole.Step], result: object
) -> None:
    run, _, _ = trained
    with run.once() as work:
        assert work
        work.result = result
    assert work.result == result
    with run.once() as work:
        pass
    assert work.result is None


@pytest.mark.parametrize("result", [torch.ones(2), object(), "x" * 40_000])
def test_results_that_can_not_be_handed_on(
    trained: tuple[farandole.Run, nn.Module, farandole.Step], result: object
) -> None:
    run, _, _ = trained

    def work() -> None:
        with run.once() as mine:
            mine.result = result

    with pytest.raises(UsageError):
        work()
