"""A member of a run of real processes whose one number is wrong: it is put out by name, the others train on.

The external worker's own process sends the number: everything in it is farandole's, but for one message on its way out.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farandole.protocol.coordinator.state import EXIT_BANNED
from tests.support.harness import ENVIRON, Elastic, alone

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
MISTAKEN = """
import sys
import msgspec
from farandole.worker.connection import Connected
from farandole.protocol import messages as m
from farandole.protocol.worker.session import Session
from farandole.script import run_script

honest = Connected.tell

def tell(self, message):
    if isinstance(message, m.Stopped) and message.synced:
        message = msgspec.structs.replace(message, round=message.round + 10**6, step=message.step + 10**6)
    honest(self, message)

def beat(self, now):  # any stop will do
    honestly(self, now)
    view = self.state_machine.view
    if view and self.state_machine.synced and not getattr(self, "stopped", False):
        self.stopped = True
        self.tell(m.Suspect(view=view.number, peer=view.members[0], reason="a broken connection"), now)

Connected.tell, honestly, Session.beat = tell, Session.beat, beat
run_script(sys.argv[1], sys.argv[2], sys.argv[3:])
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_round_too_far_ahead_costs_its_sender_the_run_and_nobody_else(tmp_path: Path) -> None:
    pace, out, expected = tmp_path / "pace", tmp_path / "out", tmp_path / "expected"
    pace.write_text("2.0")
    job = (JOB, str(out), "--pace", str(pace))
    with Elastic(tmp_path / "run", *job, workers=2, deadline_s=200.0, options=[]) as run:
        run.until_members(2)
        pace.write_text(
            "6.0"
        )  # the run lasts until the external worker has come: on a busy machine it loads torch for minutes
        command = [sys.executable, "-c", MISTAKEN, str(run.folder / "ticket"), str(JOB), str(out), "--pace", str(pace)]
        external_worker = subprocess.Popen(
            command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            run.until(lambda: bool(run.events("lost")), "the guest's eviction")
            pace.unlink()
            said, _ = external_worker.communicate(timeout=200)
            assert external_worker.returncode == EXIT_BANNED, said
            run.finish()
        finally:
            external_worker.kill()
            external_worker.communicate()
        [lost] = run.events("lost")
        assert lost["worker"] == "guest-1"
        assert all(worker in lost["reason"] for worker in ("w1", "w2"))
        assert not run.events("state lost")
    alone(tmp_path / "alone", JOB, str(expected))
    assert out.read_text() == expected.read_text()


WRONG_SUMS = """
import runpy
import sys
from farandole.collective.exchange import Exchange
from farandole.collective.schedule import REDUCED

honest = Exchange._content

def content(self, round_, message):
    tensor = honest(self, round_, message)
    wrong = (self.worker, message.peer, message.kind) == ("w1", "w2", REDUCED) and round_.number >= 5
    return tensor + 0.25 if wrong and str(tensor.dtype) == "torch.float32" else tensor

Exchange._content = content
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.processes
def test_who_sends_one_other_wrong_sums_is_named_beside_it(tmp_path: Path) -> None:
    """All three train on; w1's sums reach w2 as others than w3 has, which nobody but w1 or w2 can have done."""
    script = tmp_path / "wrong_sums.py"
    script.write_text(WRONG_SUMS)
    arguments = str(JOB), str(tmp_path / "out")
    with Elastic(tmp_path / "run", script, *arguments, workers=3, options=["--min", "3"]) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 1, run.report()
        last = run.events("replicas differ")[-1]
        assert (last["workers"], set(last["suspects"])) == (["w2"], {"w1", "w2"})
        assert not run.events("lost")
        assert not run.events("refused")
