"""`farandole run` whole, with fake workers in real processes: exit codes, signals, deaths, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_worker import gone, until
from tests.support.launched import FAKE, Launched, farandole, kill_coordinator
from tests.support.lines import naming

pytestmark = [pytest.mark.processes]


def test_a_run_from_start_to_end(launch: Callable[..., Launched], tmp_path: Path) -> None:
    run = launch("--workers", "1", "--max", "3", arguments=("--workers", "9", "--", "-h"))
    run.wait_for("w1")
    ticket = json.loads((run.folder / "ticket").read_text())
    for pid in (run.process.pid, *run.pids):
        assert ticket["secret"].encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()

    second = farandole("run", "--folder", str(run.folder), str(FAKE), cwd=tmp_path)
    assert second.returncode == 2
    assert str(run.folder) in second.stderr

    assert farandole("scale", "2", cwd=tmp_path).returncode == 0
    run.wait_for("w1", "w2")
    assert "--max 3" in farandole("scale", "4", cwd=tmp_path).stderr
    status = json.loads(farandole("status", "--json", cwd=tmp_path).stdout)
    assert [(w["id"], w["rank"], w["pool"]) for w in status["workers"]] == [("w1", 0, "local"), ("w2", 1, "local")]
    assert (status["wanted"], status["minimum"], status["maximum"]) == (2, 1, 3)
    assert naming(farandole("status", cwd=tmp_path).stdout, 2, 1, 3)

    assert "w1" in farandole("release", "w1", cwd=tmp_path).stdout
    run.wait_for("w2")
    (run.folder / "finish").touch()
    code, out, err = run.ended()
    assert (code, err) == (0, "")
    first, then, *_ = out.splitlines()
    assert "1 worker" in first
    assert str(run.folder) in then
    assert "w1 | hello from w1 --workers 9 -- -h\n" in out
    assert naming(out, "w2", "view 2")
    assert naming(out, "w1", "view 3")
    assert "exit code 0" in out
    assert "exit code 0" in farandole("status", cwd=tmp_path).stdout
    for path in (run.out, *(p for p in run.folder.rglob("*") if p.is_file() and p.name != "ticket")):
        assert ticket["secret"].encode() not in path.read_bytes(), path


@pytest.mark.long
def test_a_crash_is_replaced_and_what_the_worker_started_is_ended(launch: Callable[..., Launched]) -> None:
    run = launch("--workers", "2", arguments=("--children",))
    until(lambda: sorted(map(str, run.members())) == ["w1", "w2"])
    run.note_processes()
    (run.folder / "crash-w2").touch()
    run.wait_for("w1", "w3")
    live = farandole("status", "--run", str(run.folder), cwd=run.cwd).stdout
    assert naming(live, "w2", "code 7") or naming(live, "w2", "lost")
    (run.folder / "finish").touch()
    code, out, err = run.ended()
    assert (code, err) == (0, "")
    assert [event["worker"] for event in run.events("lost")] == ["w2"]
    assert naming(out, "w2", "code 7") or naming(out, "w2", "lost")


def test_the_scripts_own_error_is_shown_and_is_the_exit_code(launch: Callable[..., Launched]) -> None:
    run = launch("--workers", "1")
    run.wait_for("w1")
    (run.folder / "fail-w1").touch()
    code, out, err = run.ended()
    assert code == 1
    assert naming(out, "w1", "OSError: no disk")
    assert "\n  fake\nOSError: no disk" in err


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "workers die before they have joined (a broken installation, no memory for one more)",
    seen="an event for each exit, `before it asked to join; see its log`",
    outcome=(
        "after five in a row that pool starts no more, or the run ends with exit code 1 if it never began; `farandole "
        "scale` tries again"
    ),
)
def test_workers_that_never_join_end_the_run(launch: Callable[..., Launched]) -> None:
    run = launch("--workers", "2", arguments=("--silent",))
    code, out, err = run.ended()
    assert code == 1
    assert naming(out, "w1", "code 4")
    assert re.fullmatch(r"farandole: error: .*\b5\b.*\n", err)


def test_stop(launch: Callable[..., Launched], tmp_path: Path) -> None:
    run = launch("--workers", "1")
    run.wait_for("w1")
    assert "runs/r" in farandole("stop", cwd=tmp_path).stdout
    code, out, err = run.ended()
    assert (code, err) == (0, "")
    assert [event["path"] for event in run.events("saved")] == ["checkpoint"]
    assert naming(out, "checkpoint")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_in_order(launch: Callable[..., Launched], signum: signal.Signals) -> None:
    run = launch("--workers", "1")
    run.wait_for("w1")
    run.process.send_signal(signum)
    code, out, err = run.ended()
    assert (code, err) == (128 + signum, "")
    assert signum.name in out
    assert [event["path"] for event in run.events("saved")] == ["checkpoint"]
    assert naming(out, "checkpoint")


def test_a_signal_before_anything_is_there(launch: Callable[..., Launched]) -> None:
    run = launch("--workers", "1")
    until(lambda: run.folder.joinpath("settings.json").exists())  # handlers are set just before
    run.process.send_signal(signal.SIGINT)
    assert run.ended()[0] == 130


def test_the_second_signal_kills_the_frozen_too(launch: Callable[..., Launched]) -> None:
    run = launch("--workers", "1", arguments=("--children",))
    run.wait_for("w1")
    [worker] = [int(str(event["pid"])) for event in run.events("ready")]
    os.kill(worker, signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    until(lambda: run.events("stopping"))
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.ended()
    assert code == 130
    assert re.fullmatch("farandole: .*\n", err)


@pytest.mark.long
def test_a_killed_coordinator_comes_back_and_the_run_goes_on(launch: Callable[..., Launched], tmp_path: Path) -> None:
    run = launch("--workers", "2", arguments=("--children",))
    until(lambda: sorted(map(str, run.members())) == ["w1", "w2"])
    run.note_processes()
    workers = {event["worker"]: event["pid"] for event in run.events("ready")}
    number = run.events("view")[-1]["view"]
    kill_coordinator(run)
    until(lambda: run.events("view")[-1]["view"] != number)
    assert sorted(map(str, run.members())) == ["w1", "w2"]
    assert [event["worker"] for event in run.events("lost")] == []
    assert farandole("scale", "3", cwd=tmp_path).returncode == 0, "the same address, the same ticket"
    until(lambda: len(run.members()) == 3)
    (run.folder / "finish").touch()
    code, out, err = run.ended()
    assert (code, err) == (0, "")
    assert "signal 9" in out
    assert [sorted(event["workers"]) for event in run.events("coordinator back")] == [["w1", "w2"]]
    assert out.count("first view -> ") == 1, "what was shown before is not shown again"
    assert out.count("over: ") == 1
    assert {event["worker"]: event["pid"] for event in run.events("ready")}.items() >= workers.items()


@pytest.mark.long
def test_a_worker_that_dies_while_the_coordinator_is_away_is_replaced(launch: Callable[..., Launched]) -> None:
    run = launch("--workers", "2")
    until(lambda: sorted(map(str, run.members())) == ["w1", "w2"])
    run.note_processes()
    [victim] = [int(str(event["pid"])) for event in run.events("ready") if event["worker"] == "w2"]
    kill_coordinator(run)
    os.kill(victim, signal.SIGKILL)
    run.wait_for("w1", "w3")
    (run.folder / "finish").touch()
    assert run.ended()[0] == 0


def test_a_signal_while_the_coordinator_is_away_stops_in_order(launch: Callable[..., Launched]) -> None:
    run = launch("--workers", "1")
    run.wait_for("w1")
    kill_coordinator(run)
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.ended()
    assert (code, err) == (130, "")
    assert [event["path"] for event in run.events("saved")] == ["checkpoint"]
    assert naming(out, "checkpoint")


@pytest.mark.long
def test_a_coordinator_that_dies_again_and_again_ends_the_run(launch: Callable[..., Launched]) -> None:
    run = launch("--workers", "1", arguments=("--children",))
    run.wait_for("w1")
    address = json.loads((run.folder / "ticket").read_text())["address"]
    (run.folder / "settings.json").write_text("no settings")  # none that starts now can go on
    kill_coordinator(run)
    code, out, err = run.ended()
    assert code == 1
    assert len(naming(out, "signal 9")) + len(naming(out, "exit code 1")) == 5
    assert re.match(r"farandole: error: .*\b6\b.*exit code 1\b", err)
    assert str(run.folder / "coordinator.log") in err
    assert "settings.json" in (run.folder / "coordinator.log").read_text()
    assert address in (run.folder / "ticket").read_text()


def test_a_killed_run_leaves_no_process(launch: Callable[..., Launched]) -> None:
    run = launch("--workers", "2")
    until(lambda: sorted(map(str, run.members())) == ["w1", "w2"])
    run.note_processes()
    run.process.kill()
    run.process.wait()
    assert len(run.pids) == 3
    until(lambda: all(gone(pid) for pid in run.pids))
