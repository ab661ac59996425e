"""Everyone gone: runs of real processes whose every worker dies, and that come to the same bits all the same.

They run `jobs/small.py`, in whose bits every draw of a random number shows, and are compared with a world of one; the
ledger says that every sample counted once over all lives of a run. (The table of models and optimizers comes through
a death of everyone in test_same_bits.)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from farandole.control.run_folder import HIDDEN_LOG_PREFIX
from farandole.data.ledger import count
from tests.jobs import small
from tests.support import forked
from tests.support.harness import ENVIRON, Elastic, read_lines
from tests.support.small_job import EVERY_SAMPLE_ONCE, OFTEN, SCRIPT, Job, until_checkpoints

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
]


def kill_everyone(run: Elastic) -> None:
    """kill -9 of `farandole run`; the kernel ends all that it started."""
    run.process.kill()
    run.process.wait()


def test_kill_9_of_everyone_then_another_number_of_workers(undisturbed: str, tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.run(2, *OFTEN) as run:
        run.until_members(2)
        until_checkpoints(run, 2)
        kill_everyone(run)
        written = run.events("checkpoint")[-1]
    job.quick()
    with job.run(3) as run:
        run.finish()
        (resumed,) = run.events("resumed")
        assert 10 <= written["step"] <= resumed["step"]
        assert resumed["differences"] == []
        assert job.out.read_text() == undisturbed, run.report()
        assert run.events("finished")[0]["equal"]
        assert not {e["worker"] for e in run.events("ready")} & {"w1", "w2"}, "ids are never used twice"
        told = [line["step"] for line in run.lines() if "event" not in line]
        assert told == [*range(resumed["step"], small.STEPS)]
    assert count(job.folder / "ledger") == EVERY_SAMPLE_ONCE
    assert len(job.checkpoints()) <= 3 + 1, "three are kept; one may not have been finished"


@pytest.mark.long
def test_a_stopped_run_goes_on_twice_past_a_damaged_checkpoint(undisturbed: str, tmp_path: Path) -> None:
    """Stopped; then killed; then the newest checkpoint has a flipped bit, and the one before it is used."""
    job = Job(tmp_path)
    with job.run(2, "--ledger", "--checkpoint-every", "never") as run:
        run.until_step(3)
        run.command("stop")
        run.finish()
        stopped = run.events("saved")[0]
        assert Path(stopped["path"]).parent == job.folder / "checkpoints"
    with job.run(1, *OFTEN) as run:
        until_checkpoints(run, 2)
        kill_everyone(run)
        assert run.events("resumed")[0]["path"] == stopped["path"]
        expected = [event["step"] for event in run.events("checkpoint")]
    whole = [path for path in job.checkpoints() if path.with_suffix(".json").exists()]
    data = bytearray(whole[-1].read_bytes())
    data[len(data) // 2] ^= 1
    whole[-1].write_bytes(data)
    job.quick()
    with job.run(2, "--checkpoint-every", "never") as run:
        run.finish()
        (damaged,) = [event for event in run.events("checkpoint damaged") if whole[-1].stem in event["reason"]]
        assert "SHA-256" in damaged["reason"]
        assert run.events("resumed")[0]["step"] in [*expected, int(whole[-2].stem.split("-")[1])]
        assert run.events("resumed")[0]["path"] == str(whole[-2])
        assert whole[-1].stem in run.output.read_text()
        assert job.out.read_text() == undisturbed, run.report()
    assert count(job.folder / "ledger") == EVERY_SAMPLE_ONCE


def test_a_world_of_one_resumes_and_a_new_run_begins_with_its_checkpoint(undisturbed: str, tmp_path: Path) -> None:
    """Half the epochs alone, the rest alone; and the rest in a run of another folder."""
    first = tmp_path / "first"
    environ = {**ENVIRON, "FARANDOLE_FOLDER": str(first), "FARANDOLE_CHECKPOINT_EVERY": "25steps"}

    def by_itself(*arguments: str) -> None:
        command = [sys.executable, str(SCRIPT), *arguments]
        done = forked.run(command, env=environ, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr

    by_itself(str(tmp_path / "half"), "--epochs", "3")
    job = Job(tmp_path)
    job.quick()
    with job.run(2, "--resume", str(first)) as run:
        run.finish()
        (resumed,) = run.events("resumed")
        assert resumed["step"] == 27
        (difference,) = resumed["differences"]
        assert re.search(r"\bepochs\b.*\b3\b.*\b6\b", difference)
        assert difference in run.output.read_text()
        assert job.out.read_text() == undisturbed, "though here they do not"
    by_itself(str(tmp_path / "whole"))
    assert (tmp_path / "whole").read_text() == undisturbed
    events = [line for line in read_lines(first) if line.get("event", "time spent") != "time spent"]
    assert [(e["event"], e.get("step")) for e in events] == [
        ("run started", None), ("checkpoint", 25), ("finished", None), ("saved", None), ("over", None),
        ("run started", None), ("resumed", 27), ("checkpoint", 50), ("finished", None), ("saved", None), ("over", None),
    ]  # fmt: skip


@pytest.mark.failure(
    "Checkpoints",
    "a run resumes with another model, optimizer, data type or length of data",
    seen=(
        "one sentence when the first worker starts; the traceback is in its log, on lines that begin with `farandole, "
        "aside:`"
    ),
    outcome="exit code 1; training does not start",
)
def test_a_checkpoint_of_other_data_ends_the_run_and_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.run(1, *OFTEN) as run:
        until_checkpoints(run, 1)
        kill_everyone(run)
    job.arguments += ["--samples", "131"]
    with job.run(1) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 1
        said = run.output.read_text()
        assert re.search(r"\b130\b.*\b131\b.*--folder", said)
        assert "Traceback" not in said, "only the sentence"
        [failed] = run.events("failed")
        assert re.search(r"^[^\n]*\b130\b[^\n]*\b131\b[^\n]*\Z", failed["traceback"]), "one line"
        log = (run.folder / "logs" / f"{failed['worker']}.log").read_text()
        assert f"{HIDDEN_LOG_PREFIX}Traceback" in log
