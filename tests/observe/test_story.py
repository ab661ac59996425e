"""A run from its lines: what is told of it, whatever happened to it and to the file; and to a page, piece by piece."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from farandole.observe.story import PageState, Story, Tick, UpdateStream, bill, first, head
from farandole.protocol.cost import Prices
from tests.support.damaged_lines import DAMAGED_LINES
from tests.support.told_run import RUN, SPENT, STATUS, VIEW, step, written


def story(*lines: dict[str, Any], raw: list[bytes] | None = None) -> Story:
    found = Story()
    for line in raw if raw is not None else written([*lines]):
        found.take(line)
    return found


def drawn(found: Story, name: str) -> dict[int, float | None]:
    patch = found.series[name].patch(PageState())
    return {} if patch is None else dict(zip(patch.x, patch.y, strict=True))


def test_a_run_in_figures() -> None:
    found = story(*RUN)
    told = head("r", found, None, live=True)
    assert (told.step, told.total, told.size, told.left_s) == (20, 100, 1, pytest.approx(80.0))
    assert told.last_gone is not None
    assert (told.last_gone.worker, told.last_gone.how, told.last_gone.why) == ("w2", "lost", "killed by signal 9")
    assert told.texts == {"note": "warm"}
    assert drawn(found, "accuracy") == {9: 0.75}
    assert found.sizes == [(101.0, 2), (112.6, 1)]
    assert drawn(found, "step/loss")[19] == pytest.approx(0.05)


def test_the_coordinators_word_goes_first_while_the_run_is_on() -> None:
    told = head("r", story(*RUN), STATUS, live=True)
    assert (told.size, told.wanted, told.state, told.samples_per_s) == (2, 4, "training", 1234.5)


ENDS: list[tuple[list[dict[str, Any]], str]] = [
    ([], "cut off"),
    ([{"event": "over", "code": 0, "reason": "farandole stop", "time": 130.0}], "stopped"),
    (
        [{"event": "finished", "fingerprint": "ab", "equal": True}, {"event": "over", "code": 0, "time": 130.0}],
        "finished",
    ),
    ([{"event": "over", "code": 1, "reason": "w1 raised", "time": 130.0}], "failed"),
    ([{"event": "over", "code": 2, "reason": "w1 exited", "time": 130.0}], "failed"),
    ([{"event": "over", "code": 130, "reason": "SIGINT", "time": 130.0}], "stopped"),
]


@pytest.mark.parametrize(("end", "state"), ENDS)
def test_how_it_ended(end: list[dict[str, Any]], state: str) -> None:
    assert head("r", story(*RUN, *end), None, live=False).state == state


def test_steps_that_are_taken_again_replace_those_before() -> None:
    again = {"event": "resumed", "worker": "w1", "step": 5, "path": "p", "time": 200.0}
    found = story(*RUN, again, *(step(number, 200.0 + number, loss=9.0) for number in range(5, 8)))
    losses = drawn(found, "step/loss")
    assert sorted(losses) == list(range(8))
    assert losses[5] == losses[7] == 9.0
    assert losses[4] == pytest.approx(0.2)
    assert drawn(found, "accuracy") == {}, "it was of step 9"
    assert head("r", found, None, live=True).step == 8


LOST = {"event": "state lost", "reason": "nobody who held it is left", "time": 190.0}
BACK = {"event": "resumed", "worker": "w3", "step": 5, "path": "p", "time": 200.0}


@pytest.mark.parametrize("between", [[LOST, BACK], [BACK], [LOST], []], ids=["both", "resumed", "lost", "torn away"])
def test_what_counts_of_a_run_that_goes_back_whatever_the_file_still_says_of_it(between: list[dict[str, Any]]) -> None:
    found = story(*RUN, *between, *(step(number, 200.0 + number, loss=9.0) for number in range(5, 8)))
    losses = drawn(found, "step/loss")
    assert sorted(losses) == list(range(8)), "what was taken before the checkpoint is still there"
    assert [number for number, loss in losses.items() if loss == 9.0] == [5, 6, 7]


def test_damaged_lines_are_counted_and_no_more() -> None:
    lines = written(RUN)
    whole = head("r", story(raw=lines), None, live=True)
    mixed = [line for each in lines for line in (each, *DAMAGED_LINES[:4])] + DAMAGED_LINES
    told = head("r", story(raw=mixed), None, live=True)
    assert told.damaged == 4 * len(lines) + len(DAMAGED_LINES)
    assert msgspec.structs.replace(told, damaged=0) == whole


def test_losses_that_are_no_numbers_are_marked_at_their_steps() -> None:
    unfinite = {"event": "not finite", "worker": "w1", "step": 7, "loss": "nan", "time": 150.0}
    found = story(*RUN[:3], *(step(n, 102.0 + n, loss=math.nan if n == 7 else 1.0) for n in range(9)), unfinite)
    assert found.unfinite == [(7, "nan")]
    assert drawn(found, "step/loss")[7] is None


def test_a_clock_that_jumps_back_shifts_and_breaks_nothing() -> None:
    found = story(*RUN, *(step(number, 5.0 + number) for number in range(20, 30)))
    told = head("r", found, None, live=True)
    assert (told.step, told.left_s) == (30, pytest.approx(70.0)), "the steps' own time"
    assert first("r", found, 50.0, account=bill(found.account.account("r", Prices()), found), live=True)


def test_the_bill_against_as_many_workers_all_the_time() -> None:
    spent = {"event": "time spent", "workers": SPENT, "ended": (), "time": 121.0}
    found = Story()
    for line in (*written(RUN), msgspec.json.encode(spent) + b"\n"):
        found.take(line)
    paid = bill(found.account.account("r", Prices(date="2026-11-01", pools={"local": 3600.0})), found)
    assert (paid.most, paid.static_hours) == (2, pytest.approx(2 * 21.0 / 3600))
    assert paid.waiting == {"w1": 0.25}
    assert paid.goodput == pytest.approx(0.75)
    assert paid.static_dollars == pytest.approx(paid.dollars / paid.worker_hours * paid.static_hours)  # type: ignore[operator]
    unknown = bill(found.account.account("r", Prices()), found)
    assert (unknown.dollars, unknown.static_dollars) == (None, None)


class Page:
    """What a page makes of the ticks."""

    def __init__(self) -> None:
        self.x: dict[str, list[int]] = {}
        self.stays: dict[str, Any] = {}
        self.sizes: list[Any] = []
        self.events: list[Any] = []
        self.head: Any = None
        self.rows: dict[str, Any] = {}
        self.bytes: list[int] = []

    def take(self, tick: Tick) -> None:
        data = msgspec.json.encode(tick)
        self.bytes.append(len(data))
        told = json.loads(data)
        self.head = told["head"] or self.head
        self.stays |= told["stays"]
        self.sizes += told["sizes"]
        self.events += told["events"]
        self.rows = {k: v for k, v in {**self.rows, **told["workers"]}.items() if v is not None}
        for name, patch in told["series"].items():
            self.x.setdefault(name, [])[patch["at"] :] = patch["x"]

    def __eq__(self, other: object) -> bool:
        names = ("x", "stays", "sizes", "events", "head")
        return isinstance(other, Page) and all(getattr(self, n) == getattr(other, n) for n in names)


def test_tick_by_tick_a_page_comes_to_what_it_is_told_at_once() -> None:
    found, page = Story(), Page()
    telling = UpdateStream("r", found)
    for line in written(RUN):
        found.take(line)
        page.take(telling.tick(1.0, live=True))
    at_once = Page()
    at_once.take(UpdateStream("r", found).tick(1.0, live=True))
    assert page == at_once
    again = telling.tick(1.0, live=True)
    assert (again.head, again.series, again.stays, again.sizes, again.events) == (None, {}, {}, [], [])


def test_rows_of_workers_come_when_they_change_and_go() -> None:
    telling, page = UpdateStream("r", story(*RUN)), Page()
    page.take(telling.tick(1.0, STATUS, live=True))
    assert len(page.rows) == 3
    assert telling.tick(1.0, STATUS, live=True).workers == {}
    page.take(telling.tick(1.0, msgspec.structs.replace(STATUS, workers=STATUS.workers[:1]), live=True))
    assert list(page.rows) == ["w1"]
    page.take(telling.tick(1.0, None, live=True))
    assert list(page.rows) == ["w1"], "the coordinator has said nothing"
    page.take(telling.tick(1.0, None, live=False))
    assert page.rows == {}, "the run is over"


def test_only_the_first_names_that_a_script_logs_have_a_picture() -> None:
    found = story(*RUN, {"event": "log", "step": 10, **{f"metric {n}": float(n) for n in range(100)}})
    assert len(found.series) < 40


def test_the_time_between_two_starts_is_nobodys() -> None:
    again = {**VIEW, "time": 1002.0, "members": ("w5",), "step": 20}
    found = story(*RUN, {"event": "run started", "time": 1000.0}, again, step(20, 1003.0), step(21, 1004.0))
    assert found.sizes[-2:] == [(121.0, 0), (1002.0, 1)]
    assert head("r", found, None, live=True).left_s == pytest.approx(78.0), "at the pace of this start"
    assert found.pauses.result()[1:] == []
    assert bill(found.account.account("r", Prices()), found).static_hours == pytest.approx(2 * (21 + 4) / 3600)
