"""Two files, one truth: what each kind of line leaves in metrics.jsonl and in journal.sqlite.

A coordinator that is killed between the two leaves the one behind the other; the next one makes up for it.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farandole.coordinator.journal import RECENT_LINES, Journal, Shipped, read_state
from farandole.protocol import events
from farandole.protocol.coordinator.reconnection import Durable
from farandole.protocol.metrics import Line, LogLine, StepLine, as_written, metrics_line, parse_lines
from farandole.protocol.reported_events import ALL
from tests.support.journal_lines import BOOKS, LOST, OTHER, VIEW
from tests.support.metric_lines import an, logged, step_line, stepped, write
from tests.support.stage import stage

STEP = step_line(3)
LOGGED = metrics_line(logged(3, 1, accuracy=float("nan")))
LATER = msgspec.structs.replace(VIEW, view=3, step=9, time=12.5)


def test_lines_have_their_head_first() -> None:
    assert as_written(VIEW).startswith(b'{"event":"view","time":10.5,"view":2,"members":["w1"],"round":4,"step":3,')
    assert as_written(STEP).startswith(b'{"step":3,"epoch":0,"samples":10,"loss":0.5,"seconds":0.1,')
    assert as_written(LOGGED) == b'{"event":"log","step":3,"accuracy":null}\n', "JSON has no NaN"


def test_who_looks_at_the_file_is_not_steered_by_it(tmp_path: Path) -> None:
    line = an(events.FailedEvent, traceback="\x1b[2J\u202e\x9b\x7fé🎉")
    with closing(Journal(tmp_path)) as journal:
        put(journal, line)
    assert written(tmp_path) == [line]
    raw = (tmp_path / "metrics.jsonl").read_text()
    assert "é🎉" in raw
    assert not {"\x1b", "\u202e", "\x9b", "\x7f"} & set(raw)


def test_what_is_rare_is_said_where_it_is_so() -> None:
    usual = json.loads(as_written(STEP))
    assert not {"skipped", "left_out", "learning_rate"} & set(usual)
    assert usual["factor"] == 1.0
    rare = json.loads(as_written(step_line(3, skipped=2, left_out=1, learning_rate=0.0, factor=0.0)))
    assert (rare["skipped"], rare["left_out"], rare["learning_rate"], rare["factor"]) == (2, 1, 0.0, 0.0)
    assert "total" in usual, "null where it is not known"


def put(journal: Journal, *lines: Line, state: Durable = BOOKS) -> None:
    """As the server does: events are kept, with the state, before anything is written or sent."""
    for line in lines:
        if isinstance(line, events.Event):
            journal.commit([line], state)
        write(journal, line)


def written(folder: Path) -> list[Line]:
    found, damaged = parse_lines((folder / "metrics.jsonl").read_bytes().splitlines())
    assert not damaged
    return found


def kept(folder: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "journal.sqlite")) as reader:  # a second process would see the same
        return reader.execute("SELECT id, time, event, view, step, worker, detail FROM events").fetchall()


def test_events_go_to_both_files_metrics_only_to_one(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        for number, line in enumerate((VIEW, STEP, LOGGED, LOST), 1):
            put(journal, line)
            assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == number, "readable at once"
        assert kept(tmp_path) == [
            (1, 10.5, "view", 2, 3, None, '{"members":["w1"],"round":4,"cause":"why"}'),
            (2, 11.5, "lost", None, None, "w2", '{"host":"h","reason":"why"}'),
        ]
    assert written(tmp_path) == [VIEW, STEP, LogLine(step=3, fields={"accuracy": None}), LOST]


def test_reopened_journal_appends(tmp_path: Path) -> None:
    for line in (VIEW, LOST):
        with closing(Journal(tmp_path)) as journal:
            put(journal, line)
    assert written(tmp_path) == [VIEW, LOST]
    assert len(kept(tmp_path)) == 2


def test_books_are_those_of_the_newest_event(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        assert journal.state() is None
        put(journal, VIEW)
        put(journal, LOST, state=OTHER)
        assert journal.state() == OTHER
    with closing(Journal(tmp_path)) as journal:
        assert journal.state() == OTHER


def test_an_event_that_can_not_be_kept_leaves_the_books_as_they_were(tmp_path: Path) -> None:
    """All or nothing: the second line has no time."""
    with closing(Journal(tmp_path)) as journal:
        put(journal, VIEW)
        with pytest.raises(sqlite3.Error):
            journal.commit([LOST, msgspec.structs.replace(LOST, time=None)], OTHER)
        assert journal.state() == BOOKS
        assert len(kept(tmp_path)) == 1
        put(journal, LOST, state=OTHER)  # it works on
        assert journal.state() == OTHER


@pytest.mark.parametrize(("outlived", "synchronous"), [(True, 2), (False, 1)])
def test_where_workers_outlive_this_machine_each_commit_is_on_the_disk(
    tmp_path: Path, outlived: bool, synchronous: int
) -> None:
    """2 is SQLite's FULL, with an fsync for each commit of a WAL; 1 is NORMAL, without."""
    with closing(Journal(tmp_path, outlived=outlived)) as journal:
        assert journal._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert journal._database.execute("PRAGMA synchronous").fetchone() == (synchronous,)
        put(journal, VIEW)
        assert journal._database.execute("PRAGMA synchronous").fetchone() == (synchronous,)


# --- killed in the middle ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [1, 20, len(as_written(STEP)) - 1])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: int) -> None:
    with closing(Journal(tmp_path)) as journal:
        put(journal, VIEW, STEP)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(as_written(STEP)[:torn])
    with closing(Journal(tmp_path)) as journal:
        assert journal.recent == [VIEW, STEP]
        put(journal, LOST)
    assert written(tmp_path) == [VIEW, STEP, LOST]


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_events_that_were_kept_and_not_written_are_made_up_for(tmp_path: Path, missing: int) -> None:
    happened = [VIEW, LOST, LATER]
    with closing(Journal(tmp_path)) as journal:
        put(journal, *happened[:-missing], STEP)
        for line in happened[-missing:]:
            journal.commit([line], BOOKS)
    for _ in range(2):  # the second time, nothing is missing
        with closing(Journal(tmp_path)) as journal:
            assert [line for line in journal.recent if line != STEP] == happened
        assert written(tmp_path) == [*happened[:-missing], STEP, *happened[-missing:]]


def test_one_that_was_killed_before_it_could_note_that_it_had_written_writes_nothing_twice(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        put(journal, VIEW, LOST)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as killed:
        killed.execute("DELETE FROM written")
        killed.commit()
    with closing(Journal(tmp_path)):
        assert written(tmp_path) == [VIEW, LOST]


def test_events_at_the_same_time_are_told_apart(tmp_path: Path) -> None:
    same = [an(events.LostEvent, worker=f"w{n}", time=10.5) for n in range(3)]
    with closing(Journal(tmp_path)) as journal:
        journal.commit(same, BOOKS)
        write(journal, same[0])
    with closing(Journal(tmp_path)):
        assert written(tmp_path) == same


def test_events_of_long_ago_are_not_written_again(tmp_path: Path) -> None:
    """However many steps there have been since: a view may last for hours."""
    with closing(Journal(tmp_path)) as journal:
        put(journal, VIEW, LOST)
        put(journal, *(step_line(step) for step in range(2 * RECENT_LINES)))
    with closing(Journal(tmp_path)):
        assert [line for line in written(tmp_path) if not isinstance(line, StepLine)] == [VIEW, LOST]


def test_the_clock_was_set_back(tmp_path: Path) -> None:
    earlier = msgspec.structs.replace(LOST, time=3.5)
    with closing(Journal(tmp_path)) as journal:
        put(journal, VIEW)
        journal.commit([earlier], BOOKS)
    with closing(Journal(tmp_path)):
        assert written(tmp_path) == [VIEW, earlier]


def test_a_row_that_is_no_event_is_passed_over_and_counted(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        put(journal, VIEW)
        journal.commit([LOST, LATER], BOOKS)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as other:
        other.execute("UPDATE events SET event = 'another program' WHERE event = 'lost'")
        other.commit()
    with closing(Journal(tmp_path)) as journal:
        assert journal.damaged == 1
    assert written(tmp_path) == [VIEW, LATER]


# --- where the metrics go on ---------------------------------------------------------------------------------------


def line(step: int, index: int) -> Line:
    return metrics_line(logged(step, index, loss=0.5) if index else stepped(step))


LAST_LINES = [
    ((), (-1, 0), "nothing yet"),
    ((VIEW, LOST), (-1, 0), "events are no metrics"),
    ((line(4, 0),), (4, 0), "a step"),
    ((line(4, 0), line(4, 1), line(4, 2)), (4, 2), "two calls of run.log after it"),
    ((line(4, 0), line(4, 1), VIEW, line(4, 2)), (4, 2), "with an event in between"),
    ((line(4, 1), line(5, 0)), (5, 0), "the next step"),
    ((line(4, 0), an(events.StateLostEvent)), (-1, 0), "begun again: steps count from 0"),
    ((line(4, 0), an(events.StateLostEvent), line(0, 0)), (0, 0), "and goes on"),
    ((line(9, 0), an(events.ResumedEvent, step=4)), (3, ALL),
        "from a checkpoint: the steps from there on are new"),
    ((line(4, 0), *(line(4, index) for index in range(1, 2501))), (4, 2500), "more of run.log than are looked at else"),
    ((line(3, 0), *(line(4, index) for index in range(1, 2501))), (4, 2500), "... of a step whose own line is damaged"),
    ((line(4, 0), an(events.LinesLostEvent, step=4, index=70), line(4, 71)), (4, 71), "some are missing"),
    ((line(4, 0), an(events.LinesLostEvent, step=6, index=0), line(6, 1)), (6, 1), "... of steps"),
    ((line(6, 0), line(6, 1), an(events.LinesLostEvent, step=5, index=9)), (6, 1), "... told a little later"),
    ((line(6, 0), line(6, 1), an(events.LinesLostEvent)), (6, 1), "... and nobody knows where"),
    ((line(9, 0), an(events.RunStartedEvent)), (-1, 0), "started once more, and killed before its first step"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "last", "remark"), LAST_LINES)
def test_last_line(tmp_path: Path, lines: tuple[Line, ...], last: tuple[int, int], remark: str) -> None:
    with closing(Journal(tmp_path)) as journal:
        put(journal, *lines)
    with closing(Journal(tmp_path)) as journal:
        assert journal.last_line() == last, remark


# --- somebody else has locked it ------------------------------------------------------------------------------------


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "another program locks `journal.sqlite`",
    seen="`not recorded`, then `recorded again` with the number of events that the journal lacks",
    outcome=(
        "no process waits over 50 ms; `metrics.jsonl` has all events; the journal has the state a second after the "
        "lock ends"
    ),
)
@pytest.mark.timeout(30)
def test_nobody_waits_for_who_has_locked_the_journal(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal, closing(sqlite3.connect(tmp_path / "journal.sqlite")) as other:
        put(journal, VIEW)
        other.execute("BEGIN IMMEDIATE")
        for _ in range(100):
            with pytest.raises(sqlite3.OperationalError):
                journal.commit([LOST], OTHER)
            write(journal, LOST)
        assert not journal.ready
        other.rollback()
        while not journal.ready:
            time.sleep(0.01)
        put(journal, LATER, state=OTHER)
        assert journal.state() == OTHER
    assert written(tmp_path) == [VIEW, *[LOST] * 100, LATER]


@pytest.mark.failure("Processes, signals and crash loops", "another program locks `journal.sqlite`")
def test_a_server_whose_journal_is_locked_goes_on_and_catches_up(tmp_path: Path) -> None:
    async def play() -> None:
        async with stage(tmp_path) as scene:
            with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as other:
                other.execute("BEGIN IMMEDIATE")
                scene.worker("a")
                await scene.in_view("a")
                await scene.until(lambda: scene.events("not recorded"))
                other.rollback()
            await scene.until(lambda: scene.events("recorded again"))
            state = read_state(tmp_path)
            assert state is not None
            assert state.view is not None
            assert state.view.members == ("a",), "without another event"
            assert scene.events("recorded again")[0]["missing"] > 0

    asyncio.run(play())


def test_names_in_files_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """A journal, and the state beside the checkpoints, that an earlier version has written can be read."""
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as earlier, earlier:
        earlier.execute("CREATE TABLE books (id INTEGER PRIMARY KEY, books TEXT NOT NULL)")
        earlier.execute("INSERT INTO books VALUES (0, ?)", ('{"number":2,"wants":{"":1}}',))
    assert read_state(tmp_path) == BOOKS
    stored = b'{"time":5.0,"settings":{"run":"r"},"books":{"number":2,"wants":{"":1}}}'
    assert msgspec.json.decode(stored, type=Shipped).state == BOOKS
