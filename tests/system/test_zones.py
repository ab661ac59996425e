"""A run on four hosts in two zones: one copy of the sums goes from one zone to the other, and the bits stay."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.fake_worker import until
from tests.support.forked import run as run_command
from tests.support.harness import FARANDOLE, Elastic, alone, external_worker

pytestmark = pytest.mark.processes
JOB = Path(__file__).parents[1] / "jobs" / "small.py"
WIDTH = 4096
SUMS = (8 + 1 + 2 + 1) * WIDTH * 4 + 2 * WIDTH * 8  # bytes: of gradients, and of batch normalisation's buffers


@pytest.mark.long
def test_one_copy_of_the_sums_goes_each_way_between_two_zones_and_the_bits_stay(tmp_path: Path) -> None:
    """It would be two copies if each host exchanged with each other one. Then a host dies, and the rest goes on."""
    wide = ("--width", str(WIDTH), "--epochs", "16")
    alone(tmp_path / "alone", JOB, str(tmp_path / "expected"), *wide)
    pace = tmp_path / "pace"
    pace.write_text("1.6")
    out = (str(tmp_path / "out"), "--pace", str(pace), *wide)
    first = ["env", "FARANDOLE_HOST=a", "FARANDOLE_ZONE=east"]
    with ExitStack() as stack:
        run = stack.enter_context(Elastic(tmp_path / "run", JOB, *out, workers=1, options=["--max", "4"], on=first))
        run.until_members(1)
        hosts = {
            host: stack.enter_context(
                external_worker([], run.folder, tmp_path / f"guest-{host}", JOB, *out, host=host, zone=zone)
            )
            for host, zone in (("b", "west"), ("c", "west"), ("d", "east"))
        }
        run.until_members(4)
        (before, at_first), (after, at_last) = between_zones(run), between_zones(run)
        assert 1.6 * SUMS < (after - before) / (at_last - at_first) < 2.6 * SUMS
        hosts["c"].kill()
        run.until_members(3)
        run.until_step(run.step + 3)
        pace.unlink()
        run.finish()
        until(lambda: all(host.poll() is not None for host in hosts.values()))
    assert (tmp_path / "out").read_text() == (tmp_path / "expected").read_text()


def between_zones(run: Elastic) -> tuple[int, int]:
    """The bytes so far, and the step: the workers' sums are written every ten seconds."""
    lines = len(run.events("time spent"))
    run.until(lambda: len(run.events("time spent")) > lines, "a line of the sums")
    step = run.step
    shown = run_command([*FARANDOLE, "account", "--run", str(run.folder), "--json"])
    return json.loads(shown.stdout)["traffic"]["between_zones_bytes"], step
