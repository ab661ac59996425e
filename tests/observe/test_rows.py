"""The table of a run's progress where the output is no terminal."""

from __future__ import annotations

import math

from farandole.observe.text import AWAY_LINES, AWAY_ROWS, COLUMNS, HEADER_ROWS, ProgressRows
from tests.support.metric_lines import step_line

AT = "14:08:46"


def headers(rows: ProgressRows, count: int, between: int = 0) -> list[int]:
    """Which of so many rows have a header, with so many lines of others before each."""
    found: list[int] = []
    for number in range(count):
        rows.passed(between)
        *header, _ = rows.rows(step_line(number), "", 2, None)
        found += [number] * len(header)
    return found


def test_the_header_comes_again() -> None:
    assert headers(ProgressRows(), 60) == [0, HEADER_ROWS, 2 * HEADER_ROWS]
    assert headers(ProgressRows(), 11, between=AWAY_LINES) == [0, AWAY_ROWS, 2 * AWAY_ROWS], "it is off the screen"
    assert headers(ProgressRows(), 25, between=1) == [0]


def test_columns_stay_aligned_when_a_number_needs_more_room() -> None:
    rows = ProgressRows()
    usual, _ = rows.rows(step_line(5, total=100, learning_rate=0.1), AT, 2, 10.0)
    assert "  Epoch" in usual
    assert len(usual) <= COLUMNS
    titles, long = rows.rows(step_line(1_234_567, total=2_000_000, learning_rate=0.1), AT, 1000, 1e12)
    *none, short = rows.rows(step_line(7, total=2_000_000, loss=math.nan, learning_rate=0.2, factor=2.5), AT, 2, None)
    assert none == []
    assert titles.split() == ["Time", "Steps", "Epoch", "Workers", "Speed", "Loss", "LR"]
    assert len(titles) == len(long) == len(short) <= COLUMNS
    assert short.split() == [AT, "8/2000000", "0", "1/2", "0.2", "x", "2.5"], "what is not known is not shown"
