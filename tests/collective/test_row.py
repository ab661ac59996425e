"""Memory that shows what lies elsewhere: any order of showing, hiding and writing, against a list of numbers."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.collective import shm_sums as rows
from farandole.collective.arena import PAGE, Segment
from farandole.collective.shm_sums import Row

ELEMENTS = PAGE // 4  # of float32 in a page
PARTS = 4

act = st.tuples(
    st.sampled_from(["show", "own", "write", "write elsewhere"]), st.integers(0, PARTS - 1), st.integers(1, 99)
)


@settings(max_examples=50, deadline=None)
@given(st.lists(act, max_size=12))
def test_a_row_shows_what_lies_elsewhere_and_keeps_what_is_written_to_itself(acts: list[tuple[str, int, int]]) -> None:
    segment = Segment(0, PARTS * PAGE)
    segment.take(segment.size)
    elsewhere = torch.frombuffer(segment.map, dtype=torch.float32)
    row = Row(PARTS * ELEMENTS, torch.float32)
    shown: dict[int, int] = {}  # part of the row: part of the segment
    alone: dict[int, float] = {}  # what is written, or was before anything was shown
    held = [0.0] * PARTS
    for what, part, number in acts:
        start = part * ELEMENTS
        if what == "show":
            there = number % PARTS
            row.show(start, ELEMENTS, segment, there * PAGE)
            if shown.get(part) != there:
                alone.pop(part, None)
            shown[part] = there
        elif what == "own":
            row.own(start)
            if shown.pop(part, None) is not None:
                alone[part] = 0.0
        elif what == "write":
            row.tensor[start : start + ELEMENTS] = number
            alone[part] = float(number)
        else:
            elsewhere[start : start + ELEMENTS] = number
            held[part] = float(number)
        for each in range(PARTS):
            expected = alone[each] if each in alone else held[shown[each]] if each in shown else 0.0
            assert set(row.tensor[each * ELEMENTS : (each + 1) * ELEMENTS].tolist()) == {expected}
        assert [elsewhere[each * ELEMENTS].item() for each in range(PARTS)] == held
        assert row.written == bool(alone.keys() & shown.keys())


def test_one_that_can_not_be_looked_at_counts_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_PAGE_MAP", "/proc/self/no such file")
    assert Row(ELEMENTS, torch.float32).written


@pytest.mark.parametrize(("start", "offset"), [(16, 0), (0, 64)])
def test_what_does_not_begin_with_a_page_is_not_shown(start: int, offset: int) -> None:
    segment = Segment(0, 4 * PAGE)
    with pytest.raises(OSError, match=str(offset)) as caught:
        Row(4 * ELEMENTS, torch.float32).show(start, ELEMENTS, segment, offset)
    assert caught.value.errno is None, "it was not even tried"


def test_what_can_not_be_mapped_says_why() -> None:
    with open("/dev/null") as nothing, pytest.raises(OSError, match=os.strerror(errno.ENODEV)):
        Row(ELEMENTS, torch.float32).show(0, ELEMENTS, _File(nothing.fileno()), 0)


class _File:
    def __init__(self, file: int) -> None:
        self.file = file
