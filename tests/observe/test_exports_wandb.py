"""Weights & Biases, offline, by the real package: each step is a row once, also of a run that is resumed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("wandb", reason="wandb is not installed: pip install 'farandole[wandb]'")

from farandole.protocol import events
from farandole.protocol.metrics import Line, LogLine, as_written
from tests.support.mentioned import mentions
from tests.support.metric_lines import an, step_line
from tests.support.wandb_files import rows

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
ENVIRON = {**{k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}, "WANDB_MODE": "offline"}


def exported(folder: Path) -> None:
    """The process, as a run has it, whose run is over at once."""
    command = [sys.executable, "-m", "farandole.observe.export_process", str(folder), "--wandb=project"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=ENVIRON, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def write(folder: Path, *lines: Line) -> None:
    with (folder / "metrics.jsonl").open("ab") as file:
        file.writelines(map(as_written, lines))


def test_each_step_is_a_row_once_and_a_resumed_run_goes_on_as_the_same(tmp_path: Path) -> None:
    write(
        tmp_path,
        an(events.ViewEvent, members=("w1", "w2"), cause="start", step=0),
        step_line(0, loss=0.5),
        LogLine(step=0, fields={"val/accuracy": 0.75, "note": "<b>fine</b>", "best": True}),
        step_line(1, loss=float("nan"), time=10.0),
        an(events.LostEvent, worker="w2", reason="no heartbeat"),
        step_line(2, time=11.0),
    )
    exported(tmp_path)
    later = [step_line(number, time=10.0 + number) for number in range(1, 5)]
    write(
        tmp_path,
        an(events.ResumedEvent, step=1),
        *later,
        step_line(5, time=14.5),
        LogLine(step=5, fields={"accuracy": 0.25}),
    )
    exported(tmp_path)
    ids, found = rows(tmp_path)
    assert len(set(ids)) == 1
    assert [row["_step"] for row in found] == [0, 1, 2, 3, 4, 5]
    assert found[0]["step/loss"] == 0.5
    assert found[0]["val/accuracy"] == 0.75
    assert found[0]["note"] == "<b>fine</b>"
    assert math.isnan(found[1]["step/loss"])
    assert mentions(found[1]["events"], "w2", "no heartbeat")
    assert found[4]["step/loss"] == 0.5
    assert found[5]["accuracy"] == 0.25, "what is logged is there"
    assert "step/loss" not in found[5], "so soon after the one before"


def test_what_it_writes_is_private(tmp_path: Path) -> None:
    write(tmp_path, step_line(0))
    exported(tmp_path)
    assert all(not path.lstat().st_mode & 0o077 or path.is_symlink() for path in (tmp_path / "wandb").rglob("*"))
