"""A stream of samples, with a state and without, while workers join and are killed: the bits of a single process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from farandole.data.ledger import count
from tests.jobs.streamed import EPOCHS, SAMPLES
from tests.support.harness import Elastic, alone

JOB = Path(__file__).parents[1] / "jobs" / "streamed.py"
JOINS_AT = 45  # a step: in the stream, beyond the second mark


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["plain", "state"])
def test_with_a_join_and_a_kill_and_alone(tmp_path: Path, kind: str) -> None:
    out, single, pace = tmp_path / "out", tmp_path / "single", tmp_path / "pace"
    pace.touch()
    options = ["--ledger"]
    with Elastic(tmp_path / "run", JOB, str(out), kind, "--pace", str(pace), workers=2, options=options) as run:
        run.until_step(JOINS_AT)
        first, _ = run.until_members(2)
        run.command("scale", "3")
        run.until_members(3)
        run.signal(first, signal.SIGKILL)
        run.until_members(3, without=(first,))
        before = run.step
        pace.unlink()
        run.finish()
        last = run.step
    alone(tmp_path / "alone", JOB, str(single), kind)
    assert out.read_text() == single.read_text()
    assert before < last, "the run was over before the last change"
    assert count(tmp_path / "run" / "ledger") == {(e, index): 1 for e in range(EPOCHS) for index in range(SAMPLES)}
    if kind == "state":
        reads = sorted(int(each.read_text()) for each in tmp_path.glob("out.*"))
        assert len(reads) == 3
        assert reads[1] < EPOCHS * SAMPLES - 256, "both joiners begin at a mark"
