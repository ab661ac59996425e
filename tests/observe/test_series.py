"""A number by step, of which a picture has few points: the envelope is whole, and patches bring it up to date."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from farandole.observe.story import BUCKETS, POINTS, PageState, Patch, Series

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


def whole(series: Series) -> Patch:
    patch = series.patch(PageState())
    return patch or Patch(at=0, x=[], y=[])


class Picture:
    """A page's, which is brought up to date by patches alone."""

    def __init__(self) -> None:
        self.seen = PageState()
        self.x: list[int] = []
        self.y: list[float | None] = []

    def take(self, series: Series) -> int:
        """How many points it was sent."""
        patch = series.patch(self.seen)
        if patch is None:
            return 0
        self.x[patch.at :], self.y[patch.at :] = patch.x, patch.y
        return len(patch.x)


def filled(values: list[float], first: int = 0) -> Series:
    series = Series()
    for step, value in enumerate(values, first):
        series.put(step, value)
    return series


def test_no_spike_is_lost_among_a_million_steps() -> None:
    series = Series()
    for step in range(1_000_000):
        series.put(step, 9.0 if step == 654_321 else -9.0 if step == 123_457 else 1.0)
    drawn = whole(series)
    assert len(drawn.x) <= POINTS
    points = dict(zip(drawn.x, drawn.y, strict=True))
    assert points[654_321] == 9.0
    assert points[123_457] == -9.0
    assert drawn.x == sorted(drawn.x)
    assert 999_999 in drawn.x or max(drawn.x) > 997_000


@given(st.lists(NUMBERS, max_size=2 * BUCKETS + 7))
def test_least_and_greatest_of_each_bucket_are_drawn_at_their_own_steps(values: list[float]) -> None:
    series = filled(values)
    drawn = whole(series)
    width = 1 if len(values) <= BUCKETS else 2 if len(values) <= 2 * BUCKETS else 4
    for number in range(0, len(drawn.x), 2):
        bucket = [v for v in values[number // 2 * width : (number // 2 + 1) * width] if math.isfinite(v)]
        shown = drawn.y[number : number + 2]
        assert sorted(v for v in shown if v is not None) == ([min(bucket), max(bucket)] if bucket else [])
        for x, y in zip(drawn.x[number : number + 2], shown, strict=True):
            assert y is None or values[x] == y


DOINGS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 400)),
        st.tuples(st.just("cut"), st.integers(0, 1500)),
        st.tuples(st.just("back"), st.integers(0, 1500)),
        st.tuples(st.just("look"), st.just(0)),
    ),
    max_size=25,
)


@given(DOINGS, st.randoms(use_true_random=False))
def test_patches_come_to_what_the_whole_is_through_steps_taken_again(doings: list[tuple[str, int]], random) -> None:  # type: ignore[no-untyped-def]
    series, picture, step = Series(), Picture(), 0
    for what, amount in [*doings, ("look", 0)]:
        if what == "back" and amount < step:
            step = amount
        if what == "put":
            for _ in range(amount):
                series.put(step, random.random())
                step += 1
        elif what == "cut" and amount < step:
            series.cut(amount)
            step = amount
        elif what == "look":
            picture.take(series)
            assert (picture.x, picture.y) == (whole(series).x, whole(series).y)


def test_a_patch_is_what_is_new_and_the_history_comes_again_only_when_the_width_doubles() -> None:
    series, picture = Series(), Picture()
    sent: list[int] = []
    for step in range(40_000):
        series.put(step, float(step % 7))
        if step % 10 == 9:
            sent.append(picture.take(series))
    again = [count for count in sent if count > 24]
    assert len(again) == 7, "at 601 steps, 1,201, 2,401 ..."
    assert series.patch(picture.seen) is None, "nothing is new"


def test_a_gap_is_no_number() -> None:
    drawn = whole(filled([1.0, math.nan, math.inf, 2.0]))
    assert drawn.y == [1.0, 1.0, None, None, None, None, 2.0, 2.0]
    assert filled([math.nan]).last is None
    assert filled([3.0]).last == 3.0
