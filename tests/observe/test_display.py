"""What people see: words for every event, the two displays, the table of a status."""

from __future__ import annotations

import io
import os
import pty
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.style import Style
from rich.text import Text

from farandole.control.status import CoordinatorStatus, Status, ViewStatus, WorkerStatus
from farandole.observe.live import (
    Display,
    LiveDisplay,
    PlainDisplay,
    Recent,
    list_picture,
    open_display,
    picture,
)
from farandole.observe.tables import hosts_table, status_table
from farandole.observe.text import describe, progress
from farandole.pool.ssh import HostLine
from farandole.pool.ssh_check import HostFacts, HostReport
from farandole.protocol import events, numeric_facts
from farandole.protocol.coordinator.account import account
from farandole.protocol.coordinator.failures import FATAL
from farandole.protocol.metrics import Line, LogLine, as_written
from tests.support.mentioned import mentions
from tests.support.metric_lines import TIMES, an, made, step_line

SPENT = an(events.TimeSpentEvent, workers={"w1": TIMES}, ended=())

WORDS = [
    ({"event": "view", "view": 3, "members": ["w1", "w2", "w3"], "step": 57, "cause": "w3 joins"},
     ["w3 joins", "view 3", 3, "step 57"]),
    ({"event": "view", "view": 4, "members": ["w1"], "step": 60, "cause": "w2: its connection closed",
      "outcome": "redo"},
     ["w2: its connection closed", "view 4", 1, "step 60", "redo"]),
    ({"event": "view", "view": 5, "members": [], "step": 9, "cause": "farandole stop"},
     ["farandole stop", "step 9"]),
    ({"event": "lost", "worker": "w2", "host": "h", "reason": "no heartbeat for 5 s"},
     ["w2", "no heartbeat for 5 s"]),
    ({"event": "failed", "worker": "w1", "host": "h", "traceback": "Traceback:\n  x\nValueError: bad [red]\n"},
     ["w1", "ValueError: bad [red]"]),
    ({"event": "log", "step": 5, "accuracy": 0.98765432, "note": "x"},
     ["step 5", "accuracy 0.98765", "note x"]),
    ({"event": "scale", "wanted": 3, "before": 2}, [3, 2]),
    ({"event": "over", "code": 0, "reason": "the script has run to its end"},
     ["over", "the script has run to its end", "exit code 0"]),
    ({"event": "checkpoint", "worker": "w1", "step": 500, "path": "/c/x.pt", "bytes": 9, "seconds": 1.25,
      "copy_ms": 3.5}, ["step 500", "/c/x.pt", "3.5 ms", "1.25 s"]),
    ({"event": "checkpoint failed", "worker": "w1", "step": 500, "reason": "[Errno 28] No space left on device"},
     ["step 500", "[Errno 28] No space left on device"]),
    ({"event": "loader replaced", "worker": "w2", "reason": "a DataLoader process (pid 7) was ended by SIGKILL"},
     ["w2", "a DataLoader process (pid 7) was ended by SIGKILL"]),
    ({"event": "checkpoint damaged", "worker": "w1", "reason": "step-1.json can't be read: x"},
     ["step-1.json can't be read: x"]),
    ({"event": "resumed", "worker": "w1", "step": 5, "path": "/c/x.pt", "differences": []},
     ["step 5", "/c/x.pt"]),
    ({"event": "resumed", "worker": "w1", "step": 5, "path": "/c/x.pt", "differences": ["epochs: 3 then, 6 now"]},
     ["step 5", "/c/x.pt", "epochs: 3 then, 6 now"]),
    ({"event": "shares", "view": 4, "shares": {"w1": 1000, "w2": 480}, "reason": "w2 at 0.48 of the fastest's speed"},
     ["w2 at 0.48 of the fastest's speed", "32 %", "68 %", "w1"]),
    ({"event": "shares", "view": 4, "shares": dict.fromkeys("abcde", 1000), "reason": "equal"},
     ["equal", "20 %", "a", "b", "c", "d"]),  # and no more of them
    ({"event": "lost", "worker": "w2", "reason": "a long\n" + "x" * 200}, ["w2", "a long " + "x" * 152 + "…"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "named"), WORDS)
def test_events_in_plain_words(line: dict[str, Any], named: list[object]) -> None:
    told = describe(made(line))
    assert "\n" not in told
    assert mentions(told, *named)
    assert not mentions(told, "e")
    assert not mentions(told, "Traceback")


def step(number: int, **more: Any) -> Line:
    return step_line(number, epoch=1, samples=50, loss=0.123456789, seconds=0.5, time=1000 + number * 0.5, **more)


def plain(stream: io.StringIO) -> Display:
    return PlainDisplay(stream)


def live(stream: io.StringIO) -> Display:
    return LiveDisplay(Console(file=stream, force_terminal=True, width=200))


def without_control(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.parametrize("make", [plain, live])
def test_both_displays_show_events_output_and_progress(make: Callable[[io.StringIO], Display]) -> None:
    stream = io.StringIO()
    display = make(stream)
    display.wanted = 4
    with display:
        display.line(an(events.ViewEvent, view=1, members=("w1", "w2"), step=0, cause="start"))
        display.line(an(events.ReadyEvent, worker="quiet", host="unheard-of"))
        for number in (1, 2, 3):
            display.line(step(number, total=100))
        assert mentions(display.people, 2, 4, "quiet")
        display.outputs(
            [("w2", "a line with [red]markup[/red] and a :smile:"), ("", "... 7 lines"), ("w1", "\x1b[2Jx")]
        )
        display.line(an(events.OverEvent))
        display.summary(["", "outcome  finished [red]"])
    text = without_control(stream.getvalue())
    assert mentions(text, "start", "view 1", 2, "step 0")
    assert re.search(r"\d\d:\d\d:\d\d .*\bstart\b", text)
    for line in (
        "w2 | a line with [red]markup[/red] and a :smile:",
        "... 7 lines",
        "w1 | x",
        "outcome  finished [red]",
    ):
        assert re.search(rf"(^|\r){re.escape(line)}$", text, re.M), line
    assert "unheard-of" not in text


def test_what_several_workers_print_is_shown_once() -> None:
    stream = io.StringIO()
    display = plain(stream)
    display.outputs([("w1", "usage"), ("w2", "usage"), ("w2", "w2's own"), ("w1", "usage"), ("w1", ""), ("w2", "")])
    display.line(an(events.ViewEvent, members=("w1", "w2")))
    display.outputs([("w2", "epoch 0"), ("", "... 7 lines"), ("w1", "usage"), ("w1", "epoch 0"), ("", "... 7 lines")])
    lines = [line for line in without_control(stream.getvalue()).splitlines() if not re.match(r"\d", line)]
    assert lines == [
        "w1 | usage", "w2 | w2's own", "w1 | usage", "w1 | ",
        "w2 | epoch 0", "... 7 lines", "w1 | usage", "... 7 lines",
    ]  # fmt: skip


@pytest.mark.parametrize("make", [plain, live])
def test_times_never_go_backwards(make: Callable[[io.StringIO], Display]) -> None:
    """Lines of steps come late, those of `run.log` have no time, one clock is ahead, another one behind."""
    stream, noon = io.StringIO(), (2026, 11, 29, 12, 0, 0, 0, 0, -1)
    now = time.mktime(noon)
    display = make(stream)
    display.time_of_day = lambda: now
    with display:
        for at in (now - 50, now + 3600):
            display.line(an(events.ReadyEvent, time=at))
            display.line(an(events.ViewEvent, members=("w1",), time=at))
        for number in range(3):
            display.line(msgspec.structs.replace(step(number, total=3), time=now - 90 + number))
            display.line(LogLine(step=number, fields={"accuracy": 0.5}))
        display.line(an(events.SavedEvent, time=now - 80))
        display.line(an(events.OverEvent, time=now - 70))
    times = re.findall(r"(?:^|\r)(\d\d:\d\d:\d\d) ", without_control(stream.getvalue()), re.M)
    assert len(times) >= 7
    assert times[0] == time.strftime("%H:%M:%S", time.localtime(now - 50))
    assert times == sorted(times)
    assert times[-1] == "12:00:00", "not in the future"


@pytest.mark.parametrize(
    "end",
    [
        an(events.FinishedEvent),
        an(events.FailedEvent),
        an(events.ViewEvent, members=()),
        an(events.StateLostEvent),
        an(events.OverEvent),
    ],
)
def test_the_last_row_is_the_last_step_and_before_the_end(end: events.Event) -> None:
    stream = io.StringIO()
    with PlainDisplay(stream, lambda: 100.0) as display:
        for number in range(3):
            display.line(step(number, total=3))
        display.line(end)
        display.line(an(events.OverEvent))
    _titles, _first, last, *after = stream.getvalue().splitlines()
    assert last.split()[1] == "3/3"
    assert not any("3/3" in line for line in after)


def test_the_last_step_is_on_the_terminal_although_it_was_just_drawn() -> None:
    stream = io.StringIO()
    with LiveDisplay(Console(file=stream, force_terminal=True, width=200), lambda: 100.0) as display:
        for number in range(30):
            display.line(step(number, total=30))
        display.line(an(events.FinishedEvent))
        drawn = re.findall(r"step (\d+) of 30", stream.getvalue())
    assert (drawn[0], drawn[-1]) == ("1", "30")


def test_the_bar_does_not_have_the_colour_of_failures() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=200, color_system="truecolor")
    for done in (10, 50, 100):
        console.print(progress(done, 100, 0, ()))
    *drawn, _ = stream.getvalue().split("of 100")
    for text in drawn:
        done = Text.from_ansi(text.splitlines()[-1]).spans[0].style
        assert isinstance(done, Style)
        assert done.color is not None
        red, green, blue = done.color.get_truecolor()
        assert red < green
        assert red < blue


def test_stragglers_are_named_until_they_are_none_or_gone() -> None:
    display = plain(io.StringIO())
    view = an(events.ViewEvent, members=("w1", "w2", "w3"))
    display.line(view)
    shares = an(events.SharesEvent, shares={"w1": 1000, "w2": 480, "w3": 900})
    display.line(shares)
    assert mentions(display.people, 3, "w2", "0.48")
    display.line(view)
    assert "w2" in display.people
    display.line(an(events.ViewEvent, members=("w1", "w3")))
    assert display.people == "2 workers"
    display.line(shares)
    display.line(an(events.SharesEvent, shares={"w1": 1000, "w2": 1000, "w3": 1000}))
    assert display.people == "2 workers"


def test_a_row_about_every_two_seconds_and_one_at_the_end() -> None:
    now = 100.0
    stream = io.StringIO()
    with PlainDisplay(stream, lambda: now) as display:
        display.wanted = 4
        for number in range(40):
            now += 0.125
            display.line(step(number, total=50, workers=2, learning_rate=0.25, factor=2.0))
        assert stream.getvalue().count("\n") == 1 + 3
        display.line(an(events.OverEvent, code=0, reason="why"))
    titles, *rows, last, over = stream.getvalue().splitlines()
    assert titles.split() == ["Time", "Steps", "Epoch", "Workers", "Speed", "Loss", "LR"]
    assert [row.split()[1] for row in rows] == ["1/50", "17/50", "33/50"]
    assert rows[1].split()[2:] == ["1", "2/4", "100/s", "0.12346", "0.25", "x", "2"]
    assert last.split()[1] == "40/50"
    assert mentions(over, "over", "why")
    assert {row.index("0.12346") for row in rows} == {titles.index("Loss") - 3}, "columns are aligned"


def test_what_is_logged_at_every_step_of_many_is_told_of_now_and_then() -> None:
    now = 100.0
    stream = io.StringIO()
    with PlainDisplay(stream, lambda: now) as display:
        for number in range(5000):
            now += 0.002
            display.line(step(number, total=5000))
            display.line(LogLine(step=number, fields={"accuracy": 0.5}))
        display.line(an(events.OverEvent))
    shown = stream.getvalue().splitlines()
    logged = [line for line in shown if "accuracy" in line]
    counted = sum(int(line.split()[1].replace(",", "")) for line in shown if "run.log" in line)
    assert len(logged) + counted == 5000
    assert len(shown) < 150
    assert mentions(logged[-1], "step 4999", "accuracy 0.5")
    assert "over: " in shown[-1]


def test_a_live_view_is_drawn_a_few_times_a_second_and_has_all_figures() -> None:
    now = 100.0
    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=200), lambda: now)
    display.wanted = 2
    with display:
        display.line(an(events.ViewEvent, view=1, members=("w1",), step=0))
        display.line(an(events.StartingEvent, worker="w2"))
        for number in range(1000):
            now += 0.001
            display.line(step_line(number, total=2000, samples=50, loss=0.5, learning_rate=0.1, factor=3.0,
                                   seconds=0.5, time=time.time() + number * 0.5))  # fmt: skip
        drawn = without_control(stream.getvalue()).count("learning rate")
        display.account = account("r", [as_written(SPENT)])
        now += 1.0
        display.refresh()
    assert drawn in (4, 5)
    last = without_control(stream.getvalue()).rpartition("step ")[2]
    assert mentions(last, "1000 of 2000", "epoch 0", "8 min")
    assert mentions(last, "loss 0.5", "learning rate 0.1 x 3", "batch 50", "100 samples/s")
    assert mentions(last, 1, 2, "w2")
    assert mentions(last, "goodput 57.1 %", "0.0009722")


def test_a_terminal_that_can_do_nothing_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as stream:
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(open_display(stream), PlainDisplay)
        monkeypatch.setenv("TERM", "xterm")
        assert isinstance(open_display(stream), LiveDisplay)
    assert isinstance(open_display(io.StringIO()), PlainDisplay)


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
    for parts in (
        ("training",), (3, "size 2", 3, "min 1", "max none"), ("57 of 100", "epoch 2"), ("1234",), ("pid 9",)
    ):  # fmt: skip
        assert mentions(text, *parts), parts
    assert re.findall(r"^(w\d) +(\d?) +(\w+)", text, re.M) == [
        ("w1", "0", "leaving"),
        ("w2", "1", "member"),
        ("w3", "", "starting"),
    ]
    rows: list[bool] = []
    for each in (status, msgspec.structs.replace(status, state="starting", workers=())):
        console = Console(file=io.StringIO(), width=120)
        console.print(status_table(each))
        rows.append(bool(re.search(r"^workers +none", console.file.getvalue(), re.M)))  # type: ignore[attr-defined]
    assert rows == [False, True], "a run that has just begun says why nobody is there"


@pytest.mark.parametrize(("lost", "replaced"), [(0, True), (3, True), (7, False)])
def test_the_status_table_has_the_row_of_joiners_that_came_to_nothing(lost: int, replaced: bool) -> None:
    status = Status(
        run="r", coordinator=CoordinatorStatus(pid=9, address="a"), view=ViewStatus(number=3, size=1), step=57, epoch=2,
        wanted=3, minimum=1, maximum=None, state="training", reason="", code=None, workers=(), samples_per_s=None,
        loss=None, total=None, joiners_lost=lost, replaced=replaced,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    console.print(status_table(status))
    rows = re.findall(r"^joiners +(.*)", console.file.getvalue(), re.M)  # type: ignore[attr-defined]
    assert len(rows) == bool(lost)
    for row in rows:
        assert mentions(row, lost)
        assert mentions(row, FATAL) == replaced, "so many are the limit, which is still to come"


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
    first, second = re.findall(r"straggler +(.*\S)", text)
    assert mentions(first, "w2", "host-w2", "0.48", 4, 16)
    assert mentions(second, "w3", "host-w3", "0.70", 5, 16)
    assert re.search(r"^w1\b.*\b1\.00\b.*\b7\b.*\b16\b", text, re.M)


NARROW = 80
LONG_HOST = "ip-10-0-12-34.eu-central-1.compute.internal"


def test_tables_and_figures_fit_a_narrow_terminal() -> None:
    workers = tuple(
        WorkerStatus(id=f"w{rank + 10}", host=LONG_HOST, pid=1234567, pool="on-demand", rank=rank, state="member",
                     speed=0.98, shards=120, of=1280)
        for rank in range(3)
    )  # fmt: skip
    status = Status(
        run="20261125-140844-train", coordinator=CoordinatorStatus(pid=9, address="a"),
        view=ViewStatus(number=3, size=3), step=1234567, epoch=123, wanted=16, minimum=1, maximum=None,
        state="training", reason="", code=None, workers=workers, samples_per_s=123456.0, loss=0.5, total=2_000_000,
    )  # fmt: skip
    recent = Recent()
    for number in range(3):
        recent.line(step_line(1234564 + number, total=2_000_000, epoch=123, seconds=0.5, time=1000 + number * 0.5))
    stalled = msgspec.structs.replace(status, state="stopping", reason="a reason that takes more room than there is")
    for table in (
        status_table(status), picture(status, recent), list_picture(dict.fromkeys(("a", "b" * 50), stalled)),
    ):  # fmt: skip
        console = Console(file=io.StringIO(), width=NARROW)
        console.print(table)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, text.splitlines())) <= NARROW
        assert mentions(text, "1234567 of 2000000"), "in one line"
    for table in (status_table(status), picture(status, recent)):
        console = Console(file=io.StringIO(), width=NARROW)
        console.print(table)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert len(re.findall(r"^w\d+ +\d +member .* 1234567 +on-demand +0\.98 +120 of 1280 *$", text, re.M)) == 3
        assert "".join(re.findall(r"^(?:w10 +0 +member +| {22})(\S+)", text, re.M)[:3]) == LONG_HOST


def test_the_table_of_hosts_fits_a_narrow_terminal() -> None:
    facts = HostFacts(python="3.11.7", farandole="0.1.0", cores=128, free_bytes=740 * 10**9, gpus=8,
                      numerics={numeric_facts.TORCH: "2.13.0+cu130"})  # fmt: skip
    report = HostReport(line=HostLine(name=LONG_HOST, address=LONG_HOST, slots=8), facts=facts, clock_s=-0.02)
    console = Console(file=io.StringIO(), width=NARROW)
    console.print(hosts_table([report], facts), soft_wrap=True)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= NARROW
    assert len(re.findall(r" 3.11.7 +2.13.0\+cu130 +0.1.0 +8 +128 +.* 740 GB *$", text, re.M)) == 2
