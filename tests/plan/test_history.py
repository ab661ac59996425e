"""Histories: what a line may say, and what an error says of one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import UsageError
from farandole.plan.shards import History


def test_each_line_holds_from_its_step_on() -> None:
    history = History.parse("# of a spot trace\n0 1\n\n10 4  # two hosts\n12 2\n", "h.txt")
    assert [history.workers(step) for step in (0, 9, 10, 11, 12, 1000)] == [1, 1, 4, 4, 2, 2]
    assert history.peak == 4


@given(workers=st.lists(st.integers(1, 9), min_size=1, max_size=50))
def test_of_steps_and_back_through_text(workers: list[int]) -> None:
    history = History.from_steps(enumerate(workers))
    assert [history.workers(step) for step in range(len(workers))] == workers
    assert History.parse(history.text(), "text") == history
    assert len(history.changes) == 1 + sum(a != b for a, b in itertools.pairwise(workers))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 4"),
        ("# nothing\n", "0 4"),
        ("0 2\nfive 3", "line 2: 'five 3'"),
        ("0 2\n5", "line 2: '5'"),
        ("0 2 3", "line 1: '0 2 3'"),
        ("0 2\n4 0", "line 2: '4 0'.*0 workers"),
        ("1 2", "line 1: '1 2'.*step 0"),
        ("0 2\n7 3\n7 4", "line 3: '7 4'.*step 7"),
    ],
)
def test_a_line_that_is_none_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"h.txt.*{message}"):
        History.parse(text, "h.txt")
