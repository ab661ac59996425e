"""The probe: three phases timed on a clock of the test's own, the verdict, and the command on a script."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from farandole.data import object_store
from farandole.data.loader import Key, Loader
from farandole.data.object_store import NOTHING, Making, Makings
from farandole.data.probe import Ended, Phase, Probe, ProbeResult
from farandole.plan.batch import GlobalBatch
from tests.support.file_server import FileServer
from tests.support.harness import ENVIRON, FARANDOLE

JOB = Path(__file__).parents[1] / "jobs" / "probed.py"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Timed(Dataset[torch.Tensor]):
    """Each sample takes `seconds` to make."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        self._clock.now += self._seconds
        return torch.tensor([index])


def test_the_three_phases_on_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms to make a sample, 50 ms to compute a micro-batch, 30 ms an update, and then an evaluation, whose loader is
    another: it takes its time from the step and not from the waiting."""
    clock = Clock()
    monkeypatch.setattr(object_store, "_clock", None)  # put back at the end
    object_store.start(clock)
    monkeypatch.setattr(Loader, "timed", True)
    loader = Loader(Timed(clock, 0.010), GlobalBatch(8, micro=4), seed=0)
    other = Loader(Timed(clock, 0.005), GlobalBatch(4, micro=4), seed=0)
    probe = Probe(3.1, clock)
    monkeypatch.setattr(Loader, "watch", probe)

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
    assert found.both.samples == 8 * 14  # 13 steps of 230 ms take 2.99 s
    assert found.both.seconds == pytest.approx(14 * 0.230)
    assert found.both.waiting == pytest.approx(14 * 0.080)
    assert found.compute.samples == 8 * 21
    assert found.compute.seconds == pytest.approx(21 * 0.150)
    assert found.data.rate == pytest.approx(100)
    assert found.share == pytest.approx(80 / 230)
    made = [phase.making.both for phase in (found.first, found.both, found.compute, found.data)]
    assert [each.samples for each in made] == [8, 8 * 14, 4, found.data.samples], "of this loader, phase by phase"
    assert [each.computing for each in made] == pytest.approx([0.08, 14 * 0.08, 0.04, found.data.seconds])


def findings(
    *,
    waiting: float,
    compute: float,
    data: float,
    processes: int,
    cores: int,
    making: Making = NOTHING.warm,
    cold: int = 0,
    first: tuple[float, Making] = (0.0, NOTHING.warm),
) -> ProbeResult:
    """`making`: in the phase of both; `cold`: samples that wait for the store in the end."""
    return ProbeResult(
        first=Phase(8, 10.0, first[0], NOTHING.plus(first[1])),
        both=Phase(1000, 10.0, 10.0 * waiting, NOTHING.plus(making)),
        compute=Phase(int(compute * 10), 10.0),
        data=Phase(int(data * 10), 10.0, making=Makings(cold=Making(samples=cold))),
        processes=processes,
        cores=cores,
    )


DECODES = Making(samples=1000, fetching=1.0, reading=1.0, computing=9.0, collating=0.5)
HANDS_OVER = Making(samples=1000, computing=1.0, collating=2.0, handing_over=7.0)
WAITS = Making(
    samples=1000, fetching=8.0, computing=2.0, requests=100, bytes=2_000_000, request_s=5.0, url="s3://b/a.tar"
)


@pytest.mark.parametrize(
    ("waiting", "compute", "data", "processes", "cores", "making", "which", "said"),
    [
        (0.001, 100, 900, 2, 8, DECODES, "compute", "num_workers=2"),
        (0.02, 100, 101, 0, 8, WAITS, "compute", "num_workers=0"),  # exactly enough
        (0.50, 100, 100, 0, 8, DECODES, "too few", "num_workers=2"),  # one process makes as much as is computed
        (0.80, 100, 25, 0, 8, DECODES, "too few", "num_workers=5"),  # 4, and a quarter more
        (0.60, 100, 50, 2, 8, HANDS_OVER, "too few", "25 samples/s"),
        (0.60, 100, 20, 2, 8, DECODES, "decoding", "9 ms"),
        (0.60, 100, 20, 2, 8, HANDS_OVER, "handing over", "9 ms"),
        (0.10, 100, 400, 2, 8, DECODES, "compute", "num_workers=3"),
        (0.60, 100, 50, 2, 8, WAITS, "the store", "80%"),
        (0.60, 100, 50, 2, 8, WAITS, "the store", "s3://b/a.tar: 50 ms"),
        (0.60, 100, 50, 2, 8, WAITS, "the store", "0.4 MB/s"),
        (0.60, 100, 50, 2, 8, WAITS, "the store", "num_workers=5"),
        (0.60, 100, 50, 2, 8, WAITS, "the store", "50 samples/s"),
        (0.60, 100, 1, 2, 8, WAITS, "the store", "num_workers=32"),  # not without end
        (0.60, 100, 400, 2, 8, WAITS, "the store", "num_workers=3"),
    ],
)
def test_the_verdict(
    waiting: float, compute: float, data: float, processes: int, cores: int, making: Making, which: str, said: str
) -> None:
    found = findings(
        waiting=waiting, compute=compute, data=data, processes=processes, cores=cores, making=making
    )  # fmt: skip
    bottleneck, advice = found.verdict()
    assert bottleneck.startswith(which)
    assert said in advice


def test_a_cache_that_never_holds_it_is_told_from_one_that_does_not_yet() -> None:
    found = findings(waiting=0.6, compute=100, data=50, processes=2, cores=8, making=WAITS, cold=3)
    assert "cache_bytes" in found.verdict()[1]


def test_a_first_step_that_waits_for_the_store_is_not_thrown_away() -> None:
    calm: dict[str, Any] = {"waiting": 0.001, "compute": 100.0, "data": 900.0, "processes": 2, "cores": 8}
    which, said = findings(**calm, first=(6.0, WAITS)).verdict()
    assert which.startswith("the store")
    assert all(value in said for value in ("6.0 s", "s3://b/a.tar: 50 ms", "num_workers=2"))
    uneven = {**calm, "waiting": 0.1, "making": DECODES}
    assert findings(**uneven, first=(6.0, WAITS)).verdict()[0].startswith("the store")
    which, said = findings(**{**uneven, "data": 20.0}, first=(6.0, WAITS)).verdict()
    assert which == "decoding"
    assert "6.0 s" in said
    which, said = findings(**{**calm, "waiting": 0.6, "making": WAITS}, first=(6.0, WAITS)).verdict()
    assert which == "the store"
    assert "6.0 s" not in said, "it is told once"
    # processes that start, and a wait of no account
    assert findings(**calm, first=(6.0, DECODES)).verdict()[0] == "compute"
    assert findings(**calm, first=(0.3, WAITS)).verdict()[0] == "compute"


def probe(*arguments: str, code: int = 0, folder: Path) -> str:
    environ = {**ENVIRON, "FARANDOLE_TICKET": "/nowhere", "FARANDOLE_FOLDER": str(folder)}
    command = [*FARANDOLE, "probe", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=200, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


# Sleeps: whatever else the machine does makes both longer, and neither shorter.


@pytest.mark.processes
def test_one_loader_process_where_two_would_keep_up(tmp_path: Path) -> None:
    """100 ms to make a sample and 80 to compute it: 1.25 times as many as one process makes, and 1.56 to be safe."""
    output = probe(
        "--seconds", "1", str(JOB), "--decode", "100", "--train", "320", "--processes", "1", folder=tmp_path
    )  # fmt: skip
    assert "data alone" in output
    assert f"num_workers=1, {os.cpu_count()} cores" in output
    if (os.cpu_count() or 1) > 1:
        assert "bottleneck: too few" in output
    assert "num_workers=2" in output.rpartition("bottleneck")[2]
    assert list(tmp_path.iterdir()) == [], "a probe writes nothing"


@pytest.mark.processes
def test_decoding_that_no_core_keeps_up_with(tmp_path: Path) -> None:
    output = probe("--seconds", "1", str(JOB), "--burn", "150", "--processes", "1", folder=tmp_path)
    assert "bottleneck: decoding; " in output


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


@pytest.mark.processes
def test_a_script_that_ends_too_early_and_one_that_raises(tmp_path: Path) -> None:
    said = probe("--seconds", "100", str(JOB), "--epochs", "2", code=2, folder=tmp_path)
    assert "0 of 3" in said
    (tmp_path / "broken.py").write_text("raise ZeroDivisionError('mine')")
    assert "ZeroDivisionError: mine" in probe("broken.py", code=1, folder=tmp_path)
