"""Event files, as TensorBoard itself reads them: each step once, whatever becomes of run, files and clock."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'farandole[tensorboard]'")

from farandole.errors import UsageError
from farandole.observe import tensorboard as boards
from farandole.observe.export_common import Cursor
from farandole.observe.export_process import Feed
from farandole.observe.tensorboard import TensorBoard
from farandole.protocol import events
from farandole.protocol.metrics import Line, LogLine, StepLine, as_written
from tests.support.event_files import read
from tests.support.mentioned import mentions
from tests.support.metric_lines import an, step_line


class Place:
    """A run's folder with metrics.jsonl, and the folder of the event files in it."""

    def __init__(self, folder: Path) -> None:
        self.metrics = folder / "metrics.jsonl"
        self.board = folder / "tensorboard"

    def write(self, *lines: Line) -> None:
        with self.metrics.open("ab") as file:
            file.writelines(map(as_written, lines))

    def export(self, most: int | None = None, *, close: bool = True) -> TensorBoard:
        """What is in the file, or its next `most` lines, as one process would; without `close` it is killed then."""
        board = TensorBoard(self.board, self.metrics)
        cursor = Cursor(self.metrics, board.begin())
        while lines := cursor.read():
            for at, line in lines[:most]:
                board.take(line, at)
        if close:
            board.flush()
            board.close()
        return board


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def losses(place: Place) -> list[tuple[int, float]]:
    return read(place.board)[0].get("step/loss", [])


def steps(first: int, last: int, loss: float = 0.5) -> list[StepLine]:
    return [step_line(number, loss=loss, time=1000.0 + number) for number in range(first, last)]


def test_numbers_logs_and_events_are_there(place: Place) -> None:
    place.write(
        an(events.ViewEvent, members=("w1", "w2"), cause="start", step=0),
        step_line(0, loss=0.5, learning_rate=0.25, factor=2.0, workers=2),
        LogLine(step=0, fields={"val/accuracy": 0.75, "note": "fine", "best": True}),
        step_line(1, loss=math.nan, time=10.0),
        an(events.LostEvent, worker="w2", reason="no heartbeat"),
        step_line(2, loss=1e300, time=11.0),
    )
    place.export()
    assert stat.S_IMODE(place.board.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.board.iterdir()} == {0o600}
    numbers, texts = read(place.board)
    assert numbers["step/learning_rate"] == [(0, 0.5)]
    assert numbers["step/workers"] == [(0, 2), (1, 1), (2, 1)]
    assert numbers["val/accuracy"] == [(0, 0.75)]
    assert numbers["best"] == [(0, 1)]
    assert numbers["step/loss"][0] == (0, 0.5)
    assert math.isnan(numbers["step/loss"][1][1])
    assert numbers["step/loss"][2] == (2, math.inf), "single precision has no such number"
    assert texts["note"] == [(0, "    fine")]
    [(step, told)] = texts["events"]
    assert step == 2
    assert mentions(told, "step 0", "start", "view 3", 2)
    assert mentions(told, "step 1", "w2", "no heartbeat")


def test_text_is_shown_as_text(place: Place) -> None:
    """Indented, line by line, which in Markdown is code: nothing in it is a tag, a link or a picture."""
    from markdown import markdown  # tensorboard brings it, and shows texts by it

    nasty = "<script>alert(1)</script>\n\n# big\n![x](http://x/y.png)\n```\n[a](javascript:b)\r<b>bold</b>"
    place.write(
        step_line(0), LogLine(step=0, fields={"<b>note</b>": nasty}), an(events.LostEvent, worker="<b>", reason=nasty)
    )
    place.export()
    _, texts = read(place.board)
    for tag in ("<b>note</b>", "events"):
        shown = markdown(texts[tag][0][1], extensions=["markdown.extensions.tables", "markdown.extensions.fenced_code"])
        assert shown.startswith("<pre><code>")
        for markup in ("<script", "<b>", "<h1", "<img", "<a "):
            assert markup not in shown


@pytest.mark.parametrize("late", [False, True], ids=["exported as it runs", "exported late"])
@pytest.mark.parametrize(
    ("ended", "first"), [([], 6), ([an(events.StateLostEvent)], 6), ([an(events.StateLostEvent)], 0)],
    ids=["resumed", "state lost, from a checkpoint", "state lost, from the beginning"],
)  # fmt: skip
def test_steps_that_are_taken_again_count_once_and_as_the_last(
    place: Place, ended: list[Line], first: int, late: bool
) -> None:
    place.write(*steps(0, 10, 1.0), *ended)
    if not late:
        place.export()
    place.write(*([an(events.ResumedEvent, step=first)] if first else []), *steps(first, 12, 2.0))
    place.export()
    assert losses(place) == [(n, 1.0 if n < first else 2.0) for n in range(12)]


def story(draw: random.Random) -> list[Line]:
    """Steps, logs, events and resumes of a run, each step's loss saying when it was taken."""
    lines: list[Line] = []
    step = 0
    for number in range(60):
        what = draw.random()
        if what < 0.75 or not step:
            lines.append(step_line(step, loss=float(number), time=1000.0 + number))
            step += 1
        elif what < 0.85:
            lines.append(LogLine(step=step - 1, fields={"logged": float(number)}))
        elif what < 0.95:
            lines.append(an(events.LostEvent, worker=f"w{number}"))
        else:
            step = draw.randrange(step + 1)
            lines.append(an(events.ResumedEvent, step=step))
    return lines


def expected(lines: Sequence[Line]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """The losses and the logged values that count."""
    taken: dict[int, float] = {}
    logged: list[tuple[int, float]] = []
    for line in lines:
        match line:
            case StepLine():
                taken[line.step] = line.loss or 0.0
            case LogLine():
                logged.append((line.step, float(line.fields["logged"])))  # type: ignore[arg-type]
            case events.ResumedEvent(step=step):
                taken = {number: loss for number, loss in taken.items() if number < step}
                logged = [(number, value) for number, value in logged if number < step]
            case _:
                pass
    return sorted(taken.items()), logged


@pytest.mark.parametrize("seed", range(12))
def test_killed_anywhere_each_step_is_there_once(place: Place, seed: int) -> None:
    """Processes that end after any number of lines, before or after these are in the file, or the mark is written."""
    draw = random.Random(seed)
    lines = story(draw)
    place.write(*lines)
    for _ in range(6):
        board = place.export(draw.randrange(40), close=False)
        end = draw.randrange(3)
        if end and board._file is not None:
            board._file.flush()
        if end == 2:
            board.flush()
        kill(board, tear=draw.randrange(12) if draw.random() < 0.3 and end == 1 else 0)
    place.export()
    numbers, _ = read(place.board)
    taken, logged = expected(lines)
    assert numbers["step/loss"] == taken
    assert numbers.get("logged", []) == logged


def kill(board: TensorBoard, *, tear: int) -> None:
    """What its process has in memory is lost, and the last bytes do not get to the disk."""
    file = board._file
    assert file is not None
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), file.fileno())
    file.close()
    path = Path(str(file.name))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - tear])


def test_a_clock_that_goes_back_does_not_hide_what_is_new(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write(*steps(0, 3))
    place.export()
    place.write(*steps(3, 6))
    yesterday = time.time() - 86400
    monkeypatch.setattr(time, "time", lambda: yesterday)
    place.export()
    assert losses(place) == [(n, 0.5) for n in range(6)]


class Full:
    """A disk on which there is no more room, after some bytes."""

    def __init__(self, file: object, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if len(data) > self.room:
            self.file.write(data[: self.room])  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        self.room -= len(data)
        return self.file.write(data)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


def test_a_disk_that_was_full_costs_no_step(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write(*steps(0, 20))
    told: list[str] = []
    board = TensorBoard(place.board, place.metrics)
    feed = Feed(board, place.metrics, told.append, threading.Event())
    real = open
    rooms = iter([50, 500, 3000])
    monkeypatch.setattr(boards, "open", lambda *a, **k: Full(real(*a, **k), next(rooms, 10**9)), raising=False)
    for _ in range(4):
        feed.turn()
    board.close()
    assert [(mentions(words, "TensorBoard"), "[Errno 28]" in words) for words in told] == [(True, True), (True, False)]
    assert losses(place) == [(n, 0.5) for n in range(20)]


def test_of_fast_steps_those_are_left_out_that_nobody_could_see(place: Place) -> None:
    fast = [step_line(number, time=1000.0 + number / 1024, workers=1 + (number > 130)) for number in range(200)]
    place.write(*fast[:30], LogLine(step=29, fields={"logged": 1.0}), *fast[30:])
    place.export()
    numbers, _ = read(place.board)
    assert [step for step, _ in numbers["step/loss"]] == [0, 103, 131]
    assert numbers["logged"] == [(29, 1.0)]


def test_a_folder_of_another_runs_is_left_alone(tmp_path: Path) -> None:
    places = [Place(tmp_path / name) for name in ("one", "two")]
    for place in places:
        place.metrics.parent.mkdir()
        place.board = tmp_path / "board"
        place.write(*steps(0, 3))
    places[0].export()
    before = {path.name: path.read_bytes() for path in places[0].board.iterdir()}
    with pytest.raises(UsageError, match=r"\bboard\b.*\bone\b.*\btwo\b"):
        places[1].export()
    assert {path.name: path.read_bytes() for path in places[0].board.iterdir()} == before


def test_a_runs_folder_that_was_copied_is_written_anew(tmp_path: Path) -> None:
    place = Place(tmp_path / "one")
    place.metrics.parent.mkdir()
    place.write(*steps(0, 3, 1.0))
    place.export()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    copied = Place(tmp_path / "two")
    copied.write(an(events.ResumedEvent, step=2), *steps(2, 5, 2.0))
    copied.export()
    assert losses(copied) == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def test_many_events_are_one_text_of_bounded_size(place: Place) -> None:
    place.write(*(an(events.LostEvent, worker=f"w{n}", reason="x" * 5000) for n in range(500)), step_line(0))
    place.export()
    _, texts = read(place.board)
    [(_, told)] = texts["events"]
    assert len(told.splitlines()) == boards.NEWEST
    assert mentions(told, "w499")
    assert len(told) < 30_000


# --- TensorBoard's own server ----------------------------------------------------------------------------------------


@pytest.fixture(params=["true", "false"], ids=["Rust", "Python"])
def server(request: pytest.FixtureRequest, place: Place, tmp_path: Path) -> Iterator[str]:
    """The address of a server of the event files, with one of its two readers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(place.board), "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--load_fast={request.param}"], stdout=log, stderr=log)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def ask(server: str, path: str, tag: str) -> list[Any]:
    """The values of a tag, once the server has read the files."""
    deadline = time.monotonic() + 90
    while True:
        try:
            url = f"{server}/data/plugin/{path}?{urllib.parse.urlencode({'run': '.', 'tag': tag})}"
            if found := json.load(urllib.request.urlopen(url, timeout=200)):
                return found
        except (OSError, ValueError):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.world
@pytest.mark.processes
def test_its_server_shows_each_step_of_a_resumed_run_once_and_text_as_text(place: Place, server: str) -> None:
    place.write(*steps(0, 10, 1.0))
    place.export()
    note = LogLine(step=11, fields={"note": "<script>alert(1)</script>"})
    place.write(an(events.ResumedEvent, step=6), *steps(6, 12, 2.0), note)
    place.export()
    expected = [[number, 1.0] for number in range(6)] + [[number, 2.0] for number in range(6, 12)]
    shown: list[Any] = []
    while len(shown) < len(expected):  # it reads file by file
        shown = [each[1:] for each in ask(server, "scalars/scalars", "step/loss")]
    assert shown == expected
    [note_shown] = ask(server, "text/text", "note")
    assert note_shown["step"] == 11
    assert "&lt;script&gt;" in note_shown["text"]
    assert "<script" not in note_shown["text"]
