"""The probe: three phases timed on a clock of the test's own, the verdict, and the command on a script."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from farandole.data.loader import Key, Loader
from farandole.data.probe import Ended, Findings, Phase, Probe
from farandole.plan.batch import GlobalBatch
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
        self.clock, self.seconds = clock, seconds

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.now += self.seconds
        return torch.tensor([index])


def test_the_three_phases_on_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms to make a sample, 50 ms to compute a micro-batch, 30 ms an update, and then an evaluation, whose loader is
    another: it takes its time from the step and not from the waiting."""
    clock = Clock()
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
    assert found.both.samples == 8 * 14  # 13 steps of 230 ms take 2.99 s
    assert found.both.seconds == pytest.approx(14 * 0.230)
    assert found.both.waiting == pytest.approx(14 * 0.080)
    assert found.compute.samples == 8 * 21
    assert found.compute.seconds == pytest.approx(21 * 0.150)
    assert found.data.rate == pytest.approx(100)
    assert found.share == pytest.approx(80 / 230)


def findings(*, waiting: float, compute: float, data: float, processes: int, cores: int) -> Findings:
    both = Phase(1000, 10.0, 10.0 * waiting)
    rates = {"compute": Phase(int(compute * 10), 10.0), "data": Phase(int(data * 10), 10.0)}
    return Findings(both=both, **rates, processes=processes, cores=cores)


@pytest.mark.parametrize(
    ("waiting", "compute", "data", "processes", "cores", "which", "said"),
    [
        (0.001, 100, 900, 2, 8, "compute", "keeps up with num_workers=2"),
        (0.02, 100, 101, 0, 8, "compute", "keeps up with num_workers=0"),  # exactly enough
        (0.50, 100, 100, 0, 8, "data", "set num_workers=2"),  # one process makes as much as is computed
        (0.80, 100, 25, 0, 8, "data", "set num_workers=5"),  # 4, and a quarter more
        (0.60, 100, 50, 2, 8, "data", "set num_workers=5"),  # a process makes 25 a second
        (0.60, 100, 20, 2, 8, "data", "num_workers=13 would keep up, and there are 8 cores"),
        (0.10, 100, 400, 2, 8, "compute", "num_workers=2 would do, but data comes unevenly"),
    ],
)
def test_the_verdict(
    waiting: float, compute: float, data: float, processes: int, cores: int, which: str, said: str
) -> None:
    found = findings(waiting=waiting, compute=compute, data=data, processes=processes, cores=cores)
    bottleneck, advice = found.verdict()
    assert bottleneck == which
    assert said in advice


def probe(*arguments: str, code: int = 0, folder: Path) -> str:
    environ = {**ENVIRON, "FARANDOLE_TICKET": "/nowhere", "FARANDOLE_FOLDER": str(folder)}
    command = [*FARANDOLE, "probe", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=200, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.processes
def test_a_script_with_slow_data_and_one_loader_process(tmp_path: Path) -> None:
    """Sleeps: whatever else the machine does makes both longer, and neither shorter."""
    output = probe("--seconds", "1", str(JOB), "--decode", "40", "--processes", "1", folder=tmp_path)
    assert "data alone" in output
    assert "bottleneck: data; " in output
    assert f"num_workers=1, {os.cpu_count()} cores" in output
    assert list(tmp_path.iterdir()) == [], "a probe writes nothing"


@pytest.mark.processes
def test_a_script_that_ends_too_early_and_one_that_raises(tmp_path: Path) -> None:
    said = probe("--seconds", "100", str(JOB), "--epochs", "2", code=2, folder=tmp_path)
    assert "ended within the probe, which had timed 0 of 3 phases" in said
    (tmp_path / "broken.py").write_text("raise ZeroDivisionError('mine')")
    assert "ZeroDivisionError: mine" in probe("broken.py", code=1, folder=tmp_path)
