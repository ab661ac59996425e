"""How a worker's time is split into steps: no moment is in two, none in none; what is not training is told apart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import farandole
from farandole.protocol.messages import StepTime
from farandole.protocol.values import TimeClass
from farandole.training.step import StepClock
from farandole.worker.timing import Meter
from tests.support.harness import read_lines
from tests.support.steps import data, mlp, train

S = 1_000_000_000


class Hands:
    """A clock that is moved by hand, and what reads it."""

    def __init__(self) -> None:
        self.now = 7 * S
        self.meter = Meter(clock=lambda: self.now)
        self.steps = StepClock(self.meter, lambda: self.now)

    def spend(self, seconds: float, name: TimeClass = "compute") -> None:
        self.meter.enter(name)
        self.now += round(seconds * S)
        self.meter.enter("compute")


def test_a_step_runs_from_the_end_of_the_one_before() -> None:
    hands = Hands()
    hands.spend(100.0, "start")
    hands.steps.begin()
    hands.spend(1.0)
    assert hands.steps.end() == StepTime(seconds=1.0), "the first one from its own beginning"
    hands.spend(0.05)  # after the update
    hands.steps.begin()
    hands.spend(0.25)
    assert hands.steps.end() == StepTime(seconds=0.3)
    hands.spend(2.0)
    assert hands.steps.end() == StepTime(seconds=2.0), "what follows the last one"


def test_parts_are_told_apart_and_are_disjoint() -> None:
    hands = Hands()
    hands.steps.begin()
    hands.steps.end()
    with hands.steps.count_separately("evaluation"):
        hands.spend(1.0)
        hands.spend(4.0, "pause")
    with hands.steps.count_separately("once"):
        hands.spend(2.0, "exchange")
    with hands.steps.count_separately("evaluation"):
        hands.spend(0.5, "data")
    hands.spend(8.0, "few")
    hands.spend(0.125)
    assert hands.steps.end() == StepTime(seconds=15.625, evaluation_s=1.5, once_s=2.0, pause_s=12.0)
    assert hands.steps.end() == StepTime(), "each part once"


def test_an_evaluation_that_raises_is_part_of_the_step() -> None:
    hands = Hands()
    hands.steps.begin()
    with contextlib.suppress(ZeroDivisionError), hands.steps.count_separately("evaluation"):
        hands.spend(1.0)
        raise ZeroDivisionError
    assert hands.steps.end() == StepTime(seconds=1.0, evaluation_s=1.0)


def test_a_pause_that_began_before_the_step_is_not_all_its_own() -> None:
    hands = Hands()
    hands.spend(3.0, "pause")
    hands.meter.enter("pause")
    hands.now += S
    hands.steps.begin()
    hands.now += S
    hands.meter.enter("compute")
    assert hands.steps.end() == StepTime(seconds=1.0, pause_s=1.0)


def test_the_steps_of_a_run_add_up_to_its_time(kept: farandole.Run, tmp_path: Path) -> None:
    """A script that takes its time after the update, evaluates and uses `once`."""
    model = mlp()
    took = _script(kept, model)
    assert list(took) == [0, 1, 2, 3]
    assert kept._end_alone()
    lines = read_lines(tmp_path)
    steps = [line for line in lines if "loss" in line]
    whole = steps[-1]["time"] - (steps[0]["time"] - steps[0]["seconds"])
    assert sum(step["seconds"] for step in steps) == pytest.approx(whole, rel=0.3)
    assert all(step["seconds"] > 0.03 for step in steps[1:]), "with what the script does after its update"
    for step in steps:
        assert step["samples_per_s"] == pytest.approx(step["samples"] / step["seconds"], rel=1e-5)
    assert [("evaluation_s" in step, "once_s" in step) for step in steps] == [(False, False), *[(True, True)] * 3]
    [finished] = [line for line in lines if line.get("event") == "finished"]
    assert finished["seconds"] >= finished["evaluation_s"] + finished["once_s"] > 0
    assert [line["seconds"] > 0 for line in lines if line.get("event") == "saved"] == [True]


def _wait(seconds: float) -> None:
    """The script is busy."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def _script(run: farandole.Run, model: object) -> Iterator[int]:
    for step in train(run, model):  # type: ignore[arg-type]
        _wait(0.03)
        run.evaluate(model, data(), lambda outputs, targets: outputs.argmax(1) == targets)  # type: ignore[arg-type]
        with run.once() as mine:
            assert mine
        yield step.number
