"""`farandole run --bits portable`: forked workers and an external worker, whose environment differs, have the same
bits. A replay has them once more.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ENVIRON, FARANDOLE, Elastic

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="finds OpenBLAS in /proc")]


@pytest.mark.long
def test_forked_workers_and_an_external_worker_have_the_same_bits_and_so_has_a_replay(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.3")
    options = ["--bits", "portable", "--seed", "3"]
    with Elastic(tmp_path / "run", JOB, str(tmp_path / "out"), "--pace", str(pace), workers=1, options=options) as run:
        run.until_step(1)
        [numerics] = run.events("numerics")
        assert numerics["facts"]["device"] == "CPU with AVX2"
        command = [*FARANDOLE, "join", str(run.folder / "ticket"), str(JOB), str(tmp_path / "guest")]
        with subprocess.Popen(command, env={**ENVIRON, "MKL_CBWR": "AVX2", "OMP_NUM_THREADS": "2"}) as external_worker:
            run.until_members(2)
            run.until_step(run.step + 2)
            pace.unlink()
            run.finish()
            assert external_worker.wait(200) == 0
        assert not run.events("refused")
        [finished] = run.events("finished")
        assert finished["equal"]
    again = subprocess.run([*FARANDOLE, "replay", str(tmp_path / "run")], env=ENVIRON, capture_output=True, text=True,
                           check=False)  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    assert finished["fingerprint"] in again.stdout, again.stdout + again.stderr
    assert "may differ" not in again.stderr


@pytest.mark.long
def test_a_script_that_has_torch_already_is_told_how_to_start(tmp_path: Path) -> None:
    environ = {**ENVIRON, "FARANDOLE_BITS": "portable", "FARANDOLE_TICKET": ""}
    alone = subprocess.run([sys.executable, str(JOB), str(tmp_path / "out")], env=environ, capture_output=True,
                           text=True, check=False)  # fmt: skip
    assert alone.returncode == 1
    assert "UsageError: --bits portable: " in alone.stderr
    assert "OPENBLAS_CORETYPE=Haswell" in alone.stderr
