"""Which steps are left out where they are fast: of all that says something, none."""

from __future__ import annotations

import random

from farandole.observe.export_common import Spacing
from farandole.protocol.metrics import StepLine, as_written, parse_line
from tests.support.metric_lines import step_line


def admitted(lines: list[StepLine], least_s: float = 0.05) -> list[int]:
    spacing = Spacing(least_s)
    return [line.step for line in lines if spacing.admits(line)]


def test_slow_steps_are_all_there_and_of_fast_ones_one_in_so_much_time() -> None:
    assert admitted([step_line(n, time=100 + 0.0501 * n) for n in range(10)]) == [*range(10)]
    assert admitted([step_line(n, time=100 + 0.015625 * n) for n in range(12)]) == [0, 4, 8]


def test_what_says_something_is_never_left_out() -> None:
    fast = [
        step_line(n, time=100 + 0.001 * n, loss=float("nan") if n == 3 else 0.5, workers=1 + (n > 5)) for n in range(9)
    ]
    written = [parse_line(as_written(line)) for line in fast]
    assert admitted(written) == [0, 3, 6]  # type: ignore[arg-type]
    again = [step_line(n, time=100 + 0.001 * k) for k, n in enumerate((0, 1, 2, 0, 1, 2))]
    assert admitted(again) == [0, 0], "the second time"


def test_a_clock_that_jumps_loses_nothing_but_for_once() -> None:
    times = [100.0, 100.001, 50.0, 50.001, 50.06, 4e10, 50.07]
    assert admitted([step_line(n, time=time) for n, time in enumerate(times)]) == [0, 2, 4, 5, 6]


def test_who_begins_again_at_a_step_that_is_there_finds_the_same_ones() -> None:
    draw = random.Random(1)
    lines, time = [], 100.0
    for number in range(300):
        time += draw.choice((0.001, 0.01, 0.1))
        lines.append(step_line(number, time=time, workers=draw.choice((1, 1, 1, 2))))
    there = admitted(lines)
    for step in there:
        assert admitted(lines[step:]) == [each for each in there if each >= step]
