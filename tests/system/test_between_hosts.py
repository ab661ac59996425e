"""Two machines exchange what one worker each would: to the same bits, also when a worker dies."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.fake_worker import until
from tests.support.harness import Elastic, alone, external_worker
from tests.support.network import AVAILABLE, WHY_NOT, Machines

pytestmark = [
    pytest.mark.processes,
    pytest.mark.world,
    pytest.mark.skipif(sys.platform != "linux" or not AVAILABLE, reason=WHY_NOT),
]
JOB = Path(__file__).parents[1] / "jobs" / "small.py"
WIDTH = 8192
WIDE = 65_536  # each of two slices has 1.6 MB: three pieces
SUMS = (8 + 1 + 2 + 1) * WIDTH * 4 + 2 * WIDTH * 8  # bytes: of gradients, and of batch normalisation's buffers
STEPS = 40  # the steps that are read may be a few behind the bytes


def sent(machines: Machines) -> int:
    """Bytes, by the first machine."""
    counter = [*machines.on(0), "cat", "/sys/class/net/cable/statistics/tx_bytes"]
    return int(subprocess.run(counter, capture_output=True, text=True, check=True).stdout)


def test_what_goes_between_two_hosts_is_the_size_of_the_sums(tmp_path: Path) -> None:
    wide = ("--width", str(WIDTH), "--epochs", "20")
    alone(tmp_path / "alone", JOB, str(tmp_path / "expected"), *wide)
    pace = tmp_path / "pace"
    pace.write_text("1")
    out = (str(tmp_path / "out"), "--pace", str(pace), *wide)
    options = ["--listen", "0.0.0.0", "--max", "4"]
    with ExitStack() as stack:
        machines = stack.enter_context(Machines())
        run = stack.enter_context(Elastic(tmp_path / "run", JOB, *out, workers=2, options=options, on=machines.on(0)))
        run.until_members(2)
        external_workers = [
            stack.enter_context(external_worker(machines.on(1), run.folder, tmp_path / f"guest-{number}", JOB, *out))
            for number in range(2)
        ]
        run.until_members(4)
        pace.write_text("0.1")
        run.until_step(run.step + 2)
        first, before = run.step, sent(machines)
        run.until_step(first + STEPS)
        steps, after = run.step - first, sent(machines)
        assert 0.8 * SUMS * steps < after - before < 1.5 * SUMS * (steps + 1), "as if each had one worker: half of all"
        external_workers[0].kill()
        run.until_members(3)
        run.until_step(run.step + 3)
        pace.unlink()
        run.finish()
        until(lambda: external_workers[1].poll() is not None)
    assert (tmp_path / "out").read_text() == (tmp_path / "expected").read_text()


def test_slices_in_pieces_give_the_bits_of_one_worker_whoever_comes_and_goes(tmp_path: Path) -> None:
    wide = ("--width", str(WIDE))
    alone(tmp_path / "alone", JOB, str(tmp_path / "expected"), *wide)
    pace = tmp_path / "pace"
    pace.write_text("1")
    out = (str(tmp_path / "out"), "--pace", str(pace), *wide)
    options = ["--listen", "0.0.0.0", "--max", "2"]
    with ExitStack() as stack:
        machines = stack.enter_context(Machines())
        run = stack.enter_context(Elastic(tmp_path / "run", JOB, *out, workers=1, options=options, on=machines.on(0)))
        run.until_members(1)
        for number in range(2):
            log = tmp_path / f"guest-{number}"
            worker = stack.enter_context(external_worker(machines.on(1), run.folder, log, JOB, *out))
            run.until_members(2)
            run.until_step(run.step + 3)
            if number == 0:
                worker.kill()
                run.until_members(1)
        pace.unlink()
        run.finish()
    assert (tmp_path / "out").read_text() == (tmp_path / "expected").read_text()
