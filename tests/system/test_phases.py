"""Several loops in one script, while workers join and are killed in each of them: equal to a single process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.phases import STEPS
from tests.support.harness import Elastic, alone, read_lines

JOB = Path(__file__).parents[1] / "jobs" / "phases.py"
FIRST = STEPS[0]  # the first step of the second loop


def values(folder: Path) -> list[tuple[Any, ...]]:
    lines = [line for line in read_lines(folder) if "event" not in line and "samples_per_s" not in line]
    lines += [line for line in read_lines(folder) if line.get("event") == "log"]
    names = ("step", "loop_step", "loop_epoch", "loss", "accuracy", "pretrained", "scale")
    return sorted({tuple(str(line.get(name)) for name in names) for line in lines})


def assert_same(tmp_path: Path, *, died: bool = False) -> None:
    """The run in `run` has the bits of a single process. `died`: some of its lines have died with all workers."""
    alone(tmp_path / "alone", JOB, str(tmp_path / "single"))
    assert (tmp_path / "out").read_text() == (tmp_path / "single").read_text()
    found = values(tmp_path / "run")
    wanted = values(tmp_path / "alone")
    assert found == [value for value in wanted if value in found] if died else found == wanted
    assert len({scale for *_, scale in found} - {"None"}) == 1, "what is drawn and computed between the loops"
    steps = [line["step"] for line in read_lines(tmp_path / "run") if "samples_per_s" in line]
    assert died or sorted(set(steps)) == list(range(sum(STEPS)))
    assert max(steps) == sum(STEPS) - 1


@pytest.mark.long
@pytest.mark.processes
def test_with_joins_and_kills_in_both_loops_and_alone(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.touch()
    options = [str(tmp_path / "out"), "--pace", str(pace)]
    with Elastic(tmp_path / "run", JOB, *options, workers=2, options=[]) as run:
        run.until_step(2)
        run.command("scale", "3")
        _, second, _ = run.until_members(3)
        run.signal(second, signal.SIGKILL)
        run.until_members(3, without=(second,))
        assert run.step < FIRST
        pace.unlink()
        run.until_step(FIRST)
        pace.touch()
        first, _, third = run.until_members(3, without=(second,))
        run.signal(first, signal.SIGKILL)
        run.until_members(3, without=(first, second))
        run.signal(third, signal.SIGKILL)
        run.until_members(3, without=(first, second, third))
        assert FIRST < run.step < FIRST + STEPS[1]
        pace.unlink()
        run.finish()
    assert_same(tmp_path)


@pytest.mark.long
@pytest.mark.processes
def test_all_are_killed_in_the_second_loop(tmp_path: Path) -> None:
    """The next ones go on from a checkpoint of it, without a step of the first one."""
    pace = tmp_path / "pace"
    options = [str(tmp_path / "out"), "--pace", str(pace)]
    with Elastic(tmp_path / "run", JOB, *options, workers=2, options=["--checkpoint-every", "5steps"]) as run:
        run.until_step(FIRST)
        pace.touch()
        run.until(lambda: any(e["step"] > FIRST for e in run.events("checkpoint")), "a checkpoint of the second loop")
        for worker in run.members:
            run.signal(worker, signal.SIGKILL)
        run.until(lambda: bool(run.events("resumed")), "its resumption")
        pace.unlink()
        run.finish()
        assert run.events("resumed")[-1]["step"] > FIRST
    assert_same(tmp_path, died=True)


@pytest.mark.long
@pytest.mark.processes
def test_who_has_other_data_in_the_second_loop(tmp_path: Path) -> None:
    """A worker that joins in it leaves, and says why; the run goes on, and takes another one."""
    pace, other = tmp_path / "pace", tmp_path / "other"
    options = [str(tmp_path / "out"), "--pace", str(pace), "--other-data", str(other)]
    with Elastic(tmp_path / "run", JOB, *options, workers=1, options=[]) as run:
        run.until_step(FIRST)
        pace.write_text("0.3")
        other.touch()
        run.command("scale", "2")
        run.until(lambda: bool(run.events("unfed")), "the end of the worker with other data")
        failed = run.events("unfed")[0]["worker"]
        other.unlink()
        members = run.until_members(2, without=(failed,))
        assert run.members[0] == members[0] == "w1"
        assert FIRST < run.step < FIRST + STEPS[1]
        pace.unlink()
        run.finish()
    assert_same(tmp_path)


@pytest.mark.long
@pytest.mark.processes
def test_members_with_other_data_in_the_second_loop(tmp_path: Path) -> None:
    pace, other = tmp_path / "pace", tmp_path / "other"
    pace.touch()
    options = [str(tmp_path / "out"), "--pace", str(pace), "--other-data", str(other)]
    with Elastic(tmp_path / "run", JOB, *options, workers=1, options=[]) as run:
        run.until_step(1)
        other.touch()
        run.command("scale", "2")
        both = run.until_members(2)
        pace.unlink()
        run.until(lambda: run.process.poll() is not None, "its end")
        assert run.process.returncode == 1
        assert run.step == FIRST - 1, "no step of the loop that differs"
        reason = run.events("over")[-1]["reason"]
        assert all(worker in reason for worker in both)


@pytest.mark.long
@pytest.mark.processes
def test_a_batch_that_follows_the_workers_in_each_loop(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.touch()
    options = [str(tmp_path / "out"), "--pace", str(pace), "--per-worker"]
    with Elastic(tmp_path / "run", JOB, *options, workers=1, options=["--seed", "3"]) as run:
        run.until_step(2)
        run.command("scale", "2")
        _, second = run.until_members(2)
        pace.unlink()
        run.until(lambda: any("scale" in line for line in read_lines(tmp_path / "run")), "the second loop")
        pace.touch()
        run.signal(second, signal.SIGKILL)
        run.until_members(2, without=(second,))
        pace.unlink()
        run.finish()
        assert run.events("finished"), "all workers have the same state"
    lines = [line for line in read_lines(tmp_path / "run") if "samples_per_s" in line]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    second_loop = {line["step"] for line in read_lines(tmp_path / "run") if "scale" in line}
    full = [line for line in lines if line["samples"] % line["workers"] == 0]
    sizes = {(line["step"] in second_loop, line["workers"], line["samples"] // line["workers"]) for line in full}
    assert sizes >= {(False, 1, 4), (False, 2, 4), (True, 1, 6), (True, 2, 6)}
