"""`farandole run --pin`: each worker on a core of its own, its loader processes on any; the bits are those without."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.harness import Elastic, alone

JOB = Path(__file__).parents[1] / "jobs" / "loading.py"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="binds threads to cores as Linux does"),
]


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: two workers have none of their own")
def test_workers_have_cores_of_their_own_and_what_loads_for_them_has_all(tmp_path: Path) -> None:
    for folder in (tmp_path / "out", tmp_path / "expected"):
        folder.mkdir()
    alone(tmp_path / "alone", JOB, str(tmp_path / "expected"), "--cores")
    with Elastic(
        tmp_path / "run", JOB, str(tmp_path / "out"), "--cores", workers=2, options=["--pin", "--min", "2"]
    ) as run:
        run.finish()
        logs = [(tmp_path / "run" / "logs" / f"w{number}.log").read_text() for number in (1, 2)]
    assert (tmp_path / "out" / "weights").read_text() == (tmp_path / "expected" / "weights").read_text()
    said = [line.split() for log in logs for line in log.splitlines() if line.startswith("cores ")]
    assert (
        sorted(int(own) for _, own, _ in said) == sorted(os.sched_getaffinity(0))[:2]
        or len({o for _, o, _ in said}) == 2
    )
    assert {loading for _, _, loading in said} == {str(len(os.sched_getaffinity(0)))}


@pytest.mark.long
def test_who_has_no_core_of_its_own_says_so_and_takes_part(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    with Elastic(
        tmp_path / "run", JOB, str(tmp_path), workers=1, options=["--pin", "--threads", str(cores + 1)]
    ) as run:
        run.finish()
        log = (tmp_path / "run" / "logs" / "w1.log").read_text()
    assert any(all(v in line for v in ("--pin: ", "slot 0", str(cores + 1))) for line in log.splitlines())
