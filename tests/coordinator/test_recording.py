"""Lines that can't be written: a full disk costs them, the training nothing, and how many they were is told."""

from __future__ import annotations

import asyncio
import errno
import io
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from farandole.coordinator.journal import Journal
from farandole.coordinator.listener import UnauthenticatedPeers
from farandole.coordinator.observers import Observers
from farandole.coordinator.recording import Recording
from farandole.platform.files import FileThread
from farandole.protocol import events
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.metrics import LogLine, StepLine, parse_lines
from farandole.worker.context import SingleProcess
from tests.support.metric_lines import an, logged, step_line, stepped

LOST = an(events.LostEvent, worker="w1")


class Disk(io.FileIO):
    """A file on a disk with `room` bytes; what does not fit is written in part, as the kernel does."""

    room = 1 << 30

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(data[: self.room])
        self.room -= written
        return written


def disk(folder: Path) -> Disk:
    return Disk(folder / "metrics.jsonl", "ab+")


def lost(folder: Path) -> list[int]:
    """How many lines were lost, by the events. All others are whole."""
    lines, damaged = parse_lines((folder / "metrics.jsonl").read_bytes().splitlines())
    assert damaged == 0
    return [line.lines for line in lines if isinstance(line, events.LinesLostEvent)]


@pytest.mark.failure(
    "Files, disks and output",
    (
        "lines of metrics are lost: over 100,000 without a coordinator, rank 0 died beside a new joiner, all workers "
        "died, the disk was full"
    ),
)
def test_lines_that_the_coordinator_can_not_write_are_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        with closing(Journal(tmp_path)) as journal:
            told: list[events.Event] = []
            recording = Recording(journal, [], Observers([], UnauthenticatedPeers(told.append)))
            recording.event = told.append  # type: ignore[method-assign]  # what is to be kept and written next
            journal._metrics.close()
            journal._metrics = metrics = disk(tmp_path)
            for step, room in enumerate((1 << 30, 30, 0, 1 << 30, 1 << 30)):
                metrics.room = room
                recording.note(step_line(step))
                recording.note(LogLine(step=step, fields={"n": 1}))
                await asyncio.sleep(0)
                journal._files.run(int)  # the lines have been written
                await asyncio.sleep(0)
            assert [(type(event), event.lines) for event in told if isinstance(event, events.LinesLostEvent)] == [
                (events.LinesLostEvent, 4)
            ]

    asyncio.run(scenario())
    lines, damaged = parse_lines((tmp_path / "metrics.jsonl").read_bytes().splitlines())
    assert damaged == 0, "all of a line or nothing"
    assert [line.step for line in lines if isinstance(line, StepLine)] == [0, 3, 4]


def test_alone_a_full_disk_costs_lines_and_not_the_training(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":1,"ep')
    (tmp_path / "metrics.jsonl").chmod(0o600)
    it = SingleProcess(str(tmp_path), lambda: True)
    assert it._file is not None
    it._file.close()
    it._file = metrics = disk(tmp_path)
    for step, room in enumerate((1 << 30, 20, 0, 1 << 30)):
        metrics.room = room
        it.add_line(stepped(step))
        it.add_line(logged(step, 1, n=1))
    metrics.close()
    it._file = None
    assert lost(tmp_path) == [4]


@pytest.mark.parametrize("heard", ["before the next write", "after it"])
def test_events_that_a_slow_disk_takes_after_the_limit_are_not_missing_twice(tmp_path: Path, heard: str) -> None:
    async def scenario() -> None:
        with closing(Journal(tmp_path)) as journal:
            coordinator = Coordinator(RunSettings(run="r"), None, 0.0)
            recording = Recording(journal, [], Observers([], UnauthenticatedPeers(lambda _: None)))
            journal._files = FileThread("slow", limit_s=0.05)
            answers, commit = threading.Event(), journal._commit
            journal._commit = lambda *given: (answers.wait(), commit(*given))  # type: ignore[method-assign,assignment]
            recording.event(LOST)
            recording.write_journal(coordinator)
            assert coordinator.unrecorded == 1
            answers.set()
            while not journal.ready:
                time.sleep(0.001)
            if heard == "before the next write":
                while coordinator.unrecorded:
                    await asyncio.sleep(0)
            for _ in range(3):
                recording.event(LOST)
                recording.write_journal(coordinator)
                await asyncio.sleep(0.01)
            assert coordinator.unrecorded == 0
            journal._files.run(int)

    asyncio.run(scenario())
    lines, damaged = parse_lines((tmp_path / "metrics.jsonl").read_bytes().splitlines())
    assert damaged == 0
    assert [type(line) for line in lines].count(events.NotRecordedEvent) == 1
    missing = [line.missing for line in lines if isinstance(line, events.RecordedAgainEvent)]
    assert missing == [0 if heard == "before the next write" else 1]
