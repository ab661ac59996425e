"""The probe: steps that are timed on a clock of the test's own, the verdict, and the command on a script."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from farandole.data import object_store
from farandole.data.loader import Key, Loader
from farandole.data.object_store import NOTHING, Making, Makings
from farandole.data.probe import Ended, Probe, ProbeResult, StepTimes
from farandole.plan.batch import GlobalBatch
from tests.support.file_server import FileServer
from tests.support.harness import ENVIRON, FARANDOLE

JOB = Path(__file__).parents[1] / "jobs" / "probed.py"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow(Dataset[torch.Tensor]):
    """Each sample takes `seconds` to make."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        self._clock.now += self._seconds
        return torch.tensor([index])


def test_steps_on_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms to make a sample, 50 ms to compute a micro-batch, 30 ms an update, and then an evaluation, whose loader is
    another: it takes its time from the step and not from the waiting."""
    clock = Clock()
    monkeypatch.setattr(object_store, "_clock", None)  # put back at the end
    object_store.start(clock)
    loader = Loader(Slow(clock, 0.010), GlobalBatch(8, micro=4), seed=0)
    other = Loader(Slow(clock, 0.005), GlobalBatch(4, micro=4), seed=0)
    probe = Probe(3.1, clock, loader)
    loader.measure(probe, making=True)

    def train() -> None:
        for step in range(10_000):
            for shard in range(2):
                start = 8 * (step % 2) + 4 * shard
                loader.fetch(Key(epoch=step // 2, step=step, shard=shard, start=start, stop=start + 4))
                clock.now += 0.050
            clock.now += 0.030
            other.fetch(Key(epoch=0, step=0, shard=0, start=0, stop=4))

    with pytest.raises(Ended):
        train()
    found = probe.findings(cores=2)
    assert found.first.seconds == pytest.approx(0.230)
    assert found.first.waiting == pytest.approx(0.080)
    assert found.steps.samples == 8 * 14  # 13 steps of 230 ms take 2.99 s
    assert found.steps.seconds == pytest.approx(14 * 0.230)
    assert found.steps.waiting == pytest.approx(14 * 0.080)
    assert found.steps.share == pytest.approx(80 / 230)
    assert found.steps.compute_rate == pytest.approx(8 / 0.150)
    made = [steps.making.both for steps in (found.first, found.steps)]
    assert [each.samples for each in made] == [8, 8 * 14], "of this loader"
    assert [each.computing for each in made] == pytest.approx([0.08, 14 * 0.08])


def findings(
    waiting: float, making: Making, processes: int, cores: int = 8, *, first: tuple[float, Making] = (0.0, Making())
) -> ProbeResult:
    """Of 1,000 samples in 10 s, `waiting` of which is waited for."""
    return ProbeResult(
        first=StepTimes(8, 10.0, first[0], NOTHING.plus(first[1])),
        steps=StepTimes(1000, 10.0, 10.0 * waiting, NOTHING.plus(making)),
        processes=processes,
        cores=cores,
    )


DECODES = Making(samples=1000, fetching=1.0, reading=1.0, computing=9.0, collating=0.5)
HANDS_OVER = Making(samples=1000, computing=1.0, collating=2.0, handing_over=7.0)
WAITS = Making(
    samples=1000, fetching=8.0, computing=2.0, requests=100, bytes=2_000_000, request_s=5.0, url="s3://b/a.tar"
)


@pytest.mark.parametrize(
    ("waiting", "making", "processes", "which", "value"),
    [
        (0.001, DECODES, 2, "compute", "num_workers=2"),
        (0.02, WAITS, 0, "compute", "num_workers=0"),  # exactly enough
        (0.50, DECODES, 0, "too few", "num_workers=3"),  # 2.3, and a quarter more
        (0.50, DECODES, 0, "too few", "200"),
        (0.80, DECODES, 0, "too few", "num_workers=8"),
        (0.60, HANDS_OVER, 2, "too few", "100 samples/s"),
        (0.90, DECODES, 2, "decoding", "9 ms"),
        (0.90, HANDS_OVER, 2, "handing over", "9 ms"),
        (0.10, DECODES, 2, "compute", "num_workers=3"),
        (0.60, WAITS, 2, "the store", "80%"),
        (0.60, WAITS, 2, "the store", "s3://b/a.tar: 50 ms"),
        (0.60, WAITS, 2, "the store", "0.4 MB/s"),
        (0.60, WAITS, 2, "the store", "num_workers=4"),
        (0.60, WAITS, 2, "the store", "cache_bytes"),
        (0.99, WAITS, 2, "the store", "num_workers=32"),  # at most four a core
        (0.10, WAITS, 2, "the store", "num_workers=3"),
    ],
)
def test_the_verdict(waiting: float, making: Making, processes: int, which: str, value: str) -> None:
    bottleneck, advice = findings(waiting, making, processes).verdict()
    assert bottleneck.startswith(which)
    assert value in advice


def test_a_store_whose_data_is_partly_cached() -> None:
    making = Makings(cold=WAITS, warm=Making(samples=100, reading=0.1, computing=0.1))
    found = ProbeResult(first=StepTimes(8, 10.0), steps=StepTimes(1000, 10.0, 6.0, making), processes=2, cores=8)
    bottleneck, advice = found.verdict()
    assert bottleneck == "the store"
    assert "500 samples/s" in advice


def test_a_first_step_that_waits_for_the_store_is_not_thrown_away() -> None:
    which, advice = findings(0.001, DECODES, 2, first=(6.0, WAITS)).verdict()
    assert which.startswith("the store")
    assert all(value in advice for value in ("6.0 s", "s3://b/a.tar: 50 ms", "num_workers=2"))
    assert findings(0.1, DECODES, 2, first=(6.0, WAITS)).verdict()[0].startswith("the store")
    which, advice = findings(0.9, DECODES, 2, first=(6.0, WAITS)).verdict()
    assert which == "decoding"
    assert "6.0 s" in advice
    which, advice = findings(0.6, WAITS, 2, first=(6.0, WAITS)).verdict()
    assert which == "the store"
    assert "6.0 s" not in advice, "it is told once"
    # processes that start, and a wait of no account
    assert findings(0.001, DECODES, 2, first=(6.0, DECODES)).verdict()[0] == "compute"
    assert findings(0.001, DECODES, 2, first=(0.3, WAITS)).verdict()[0] == "compute"


def probe(*arguments: str, code: int = 0, folder: Path) -> str:
    environ = {**ENVIRON, "FARANDOLE_TICKET": "/nowhere", "FARANDOLE_FOLDER": str(folder)}
    command = [*FARANDOLE, "probe", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=200, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


# Sleeps: whatever else the machine does makes both longer, and neither shorter.


@pytest.mark.long
@pytest.mark.processes
def test_one_loader_process_where_two_would_keep_up(tmp_path: Path) -> None:
    """100 ms to make a sample and 80 to compute it: 1.25 times as many as one process makes, and 1.56 to be safe."""
    output = probe(
        "--seconds", "1", str(JOB), "--decode", "100", "--train", "320", "--processes", "1", folder=tmp_path
    )  # fmt: skip
    assert "after it" in output
    assert f"num_workers=1, {os.cpu_count()} cores" in output
    if (os.cpu_count() or 1) > 1:
        assert "bottleneck: too few" in output
    assert "num_workers=2" in output.rpartition("bottleneck")[2]
    assert list(tmp_path.iterdir()) == [], "a probe writes nothing"


@pytest.mark.long
@pytest.mark.processes
def test_decoding_that_no_core_keeps_up_with(tmp_path: Path) -> None:
    output = probe("--seconds", "1", str(JOB), "--burn", "150", "--processes", "1", folder=tmp_path)
    assert "bottleneck: decoding; " in output


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("processes", [pytest.param("0", marks=pytest.mark.long), "2"])
def test_a_store_from_which_each_sample_is_fetched(tmp_path: Path, processes: str) -> None:
    shards = stored(tmp_path)
    with FileServer(shards, delay_s=0.2, bytes_s=200_000) as server:
        output = probe(
            "--seconds", "1", str(JOB), "--store", server.url, "--forgets", "--processes", processes, folder=shards
        )
    assert "bottleneck: the store; " in output
    assert f"({server.url}/shard: " in output, "which store, and how fast it is"
    assert "cache_bytes" in output


@pytest.mark.long
@pytest.mark.processes
def test_a_store_that_only_the_first_step_waits_for(tmp_path: Path) -> None:
    shards = stored(tmp_path)
    with FileServer(shards, delay_s=2.0) as server:
        output = probe(
            "--seconds", "1", str(JOB), "--store", server.url, "--train", "400", "--processes", "1", folder=shards
        )
        assert server.gets.total() == 1
    told = output.rpartition("bottleneck: the store")[2]
    assert re.search(r"\b\d+\.\d s\b", told), "how long the first step waited"
    assert "num_workers=1" in told, "which is enough from the cache"


def stored(folder: Path) -> Path:
    """A folder with one file of 20 kB."""
    shards = folder / "shards"
    shards.mkdir()
    (shards / "shard").write_bytes(bytes(20_000))
    return shards


@pytest.mark.long
@pytest.mark.processes
def test_a_script_that_ends_too_early_and_one_that_raises(tmp_path: Path) -> None:
    said = probe("--seconds", "100", str(JOB), "--epochs", "2", code=2, folder=tmp_path)
    assert "--seconds 100" in said
    (tmp_path / "broken.py").write_text("raise ZeroDivisionError('mine')")
    assert "ZeroDivisionError: mine" in probe("broken.py", code=1, folder=tmp_path)
