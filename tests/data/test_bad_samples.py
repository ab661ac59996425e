"""Samples that can't be decoded: named, or left out, counted, and in nobody's gradient."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import farandole
from farandole import joining
from farandole.data import ledger
from farandole.data.loader import Key, Loader
from farandole.errors import BadSample, ShardError, UsageError
from farandole.plan.batch import GlobalBatch
from tests.jobs.loading import EPOCHS, SAMPLES
from tests.support.harness import Elastic, alone, read_lines

JOB = Path(__file__).parents[1] / "jobs" / "loading.py"
BATCH = GlobalBatch(8, micro=4)


class Rows(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, bad: set[int], length: int = 20, error: type[Exception] = OSError) -> None:
        self.bad, self.error = bad, error
        self.rows = torch.randn(length, 5, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.bad:
            raise self.error("image file is truncated")
        return self.rows[index], index


@pytest.mark.failure("Data and loader processes", "a sample can't be read or decoded")
@pytest.mark.parametrize("processes", [0, 1])
def test_left_out_they_are_told_and_the_rest_is_what_it_is(processes: int, caplog: pytest.LogCaptureFixture) -> None:
    dataset = Rows({5, 8, 9, 10, 11})
    loader = Loader(dataset, BATCH, seed=0, shuffle=False, on_bad_sample="skip", num_workers=processes)
    try:
        whole = loader.fetch(Key(0, 0, 0, 0, 4))
        assert (whole[1].tolist(), loader.skipped) == ([0, 1, 2, 3], ())
        rows, labels = loader.fetch(Key(0, 0, 1, 4, 8))
        assert (labels.tolist(), loader.skipped) == ([4, 6, 7], (5,))
        assert torch.equal(rows, dataset.rows[[4, 6, 7]])
        assert loader.fetch(Key(0, 1, 0, 8, 12)) is None
        assert loader.skipped == (8, 9, 10, 11)
    finally:
        loader.close()
    said = [record.getMessage() for record in caplog.records if record.name == "farandole.data.loader"]
    assert re.search(r"\bepoch 0\b.*\bsample 5\b.*\bRows\b.*OSError: image file is truncated", said[0])
    assert len(said) == 5


@pytest.mark.failure(
    "Data and loader processes",
    "a sample can't be read or decoded",
    seen="`BadSample`, with its index and dataset",
    outcome=(
        'the script fails, exit code 1; with `on_bad_sample="skip"` the sample is skipped, counted and reported '
        "(docs/data.md)"
    ),
)
def test_raised_they_name_index_dataset_and_remedy() -> None:
    with pytest.raises(BadSample, match=r'\b5\b.*\bRows\b.*OSError: image .*on_bad_sample="skip"') as caught:
        Loader(Rows({5}), BATCH, seed=0, shuffle=False).fetch(Key(0, 0, 1, 4, 8))
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(UsageError, match=r"on_bad_sample='ignore'.*\"raise\".*\"skip\""):
        Loader(Rows(set()), BATCH, seed=0, on_bad_sample="ignore")


@pytest.mark.parametrize("error", [ShardError, MemoryError])
def test_what_is_no_fault_of_the_sample_s_is_never_left_out(error: type[Exception]) -> None:
    with pytest.raises(error):
        Loader(Rows({5}, error=error), BATCH, seed=0, shuffle=False, on_bad_sample="skip").fetch(Key(0, 0, 1, 4, 8))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[farandole.Run]:
    for name in ("TICKET", "FOLDER", "LEDGER"):
        monkeypatch.delenv(f"FARANDOLE_{name}", raising=False)
    monkeypatch.setattr(joining, "_current", None)
    threads = torch.get_num_threads()
    yield farandole.join()
    torch.set_num_threads(threads)


def test_the_gradient_is_the_mean_over_the_good_ones(run: farandole.Run) -> None:
    """One bad of eight; a whole micro-batch bad; a whole step bad, which changes nothing; and all good."""
    model = nn.Linear(5, 1).double()
    plain = nn.Linear(5, 1).double()
    plain.load_state_dict(model.state_dict())
    run.replicate(model=model)
    bad = {5, 8, 9, 10, 11, *range(16, 24)}
    dataset = Rows(bad, length=32)
    loader = run.loader(dataset, batch=BATCH, shuffle=False, on_bad_sample="skip")
    found = []
    for step in run.steps(loader, epochs=1):
        for rows, _ in step:
            step.backward(model(rows.double()).square().mean())
        good = [index for index in range(8 * step.number, 8 * step.number + 8) if index not in bad]
        assert step.skipped == 8 - len(good)
        found.append(len(good))
        if not good:
            assert model.weight.grad is None
            assert step.loss != step.loss  # not a number: there is none
            continue
        plain.zero_grad()
        loss = plain(dataset.rows[good].double()).square().mean()
        loss.backward()
        torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)
        assert step.loss == pytest.approx(loss.item())
    assert found == [7, 4, 0, 8]


@pytest.mark.processes
def test_the_same_bits_through_a_kill_and_each_is_counted(tmp_path: Path) -> None:
    bad = {3, 17, 18, 40, 41, 42, 59}
    text = ",".join(map(str, sorted(bad)))
    out, expected = tmp_path / "out", tmp_path / "expected"
    for folder in (out, expected):
        folder.mkdir()
    skipping, pace = ["--bad", text, "--on-bad", "skip"], out / "pace"
    alone(tmp_path / "one", JOB, str(expected), *skipping)
    pace.write_text("0.2")
    arguments = [str(out), *skipping]
    with Elastic(tmp_path / "run", JOB, *arguments, workers=2, options=["--ledger"]) as elastic:
        elastic.until_members(2)
        elastic.until_step(elastic.step + 2)
        elastic.signal(elastic.members[1], signal.SIGKILL)
        elastic.until(lambda: bool(elastic.events("lost")), "the loss")
        pace.write_text("0")
        elastic.finish()
        assert "BAD SAMPLE" in elastic.output.read_text()
    weights = (out / "weights").read_text()
    assert weights == (expected / "weights").read_text()
    good = [index for index in range(SAMPLES) if index not in bad]
    assert float(weights.split()[1]) == pytest.approx(EPOCHS * sum(good) / len(good))
    for folder in (tmp_path / "one" / "ledger", tmp_path / "run" / "ledger"):
        assert ledger.count(folder) == Counter((epoch, index) for epoch in range(EPOCHS) for index in good)
        assert ledger.skipped(folder) == Counter((epoch, index) for epoch in range(EPOCHS) for index in bad)
    assert skips(tmp_path / "run") == skips(tmp_path / "one")
    assert sum(skips(tmp_path / "run").values()) == EPOCHS * len(bad)


def skips(folder: Path) -> dict[int, Any]:
    return {line["step"]: line["skipped"] for line in read_lines(folder) if "skipped" in line}


@pytest.mark.processes
def test_with_nothing_to_leave_out_the_bits_are_those_of_raise(tmp_path: Path) -> None:
    for how in ("skip", "raise"):
        (tmp_path / how).mkdir()
        alone(tmp_path / how, JOB, str(tmp_path / how), "--on-bad", how)
    assert (tmp_path / "skip" / "weights").read_text() == (tmp_path / "raise" / "weights").read_text()
    assert skips(tmp_path / "skip") == {}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EMFILE])
def test_what_the_system_says_of_the_machine_is_no_bad_sample(number: int) -> None:
    """Left out here, it would be counted elsewhere: the bits would differ."""

    class Broken(Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            raise OSError(number, os.strerror(number), f"file {index}")

    loader = Loader(Broken(), GlobalBatch(8, micro=8), seed=0, on_bad_sample="skip")
    with pytest.raises(ShardError, match=rf"\b\d\b.*{os.strerror(number)}"):
        loader.fetch(Key(0, 0, 0, 0, 8))
