"""A script that is a module of a package: struck, it ends with the bits of `python -m`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.forked import run
from tests.support.harness import ENVIRON, FARANDOLE, Elastic, external_worker

MODULE = "farandole_job.inner.train"
SCRIPT = """
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import farandole

from ..net import net

if __name__ == "__main__":
    out, pace = map(Path, sys.argv[1:])
    run = farandole.join()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model=model, optimizer=optimizer)
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    rows = DataLoader(
        TensorDataset(inputs, inputs.sum(1, keepdim=True)), 16, shuffle=True, num_workers=1,
        multiprocessing_context="spawn",
    )
    for step in run.steps(run.loader(rows, micro=4), epochs=40):
        for x, y in step:
            if pace.exists():
                time.sleep(0.05)
            step.backward((model(x) - y).square().mean())
        optimizer.step()
    if run.is_leader:
        out.write_text(f"{__package__} {run.fingerprint()}")
"""
NET = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))\n"


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc")
def test_a_module_with_a_kill_and_a_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "project" / "farandole_job" / "inner"
    inner.mkdir(parents=True)
    for name, text in {"__init__.py": "", "../__init__.py": "", "../net.py": NET, "train.py": SCRIPT}.items():
        (inner / name).write_text(text)
    monkeypatch.chdir(tmp_path / "project")
    environ = {**ENVIRON, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    alone, out, pace = tmp_path / "alone", tmp_path / "out", tmp_path / "pace"
    done = run([sys.executable, "-m", MODULE, str(alone), str(pace)], env=environ, timeout=200)
    assert done.returncode == 0, done.stderr
    pace.touch()
    job = (str(out), str(pace))
    with Elastic(tmp_path / "run", Path(MODULE), *job, workers=2, options=["-m"]) as elastic:
        elastic.until_step(2)
        first, _ = elastic.until_members(2)
        elastic.signal(first, signal.SIGKILL)
        elastic.until_members(2, without=(first,))
        with external_worker([], elastic.folder, tmp_path / "other.out", Path(MODULE), *job):
            elastic.until_members(3, without=(first,))
            before = elastic.step
            pace.unlink()
            elastic.finish()
    assert out.read_text() == alone.read_text()
    assert out.read_text().split()[0] == "farandole_job.inner"
    assert before < elastic.step
    refused = run([*FARANDOLE, "run", "-m", str(inner / "train.py"), *job], env=ENVIRON, timeout=100)
    assert refused.returncode == 2
