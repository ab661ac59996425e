"""What people see: words for every event, log lines as they come, the two displays, the table."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from farandole.control.status import CoordinatorStatus, Status, ViewStatus, WorkerStatus
from farandole.membership import events
from farandole.membership.metrics import Line
from farandole.observe.display import Display, LiveDisplay, PlainDisplay
from farandole.observe.follow import Follower
from farandole.observe.table import status_table
from farandole.observe.words import describe
from tests.support.metric_lines import an, made, step_line

WORDS = [
    ({"event": "view", "view": 3, "members": ["w1", "w2", "w3"], "step": 57, "cause": "w3 joins"},
     "w3 joins -> view 3 of 3 workers at step 57"),
    ({"event": "view", "view": 4, "members": ["w1"], "step": 60, "cause": "w2: its connection closed",
      "outcome": "redo"},
     "w2: its connection closed -> view 4 of 1 worker at step 60, that step's exchange: redo"),
    ({"event": "view", "view": 5, "members": [], "step": 9, "cause": "farandole stop"},
     "farandole stop -> everyone leaves after step 9"),
    ({"event": "lost", "worker": "w2", "host": "h", "reason": "no heartbeat for 5 s"},
     "w2 is lost: no heartbeat for 5 s"),
    ({"event": "failed", "worker": "w1", "host": "h", "traceback": "Traceback:\n  x\nValueError: bad [red]\n"},
     "the script failed on w1: ValueError: bad [red]"),
    ({"event": "log", "step": 5, "accuracy": 0.98765432, "note": "x"},
     "step 5: accuracy 0.98765, note x"),
    ({"event": "scale", "wanted": 3, "before": 2}, "3 workers wanted, 2 before"),
    ({"event": "over", "code": 0, "reason": "the script has run to its end"},
     "over: the script has run to its end (exit code 0)"),
    ({"event": "checkpoint", "worker": "w1", "step": 500, "path": "/c/x.pt", "bytes": 9, "seconds": 1.25,
      "copy_ms": 3.5}, "checkpoint of step 500: /c/x.pt (3.5 ms of training, 1.25 s behind it)"),
    ({"event": "checkpoint failed", "worker": "w1", "step": 500, "reason": "[Errno 28] No space left on device"},
     "NO CHECKPOINT of step 500: [Errno 28] No space left on device; training goes on"),
    ({"event": "loader replaced", "worker": "w2", "reason": "a DataLoader process (pid 7) was ended by SIGKILL"},
     "w2: a DataLoader process (pid 7) was ended by SIGKILL; others were started in its place"),
    ({"event": "checkpoint damaged", "worker": "w1", "reason": "step-1.json can't be read: x"},
     "CHECKPOINT PASSED OVER: step-1.json can't be read: x"),
    ({"event": "resumed", "worker": "w1", "step": 5, "path": "/c/x.pt", "differences": []},
     "resumed at step 5 from /c/x.pt"),
    ({"event": "resumed", "worker": "w1", "step": 5, "path": "/c/x.pt", "differences": ["epochs: 3 then, 6 now"]},
     "resumed at step 5 from /c/x.pt; THE BITS MAY DIFFER: epochs: 3 then, 6 now"),
    ({"event": "shares", "view": 4, "shares": {"w1": 1000, "w2": 480}, "reason": "w2 at 0.48 of the fastest's speed"},
     "w2 at 0.48 of the fastest's speed: shards are dealt anew, 32 % to w2, 68 % to w1"),
    ({"event": "shares", "view": 4, "shares": dict.fromkeys("abcde", 1000), "reason": "equal"},
     "equal: shards are dealt anew, 20 % to a, 20 % to b, 20 % to c, 20 % to d ..."),
    ({"event": "lost", "worker": "w2", "reason": "a long\n" + "x" * 200}, "w2 is lost: a long " + "x" * 152 + "…"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words"), WORDS)
def test_events_in_plain_words(line: dict[str, Any], words: str) -> None:
    assert describe(made(line)) == words


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


def step(number: int, **more: Any) -> Line:
    return step_line(number, epoch=1, samples=50, loss=0.123456789, time=1000 + number * 0.5, **more)


def plain(stream: io.StringIO) -> Display:
    return PlainDisplay(stream)


def live(stream: io.StringIO) -> Display:
    return LiveDisplay(Console(file=stream, force_terminal=True, width=200))


@pytest.mark.parametrize("make", [plain, live])
def test_both_displays_show_events_output_and_progress(make: Callable[[io.StringIO], Display]) -> None:
    stream = io.StringIO()
    display = make(stream)
    display.wanted = 4
    with display:
        display.line(an(events.View, view=1, members=("w1", "w2"), step=0, cause="start"))
        display.line(an(events.Ready, worker="quiet"))
        for number in (1, 2, 3):
            display.line(step(number, total=100))
        assert display.facts == "loss 0.12346, 100 samples/s, 2 of 4 workers"
        display.output("w2", "a line with [red]markup[/red] and a :smile:")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert re.search(r"\d\d:\d\d:\d\d  start -> view 1 of 2 workers at step 0", text)
    assert "w2 | a line with [red]markup[/red] and a :smile:" in text
    assert "quiet" not in text
    assert "2 of 4 workers" in text


def test_stragglers_are_named_until_they_are_none_or_gone() -> None:
    display = plain(io.StringIO())
    view = an(events.View, members=("w1", "w2", "w3"))
    display.line(view)
    shares = an(events.Shares, shares={"w1": 1000, "w2": 480, "w3": 900})
    display.line(shares)
    assert display.facts == "3 workers, w2 at 0.48 of the speed"
    display.line(view)
    assert "w2" in display.facts
    display.line(an(events.View, members=("w1", "w3")))
    assert display.facts == "2 workers"
    display.line(shares)
    display.line(an(events.Shares, shares={"w1": 1000, "w2": 1000, "w3": 1000}))
    assert display.facts == "2 workers"


def test_plain_progress_is_about_every_two_seconds() -> None:
    now = 100.0
    stream = io.StringIO()
    with PlainDisplay(stream, lambda: now) as display:
        for number in range(40):
            now += 0.125
            display.line(step(number))
    assert stream.getvalue().count("\n") == 3
    assert "step 16, epoch 1: loss 0.12346, 100 samples/s, 0 workers" in stream.getvalue()


def test_status_table_says_all_of_it() -> None:
    workers = tuple(
        WorkerStatus(id=name, host="here", pid=pid, pool="local", rank=rank, state=state)
        for name, pid, rank, state in (("w3", 3, None, "starting"), ("w2", 2, 1, "member"), ("w1", 1, 0, "leaving"))
    )
    status = Status(
        run="r", coordinator=CoordinatorStatus(pid=9, address="http://127.0.0.1:1"), view=ViewStatus(number=3, size=2),
        step=57, epoch=2, wanted=3, minimum=1, maximum=None, state="training", reason="", code=None, workers=workers,
        samples_per_s=1234.5, loss=0.5, total=100,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=120)
    console.print(status_table(status))
    assert "straggler" not in console.file.getvalue()  # type: ignore[attr-defined]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("training", "3, size 2; wanted 3, min 1, max none", "57 of 100, epoch 2", "1234", "pid 9"):
        assert part in text, part
    assert re.findall(r"^(w\d) +(\d?) +(\w+)", text, re.M) == [
        ("w1", "0", "leaving"),
        ("w2", "1", "member"),
        ("w3", "", "starting"),
    ]


def test_the_status_table_names_stragglers() -> None:
    workers = tuple(
        WorkerStatus(
            id=name, host=f"host-{name}", pid=1, pool="", rank=rank, state="member", speed=speed, shards=shards, of=16
        )
        for rank, (name, speed, shards) in enumerate((("w1", 1.0, 7), ("w2", 0.484, 4), ("w3", 0.7, 5)))
    )
    status = Status(
        run="r", coordinator=CoordinatorStatus(pid=9, address="a"), view=ViewStatus(number=3, size=3), step=57, epoch=2,
        wanted=3, minimum=1, maximum=None, state="training", reason="", code=None, workers=workers, samples_per_s=None,
        loss=None, total=None,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=120)
    console.print(status_table(status))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.findall(r"straggler +(.*\S)", text) == [
        "w2 on host-w2: 0.48 of the fastest's speed, 4 of 16 shards",
        "w3 on host-w3: 0.70 of the fastest's speed, 5 of 16 shards",
    ]
    assert re.search(r"^w1 .* 1\.00 +7 of 16", text, re.M)
