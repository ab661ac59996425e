"""Traces that are drawn from a model of a trace."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.market.model import drawn
from farandole.market.traces import MarketTrace


def trace(*counts: int, name: str = "zone") -> MarketTrace:
    return MarketTrace(name=name, gap_s=300, counts=counts)


def stays(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(count, len([*same])) for count, same in groupby(counts)]


@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=60), seed=st.integers(0, 5))
def test_a_drawn_trace_has_the_stays_and_changes_of_the_trace(counts: list[int], seed: int) -> None:
    whole = trace(*counts)
    found = drawn(whole, seed)
    assert (found.name, found.gap_s, len(found.counts)) == ("zone", 300, len(counts))
    assert found.counts[0] == counts[0]
    known = stays(whole.counts)
    changes = {(a, b) for (a, _), (b, _) in zip(known, [*known[1:], known[0]], strict=True)}
    new = stays(found.counts)
    assert {(a, b) for (a, _), (b, _) in pairwise(new)} <= changes
    if known[0][0] != known[-1][0]:  # else the last and the first stay may follow each other
        assert set(new[:-1]) <= set(known), "only the last one may be cut"


def test_a_seed_gives_one_trace_and_zones_differ() -> None:
    whole = trace(*(0, 1, 2, 1, 3, 0, 2, 2, 1) * 20)
    assert drawn(whole, 1) == drawn(whole, 1)
    assert drawn(whole, 1).counts != drawn(whole, 2).counts
    other = trace(*whole.counts, name="other")
    assert drawn(other, 1).counts != drawn(whole, 1).counts


def test_the_part_of_the_time_with_a_machine_is_that_of_the_trace_in_the_mean() -> None:
    whole = trace(*(0,) * 30, *(1,) * 10, *(0,) * 5, *(2,) * 15, *(0,) * 20, *(1,) * 20)
    parts = [drawn(whole, seed).availability for seed in range(400)]
    assert sum(parts) / len(parts) == pytest.approx(whole.availability, abs=0.05)
