"""`run.loader(..., drop_last=True)`: an epoch's short last window is left out, said and counted."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import farandole
from farandole.checkpoint import restore
from farandole.checkpoint.store import Manifest
from farandole.data import ledger
from farandole.data.loader import Loader
from farandole.errors import UsageError
from farandole.plan.batch import GlobalBatch, PerWorkerBatch
from farandole.training import run_state
from farandole.training.progress import Length
from farandole.training.replica import Replica
from tests.support.harness import Elastic, alone, read_lines
from tests.support.steps import BATCH, SEED, data, mlp

JOB = Path(__file__).parents[1] / "jobs" / "small.py"


@pytest.mark.failure(
    "Data and loader processes",
    "the last window of an epoch is short (one sample, if 129 are trained at a batch of 64), and must not be",
    seen="with `drop_last=True`, the number of omitted samples of each epoch at the start; `left_out` in the metrics",
    outcome="all windows are complete; the ledger counts the other samples as omitted",
)
def test_every_window_is_whole_and_each_epoch_leaves_out_others(
    run: farandole.Run, caplog: pytest.LogCaptureFixture
) -> None:
    rows = data(2 * BATCH + 1)
    loader = run.loader(rows, batch=GlobalBatch(BATCH, micro=BATCH), drop_last=True)
    [told] = [message for message in caplog.messages if "drop_last" in message]
    assert re.findall(r"\d+", told) == ["1", "33"]
    model = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    run.replicate(model=model)
    seen: list[tuple[int, int, bool, int]] = []
    for step in run.steps(loader, epochs=2):
        for inputs, _ in step:
            step.backward(model(inputs).mean())
        seen.append((step.epoch, step.samples, step.ends_epoch, step.left_out))
    assert seen == [(epoch, BATCH, last, int(last)) for epoch in (0, 1) for last in (False, True)]
    assert len(loader) == 2


@pytest.mark.failure(
    "Data and loader processes",
    "`drop_last=True` is used with a `PerWorkerBatch`, with less data than a batch, or in an evaluation",
    seen="an error at once says why",
    outcome="training does not start",
)
@pytest.mark.parametrize(
    ("length", "batch", "values"),
    [
        (15, GlobalBatch(16, micro=4), r"drop_last=True.*\b15\b.*\b16\b"),
        (32, PerWorkerBatch(16, micro=4), r"drop_last=True.*farandole\.GlobalBatch"),
    ],
)
def test_it_is_refused_where_it_makes_no_sense(length: int, batch: GlobalBatch | PerWorkerBatch, values: str) -> None:
    with pytest.raises(UsageError, match=values):
        Loader(data(length), batch, seed=0, drop_last=True)


def test_batch_normalisation_takes_a_window_of_one_more_than_a_micro_batch(run: farandole.Run) -> None:
    """65 samples at micro 64: not 64 and 1, at which batch normalisation raises."""
    model = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    run.replicate(model=model)
    sizes: list[int] = []
    for step in run.steps(run.loader(data(65), batch=GlobalBatch(128, micro=64)), epochs=1):
        for inputs, _ in step:
            sizes.append(len(inputs))
            step.backward(model(inputs).mean())
    assert sizes == [33, 32]


@pytest.mark.failure(
    "Data and loader processes",
    "`drop_last` is added to, or removed from, a run that resumes",
    seen="an error at the start, with the value in the checkpoint",
    outcome="training does not start",
)
def test_it_is_part_of_the_job(run: farandole.Run) -> None:
    """A checkpoint of a run without it is of another job: its place in an epoch may be one that there is not."""
    replica = Replica({"model": mlp()})
    cpu = torch.device("cpu")
    with_it = run.loader(data(33), batch=GlobalBatch(BATCH, micro=4), drop_last=True)
    without = run.loader(data(33), batch=GlobalBatch(BATCH, micro=4))
    then, now = (run_state.signature(cpu, loader, Length(epochs=1), replica).facts for loader in (without, with_it))
    manifest = Manifest(
        epoch=0, offset=32, step=2, whole=True, run="r", worker="w1", seed=SEED, facts=then, time=0.0
    )  # fmt: skip
    [name] = {name for name, value in {*then} ^ {*now}}
    with pytest.raises(UsageError, match=re.escape(name)):
        restore.compare(manifest, now, SEED, "step-2.pt")


@pytest.mark.failure(
    "Data and loader processes",
    "`drop_last=True` is used with a `PerWorkerBatch`, with less data than a batch, or in an evaluation",
)
def test_an_evaluation_counts_every_sample(run: farandole.Run) -> None:
    model = mlp()
    run.replicate(model=model)
    for step in run.steps(run.loader(data(), batch=GlobalBatch(BATCH, micro=BATCH)), epochs=1):
        for inputs, _ in step:
            step.backward(model(inputs).mean())
        with pytest.raises(UsageError, match=r"run\.evaluate\(drop_last=True\)"):
            run.evaluate(model, data(), lambda *_: 1.0, drop_last=True)
        break


@pytest.mark.failure(
    "Data and loader processes",
    "the last window of an epoch is short (one sample, if 129 are trained at a batch of 64), and must not be",
)
@pytest.mark.processes
def test_with_two_workers_and_alone(tmp_path: Path) -> None:
    """130 samples, 16 a step: 2 of them are left out, of each epoch others, and the ledger knows which."""
    arguments = ("--epochs", "3", "--drop-last")
    with Elastic(
        tmp_path / "run", JOB, str(tmp_path / "a"), *arguments, workers=2, options=["--min", "2", "--ledger"]
    ) as run:
        run.finish()
    alone(tmp_path / "alone", JOB, str(tmp_path / "b"), *arguments)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    for folder in (tmp_path / "run", tmp_path / "alone"):
        used, left = ledger.count(folder / "ledger"), ledger.skipped(folder / "ledger")
        assert used + left == Counter((epoch, sample) for epoch in range(3) for sample in range(130))
        assert Counter(epoch for epoch, _ in left) == {0: 2, 1: 2, 2: 2}
        assert len({frozenset(sample for e, sample in left if e == epoch) for epoch in range(3)}) == 3
        steps = [line for line in read_lines(folder) if "event" not in line]
        assert [line.get("left_out", 0) for line in steps] == [0, 0, 0, 0, 0, 0, 0, 2] * 3
        assert {line["samples"] for line in steps} == {16}
