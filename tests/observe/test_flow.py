"""How much of a worker's output is shown: all of it while it can be read, and a word about the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.observe.text import BURST, LINES_A_S, NEWEST, SAY_S, Flow
from tests.support.mentioned import mentions


def some(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % n for n in range(first, first + count)]


def test_as_usual_every_line_is_shown_at_once() -> None:
    flow = Flow("w1")
    for tick in range(1000):
        assert flow.take(some(int(LINES_A_S / 10)), tick / 10) == (some(int(LINES_A_S / 10)), "", ())
    assert flow.end() == ("", ())


@pytest.mark.failure("Files, disks and output", "a script prints faster than can be shown, or a line without an end")
def test_a_flood_has_a_word_and_its_newest_lines_every_two_seconds() -> None:
    flow, at = Flow("w1"), 0
    shown: list[tuple[float, int, str, int]] = []
    for tick in range(100):
        lines = some(10_000, at)
        at += len(lines)
        first, word, newest = flow.take(lines, tick / 10)
        if first or word or newest:
            shown.append((tick / 10, len(first), word, len(newest)))
            assert not newest or newest[-1] == lines[-1]
    assert shown[0] == (0.0, int(BURST), "", 0)
    assert [(time, lines) for time, lines, _, _ in shown[1:]] == [(SAY_S * n, 0) for n in range(1, 5)]
    assert [mentions(word, f"{200_000 - NEWEST:,}", "w1") for *_, word, _ in shown[2:]] == [True] * 3
    assert {newest for *_, newest in shown[1:]} == {NEWEST}
    word, newest = flow.end()
    assert mentions(word, f"{190_000 - NEWEST:,}", "w1")
    assert newest[-1] == b"%d" % (at - 1)


def test_after_it_all_is_shown_again() -> None:
    flow = Flow("w1")
    flow.take(some(5000), 0.0)
    assert flow.take(some(3), 1.0) == ((), "", ()), "with the next word"
    first, word, newest = flow.take([], SAY_S)
    assert (list(first), len(newest)) == ([], NEWEST)
    assert mentions(word, "3,993", "w1")
    flow.take([], 2 * SAY_S)
    assert flow.take(some(3), 3 * SAY_S) == (some(3), "", ())


def test_each_of_many_has_its_part() -> None:
    first, _, _ = Flow("w1").take(some(5000), 0.0, part=0.01)
    assert len(first) == BURST / 100


def test_what_was_not_read_is_told_in_bytes() -> None:
    flow = Flow("w1")
    assert flow.take(some(20), 0.0, passed=100, unread=5_000_000) == ([], "", ())
    assert mentions(flow.take([], SAY_S)[1], 110, "5 MB", "w1")


def test_the_newest_lines_are_neighbours() -> None:
    flow = Flow("w1")
    flow.take(some(20), 0.0, passed=100)
    flow.take(some(3, first=500), 1.0, passed=380)
    first, word, newest = flow.take([], SAY_S)
    assert (first, newest) == ((), tuple(some(3, first=500)))
    assert mentions(word, 500, "w1")


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 5000), st.floats(0, 5)), max_size=30))
def test_what_is_shown_and_what_is_counted_is_all_of_it(looks: list[tuple[int, int, float]]) -> None:
    """In order, and none twice."""
    flow, at, now, shown, counted = Flow("w1"), 0, 0.0, list[bytes](), 0
    for count, passed, later in looks:
        now += later
        lines = some(count, at + passed)
        at += passed + count
        first, word, then = flow.take(lines, now, passed=passed)
        shown += [*first, *then]
        counted += _count(word)
    word, then = flow.end()
    shown += then
    assert len(shown) + counted + _count(word) == at
    assert shown == sorted(set(shown), key=int)
    assert len(shown) <= BURST + LINES_A_S * now + NEWEST * (len(looks) + 1)


def _count(word: str) -> int:
    return int(word.split()[1].replace(",", "")) if word else 0
