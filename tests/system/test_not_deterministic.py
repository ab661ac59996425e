"""A script with an operator that has no deterministic form ends a run on GPUs; the device is made believe."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.platform import cpu
from tests.support.forked import ENVIRON
from tests.support.harness import Elastic

pytestmark = pytest.mark.processes

[(VARIABLE, SIZE)] = cpu.SAME.items()
JOB = f"""
import os
import torch
from farandole.numerics import settings as cuda

print("the workspace is", os.environ.get("{VARIABLE}"))
torch.cuda.set_device = lambda device: print("on", device)
torch.cuda.device_count = lambda: 1
cuda.begin(torch.device("cuda", 0), "same")
torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
"""


@pytest.mark.failure(
    "Scripts that differ between workers",
    (
        "an operator has no deterministic form on CUDA (`histc`, the backward pass of `adaptive_avg_pool2d`), under "
        "`--bits same`"
    ),
    seen=(
        "one sentence when it is used, with the operator, the script's line and the remedy; the traceback is in the "
        "worker's log"
    ),
    outcome="exit code 1; the state is saved; use another operator, or `--bits any`",
)
def test_one_sentence_names_it_and_the_log_has_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ENVIRON, VARIABLE, raising=False)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    with Elastic(tmp_path / "run", script, workers=1, options=[]) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        output = run.output.read_text()
    assert run.process.returncode == 1, output
    assert "Traceback" not in output
    told = [line for line in output.splitlines() if line.startswith("farandole: error on w1: put_ (job.py, line 10) ")]
    assert len(told) == 1, output
    assert told[0].endswith("--bits any")
    log = (tmp_path / "run" / "logs" / "w1.log").read_text()
    assert f"the workspace is {SIZE}\non cuda:0\n" in log
    assert "put_ does not have a deterministic implementation" in log
