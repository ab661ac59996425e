"""A line that several workers print is shown once."""

from __future__ import annotations

from farandole.observe.text import FORGET_S, REMEMBERED, SameOutput


def shown(*lines: tuple[str, str] | tuple[str, str, float]) -> list[tuple[str, str]]:
    """The lines that are shown, of (worker, text) or (worker, text, time)."""
    same = SameOutput()
    return [(worker, text) for worker, text, *at in lines if same.is_new(worker, text, *(at or [0.0]))]


def test_a_line_is_shown_as_often_as_the_worker_that_prints_it_most() -> None:
    ahead = [("w1", "---")] * 3
    assert shown(*ahead, *[("w2", "---")] * 3) == ahead, "w2 is three lines behind"
    assert shown(("w1", "a"), ("w2", "a"), ("w2", "a"), ("w1", "a")) == [("w1", "a"), ("w2", "a")]


def test_lines_that_differ_are_shown() -> None:
    lines = [("w1", "loss 0.51"), ("w2", "loss 0.52"), ("w1", "seen 12"), ("w2", "seen 13"), ("w1", ""), ("w1", "")]
    assert shown(*lines) == lines


def test_a_time_of_day_is_no_difference() -> None:
    first = [("w1", "2026-11-29 14:56:48,157 INFO joined"), ("w1", "[9:05] done in 3 s")]
    assert shown(*first, ("w2", "2026-11-29 14:56:49,003 INFO joined"), ("w2", "[9:06] done in 3 s")) == first
    assert shown(("w1", "done in 3 s"), ("w2", "done in 4 s")) == [("w1", "done in 3 s"), ("w2", "done in 4 s")]


def test_a_worker_that_joins_later_repeats_nothing() -> None:
    assert shown(("w1", "loading"), ("w2", "loading", 1e6)) == [("w1", "loading")]
    steps = [(worker, "step", float(at)) for at in range(20) for worker in ("w1", "w2")[: 1 + at // 10]]
    assert shown(*steps) == [("w1", "step")] * 20


def test_who_is_left_is_shown_again() -> None:
    """w2 has printed the line less often than w1, which leaves."""
    before = [(worker, "step", float(at)) for at in range(20) for worker in ("w1", "w2")[: 1 + at // 10]]
    after = [("w2", "step", 20.0 + at) for at in range(3 * int(FORGET_S))]
    then = shown(*before, *after)[20:]
    assert then == [("w2", "step")] * len(then)
    assert len(then) >= FORGET_S


def test_a_slow_loop_shows_its_line_once_a_step() -> None:
    steps = [(worker, "step", 10 * FORGET_S * at) for at in range(5) for worker in ("w1", "w2", "w3")]
    assert shown(*steps) == [("w1", "step")] * 5


def test_only_so_many_lines_are_remembered() -> None:
    many = [("w1", str(number)) for number in range(REMEMBERED)]
    first, newest = ("w2", "0"), ("w2", str(REMEMBERED - 1))
    assert shown(*many, first, newest) == many
    assert shown(*many, ("w1", "more"), first, newest) == [*many, ("w1", "more"), first]
