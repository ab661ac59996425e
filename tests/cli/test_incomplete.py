"""A checkpoint whose writer was killed, as a second Ctrl-C does: it is not said to be none."""

from __future__ import annotations

import asyncio
import json
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from farandole.checkpoint.store import incomplete, incomplete_here
from farandole.cli.commands import app
from farandole.cli.resume import GivenOptions, settle
from farandole.observe.live import PlainDisplay, Written, sum_up
from farandole.protocol import events
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.cost import Prices
from farandole.protocol.messages import RunTerms
from farandole.protocol.metrics import as_written
from tests.support.metric_lines import an, step_line

HALF = "step-00000528-0123abcd.pt"


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The folder of a run that was killed while it wrote its only checkpoint."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    (folder / "checkpoints" / HALF).write_bytes(b"half")
    (folder / "settings.json").write_bytes(msgspec.json.encode(RunSettings(run="run")))
    (folder / "metrics.jsonl").write_bytes(as_written(step_line(523)))
    return folder


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "a second Ctrl-C comes while the last checkpoint is written",
    seen="the name of the incomplete checkpoint in the summary, in `farandole status` and at the resume",
    outcome="no run resumes from it; an older complete checkpoint is used",
)
def test_status_names_it(killed: Path) -> None:
    answer = CliRunner().invoke(app, ["status", "--json", "--run", str(killed)], catch_exceptions=False)
    past = json.loads(answer.output)
    assert past["checkpoint"] == ""
    assert HALF in past["incomplete"]


def test_status_names_the_checkpoint_of_a_copied_folder_and_the_steps_after_it(killed: Path) -> None:
    name = "step-00000500-0123abcd-89abcdef.pt"
    saved = an(events.CheckpointEvent, path=f"/elsewhere/checkpoints/{name}", step=500)
    (killed / "metrics.jsonl").write_bytes(b"".join(map(as_written, (step_line(499), saved, step_line(523)))))
    for copied in (False, True):
        if copied:
            (killed / "checkpoints" / name).touch()
        answer = CliRunner().invoke(app, ["status", "--json", "--run", str(killed)], catch_exceptions=False)
        past = json.loads(answer.output)
        assert past["checkpoint"] == (str(killed / "checkpoints" / name) if copied else saved.path)
        assert (past["steps"], past["again"]) == (524, 24)


def test_the_summary_names_it(killed: Path) -> None:
    shown = StringIO()
    asyncio.run(sum_up(Written(killed, Prices()), PlainDisplay(shown), None))
    assert HALF in next(line for line in shown.getvalue().splitlines() if line.startswith("incomplete"))


@pytest.mark.failure("Processes, signals and crash loops", "a second Ctrl-C comes while the last checkpoint is written")
def test_who_resumes_the_run_hears_of_it(killed: Path) -> None:
    settled = settle(GivenOptions(), RunTerms(), killed)
    assert settled.newest.path == ""
    assert HALF in settled.note


def test_what_is_older_than_a_whole_one_is_not_named(killed: Path) -> None:
    place = str(killed / "checkpoints")
    assert HALF in incomplete(place, after=527)
    assert incomplete(place, after=528) == ""
    (killed / "checkpoints" / "step-00000600-0123abcd.pt").touch()
    assert "step-00000600" in incomplete(place), "the newest"
    assert incomplete_here("s3://elsewhere/x") == ""
    assert incomplete_here(str(killed / "none")) == ""
