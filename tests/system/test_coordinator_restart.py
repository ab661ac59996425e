"""A coordinator's process is killed, and started again: its workers find it, and nothing of the record is lost."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from farandole.control.api import Api
from farandole.control.ticket import Ticket
from farandole.coordinator.journal import read_state
from tests.support.coordinator_process import listening, settings, start
from tests.support.fake_worker import until
from tests.support.trainer import Board, Trainer

pytestmark = [pytest.mark.processes]


class Run:
    """A coordinator's process that is killed again and again, and workers of this process."""

    def __init__(self, folder: Path, *workers: str, **options: object) -> None:
        self.folder = folder
        settings(folder, wanted=len(workers), minimum=1, heartbeat_s=0.1, **options)
        self.process: subprocess.Popen[bytes]
        self.ticket: Ticket
        self.begin()
        board = Board()
        self.trainers = {worker: Trainer(self.ticket, board, worker) for worker in workers}
        until(lambda: self.agree(*workers))

    def begin(self, *options: str) -> None:
        self.process = start(self.folder, *options)
        self.ticket = listening(self.folder, self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        for trainer in self.trainers.values():
            trainer.stop()

    def agree(self, *workers: str) -> int:
        """The number of the view that they are all in, 0 if they are not in one of just them."""
        views = {self.trainers[worker].view for worker in workers}
        view = views.pop()
        return view.number if not views and view is not None and set(view.members) == set(workers) else 0

    def steps(self, count: int, *workers: str) -> None:
        """They train on."""
        begun = {worker: self.trainers[worker].step for worker in workers}
        until(lambda: all(self.trainers[worker].step >= at + count for worker, at in begun.items()))

    # --- its record ------------------------------------------------------------------------------------------

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("event") == name]

    def written(self) -> list[int]:
        """The steps, in the order of the file."""
        return [line["step"] for line in self.lines() if "event" not in line]

    def journal(self) -> list[tuple[float, str]]:
        with closing(sqlite3.connect(self.folder / "journal.sqlite")) as reader:
            return reader.execute("SELECT time, event FROM events ORDER BY id").fetchall()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def begin(*workers: str, **options: object) -> Run:
        runs.append(Run(tmp_path, *workers, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


@pytest.mark.long
def test_killed_again_and_again_it_takes_up_where_it_was(launch: Any) -> None:
    run: Run = launch("w1", "w2")
    address, secret = run.ticket.address, run.ticket.secret
    for _ in range(3):
        number = run.agree("w1", "w2")
        run.steps(20, "w1", "w2")
        run.kill()
        killed = run.trainers["w1"].step
        run.steps(20, "w1", "w2")  # without it
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write('{"step":12,"lo')  # torn
        run.begin("--again")
        assert (run.ticket.address, run.ticket.secret) == (address, secret)
        until(lambda number=number: run.agree("w1", "w2") not in (0, number))
        assert run.agree("w1", "w2") == number + 1
        until(lambda killed=killed: run.written()[-1] > killed + 20)
    Api(run.ticket).stop("enough", 7)
    until(lambda: all(trainer.client.instructions.exit for trainer in run.trainers.values()))
    assert {
        trainer.client.instructions.exit.code for trainer in run.trainers.values() if trainer.client.instructions.exit
    } == {1}
    assert (state := read_state(run.folder))
    assert state.over
    assert state.over.code == 7
    assert run.process.wait(200) == 0

    written = run.written()
    assert written == list(range(len(written))), "no step is lost, none is written twice"
    assert len(run.written()) > 120
    assert [(line["time"], line["event"]) for line in run.lines() if "event" in line] == run.journal()
    assert run.events("lost") == []
    views = [event["view"] for event in run.events("view")]
    assert views == sorted(set(views)), "no number is given twice"
    assert len(run.events("coordinator back")) == 3


def test_rank_0_ends_while_it_is_away(launch: Any) -> None:
    """The lines that only it had sent, and nobody had written, come from the next rank 0."""
    run: Run = launch("w1", "w2", heartbeat_timeout_s=2.0)
    members = run.trainers["w1"].view
    assert members is not None
    first, second = members.members
    run.steps(20, first, second)
    run.kill()
    run.steps(20, first, second)
    run.trainers[first].stop()
    run.begin("--again")
    until(lambda: run.agree(second))
    step = run.trainers[second].step
    until(lambda: run.written()[-1] > step)
    written = run.written()
    assert written == list(range(len(written)))
    assert [event["worker"] for event in run.events("lost")] == [first]
