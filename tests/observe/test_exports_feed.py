"""An observer that is slow, raises, or hangs: told once, tried again, and never anybody else's affair."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.control.run_folder import Observer, RecordingObserver
from farandole.observe import export_process as feeds
from farandole.observe.export_process import Feed
from farandole.protocol.metrics import Line, as_written
from tests.support.mentioned import mentions
from tests.support.metric_lines import step_line

pytestmark = pytest.mark.timeout(30)
LINES = [step_line(number) for number in range(5)]


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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(as_written, LINES)))
    return tmp_path / "metrics.jsonl"


class Told(list[str]):
    __call__ = list[str].append


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_gets_all_lines_and_is_closed_when_the_run_is_over(path: Path) -> None:
    over, told, observer = threading.Event(), Told(), Marked()
    feed = Feed(observer, path, told, over)
    thread = threading.Thread(target=feed.run)
    thread.start()
    until(lambda: observer.lines == LINES)
    assert not observer.closed
    with path.open("ab") as file:
        file.write(as_written(step_line(5)))
    over.set()
    thread.join()
    assert observer.lines == [*LINES, step_line(5)]
    assert (observer.begun, observer.closed, feed.done) == (1, 1, True)
    assert told == []


def test_lines_that_are_written_while_the_last_read_is_under_way_are_not_lost(path: Path) -> None:
    """The run writes its last line and ends, at whatever moment it is asked whether it has."""

    class Ending(threading.Event):
        def is_set(self) -> bool:
            if not super().is_set():
                with path.open("ab") as file:
                    file.write(as_written(step_line(5)))
                self.set()
            return super().is_set()

    path.write_bytes(b"")
    observer = Marked()
    feed = Feed(observer, path, Told(), Ending())
    assert feed.turn()
    assert observer.lines == [step_line(5)]
    assert not feed.turn()
    assert (observer.closed, feed.done) == (1, True)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("x"), RecursionError(), MemoryError()]
)
def test_one_that_raises_is_told_once_and_goes_on_where_it_says(path: Path, error: Exception) -> None:
    failing, told = [True], Told()

    def trouble(line: Line) -> None:
        if failing and line == LINES[2]:
            raise error

    observer = Marked(trouble)
    feed = Feed(observer, path, told, threading.Event())
    for _ in range(4):
        assert not feed.turn()
    assert observer.begun == 4
    assert len(told) == 1
    assert mentions(told[0], "this one")
    assert str(error) in told[0]
    failing.clear()
    assert feed.turn()
    assert observer.lines == LINES, "each once"
    assert not feed.turn()
    assert len(told) == 2
    assert mentions(told[1], "this one")
    assert told[1] != told[0]


def test_it_is_tried_again_later_and_later(path: Path) -> None:
    def trouble(_: Line) -> None:
        raise OSError

    feed = Feed(Marked(trouble), path, Told(), threading.Event())
    pauses = []
    for _ in range(9):
        pauses.append(feed._pause_s(feed.turn()))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_one_that_fails_in_the_end_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "END_S", 0.3)
    monkeypatch.setattr(feeds, "RETRY_S", 0.05)

    def trouble(_: Line) -> None:
        raise OSError(5, "Input/output error")

    over, told = threading.Event(), Told()
    over.set()
    feed = Feed(Marked(trouble), path, told, over)
    feed.run()
    assert not feed.done
    assert len(told) == 2
    assert mentions(told[1], "this one")


def test_one_that_works_hard_rests(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second of work is followed by four of them without."""
    monkeypatch.setattr(feeds, "EVERY_S", 0.0)
    times: list[float] = []

    class Slow(Observer):
        name = "slow"

        def take(self, line: Line, at: int = 0) -> None:
            del line, at
            times.append(time.monotonic())
            time.sleep(0.02)

    over = threading.Event()
    thread = threading.Thread(target=Feed(Slow(), path, Told(), over).run)
    thread.start()
    until(lambda: len(times) == len(LINES))
    with path.open("ab") as file:
        file.write(as_written(step_line(5)))
    until(lambda: len(times) > len(LINES))
    over.set()
    thread.join()
    assert times[5] - times[4] > 0.35


def test_damage_is_told_once(path: Path) -> None:
    told = Told()
    feed = Feed(Marked(), path, told, threading.Event())
    for _ in range(2):
        with path.open("ab") as file:
            file.write(b"rubbish\n")
        feed.turn()
    (said,) = told
    assert mentions(said, "this one", "metrics.jsonl")
