"""Checkpoints in S3: a real server process speaks its protocol, goes down while training goes on, and comes back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.checkpoint import save
from farandole.checkpoint.store import Sealing, Sink, Store
from tests.support.checkpoints import manifest
from tests.support.harness import ENVIRON, Elastic, alone
from tests.support.s3_server import S3

pytest.importorskip("s3fs", reason="S3 takes s3fs")
pytest.importorskip("moto", reason="the S3 server of the tests is moto's")
pytestmark = [
    pytest.mark.world,
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
]

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
EPOCHS = ("--epochs", "40")


def refusals(run: Elastic) -> list[dict[str, Any]]:
    return [e for e in run.events("checkpoint failed") if "Could not connect to the endpoint" in e["reason"]]


def test_training_goes_on_while_s3_is_down_and_a_dead_run_goes_on_from_s3(s3: S3, tmp_path: Path) -> None:
    pace, out, expected = tmp_path / "pace", tmp_path / "out", tmp_path / "expected"
    pace.write_text("1")
    alone(tmp_path / "one", JOB, str(expected), *EPOCHS)
    job = [str(out), "--pace", str(pace), *EPOCHS]  # more steps than S3 can be away for, on a slow machine too
    options = ["--checkpoints", "s3://bucket/some/where", "--checkpoint-every", "3steps", "--keep", "1"]

    def run(folder: str, *options: str) -> Elastic:
        return Elastic(tmp_path / folder, JOB, *job, workers=2, options=[*options])

    with run("run", *options) as training:
        training.until(lambda: bool(training.events("checkpoint")), "a checkpoint")
        s3.end()
        training.until(lambda: bool(refusals(training)), "a checkpoint that could not connect")
        failed, reached = refusals(training)[0], training.step
        training.until_step(reached + 2)
        s3.start()
        written = len(training.events("checkpoint"))
        training.until(lambda: len(training.events("checkpoint")) > written, "a checkpoint after S3 came back")
        assert re.search(rf"\bCHECKPOINT\b.*\bstep {failed['step']}\b", training.output.read_text())
        newest = training.events("checkpoint")[-1]
        training.process.kill()
        training.process.wait()
    pace.unlink()
    with run("another", "--resume", "s3://bucket/some/where") as resumed:
        resumed.finish()
        (event,) = resumed.events("resumed")
        assert event["step"] >= newest["step"]
        assert event["path"].startswith("s3://bucket/some/where/step-")
        assert out.read_text() == expected.read_text(), resumed.report()


def test_a_worker_that_gives_up_in_the_middle_leaves_nothing(s3: S3) -> None:
    """Of a state so large that some of it is there already, and of a small one.

    A loader process that is forked meanwhile has a copy of the pipe, as there is one here.
    """
    store = Store("s3://bucket/place")
    copies: list[int] = []

    def write(pieces: int, *, die: bool) -> None:
        def produce(sink: Sink) -> bytes:
            copies.append(os.dup(sink._pipe.fileno()))  # type: ignore[attr-defined]
            sealing = Sealing(sink)
            for _ in range(pieces):
                sealing.write(bytes(1 << 20))
            if die:
                raise ZeroDivisionError
            return sealing.seal(manifest(1))

        save.send(store, "step-00000001-00000000", produce, 3)

    for pieces in (60, 1):
        with pytest.raises(ZeroDivisionError):
            write(pieces, die=True)
        assert "step-" not in s3.listing()
    write(1, die=False)
    assert "<Key>place/step-00000001-00000000.pt</Key>" in s3.listing()
    assert "<Size>1048576</Size>" in s3.listing()
    for copy in copies:
        os.close(copy)


def test_a_worker_that_dies_in_the_middle_leaves_nothing(s3: S3) -> None:
    """Its pipe ends, and so does the uploader, which then leaves nothing."""
    program = """
import os, signal
from farandole.checkpoint import save
from farandole.checkpoint.store import Store
def produce(sink):
    for _ in range(60):
        sink.write(bytes(1 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
save.send(Store("s3://bucket/place"), "step-00000001-00000000", produce, 3)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.read()  # the uploader has this pipe too: it ends when both have ended
        assert worker.wait() == -signal.SIGKILL
    assert "step-" not in s3.listing()


def test_what_can_not_be_is_said_before_anything_is_started(s3: S3, tmp_path: Path) -> None:
    def refused(*options: str) -> str:
        command = [sys.executable, "-m", "farandole", "run", *options, str(JOB)]
        done = subprocess.run(command, env=ENVIRON, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode in (1, 2), done.stderr
        assert not (tmp_path / "runs").exists()
        return done.stderr.splitlines()[-1]

    assert "s3://nowhere/x" in refused("--checkpoints", "s3://nowhere/x")
    assert "--resume s3://bucket/x" in refused("--resume", "s3://bucket/x")
    s3.end()
    assert "s3://bucket/x" in refused("--checkpoints", "s3://bucket/x")
    assert "s3://bucket/x" in refused("--resume", "s3://bucket/x")
