"""Failures of real processes, one at a time and at a chosen moment: what docs/failure_model.md promises of each.

Kills at a moment of the protocol are chaos runs with a schedule written by hand, and are judged like them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import chaos
from chaos.attack import Attack
from chaos.launched import Launched
from chaos.schedule import Blow, Schedule
from chaos.trial import digits, judged
from chaos.verdict import Reference
from chaos.watch import Watch
from farandole.coordinator.journal import Journal
from farandole.protocol.events import FinishedEvent, LostEvent, ResumedEvent
from farandole.protocol.failure_detector import FLOOR_S
from tests.support.by_hand import by_hand
from tests.support.disks import fill, small_disk
from tests.support.fake_worker import until
from tests.support.harness import Elastic
from tests.support.mentioned import mentions
from tests.support.metric_lines import write
from tests.support.stage import Stage, play

pytestmark = [pytest.mark.processes]
JOB = Path(chaos.__file__).with_name("job.py")
FAULTS = Path(__file__).parents[1] / "jobs" / "faults.py"
SMALL = FAULTS.with_name("small.py")


# --- kill -9, at moments of the protocol -----------------------------------------------------------------------------


def kill(role: str, event: str, delay_s: float = 0.0) -> Blow:
    return blow("kill", role, event, delay_s)


def blow(kind: str, role: str = "", event: str = "", delay_s: float = 0.0, workers: int = 0) -> Blow:
    return Blow(kind=kind, event=event, delay_s=delay_s, role=role, choice=0.0, seconds=0.0, workers=workers)


GROW = blow("scale", event="log", workers=4)
COORDINATOR = "kill coordinator"
MOMENTS = {
    "computing; while the others recover; while a view is proposed, the one with the replacements": (
        3, kill("rank 0", "log", 0.2), kill("member", "lost"), kill("rank 0", "proposed"),
    ),
    "a joiner connects, then one with the state on its way, then a leaver on its way out": (
        3, GROW, kill("joiner", "proposed"), kill("joiner", "view"), blow("notice", "member", "log"),
        kill("leaver", "proposed"),
    ),
    "the coordinator and a worker; the coordinator while the others recover; while a view is proposed": (
        2, blow(COORDINATOR, event="log", delay_s=0.1), kill("member", ""), blow(COORDINATOR, event="lost"),
        blow(COORDINATOR, event="proposed"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "moment", [*(pytest.param(each, marks=pytest.mark.long) for each in [*MOMENTS][:-1]), [*MOMENTS][-1]]
)
def test_kill_9_at_a_moment_of_the_protocol(
    moment: str, place: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    number = list(MOMENTS).index(moment)
    workers, *blows = MOMENTS[moment]
    options = ["--workers", str(workers), "--min", "2"]
    with Launched(place / f"moment-{number}", digits(place), options, pace_s=0.04) as run:
        assert run.until(lambda: len(run.watch.holders) == workers, 60.0)
        attack = Attack(Schedule(seed=0, workers=workers, minimum=2, blows=tuple(blows)), run, patience_s=30.0)
        attack.fight()
        told = judged(number, run, run.finish(), attack.struck, reference)
    assert not told.complaints, capsys.readouterr().out
    assert [struck.kind for struck in attack.struck if struck.target] == [blow.kind for blow in blows]


# --- standing still --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_who_stands_still_for_a_while_costs_nothing_and_an_evicted_external_worker_that_wakes_up_comes_back(
    place: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator, then a worker; then an external worker for longer, which ends, and begins anew in its place."""
    with Launched(place / "woken", digits(place), ["--workers", "2", "--min", "2"], pace_s=0.1) as run:
        watch = run.watch
        assert run.until(lambda: len(watch.holders) == 2, 60.0)
        assert run.join()
        coordinator = watch.coordinator()
        assert coordinator is not None
        status = Path(f"/proc/{coordinator}/status")
        os.kill(coordinator, signal.SIGSTOP)
        until(lambda: "stopped" in status.read_text())
        before = sum(1 for _ in committed(run.folder))
        until(lambda: sum(1 for _ in committed(run.folder)) > before + 20)  # two workers write one line a step
        assert "stopped" in status.read_text()
        os.kill(coordinator, signal.SIGCONT)
        assert run.freeze(watch.pids[watch.members[0]], FLOOR_S / 2)
        assert run.until(lambda: "guest-1" in watch.holders)
        assert watch.seen["lost"] == 0
        watch.signal(watch.pids["guest-1"], signal.SIGSTOP)
        assert run.until(lambda: watch.seen["lost"] > 0)
        [lost] = watch.events(LostEvent)
        assert lost.worker == "guest-1"
        assert not lost.reason.startswith("stalled"), "its silence, not that others wait"
        before = watch.step
        assert run.until(lambda: watch.step > before + 5), "the others go on"
        watch.signal(watch.pids["guest-1"], signal.SIGCONT)
        assert run.until(lambda: "guest-2" in watch.holders), "it comes back by itself"
        assert watch.pids["guest-2"] == run.external_workers[0].pid
        told = judged(0, run, run.finish(), [], reference)
        assert run.external_workers[0].wait(200) == 0
    assert not told.complaints, capsys.readouterr().out


def committed(folder: Path) -> Iterator[str]:
    """Lines of the workers' ledgers, which need no coordinator."""
    for path in (folder / "ledger").glob("*.jsonl"):
        yield from (line for line in path.read_text().splitlines() if '"committed"' in line)


# --- the disk, and the coordinator away for too long -----------------------------------------------------------------


@pytest.mark.world
def test_a_full_disk_costs_the_run_its_record_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        scene.worker("w2")
        await scene.in_view("w1", "w2")
        full = fill(scene.folder)
        scene.tasks["w2"].cancel()
        await scene.in_view("w1")
        step = scene.server.status().step
        await scene.until(lambda: scene.server.status().step > step)
        full.unlink()
        scene.worker("w3")
        await scene.in_view("w1", "w3")
        metrics = scene.folder / "metrics.jsonl"
        await scene.until(lambda: '"members":["w1","w3"]' in metrics.read_text())

    with small_disk(tmp_path / "disk", "1m") as disk:
        play(disk, scenario, heartbeat_s=0.1, heartbeat_timeout_s=1.0)
    assert "database or disk is full" in caplog.text, "as SQLite says"


@pytest.mark.failure("Files, disks and output", "the disk of the run's folder becomes full during training")
@pytest.mark.world
def test_what_is_written_after_the_disk_was_full_can_be_read(tmp_path: Path) -> None:
    line = {"step": 3, "loss": 0.5}
    with small_disk(tmp_path / "disk", "1m") as disk, closing(Journal(disk)) as journal:
        write(journal, line)
        full = fill(disk)
        with contextlib.suppress(OSError):
            for _ in range(4096):
                write(journal, line)
        full.unlink()
        write(journal, line)
        for written in (disk / "metrics.jsonl").read_text().splitlines():
            assert json.loads(written) == line


@pytest.mark.long
def test_workers_without_a_coordinator_save_and_leave_and_the_run_goes_on_from_there(
    place: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, pace = place / "orphans", place / "orphans.slow"
    pace.write_text(
        "0.3"
    )  # so that the lease ends in the first epoch: in an evaluation no state is that of a whole step
    job = [str(JOB), str(digits(place)), "--pace", str(pace)]
    watch = Watch(folder)

    def trained() -> bool:
        watch.look()
        return watch.step >= 3

    with by_hand(folder, 2, job, wanted=2, minimum=2, ledger=True, orphan_s=6.0) as run:
        until(trained)
        run.coordinator.kill()
        assert [process.wait(200) for process in run.workers] == [4, 4]
    assert list((folder / "checkpoints").glob("*.pt"))
    with Launched(folder, digits(place), ["--workers", "1"]) as resumed:
        told = judged(0, resumed, resumed.finish(), [], reference)
    assert not told.complaints, capsys.readouterr().out
    assert resumed.watch.events(ResumedEvent)[0].step > watch.step


# --- the script ------------------------------------------------------------------------------------------------------


def test_a_script_that_raises_ends_the_run_with_its_traceback_and_a_checkpoint(tmp_path: Path) -> None:
    arguments = (str(tmp_path), "--fault", "raise")
    with Elastic(tmp_path / "run", FAULTS, *arguments, workers=2, options=["--min", "2"]) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 1, run.report()
        output = run.output.read_text()
        assert "RuntimeError: a trouble of the script's own" in output
        assert output.count("Traceback (most recent call last)") == 1
        [failed] = run.events("failed")
        frames = re.findall(r'File "([^"]*)"', failed["traceback"])
        assert frames[0] == str(FAULTS), "from the script's own frame on"
        log = run.folder / "logs" / f"{failed['worker']}.log"
        assert mentions(output, log), "where the whole traceback is"
        whole = re.findall(r'File "([^"]*)"', log.read_text())
        assert whole[-len(frames) :] == frames
        assert any(Path(frame).name == "snapshot.py" for frame in whole)
        [saved] = run.events("saved")
        assert saved["whole"]
        assert Path(saved["path"]).exists()


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the script exits before `farandole.join()` (wrong arguments, `sys.exit`)",
    seen="its output, once for all workers, and an event with the exit code",
    outcome="the run ends at once with that exit code; a run that trains continues without that worker",
)
def test_a_script_that_refuses_its_arguments_ends_the_run_at_once_and_says_so_once(tmp_path: Path) -> None:
    """Each worker prints the usage and exits, as argparse does; none is started again."""
    with Elastic(
        tmp_path / "run", SMALL, "--epochs", "many", "--stall=9", "--folder", "x", workers=3, options=[]
    ) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 2, run.report()
        assert run.output.read_text().count("usage: small.py") == 1
        assert mentions(run.output.read_text(), "--stall=9", "--folder", "farandole run"), "ours, in the wrong place"
        assert 1 <= len(run.events("failed")) <= 3
        assert {event["worker"] for event in run.events("failed")} <= {"w1", "w2", "w3"}
        assert not run.events("died")
        assert len(list((run.folder / "logs").iterdir())) <= 4, "three workers' and the run's own"


@pytest.mark.failure(
    "Processes, signals and crash loops", "the script exits before `farandole.join()` (wrong arguments, `sys.exit`)"
)
@pytest.mark.parametrize(("code", "expected"), [("7", 7), ("'no data at /data'", 1)])
@pytest.mark.parametrize("join", ["", "import farandole; farandole.join()"])
def test_the_code_with_which_the_script_exits_is_that_of_the_run(
    join: str, code: str, expected: int, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import sys\n{join}\nsys.exit({code})\n")
    with Elastic(tmp_path / "run", script, workers=1, options=[]) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == expected, run.report()
        output = run.output.read_text()
        assert "Traceback" not in output
        assert output.count("no data at /data") == code.count("no data at /data")
        [failed] = run.events("failed")
        assert mentions(failed["traceback"], f"code {expected}", "farandole.join()" if not join else "line 3")


@pytest.mark.long
def test_a_worker_that_hangs_is_evicted_and_the_others_inherit_its_part(tmp_path: Path) -> None:
    """Its heartbeats come, its step does not: the peers that wait for it say so, after the stall limit."""
    job = [str(FAULTS), str(tmp_path), "--fault", "hang"]
    with by_hand(tmp_path / "run", 3, job, wanted=2, minimum=2, stall_s=1.0) as run:
        assert run.coordinator.wait(200) == 0
        watch = Watch(run.folder)
        watch.look()
        [lost] = watch.events(LostEvent)
        assert lost.reason.startswith("stalled: ")
        assert re.search(r"\b\d+(\.\d+)? s\b", lost.reason)
        assert watch.pids[lost.worker] == int((tmp_path / "hung").read_text())
        assert [event.equal for event in watch.events(FinishedEvent)] == [True]
        codes = sorted(process.wait(200) for process in run.workers)
        assert codes in ([0, 0, 0], [0, 0, 1]), "the hung one ends by its grace, and begins anew: the run may be over"


# --- without `farandole run` -----------------------------------------------------------------------------------------
