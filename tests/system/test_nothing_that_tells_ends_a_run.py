"""Whole runs whose disk is full, whose output nobody takes, whose state are cleared away: they end as they would have.

Real processes, and real training where the bits matter.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from farandole.data.ledger import count
from farandole.errors import LedgerIncomplete
from tests.support.by_hand import by_hand
from tests.support.disks import fill, freezable_disk, small_disk
from tests.support.fake_worker import gone, until
from tests.support.harness import FARANDOLE, Elastic, alone, read_lines
from tests.support.launched import FAKE, Launched, kill_coordinator
from tests.support.lines import naming

pytestmark = [pytest.mark.processes]
TELLING = Path(__file__).parents[1] / "jobs" / "telling.py"
MODULE = "farandole.coordinator.process"
PACE_S = "0.05"


def telling(folder: Path) -> tuple[str, ...]:
    """Arguments of the job, slow until `folder`/pace is gone."""
    (folder / "pace").write_text(PACE_S)
    return str(folder / "out"), "--pace", str(folder / "pace")


def further(run: Elastic, out: Path, steps: int = 10) -> None:
    """Wait until the training has gone on, as its own file says."""

    def step() -> int:
        path = out.with_suffix(".step")
        return int(path.read_text()) if path.exists() else -1

    before = step()
    run.until(lambda: step() >= before + steps, f"{steps} more steps")


def coordinator(run: Elastic) -> psutil.Process:
    """That of now, which may not have been able to write down its id."""
    [found] = [child for child in psutil.Process(run.process.pid).children() if MODULE in child.cmdline()]
    return found


def members(run: Elastic) -> set[str]:
    """That the coordinator knows, whatever it could write."""
    asked = [*FARANDOLE, "status", "--json", "--run", str(run.folder)]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    workers = json.loads(answer.stdout)["workers"] if answer.returncode == 0 else ()
    return {worker["id"] for worker in workers if worker["rank"] is not None}


def fingerprint(folder: Path) -> str:
    """Of the job undisturbed."""
    alone(folder / "alone", TELLING, str(folder / "reference"))
    return (folder / "reference").read_text()


# --- a full disk ---------------------------------------------------------------------------------------------


@pytest.mark.failure(
    "Files, disks and output",
    "the disk of the run's folder becomes full during training",
    seen=(
        "`NOT RECORDED: the run's folder can't be written` at the next event; `THE LEDGER OF w1 IS INCOMPLETE` with "
        "`--ledger`"
    ),
    outcome=(
        "training continues with the same bits; lines, output and checkpoints of that time are missing; their number "
        "is reported later"
    ),
)
@pytest.mark.world
def test_a_full_disk_a_killed_coordinator_and_a_lost_worker_cost_the_record_only(tmp_path: Path) -> None:
    """Books that are not on the disk: the second coordinator must know the worker that came when it was full."""
    expected = fingerprint(tmp_path)
    arguments, out = telling(tmp_path), tmp_path / "out"
    with small_disk(tmp_path / "disk", "4m") as disk:
        folder = disk / "run"
        options = ["--min", "1", "--ledger", "--checkpoint-every", "never"]
        with Elastic(folder, TELLING, *arguments, workers=2, options=options) as run:
            run.until_members(2)
            run.until_step(3)
            full = fill(disk)
            further(run, out, 30)  # a kilobyte each, on two workers: whatever room was left is taken
            coordinator(run).kill()
            further(run, out)
            run.signal("w2", signal.SIGKILL)
            run.until(lambda: members(run) == {"w1", "w3"}, "the replacement")
            further(run, out)
            coordinator(run).kill()
            further(run, out)
            full.unlink()
            (tmp_path / "pace").unlink()
            run.finish()
            assert out.read_text() == expected
            assert run.events("recorded again")[0]["missing"] > 0
            assert [event["equal"] for event in run.events("finished")] == [True]
            lost = [(event["worker"], event["reason"]) for event in run.events("lost")]
            assert lost == [], "it was lost on the full disk, and nobody since"
            with pytest.raises(LedgerIncomplete, match="w1"):
                count(folder / "ledger")
            for path in (folder / "logs" / "w1.log", run.output):
                assert os.strerror(errno.ENOSPC) in path.read_text(), path


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the disk of the run's folder does not answer (a hard mount without its server)",
    seen=(
        "`not recorded`; later the delayed lines, and `recorded again` with the number of events that the journal lacks"
    ),
    outcome=(
        "the coordinator waits once, at most 2 s; scripts that print, checkpoints there and new processes wait as "
        "long as the disk"
    ),
)
@pytest.mark.world
def test_a_disk_that_does_not_answer_costs_no_step_and_no_worker(tmp_path: Path) -> None:
    """Every write to the run's folder blocks. A script that prints blocks too: its output is a file in that folder."""
    expected = fingerprint(tmp_path)
    arguments, out = telling(tmp_path), tmp_path / "out"
    with freezable_disk(tmp_path / "disk") as disk:
        options = ["--min", "1", "--checkpoint-every", "never"]
        with Elastic(disk.folder / "run", TELLING, *arguments, "--silent", workers=3, options=options) as run:
            try:
                run.until_members(3)  # one that is still on its way can't write its log later
                run.until_step(3)
                disk.freeze()
                further(run, out, 30)
                assert members(run) == {"w1", "w2", "w3"}
                run.signal("w2", signal.SIGKILL)
                run.until(lambda: "w2" not in members(run), "w2 is missed")
                further(run, out, 30)
            finally:
                disk.thaw()
            (tmp_path / "pace").unlink()
            run.finish()
            assert out.read_text() == expected
            assert [event["equal"] for event in run.events("finished")] == [True]
            assert [event["worker"] for event in run.events("lost")] == ["w2"], "the frozen disk cost nobody else"
            steps = [line["step"] for line in run.lines() if "event" not in line and "loss" in line]
            assert steps == list(range(max(steps) + 1)), "every line is there"


# --- state that are gone --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.failure(
    "Files, disks and output",
    "the journal is deleted while the run is on",
    seen="nothing, until the coordinator dies",
    outcome="the next coordinator gets the state from memory; no worker is lost",
)
@pytest.mark.failure(
    "Files, disks and output",
    "the journal is overwritten with random data",
    seen="`THE JOURNAL IS DAMAGED` when the next coordinator or a resumed run opens it",
    outcome="it is renamed to `journal.sqlite.damaged-1`, and a new one starts; no worker is lost",
)
@pytest.mark.parametrize("what", [pytest.param("rubbish", marks=pytest.mark.long), "nothing"])
def test_a_journal_that_is_spoilt_under_a_live_coordinator_costs_nobody(
    launch: Callable[..., Launched], what: str
) -> None:
    run = launch("--workers", "2")
    until(lambda: sorted(map(str, run.members())) == ["w1", "w2"])
    run.note_processes()
    number = run.events("view")[-1]["view"]
    for path in run.folder.glob("journal.sqlite*"):
        path.unlink()
    if what == "rubbish":
        (run.folder / "journal.sqlite").write_bytes(b"what is this? " * 500)
    kill_coordinator(run)
    until(lambda: run.events("view")[-1]["view"] != number)
    assert sorted(map(str, run.members())) == ["w1", "w2"]
    assert run.events("lost") == []
    (run.folder / "finish").touch()
    code, _, err = run.ended()
    assert (code, err) == (0, "")
    damaged = run.events("journal damaged")
    assert ["journal.sqlite.damaged-1" in event["reason"] for event in damaged] == [True] * (what == "rubbish")
    assert bool(list(run.folder.glob("journal.sqlite.damaged-1"))) == (what == "rubbish")


@pytest.mark.long
def test_without_any_books_whoever_holds_a_state_saves_it_and_goes(tmp_path: Path) -> None:
    """And comes back, as external workers do: the run goes on with what they have saved."""
    expected = fingerprint(tmp_path)
    arguments = telling(tmp_path)
    folder = tmp_path / "run"
    with by_hand(folder, 2, [str(TELLING), *arguments], wanted=2, minimum=2) as run:
        until(lambda: (tmp_path / "out.step").exists())
        run.coordinator.kill()
        run.coordinator.wait()
        for path in folder.glob("journal.sqlite*"):
            path.unlink()
        command = [sys.executable, "-m", "farandole.coordinator.process", str(folder), "--die-with", str(os.getpid())]
        with subprocess.Popen([*command, "--again"]) as again:
            until(lambda: any(line.get("event") == "resumed" for line in read_lines(folder)))
            (tmp_path / "pace").unlink()
            assert [process.wait(200) for process in run.workers] == [0, 0]
            again.kill()
    assert (tmp_path / "out").read_text() == expected


# --- output that nobody takes ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.failure(
    "Files, disks and output",
    "the output of `farandole run` can't be written: `>&-`, a closed pipe, a full disk",
    seen="nothing; once there is room again, a line with the number of lost bytes",
    outcome="the run continues to its own exit code",
)
@pytest.mark.parametrize(
    "where",
    [
        "> /dev/full 2>&1",
        *(pytest.param(where, marks=pytest.mark.long) for where in (">&- 2>&-", "| head -n 1 > first")),
    ],
)
def test_output_that_nobody_takes_ends_no_run(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "r"
    words = f"{sys.executable} -m farandole run --workers 1 --folder {folder} {FAKE} {folder}"
    piped = where.startswith("|")
    command = f"({words}; echo $? > code) {where}" if piped else f"{words} {where}; echo $? > code"
    with subprocess.Popen(["bash", "-c", command], cwd=tmp_path) as shell:
        until(
            lambda: (folder / "metrics.jsonl").exists() and '"event":"view"' in (folder / "metrics.jsonl").read_text()
        )
        (folder / "finish").touch()
        shell.wait(200)
    until(lambda: (tmp_path / "code").exists())
    assert (tmp_path / "code").read_text() == "0\n"
    assert '"event":"over"' in (folder / "metrics.jsonl").read_text()


# --- the run's folder -----------------------------------------------------------------------------------------


@pytest.mark.failure(
    "Files, disks and output",
    "the folder of the run is deleted or moved",
    seen="`THE RUN'S FOLDER IS GONE`, within a second",
    outcome="training continues without a record; if the coordinator dies then, the run ends with the reason",
)
@pytest.mark.failure(
    "Files, disks and output",
    "`--folder` names a folder with other files",
    seen="`note: ... holds files that are not a run's (thesis.tex)`, at the start",
    outcome="the files are not changed",
)
def test_a_folder_that_goes_and_one_that_holds_others_files_are_worth_a_word(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").touch()
    run = launch("--workers", "1")
    run.wait_for("w1")
    assert "thesis.tex" in run.out.read_text()
    assert (folder / "thesis.tex").exists()
    before = len(run.out.read_text())
    folder.rename(tmp_path / "elsewhere")
    until(lambda: naming(run.out.read_text()[before:], folder))
    (tmp_path / "elsewhere").rename(folder)
    (folder / "finish").touch()
    assert run.ended()[0] == 0


# --- scripts with bad manners -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.failure("Files, disks and output", "a script prints to a full disk, or closes its standard output")
@pytest.mark.failure(
    "Files, disks and output", "a script prints control sequences (colours, titles, content of others' files)"
)
@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the script of a replacement fails before it is admitted, and the run ends well",
    seen="an event when it happens, not again at the end",
    outcome="exit code 0",
)
@pytest.mark.failure(
    "Processes, signals and crash loops",
    "a script leaves a process in its own session",
    seen="`killing process 123, which w2 left behind`, within a second of the worker's end",
    outcome="the process is killed, but not for external workers",
)
def test_a_script_with_bad_manners_ends_well(tmp_path: Path) -> None:
    """Control sequences, a daemon, a replacement that failed, a closed output: and nothing of it in the last lines."""
    arguments = telling(tmp_path)
    with Elastic(tmp_path / "run", TELLING, *arguments, "--manners", workers=2, options=["--min", "2"]) as run:
        run.until_step(3)
        child = int((tmp_path / "out.child-w2").read_text())
        assert not gone(child)
        run.signal("w2", signal.SIGKILL)
        run.until(lambda: gone(child), "the end of what w2 had started")
        run.until_members(2, without=("w2",))
        assert [event["worker"] for event in run.events("failed")] == ["w3"]
        (tmp_path / "pace").unlink()
        run.finish()
        said = run.output.read_text()
        assert naming(said, f"process {child}", "w2")
        happened, over, last = said.partition("over: ")
        assert over
        assert naming(happened, "w3", "fail"), "as it happened"
        assert not naming(last, "w3", "fail")
        assert "\x1b" not in said
        assert "w1 | red\ufffd and plain" in said
        assert "\x1b[2J\x1b]0;owned\x07\x1b[31mred\x1b[0m" in (tmp_path / "run" / "logs" / "w1.log").read_text()
        for worker in ("w1", "w4"):
            assert gone(int((tmp_path / f"out.child-{worker}").read_text())), worker
