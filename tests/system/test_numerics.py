"""Real runs, and guests whose libraries compute as on another CPU: refused by the operation's name, or let in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.harness import ENVIRON, FARANDOLE, Elastic

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
SEE = "see `farandole numerics --against TICKET`, or give the run --bits any"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
    pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL"),
]


def guest(run: Elastic, out: Path, **environ: str) -> subprocess.Popen[str]:
    command = [*FARANDOLE, "join", str(run.folder / "ticket"), str(JOB), str(out)]
    environ = {**ENVIRON, **environ}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_guest_that_computes_other_bits_is_refused_by_the_name_of_an_operation(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.3")
    with Elastic(tmp_path / "run", JOB, str(tmp_path / "out"), "--pace", str(pace), workers=1, options=[]) as run:
        run.until_step(1)
        [numerics] = run.events("numerics")
        assert numerics["worker"] == "w1"
        assert numerics["facts"]["torch version"] == torch.__version__
        assert numerics["facts"]["setting default dtype"] == "float32"
        with guest(run, tmp_path / "guest", MKL_CBWR="COMPATIBLE") as other:
            said, _ = other.communicate(timeout=60)
        assert other.returncode == 1
        [refused] = run.events("refused")
        assert refused["reason"].startswith("operation matmul of 64x1024 by 1024x512: this worker computes other bits")
        assert refused["reason"].endswith(SEE)
        assert refused["reason"] in said
        with guest(run, tmp_path / "guest") as like:
            run.until_members(2)
            pace.unlink()
            run.finish()
            assert like.wait(30) == 0
        assert len(run.events("numerics")) == 1


def test_by_option_it_is_let_in_and_it_is_told_from_when_on_no_bits_are_promised(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.3")
    options = ["--bits", "any"]
    with Elastic(tmp_path / "run", JOB, str(tmp_path / "out"), "--pace", str(pace), workers=1, options=options) as run:
        run.until_step(2)
        with guest(run, tmp_path / "guest", ONEDNN_MAX_CPU_ISA="SSE41") as other:
            run.until_members(2)
            [told] = run.events("bits not promised")
            entered = run.events("view")[-1]["step"]
            run.command("stop")
            run.until(lambda: run.process.poll() is not None, "the end")
            assert other.wait(30) == 0
        assert told["worker"] == "guest-1"
        assert 1 <= told["step"] < entered
        assert told["what"][0].startswith("operation convolution 3x3 of 3x32x32")
        assert run.events("refused") == []
        assert "THE BITS ARE NOT PROMISED AFTER STEP" in run.output.read_text()
