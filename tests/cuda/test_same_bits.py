"""One run's bits on GPU workers, two or three of which share a GPU where there is one: undisturbed, through a join and
a kill -9, from a checkpoint; and what is in force meanwhile.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from farandole.numerics.settings import REQUIRED_SETTINGS
from farandole.platform import cpu
from farandole.pool import local
from farandole.protocol.numeric_facts import SETTING
from tests.jobs import on_device
from tests.support.gpu import NEEDS_GPU
from tests.support.harness import Elastic, alone
from tests.support.shared import once

pytestmark = [NEEDS_GPU, pytest.mark.processes]

JOB = Path(on_device.__file__)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A world of one, which begins with nothing but Python."""

    def train(folder: Path) -> dict[str, Any]:
        alone(folder, JOB, str(folder / "out.json"))
        return json.loads((folder / "out.json").read_text())

    return once(tmp_path_factory, "gpu", train)


def result(out: Path) -> tuple[str, str, list[float]]:
    told = json.loads(out.read_text())
    return told["fingerprint"], told["last"], told["drawn"]


def of(told: dict[str, Any]) -> tuple[str, str, list[float]]:
    return told["fingerprint"], told["last"], told["drawn"]


def test_what_the_same_bits_need_is_in_force(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["device"] == "cuda:0"
    assert undisturbed["current"] == 0
    assert undisturbed[on_device.VARIABLE] == cpu.SAME[on_device.VARIABLE]
    assert {name: undisturbed["in force"][SETTING + name] for name in REQUIRED_SETTINGS} == REQUIRED_SETTINGS


def test_a_second_time_and_in_a_run(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    alone(tmp_path / "alone", JOB, str(tmp_path / "again"))
    assert result(tmp_path / "again") == of(undisturbed)
    with Elastic(tmp_path / "run", JOB, str(tmp_path / "out"), workers=2, options=[]) as run:
        run.finish()
        assert local.SLOW not in " ".join(run.output.read_text().split()), "workers are forked, and use the GPU"
    told = json.loads((tmp_path / "out").read_text())
    assert of(told) == of(undisturbed)
    assert told["in force"] == undisturbed["in force"]


def test_through_a_join_and_a_kill(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.touch()
    arguments = [str(tmp_path / "out"), "--pace", str(pace)]
    with Elastic(tmp_path / "run", JOB, *arguments, workers=2, options=[], deadline_s=240.0) as run:
        run.until_step(2)
        run.command("scale", "3")
        run.until_members(3)
        run.until_step(run.step + 2)
        victim = run.members[0]
        run.signal(victim, signal.SIGKILL)
        run.until_members(3, without=(victim,))
        assert run.step < on_device.STEPS - 1
        pace.unlink()
        run.finish()
        assert [event["equal"] for event in run.events("finished")] == [True]
    assert result(tmp_path / "out") == of(undisturbed)


@pytest.mark.parametrize("way", [way for way in on_device.WAYS if way != "float32"])
def test_in_other_precisions_on_another_stream_and_compiled(
    way: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """A loop on a stream of its own has the bits of the default stream."""
    pace = tmp_path / "pace"
    arguments = ["--way", way, "--pace", str(pace)]
    alone(tmp_path / "alone", JOB, str(tmp_path / "alone.json"), *arguments)
    pace.touch()
    with Elastic(tmp_path / "run", JOB, str(tmp_path / "out"), *arguments, workers=2, options=[]) as run:
        run.until_members(2)
        run.signal(victim := run.members[0], signal.SIGKILL)
        run.until_members(2, without=(victim,))
        assert run.step < on_device.STEPS - 1
        pace.unlink()
        run.finish()
    assert result(tmp_path / "out") == result(tmp_path / "alone.json")
    if way in ("stream", "float16", "bfloat16"):
        assert (result(tmp_path / "out") == of(undisturbed)) == (way == "stream")


def test_from_a_checkpoint(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.touch()
    arguments = [str(tmp_path / "out"), "--pace", str(pace)]
    options = ["--checkpoint-every", "5steps"]
    with Elastic(tmp_path / "first", JOB, *arguments, workers=2, options=options) as run:
        run.until(lambda: bool(run.events("checkpoint")), "a checkpoint")
        run.command("stop")
        run.until(lambda: run.process.poll() is not None, "the end")
    pace.unlink()
    options = ["--resume", str(tmp_path / "first" / "checkpoints")]
    with Elastic(tmp_path / "second", JOB, *arguments, workers=1, options=options) as run:
        run.finish()
        assert 0 < run.events("resumed")[0]["step"] < on_device.STEPS
    assert result(tmp_path / "out")[:2] == of(undisturbed)[:2]
