"""`farandole bench batch`: targets, how the lines of a training are read, and trainings of a real script."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from farandole.bench.batch import LOSS, BatchRow, Target, TargetWatch, batch_table, target_of
from farandole.errors import UsageError
from farandole.protocol.metrics import LogLine, StepLine
from tests.support.forked import run
from tests.support.harness import FARANDOLE
from tests.support.lines import naming
from tests.support.mentioned import mentions

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
ACCURACY = Target(metric="accuracy", value=0.5, rises=True)


def step(number: int, samples: int, loss: float | None = 1.0) -> StepLine:
    return StepLine(
        step=number, epoch=0, samples=samples, loss=loss, seconds=0.1, samples_per_s=1.0, view=1, workers=1, time=1.0,
        total=None, factor=1.0,
    )  # fmt: skip


def watched(target: Target, lines: Sequence[StepLine | LogLine], window: int = 1) -> TargetWatch:
    watch = TargetWatch(target, window)
    for line in lines:
        watch.add(line)
    return watch


def logged(number: int, **fields: float) -> LogLine:
    return LogLine(step=number, fields=fields)


def batch_row(batch: int, *samples: float | None) -> BatchRow:
    return BatchRow(
        workers=batch // 8, batch=batch, samples=samples, best=(0.5,) * len(samples), seconds=(1.0,) * len(samples),
        target="accuracy>=0.5",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("accuracy>=0.5", ACCURACY),
        (" loss <= 1e-2 ", Target(metric="loss", value=0.01, rises=False)),
    ],
)
def test_targets(text: str, target: Target) -> None:
    assert target_of(text) == target
    assert target_of(target.text) == target


@pytest.mark.parametrize("text", ["accuracy", "accuracy=0.5", "accuracy>0.5", "accuracy>=high", "loss<=nan", ">=1", ""])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        target_of(text)
    assert mentions(str(caught.value), "--target", text)


def test_between_two_values_of_a_logged_metric_the_target_is_on_a_line() -> None:
    lines = [step(0, 100), logged(0, accuracy=0.4), step(1, 100), step(2, 100), logged(2, accuracy=0.6)]
    watch = watched(ACCURACY, [*lines, step(3, 100), logged(3, accuracy=0.9)])
    assert watch.reached == pytest.approx(200)
    assert watch.samples == 300, "nothing counts after the target"
    assert watch.values == [0.4, 0.6]
    assert watched(ACCURACY, lines[:3]).reached is None
    assert watched(ACCURACY, [step(0, 64), logged(0, accuracy=0.6)]).reached == 64, "there is no value before"


def test_the_loss_is_a_mean_over_steps_weighted_by_samples() -> None:
    target = Target(metric=LOSS, value=1.0, rises=False)
    watch = watched(target, [step(0, 10, 0.1), step(1, 30, 3.0)], window=2)
    assert watch.reached is None
    assert watch.values == [pytest.approx((1.0 + 90.0) / 40)]
    assert watched(target, [step(0, 10, 0.1)], window=2).values == [], "too few steps"
    unknown = watched(target, [step(0, 10, None), step(1, 10, 0.5), step(2, 10, 0.5)], window=2)
    assert unknown.values == [math.inf, 0.5]
    assert unknown.reached == 30
    assert watched(target, [step(0, 10, 9.0), logged(0, loss=0.1)]).values == [9.0], "not what the script logs"


def test_the_batch_is_that_of_a_whole_step() -> None:
    watch = watched(ACCURACY, [step(0, 16), step(1, 16), step(2, 2), logged(2, top5=0.1)])
    assert (watch.batch, watch.samples, watch.names) == (16, 34, {"top5"})


def test_a_size_has_a_mean_if_all_its_trainings_reach_the_target() -> None:
    assert batch_row(8, 100.0, 200.0).mean_samples == 150
    assert batch_row(8, 100.0, None).mean_samples is None
    table = batch_table([batch_row(8, 100.0, 200.0), batch_row(16, 300.0, 300.0), batch_row(32, 100.0, None)])
    columns = {column.header: [*column.cells] for column in table.columns}
    assert columns["times as many"] == ["1.00", "2.00", ""]
    assert columns["steps"] == ["19", "19", ""]
    assert columns["batch"] == ["8", "16", "32"]


def test_best_is_by_the_direction() -> None:
    assert ACCURACY.best([0.1, 0.4, 0.3]) == 0.4
    assert target_of("loss<=0").best([0.1, 0.4, 0.3]) == 0.1
    assert ACCURACY.best([]) is None


# --- real trainings ---------------------------------------------------------------------------------------------------


def bench(folder: Path, *words: str, after: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and output of a bench on a small job whose batch follows the workers."""
    job = (str(JOB), str(folder / "out"), "--rule", "MomentumCompensation")
    done = run([*FARANDOLE, "bench", "batch", *words, *job, *after], cwd=folder, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.processes
def test_trainings_with_the_batches_of_one_and_two_workers(tmp_path: Path) -> None:
    code, out = bench(
        tmp_path, "--workers", "2,1", "--target", "loss<=100", "--json", "rows.json", after=("--epochs", "100000")
    )
    assert code == 0, out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["workers"], row["batch"], row["target"]) for row in rows] == [
        (1, 8, "loss<=100"),
        (2, 16, "loss<=100"),
    ]
    assert [row["samples"] for row in rows] == [[130 + 3 * 8], [130 + 16]], "20 and 10 steps; an epoch has 17 and 9"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json"], "the script did not come to its end"


@pytest.mark.long
@pytest.mark.processes
def test_a_target_that_is_not_reached_and_one_that_is_not_logged(tmp_path: Path) -> None:
    code, out = bench(tmp_path, "--workers", "1", "--target", "loss<=0", "--json", "rows.json")
    assert code == 1
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert row["samples"] == [None]
    assert row["best"][0] > 0
    code, out = bench(tmp_path, "--workers", "1", "--target", "accuracy>=1")
    assert code == 2
    assert naming(out, "accuracy", "loss")


@pytest.mark.long
@pytest.mark.processes
def test_a_constant_batch_and_a_script_that_fails(tmp_path: Path) -> None:
    words = (*FARANDOLE, "bench", "batch", "--workers", "1,2", "--target", "loss<=100")
    done = run([*words, str(JOB), str(tmp_path / "out")], cwd=tmp_path, timeout=120)
    assert done.returncode == 2
    assert naming(done.stdout + done.stderr, "PerWorkerBatch", "2 workers", "16 samples")
    done = run([*words, str(JOB), str(tmp_path / "out"), "--samples", "none"], cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert naming(done.stdout + done.stderr, "none")
