"""What `farandole run` and `attach` show of real runs: on a terminal, into a file, and at the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.fake_worker import until
from tests.support.harness import ENVIRON, FARANDOLE, Elastic, read_lines
from tests.support.mentioned import mentions
from tests.support.summary_rows import rows_of
from tests.support.terminal import OnATerminal, lines_of

pytestmark = [pytest.mark.processes]
JOBS = Path(__file__).parents[1] / "jobs"
SMALL_STEPS, SMALL_SAMPLES = 54, 6 * 130
STEPS_AN_EPOCH = 8  # of printing.py


def summary_in(text: str) -> dict[str, str]:
    """By the names of its rows."""
    rows = text[text.rindex("\noutcome ") + 1 :].splitlines()
    return rows_of([row for row in rows if not row.startswith("farandole")])


def of(path: Path) -> dict[str, str]:
    return summary_in(path.read_text())


@pytest.mark.long
def test_on_a_terminal_the_figures_stay_below_what_happens(tmp_path: Path) -> None:
    folder, pace = tmp_path / "run", tmp_path / "pace"
    pace.write_text("0.05")
    prices = tmp_path / "prices.toml"
    prices.write_text('date = "2026-11-01"\n[pools]\nlocal = 3.6\n')
    job = [str(JOBS / "small.py"), str(tmp_path / "out"), "--pace", str(pace), "--epochs", "1000"]
    terminal = OnATerminal(
        [*FARANDOLE, "run", "--workers", "2", "--prices", str(prices), "--folder", str(folder), *job]
    )
    terminal.until("learning rate")
    terminal.until("2 of 2 workers")
    terminal.until("goodput")
    os.kill(terminal.process.pid, signal.SIGINT)
    text = "\n".join(lines_of(terminal.rest()))
    assert terminal.process.wait(200) == 130
    assert re.search(r"━.*\b\d+\b.*\b9000\b.*\b\d+ min\b", text)
    assert re.search(r"\bloss [\d.]+\b.*\b\d+ samples/s", text)
    assert re.search(r"^goodput [\d.]+ %.*\bdollars$", text, re.M)
    assert re.search(r"^\d\d:\d\d:\d\d  w\d\b.*\bview 2\b.*\b2\b.*\b\d+$", text, re.M)
    found = summary_in(text)
    assert "SIGINT" in found["outcome"]
    assert re.fullmatch(r"[\d.e-]+\D.*2026-11-01", found["dollars"])
    assert found["model"].startswith(str(folder / "checkpoints"))
    assert found["samples lost"] == "0"


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_and_says_what_was_taken_again(tmp_path: Path) -> None:
    """As does who looks on for the end only: the same."""
    folder, pace, out = tmp_path / "run", tmp_path / "pace", str(tmp_path / "out")
    pace.write_text("0.1")
    job = (JOBS / "small.py", out, "--pace", str(pace))
    with Elastic(folder, *job, workers=2, options=["--checkpoint-every", "20steps"]) as run:
        run.until_step(30)
        run.process.kill()
        run.process.wait()
    reached = max(line["step"] for line in read_lines(folder) if "event" not in line)
    shown = tmp_path / "shown"
    pace.write_text("1.0")  # so that it is not over before it is watched
    with Elastic(folder, *job, workers=2, options=[]) as run:
        run.until(lambda: bool(run.events("resumed")), "a first view of the second start")
        with shown.open("wb") as stream:
            attached = subprocess.Popen([*FARANDOLE, "attach", "--run", str(folder)], env=ENVIRON, stdout=stream)
        until(lambda: "Epoch" in shown.read_text())
        pace.unlink()
        run.finish()
        assert attached.wait(200) == 0
        found = of(run.output)
    text = run.output.read_text()
    assert ["Time", "Steps", "Epoch", "Workers", "Speed", "Loss", "LR"] in [line.split() for line in text.splitlines()]
    assert re.search(rf"^\d\d:\d\d:\d\d +{SMALL_STEPS}/{SMALL_STEPS} +5 +[12]/2 +[\d.]+/s +\S+ +\S+$", text, re.M)
    assert re.match(r"finished\b.*\bexit code 0\b", found["outcome"])
    assert re.findall(r"[\d,]*\d", found["steps"]) == [str(SMALL_STEPS), str(SMALL_STEPS), f"{SMALL_SAMPLES:,}"]
    [again] = re.findall(r"^\d+", found["taken again"])
    assert 10 <= int(again) <= reached + 1
    assert "samples lost" not in found
    assert "dollars" not in found, "nobody has named a price"
    assert Path(found["model"]).exists()
    assert of(shown) == found


def test_what_the_workers_print_and_log_is_shown_once_and_times_never_go_backwards(tmp_path: Path) -> None:
    with Elastic(tmp_path / "run", JOBS / "printing.py", workers=2, options=["--min", "2"]) as run:
        run.finish()
        text = run.output.read_text()
        logs = [path.read_text() for path in (run.folder / "logs").glob("w*.log")]
    lines = text.splitlines()
    last = 3 * STEPS_AN_EPOCH - 1
    for printed in (
        "before join", "on standard error", "UserWarning: a warning", "INFO after join", "after the loop",
        *(f"{how} step {number}" for how in ("printed", "logged") for number in range(last + 1)),
    ):  # fmt: skip
        assert len([line for line in lines if re.search(rf"\b{printed}$", line)]) == 1, printed
    assert len(logs) == 2
    for log in logs:
        assert mentions(log, f"printed step {last}")
    assert mentions(lines[0], "2 workers")
    times = re.findall(r"^\d\d:\d\d:\d\d", text, re.M)
    assert times == sorted(times) or times[-1] < times[0], "it was midnight meanwhile"
    rows = [line.split()[1] for line in lines if re.match(r"[\d:]{8} +\d+/", line)]
    assert rows[-1] == f"{last + 1}/{last + 1}"
    [ended] = run.events("over")
    assert len([line for line in lines if ended["reason"] in line and not line.startswith("outcome ")]) == 1


def test_the_second_ctrl_c_says_how_far_it_was(tmp_path: Path) -> None:
    folder, pace = tmp_path / "run", tmp_path / "pace"
    pace.write_text("0.2")
    job = (JOBS / "small.py", str(tmp_path / "out"), "--pace", str(pace))
    with Elastic(folder, *job, workers=1, options=["--checkpoint-every", "1h"]) as run:
        run.until_step(3)
        worker = run.events("ready")[0]["worker"]
        run.signal(worker, signal.SIGSTOP)
        run.process.send_signal(signal.SIGINT)
        run.until(lambda: bool(run.events("stopping")), "the stop")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(200) == 130
        found = of(run.output)
    assert re.match(r"cut off\b", found["outcome"])
    assert found["model"] == "not saved"
    assert "samples lost" not in found
