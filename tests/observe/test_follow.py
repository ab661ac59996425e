"""What workers print, as they print it: whole lines, and never so many that the display falls behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farandole.control.run_folder import HIDDEN_LOG_PREFIX
from farandole.observe import live
from farandole.observe.live import LONGEST, READ_BYTES, Follower
from farandole.observe.text import BURST, NEWEST, SAY_S
from tests.support.mentioned import mentions


def test_follower_gives_whole_lines_once_and_the_rest_at_the_end(tmp_path: Path) -> None:
    first, second = tmp_path / "w1.log", tmp_path / "w2.log"
    with Follower(tmp_path) as follower, first.open("wb", buffering=0) as log:
        assert follower.lines() == []
        log.write(b"one\ntw")
        assert follower.lines() == [("w1", "one")]
        assert follower.lines() == []
        second.write_bytes(b"50%\r100%\nwindows\r\n\xff[bold]")
        log.write(b"o\n")
        assert follower.lines() == [("w1", "two"), ("w2", "100%"), ("w2", "windows")]
        log.write(b"three\nunfinished")
        assert follower.flush() == [("w1", "three"), ("w1", "unfinished"), ("w2", "\N{REPLACEMENT CHARACTER}[bold]")]


def test_follower_leaves_out_what_earlier_workers_of_the_run_said(tmp_path: Path) -> None:
    (tmp_path / "w1.log").write_text("old\n")
    with Follower(tmp_path) as follower:
        (tmp_path / "w2.log").write_text("new\n")
        assert follower.lines() == [("w2", "new")]


def test_what_is_aside_is_not_shown(tmp_path: Path) -> None:
    with Follower(tmp_path) as follower:
        (tmp_path / "w1.log").write_text(f"a\n{HIDDEN_LOG_PREFIX}b\nc\n{HIDDEN_LOG_PREFIX}d")
        assert follower.flush() == [("w1", "a"), ("w1", "c")]


@pytest.mark.failure(
    "Files, disks and output",
    "a script prints faster than can be shown, or a line without an end",
    seen=(
        "`... 209,990 lines of w1 are only in its log` every two seconds, with the newest ten; of a long line its "
        "beginning"
    ),
    outcome=(
        "events and progress are shown, the script does not wait, memory stays constant; the log files have all lines"
    ),
)
def test_a_flood_of_one_is_told_of_and_the_others_are_shown(tmp_path: Path) -> None:
    now = 50.0
    with Follower(tmp_path, lambda: now) as follower, (tmp_path / "w1.log").open("w") as flood:
        (tmp_path / "w2.log").write_text("one line\n")
        flood.writelines(f"line {n}\n" for n in range(20_000))
        flood.flush()
        shown = follower.lines()
        assert shown[-1] == ("w2", "one line")
        assert [text for _, text in shown[:-1]] == [f"line {n}" for n in range(int(BURST / 2))]
        now += SAY_S
        flood.writelines(f"line {n}\n" for n in range(20_000, 400_000))  # more than is read of it
        flood.flush()
        assert os.fstat(flood.fileno()).st_size > 3 * READ_BYTES
        (source, word), *newest = follower.lines()
        assert source == ""
        assert mentions(word, f"{400_000 - int(BURST / 2) - NEWEST:,}", "w1")
        assert newest == [("w1", f"line {n}") for n in range(400_000 - NEWEST, 400_000)]
        assert follower.flush() == []


def test_what_comes_too_fast_to_be_counted_is_told_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "READ_BYTES", 1000)
    monkeypatch.setattr(live, "COUNT_BYTES", 2000)
    with Follower(tmp_path) as follower:
        (tmp_path / "w1.log").write_text("123456789\n" * 600_000)
        assert follower.lines() == []
        (source, word), *newest = follower.flush()
    assert source == ""
    assert mentions(word, 300 - NEWEST, "6 MB", "w1")
    assert newest == [("w1", "123456789")] * NEWEST


@pytest.mark.failure("Files, disks and output", "a script prints faster than can be shown, or a line without an end")
def test_a_line_without_an_end_takes_no_memory(tmp_path: Path) -> None:
    with Follower(tmp_path) as follower, (tmp_path / "w1.log").open("wb", buffering=0) as log:
        for percent in range(2000):
            log.write(f"\r{percent} %{'.' * 1000}".encode())
            assert follower.lines() == []
        log.write(b"\rdone\r")
        log.write(b"\n")
        assert follower.lines() == [("w1", "done")]
        for _ in range(20):
            log.write(b"x" * 100_000)
            assert follower.lines() == []
        log.write(b"\nnext\n")
        (_, long), after = follower.lines()
    assert long.startswith("x" * LONGEST + "…")
    assert len(long) < LONGEST + 100, "the rest is not shown"
    assert after == ("w1", "next")
