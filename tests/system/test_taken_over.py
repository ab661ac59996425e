"""A `farandole run` that is killed leaves other hosts' workers training; the next one on its folder finds them."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.harness import Elastic, alone

pytestmark = [pytest.mark.processes]
JOB = Path(__file__).parents[1] / "jobs" / "digits.py"


@pytest.mark.long
def test_it_goes_on_with_the_same_workers_to_the_same_bits(tmp_path: Path) -> None:
    """The local worker has ended with it; those of an agent have not, and have lost nothing."""
    hosts, pace, out = tmp_path / "hosts.txt", tmp_path / "pace", tmp_path / "out"
    hosts.write_text("localhost slots=2\n")
    pace.touch()
    options = ["--pool", "local,size=1", "--pool", f"ssh,hosts={hosts}"]
    command = (tmp_path / "run", JOB, str(out), "--pace", str(pace))
    with Elastic(*command, workers=3, options=options) as first:
        first.until_members(3)
        first.until_step(3)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        with Elastic(*command, workers=3, options=options) as second:
            second.until_members(3, without=("w1",))
            assert {"ssh-w1", "ssh-w2"} < set(second.members)
            assert [event["worker"] for event in second.events("lost")] == ["w1"]
            pace.unlink()
            second.finish()
            assert not second.events("resumed"), second.report()
    alone(tmp_path / "alone", JOB, str(tmp_path / "alone.out"))
    assert out.read_text() == (tmp_path / "alone.out").read_text()


@pytest.mark.long
def test_it_goes_on_at_another_address(tmp_path: Path) -> None:
    """As from another machine: each host's agent is told, and its workers read the ticket again."""
    hosts, pace, out = tmp_path / "hosts.txt", tmp_path / "pace", tmp_path / "out"
    hosts.write_text("localhost slots=2\n")
    pace.touch()
    options = ["--pool", f"ssh,hosts={hosts}"]
    command = (tmp_path / "run", JOB, str(out), "--pace", str(pace))
    with Elastic(*command, workers=2, options=options) as first:
        first.until_members(2)
        first.until_step(3)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        with Elastic(*command, workers=2, options=[*options, "--listen", "127.0.0.2"]) as second:
            second.until(lambda: bool(second.events("view")), "all to be back")
            assert "127.0.0.2" in (tmp_path / "run" / "ticket").read_text()
            pace.unlink()
            second.finish()
            assert not second.events("lost"), second.report()
    alone(tmp_path / "alone", JOB, str(tmp_path / "alone.out"))
    assert out.read_text() == (tmp_path / "alone.out").read_text()


@pytest.mark.long
def test_it_goes_on_from_what_was_shipped_when_its_folder_is_lost(tmp_path: Path) -> None:
    """What is left is its ticket, which somebody has kept, and what lies beside its checkpoints."""
    hosts, pace, out, ticket = (tmp_path / name for name in ("hosts.txt", "pace", "out", "ticket"))
    hosts.write_text("localhost slots=2\n")
    pace.touch()
    options = ["--pool", f"ssh,hosts={hosts}", "--checkpoints", str(tmp_path / "store"), "--checkpoint-every", "never"]
    job = (JOB, str(out), "--pace", str(pace))
    with Elastic(tmp_path / "run", *job, workers=2, options=options) as first:
        first.until_members(2)
        first.until_step(3)
        shutil.copy(first.folder / "ticket", ticket)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        members = first.members
        (tmp_path / "run").rename(tmp_path / "lost")
        taking = [*options, "--listen", "127.0.0.2", "--take-over", str(ticket)]
        with Elastic(tmp_path / "new", *job, workers=2, options=taking) as second:
            second.until(lambda: bool(second.events("view")), "all to be back")
            assert set(second.members) == set(members)
            pace.unlink()
            second.finish()
            assert not second.events("lost") + second.events("resumed"), second.report()
        (tmp_path / "lost").rename(tmp_path / "run")
    alone(tmp_path / "alone", JOB, str(tmp_path / "alone.out"))
    assert out.read_text() == (tmp_path / "alone.out").read_text()


@pytest.mark.long
def test_another_script_is_not_what_is_to_be_taken_over(tmp_path: Path) -> None:
    hosts, pace = tmp_path / "hosts.txt", tmp_path / "pace"
    hosts.write_text("localhost\n")
    pace.touch()
    options = ["--pool", f"ssh,hosts={hosts}"]
    job = (tmp_path / "run", JOB, str(tmp_path / "out"), "--pace", str(pace))
    with Elastic(*job, workers=1, options=options) as first:
        first.until_step(1)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        with Elastic(tmp_path / "run", JOB, str(tmp_path / "other"), workers=1, options=options) as other:
            other.process.wait()
            assert other.process.returncode == 2
            assert f"{tmp_path / 'run'}: 1 workers" in other.output.read_text()
        with Elastic(*job, workers=1, options=options) as second:
            second.until(lambda: bool(second.events("coordinator back")), "its coordinator")
            second.command("stop")
            second.until(lambda: second.process.poll() is not None, "the end")
