"""Samples by weight and batches of a batch sampler, while workers join and are killed: those of a single process."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from farandole.data.ledger import count
from tests.jobs.sampled import DRAWN, EPOCHS, SAMPLES
from tests.support.harness import Elastic, alone, external_worker, read_lines

JOB = Path(__file__).parents[1] / "jobs" / "sampled.py"


def sizes(folder: Path) -> list[tuple[int, int, int]]:
    return [(line["epoch"], line["step"], line["samples"]) for line in read_lines(folder) if "samples_per_s" in line]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("kind", [pytest.param("weighted", marks=pytest.mark.long), "batches"])
def test_with_a_join_and_a_kill_and_alone(tmp_path: Path, kind: str) -> None:
    out, single, pace = tmp_path / "out", tmp_path / "single", tmp_path / "pace"
    pace.write_text("0.01")
    options = ["--ledger"]
    with Elastic(tmp_path / "run", JOB, str(out), kind, "--pace", str(pace), workers=2, options=options) as run:
        run.until_step(2)
        first, _ = run.until_members(2)
        run.command("scale", "3")
        run.until_members(3)
        run.signal(first, signal.SIGKILL)
        run.until_members(3, without=(first,))
        before = run.step
        pace.unlink()
        run.finish()
    alone(tmp_path / "alone", JOB, str(single), kind)
    assert out.read_text() == single.read_text()
    took = sizes(tmp_path / "run")
    assert took == sizes(tmp_path / "alone")
    assert before < took[-1][1], "the run was over before the last change"
    used = count(tmp_path / "run" / "ledger")
    by_epoch = Counter(epoch for epoch, _ in used.elements())
    assert by_epoch == dict.fromkeys(range(EPOCHS), DRAWN if kind == "weighted" else SAMPLES)
    if kind == "batches":
        assert set(used.values()) == {1}
        assert len({samples for *_, samples in took}) > 3, "batches of one size would show nothing"
    else:
        assert max(used.values()) > 1


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("kind", [pytest.param("weighted", marks=pytest.mark.long), "batches"])
def test_a_worker_whose_sampler_draws_others_is_refused(tmp_path: Path, kind: str) -> None:
    out, pace = tmp_path / "out", tmp_path / "pace"
    pace.write_text("0.2")  # until the other worker has come
    job = (str(out), kind, "--pace", str(pace))
    with Elastic(tmp_path / "run", JOB, *job, workers=1, options=[]) as run:
        run.until_step(2)
        with external_worker([], run.folder, tmp_path / "other.out", JOB, *job, "--seed-of-weights", "4") as other:
            run.until(lambda: other.poll() is not None, "the end of the worker with other weights")
        assert other.returncode == 1
        [refused] = run.events("refused")
        assert run.members == (run.events("ready")[0]["worker"],)
        pace.unlink()
        run.finish()
    assert "order" in refused["reason"], "the part of the signature that differs"
