"""What the exporters share: each line of metrics.jsonl reaches an exporter once; an exporter that fails never ends a
run; the values have their names. Then Weights & Biases, offline, by the real package.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.control.run_folder import Observer, RecordingObserver
from farandole.errors import NotPrivate
from farandole.observe import export_process
from farandole.observe.export_common import (
    OURS,
    READ_BYTES,
    Cursor,
    Mark,
    Spacing,
    before,
    identity,
    load,
    of_log,
    of_step,
)
from farandole.observe.export_process import Feed
from farandole.protocol import events
from farandole.protocol.metrics import Line, LogLine, StepLine, as_written, parse_line
from tests.support.mentioned import mentions
from tests.support.metric_lines import an, step_line

pytestmark = pytest.mark.timeout(300)
LINES: list[Line] = [an(events.ViewEvent), step_line(0), LogLine(step=0, fields={"accuracy": 0.5}), step_line(1)]
STEPS = [step_line(number) for number in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *lines: Line) -> None:
    with path.open("ab") as file:
        file.writelines(map(as_written, lines))


# --- cursor ----------------------------------------------------------------------------------------------------------


def test_each_line_comes_once_with_its_place(path: Path) -> None:
    cursor = Cursor(path)
    assert cursor.read() == []
    write(path, *LINES[:2])
    first = cursor.read()
    write(path, *LINES[2:])
    second = cursor.read()
    assert [line for _, line in first + second] == LINES
    assert cursor.read() == []
    content = path.read_bytes()
    for at, line in first + second:
        assert content[at:].startswith(as_written(line))
        assert Cursor(path, at).read()[0] == (at, line), "a reader that begins there gets it"
    assert before(path, len(content)) == LINES
    assert before(path, len(as_written(LINES[0]))) == LINES[:1]


def test_a_torn_line_waits_for_its_end(path: Path) -> None:
    whole = as_written(LINES[1])
    path.write_bytes(whole[:20])
    cursor = Cursor(path)
    assert cursor.read() == []
    path.write_bytes(whole)
    assert cursor.read() == [(0, LINES[1])]
    path.write_bytes(whole + b'{"step": 7, "ep')
    assert cursor.read() == []
    path.write_bytes(whole)  # as the next coordinator leaves it
    write(path, LINES[3])
    assert cursor.read() == [(len(whole), LINES[3])]
    assert not cursor.damaged


@pytest.mark.parametrize(
    "damage",
    [b"\n", b"\xff\x00\n", b'{"step": 3}\n', b"x\r" + as_written(LINES[1]), b"x" * (2 * READ_BYTES) + b"\n"],
    ids=["empty", "bytes", "half", "two in one", "without end"],
)
def test_damage_is_passed_over_and_counted(path: Path, damage: bytes) -> None:
    path.write_bytes(as_written(LINES[0]) + damage + as_written(LINES[3]))
    cursor = Cursor(path)
    assert [line for _ in range(5) for _, line in cursor.read()] == [LINES[0], LINES[3]]
    assert cursor.damaged


def test_more_than_is_read_at_a_time_comes_in_pieces(path: Path) -> None:
    many = [step_line(number) for number in range(3000)]
    write(path, *many)
    cursor = Cursor(path)
    pieces: list[list[Line]] = []
    while piece := cursor.read():
        pieces.append([line for _, line in piece])
    assert len(pieces) > 1
    assert [line for piece in pieces for line in piece] == many


def test_a_file_that_is_shorter_than_what_was_read_is_not_exported_again(path: Path) -> None:
    write(path, *LINES)
    cursor = Cursor(path)
    cursor.read()
    path.write_bytes(as_written(LINES[0]))
    assert cursor.read() == []
    assert cursor.damaged == 1
    write(path, LINES[3])
    assert [line for _, line in cursor.read()] == [LINES[3]]


def test_a_link_in_the_files_place_is_not_followed(path: Path) -> None:
    write(path.with_name("others"), *LINES)
    path.symlink_to(path.with_name("others"))
    with pytest.raises(NotPrivate):
        Cursor(path).read()


def test_a_mark_is_of_one_file_and_whole(tmp_path: Path, path: Path) -> None:
    place = tmp_path / "farandole.json"
    assert load(place, path) == Mark(run=tmp_path.name)
    write(path, *LINES)
    mark = Mark(at=40, step=3, file=identity(path), run=tmp_path.name, id="x")
    mark.save(place)
    assert load(place, path) == mark
    nothing = Mark(file=identity(path), run=tmp_path.name)
    for content in (b"", b"{", b'{"at": -1}', b'{"at": 1, "more": 2}', b"\xff" * 100, b"[" * 100_000):
        place.write_bytes(content)
        assert load(place, path) == nothing, content[:20]
    Mark(at=10_000, step=3, file=identity(path)).save(place)
    assert load(place, path) == nothing, "beyond the file's end"
    mark.save(place)
    os.rename(path, tmp_path / "old")
    write(path, *LINES)
    assert load(place, path).at == 0, "another file"


# --- an exporter that is slow or fails --------------------------------------------------------------------------------


class Marked(RecordingObserver):
    """Fails as `trouble` says, and goes on at the line after the last that it has kept."""

    name = "this one"

    def __init__(self, trouble: Callable[[Line], None] = lambda _: None) -> None:
        super().__init__()
        self.trouble = trouble
        self.begun = self.closed = 0
        self.next = 0

    def begin(self) -> int:
        self.begun += 1
        return self.next

    def take(self, line: Line, at: int = 0) -> None:
        self.trouble(line)
        super().take(line)
        self.next = at + len(as_written(line))

    def close(self) -> None:
        self.closed += 1


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_gets_all_lines_and_is_closed_when_the_run_is_over(path: Path) -> None:
    write(path, *STEPS)
    over, messages, observer = threading.Event(), list[str](), Marked()
    feed = Feed(observer, path, messages.append, over)
    thread = threading.Thread(target=feed.run)
    thread.start()
    until(lambda: observer.lines == STEPS)
    assert not observer.closed
    write(path, step_line(5))
    over.set()
    thread.join()
    assert observer.lines == [*STEPS, step_line(5)]
    assert (observer.begun, observer.closed, feed.done) == (1, 1, True)
    assert messages == []


def test_lines_that_are_written_while_the_last_read_is_under_way_are_not_lost(path: Path) -> None:
    """The run writes its last line and ends, at whatever moment it is asked whether it has."""

    class Ending(threading.Event):
        def is_set(self) -> bool:
            if not super().is_set():
                write(path, step_line(5))
                self.set()
            return super().is_set()

    observer = Marked()
    feed = Feed(observer, path, list[str]().append, Ending())
    assert feed.turn()
    assert observer.lines == [step_line(5)]
    assert not feed.turn()
    assert (observer.closed, feed.done) == (1, True)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("x"), RecursionError(), MemoryError()]
)
def test_one_that_raises_is_reported_once_retried_later_and_later_and_goes_on_at_its_mark(
    path: Path, error: Exception
) -> None:
    write(path, *STEPS)
    failing, messages = [True], list[str]()

    def trouble(line: Line) -> None:
        if failing and line == STEPS[2]:
            raise error

    observer = Marked(trouble)
    feed = Feed(observer, path, messages.append, threading.Event())
    assert [feed._pause_s(feed.turn()) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert observer.begun == 9
    [failed] = messages
    assert mentions(failed, "this one")
    assert str(error) in failed
    failing.clear()
    assert feed.turn()
    assert observer.lines == STEPS, "each once"
    assert not feed.turn()
    _, works = messages
    assert mentions(works, "this one")
    assert works != failed


def test_one_that_fails_in_the_end_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_process, "END_S", 0.3)
    monkeypatch.setattr(export_process, "RETRY_S", 0.05)
    write(path, *STEPS)

    def trouble(_: Line) -> None:
        raise OSError(5, "Input/output error")

    over, messages = threading.Event(), list[str]()
    over.set()
    feed = Feed(Marked(trouble), path, messages.append, over)
    feed.run()
    assert not feed.done
    assert len(messages) == 2
    assert mentions(messages[1], "this one")


def test_one_that_works_hard_rests(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second of work is followed by four of them without."""
    monkeypatch.setattr(export_process, "EVERY_S", 0.0)
    write(path, *STEPS)
    times: list[float] = []

    class Slow(Observer):
        name = "slow"

        def take(self, line: Line, at: int = 0) -> None:
            del line, at
            times.append(time.monotonic())
            time.sleep(0.02)

    over = threading.Event()
    thread = threading.Thread(target=Feed(Slow(), path, list[str]().append, over).run)
    thread.start()
    until(lambda: len(times) == len(STEPS))
    write(path, step_line(5))
    until(lambda: len(times) > len(STEPS))
    over.set()
    thread.join()
    assert times[5] - times[4] > 0.35


def test_damage_is_reported_once(path: Path) -> None:
    messages = list[str]()
    feed = Feed(Marked(), path, messages.append, threading.Event())
    for _ in range(2):
        with path.open("ab") as file:
            file.write(b"rubbish\n")
        feed.turn()
    [message] = messages
    assert mentions(message, "this one", "metrics.jsonl")


# --- which steps, and their values ------------------------------------------------------------------------------------


def admitted(lines: list[StepLine]) -> list[int]:
    spacing = Spacing(0.05)
    return [line.step for line in lines if spacing.admits(line)]


def test_of_fast_steps_one_in_so_much_time_is_exported_and_none_that_says_something_is_left_out() -> None:
    assert admitted([step_line(n, time=100 + 0.0501 * n) for n in range(10)]) == [*range(10)]
    assert admitted([step_line(n, time=100 + 0.015625 * n) for n in range(12)]) == [0, 4, 8]
    fast = [step_line(n, time=100 + 0.001 * n, loss=math.nan if n == 3 else 0.5, workers=1 + (n > 5)) for n in range(9)]
    assert admitted(fast) == [0, 3, 6]
    again = [step_line(n, time=100 + 0.001 * k) for k, n in enumerate((0, 1, 2, 0, 1, 2))]
    assert admitted(again) == [0, 0], "the second time"
    jumps = [100.0, 100.001, 50.0, 50.001, 50.06, 4e10, 50.07]
    assert admitted([step_line(n, time=time) for n, time in enumerate(jumps)]) == [0, 2, 4, 5, 6]


def test_a_reader_that_begins_again_at_an_exported_step_selects_the_same_ones() -> None:
    draw = random.Random(1)
    lines, time = [], 100.0
    for number in range(300):
        time += draw.choice((0.001, 0.01, 0.1))
        lines.append(step_line(number, time=time, workers=draw.choice((1, 1, 1, 2))))
    exported = admitted(lines)
    for step in exported:
        assert admitted(lines[step:]) == [each for each in exported if each >= step]


def test_a_step_has_its_numbers_and_no_others() -> None:
    line = step_line(3, epoch=2, samples=64, loss=0.5, seconds=0.25, samples_per_s=256.0, view=4, workers=2,
                     learning_rate=0.1, factor=2.0, skipped=1, evaluation_s=0.1, once_s=0.05, pause_s=0.02)  # fmt: skip
    assert of_step(line) == {
        "step/loss": 0.5, "step/learning_rate": 0.2, "step/learning_rate_factor": 2.0,
        "step/samples_per_second": 256.0, "step/seconds": 0.25, "step/samples": 64, "step/samples_skipped": 1,
        "step/workers": 2, "step/view": 4, "step/epoch": 2, "step/evaluation_seconds": 0.1,
        "step/once_seconds": 0.05, "step/pause_seconds": 0.02,
    }  # fmt: skip
    assert set(of_step(line)) == OURS
    for loss in (math.nan, math.inf, -math.inf):
        line = parse_line(as_written(step_line(3, loss=loss, learning_rate=math.nan, factor=math.inf)))
        assert isinstance(line, StepLine)
        assert math.isnan(of_step(line)["step/loss"])
        assert "step/learning_rate" not in of_step(line), "what is not known is not 0"


def test_a_log_keeps_its_names_but_for_ours() -> None:
    fields = {
        "val/accuracy": 0.5, "best": True, "n": 2**62, "note": "<script>alert(1)</script>", "lost": None,
        "step/loss": 7, "": 1.0, "<b>": 2,
    }  # fmt: skip
    numbers, texts = of_log(LogLine(step=3, fields=fields))
    assert math.isnan(numbers.pop("lost"))
    assert numbers == {
        "val/accuracy": 0.5, "best": 1.0, "n": float(2**62), "log/step/loss": 7.0, "log/": 1.0, "<b>": 2.0,
    }  # fmt: skip
    assert texts == {"note": "<script>alert(1)</script>"}


# --- Weights & Biases -------------------------------------------------------------------------------------------------


def export_to_wandb(folder: Path) -> None:
    """The process, as a run has it, whose run is over at once."""
    environ = {**{k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}, "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", "farandole.observe.export_process", str(folder), "--wandb=project"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environ, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.processes
def test_in_wandb_each_step_is_a_row_once_and_a_resumed_run_goes_on_as_the_same(tmp_path: Path, path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'farandole[wandb]'")
    from tests.support.wandb_files import rows

    write(
        path,
        an(events.ViewEvent, members=("w1", "w2"), cause="start", step=0),
        step_line(0, loss=0.5),
        LogLine(step=0, fields={"val/accuracy": 0.75, "note": "<b>fine</b>", "best": True}),
        step_line(1, loss=math.nan, time=10.0),
        an(events.LostEvent, worker="w2", reason="no heartbeat"),
        step_line(2, time=11.0),
    )
    export_to_wandb(tmp_path)
    write(path, an(events.ResumedEvent, step=1), *(step_line(number, time=10.0 + number) for number in range(1, 5)))
    write(path, step_line(5, time=14.5), LogLine(step=5, fields={"accuracy": 0.25}))
    export_to_wandb(tmp_path)
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
    written = (tmp_path / "wandb").rglob("*")
    assert all(not path.lstat().st_mode & 0o077 or path.is_symlink() for path in written), "private"
