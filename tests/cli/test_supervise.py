"""What a supervisor says while nothing happens, and how it takes a coordinator that has ended."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from farandole.cli.supervisor import POLL_S, Coordinators, Supervisor
from farandole.errors import FarandoleError
from farandole.observe.live import PlainDisplay
from farandole.protocol import events
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.settings import PoolTerms
from tests.support.metric_lines import an


def test_what_is_loading_is_said_until_the_first_worker_is_there(tmp_path: Path) -> None:
    async def scenario() -> str:
        shown = io.StringIO()
        supervisor = Supervisor(RunSettings(run="r", folder=str(tmp_path)), "train.py", [], PlainDisplay(shown))
        explaining = asyncio.create_task(supervisor._explain_silence())
        while not shown.getvalue():
            await asyncio.sleep(POLL_S)
        supervisor._noted(an(events.StartingEvent))
        await explaining
        return shown.getvalue()

    said = asyncio.run(scenario())
    assert said.count("\n") == 1
    assert "torch" in said
    assert str(tmp_path / "logs") in said


def test_a_run_without_a_host_is_not_said_to_load_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.cli.supervisor.LOADING_S", 0.1)

    async def scenario() -> list[str]:
        shown = io.StringIO()
        settings = RunSettings(run="r", folder=str(tmp_path))
        supervisor = Supervisor(
            settings, "train.py", [], PlainDisplay(shown), specs=[PoolTerms(name="quick", kind="slurm")]
        )
        explaining = asyncio.create_task(supervisor._explain_silence())
        while not shown.getvalue():
            await asyncio.sleep(POLL_S)
        supervisor._noted(msgspec.structs.replace(an(events.HostEvent), host="one", state="joined"))
        while shown.getvalue().count("\n") < 2:
            await asyncio.sleep(POLL_S)
        supervisor._noted(an(events.StartingEvent))
        await explaining
        return shown.getvalue().splitlines()

    before, after = asyncio.run(scenario())
    assert "quick" in before
    assert "torch" not in before
    assert "torch" in after


def test_a_worker_that_is_there_at_once_needs_no_word(tmp_path: Path) -> None:
    async def scenario() -> str:
        shown = io.StringIO()
        supervisor = Supervisor(RunSettings(run="r", folder=str(tmp_path)), "train.py", [], PlainDisplay(shown))
        supervisor._noted(an(events.StartingEvent))
        await supervisor._explain_silence()
        return shown.getvalue()

    assert asyncio.run(scenario()) == ""


def test_coordinators_that_die_before_they_serve_end_the_run_also_if_each_dies_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farandole.cli.supervisor.FAST_S", 0.0)
    (tmp_path / "settings.json").write_text("no settings")

    async def scenario() -> None:
        coordinators = Coordinators(tmp_path, "127.0.0.1:0", lambda _: None, is_restart=False)
        try:
            await coordinators.tend()
        finally:
            coordinators.close()

    with pytest.raises(FarandoleError, match=r"\b6\b.*exit code 1\b"):
        asyncio.run(scenario())


def test_a_coordinator_that_has_ended_the_run_is_not_taken_for_dead(tmp_path: Path) -> None:
    """The word that the run is over comes on another connection, and may be behind many lines."""

    async def scenario() -> list[str]:
        shown: list[str] = []
        coordinators = Coordinators(tmp_path, "127.0.0.1:0", shown.append, is_restart=False)
        try:
            coordinators._process.kill()
            coordinators._process.wait()
            coordinators._process = subprocess.Popen([sys.executable, "-c", ""])
            tending = asyncio.create_task(coordinators.tend())
            await coordinators.ended(60.0)
            asyncio.get_running_loop().call_later(10 * POLL_S, coordinators.over)
            await coordinators._over_event.wait()
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)
        finally:
            coordinators.close()
        return shown

    assert asyncio.run(scenario()) == []
