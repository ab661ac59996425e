"""A run's folder belongs to one `farandole run`, also while its coordinator is being started again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from farandole.cli.folders import check_folder, live, make_folder, past_of
from farandole.control.run_folder import LOCK, METRICS, RECORD, TICKET, hold
from farandole.control.ticket import Ticket, new_secret
from farandole.errors import CoordinatorAway, CoordinatorUnreachable, RunFolderInUse
from farandole.protocol import events
from farandole.protocol.metrics import as_written
from tests.support.metric_lines import an, step_line


def folder_of_a_run(tmp_path: Path) -> Path:
    """Whose coordinator is gone: nobody listens at port 1."""
    folder = tmp_path / "r"
    folder.mkdir()
    Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="r").save(folder / TICKET)
    (folder / RECORD).write_text('{"pid": 1, "address": "http://127.0.0.1:1"}')
    return folder


@pytest.mark.failure(
    "Files, disks and output",
    "two `farandole run` start in one folder at once",
    seen="an error at once, for the second",
    outcome="the second has exit code 2 and changes nothing; the first continues",
)
def test_the_second_of_two_at_once_is_refused_and_takes_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "r", "train.py")
    Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="r").save(folder / TICKET)
    with pytest.raises(RunFolderInUse, match=re.escape(str(folder))):
        make_folder(folder, "train.py")
    assert (folder / TICKET).exists(), "the ticket of the one that is alive"


def test_a_run_without_its_coordinator_is_alive(tmp_path: Path) -> None:
    folder = folder_of_a_run(tmp_path)
    handle = hold(folder)
    with pytest.raises(RunFolderInUse, match=re.escape(str(folder))):
        check_folder(folder)
    with pytest.raises(CoordinatorAway, match=re.escape(str(folder))), live(folder) as api:
        api.status()
    os.close(handle)
    check_folder(folder)
    with pytest.raises(CoordinatorUnreachable, match=re.escape(str(folder))) as caught, live(folder) as api:
        api.status()
    assert not isinstance(caught.value, CoordinatorAway)
    assert (folder / LOCK).exists(), "a lock is not the file but who holds it"


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "`scale`, `release` or `attach` is called while the run ends",
    seen='"the run is ending", with the reason',
    outcome="no worker is started or released",
)
def test_a_run_that_ends_is_not_said_to_train_on(tmp_path: Path) -> None:
    """Its `farandole run` still holds the folder; nobody is to ask again."""
    folder = folder_of_a_run(tmp_path)
    over, started = an(events.OverEvent, code=7, reason="farandole stop"), an(events.RunStartedEvent)
    handle = hold(folder)
    for lines, ends in (([over], True), ([over, started], False), ([over, started, over], True)):
        (folder / METRICS).write_bytes(b"".join(as_written(line) for line in [step_line(1), *lines]))
        with pytest.raises(CoordinatorUnreachable) as refused, live(folder) as api:
            api.status()
        assert ("exit code 7" in str(refused.value)) == ends
        outcome = past_of(folder)
        assert (outcome.code if outcome else None) == (7 if ends else None), "what `farandole status` shows"
    os.close(handle)
