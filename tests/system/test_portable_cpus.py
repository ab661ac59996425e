"""`--bits portable`: a net has the same bits whatever level this CPU is told to have, and on six emulated CPUs, of
which `make test-long` has one as a worker of a run beside this CPU. Emulators take minutes.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import emulated
from tests.support.harness import ENVIRON, Elastic

JOB = Path(__file__).parents[1] / "jobs" / "portable.py"
LEVELS = {
    "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX", "AVX2", "AVX512_CORE", "ALL"),
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "MKL_CBWR": ("COMPATIBLE", "SSE4_2", "AVX2", "AVX512", "AUTO"),
    "OPENBLAS_CORETYPE": ("Nehalem", "Zen", "SkylakeX"),
}
pytestmark = [pytest.mark.world, pytest.mark.skipif(sys.platform != "linux", reason="finds OpenBLAS in /proc")]


def rehearsal(history: Path) -> Sequence[str]:
    history.write_text("0 2\n")
    return ["-m", "farandole", "rehearse", "--bits", "portable", "--history", str(history), str(JOB)]


def fingerprint(process: subprocess.Popen[str]) -> str:
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    return said.split()[-1]


def test_whatever_levels_this_cpu_is_told_to_have(tmp_path: Path) -> None:
    words = rehearsal(tmp_path / "history")
    plain = fingerprint(emulated.start("", words, ENVIRON))
    for values in itertools.zip_longest(*LEVELS.values()):
        told = {name: value for name, value in zip(LEVELS, values, strict=True) if value}
        assert fingerprint(emulated.start("", words, {**ENVIRON, **told})) == plain, told


@pytest.mark.minutes
@pytest.mark.parametrize("pair", [*zip(emulated.AMD, emulated.INTEL, strict=True)], ids="-".join)
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
def test_on_cpus_of_two_makers(pair: tuple[str, str], tmp_path: Path) -> None:
    words = rehearsal(tmp_path / "history")
    both = {cpu: emulated.start(cpu, words, ENVIRON) for cpu in pair}
    found = {cpu: fingerprint(process) for cpu, process in both.items()}
    assert set(found.values()) == {fingerprint(emulated.start("", words, ENVIRON))}, found


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
def test_as_workers_of_one_run(tmp_path: Path) -> None:
    """The emulated one is let in by what it computes, and computes half of each batch."""
    pace, options = tmp_path / "pace", ["--bits", "portable", "--equal", "--stall", "300"]
    pace.touch()
    arguments = ["--pace", str(pace), "--epochs", "20"]
    with Elastic(tmp_path / "run", JOB, *arguments, workers=1, options=options, deadline_s=1000.0) as run:
        run.until_step(0)
        join = ["-m", "farandole", "join", str(run.folder / "ticket"), str(JOB), *arguments]
        with emulated.start("Haswell", join, ENVIRON) as external_worker:
            run.until(lambda: len(run.members) == 2 or external_worker.poll() is not None, "a view of both")
            pace.unlink()
            run.finish()
            said, errors = external_worker.communicate()
            assert external_worker.returncode == 0, said + errors
        [finished] = run.events("finished")
        assert finished["equal"]
        assert not run.events("refused")
    replay = emulated.start("", ["-m", "farandole", "replay", str(tmp_path / "run")], ENVIRON)
    assert finished["fingerprint"] in replay.communicate()[0]
    assert replay.returncode == 0
