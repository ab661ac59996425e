"""The pools of a run on a market: what the shipped decisions come to there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.market.play import Machines, Moment, SpotType
from farandole.market.pools import PoolsOfRun
from farandole.pool.reconciler import PoolReconciler
from farandole.protocol.coordinator import scaling
from farandole.protocol.messages import Roster
from tests.support.market import fleet, moment


def next_moment(now: Moment, decided: Machines, available: tuple[int, ...]) -> Moment:
    """The moment an interval later, after the market has taken machines back."""
    spot = tuple(map(min, decided.spot, available))
    return replace(
        now, time_s=now.time_s + now.gap_s, available=available, fleet=Machines(spot=spot, on_demand=decided.on_demand)
    )


@given(
    history=st.lists(
        st.tuples(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.integers(0, 4)), min_size=1, max_size=30
    ),
    most=st.integers(4, 8),
)
def test_all_that_is_there_runs_and_what_runs_stays(history: list[tuple[tuple[int, int], int]], most: int) -> None:
    pools, now = PoolsOfRun(most), moment(available=(0, 0), fleet=fleet(0, 0))
    decided = now.fleet
    for available, on_demand in history:
        now = next_moment(now, decided, available)
        decided = pools.decide(now, on_demand)
        assert decided.on_demand == on_demand
        assert sum(decided.spot) == min(sum(available), most - on_demand)
        assert all(spot <= there for spot, there in zip(decided.spot, available, strict=True))
        if sum(now.fleet.spot) <= most - on_demand:
            assert all(after >= before for after, before in zip(decided.spot, now.fleet.spot, strict=True))
        else:
            assert all(after <= before for after, before in zip(decided.spot, now.fleet.spot, strict=True))


@given(history=st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_a_reserve_comes_first_and_spot_machines_have_the_rest(history: list[int]) -> None:
    pools, now, decided = PoolsOfRun(8, reserve=2), moment(), fleet(0)
    for there in history:
        now = next_moment(now, decided, (there,))
        decided = pools.decide(now)
        assert decided == fleet(min(there, 6), on_demand=2)


def test_the_newest_worker_leaves_wherever_it_is() -> None:
    pools, now = PoolsOfRun(4), moment(available=(1, 2), fleet=fleet(0, 0))
    first = pools.decide(now)
    assert first == fleet(1, 2)
    now = next_moment(now, first, (2, 2))
    second = pools.decide(now)
    assert second == fleet(2, 2)
    assert pools.decide(next_moment(now, second, (2, 2)), on_demand=1) == fleet(1, 2, on_demand=1)


def test_the_market_takes_the_oldest_machine_of_a_zone() -> None:
    pools, now, decided = PoolsOfRun(3), moment(available=(0, 0), fleet=fleet(0, 0)), fleet(0, 0)
    for available in ((1, 0), (1, 1), (2, 1), (1, 1)):
        now = next_moment(now, decided, available)
        decided = pools.decide(now)
        assert decided.spot == available
    now = next_moment(now, decided, (1, 1))
    assert pools.decide(now, on_demand=2) == fleet(0, 1, on_demand=2), "the one in the first zone is newer"


def test_machines_that_do_more_for_a_dollar_come_first_then_the_zone_with_most_room() -> None:
    types = (SpotType(speed=1.0, dollars=0.5), SpotType(speed=1.0, dollars=0.5), SpotType(speed=0.5, dollars=0.2))
    now = moment(available=(2, 3, 1), fleet=fleet(0, 0, 0), types=types)
    assert PoolsOfRun(3).decide(now) == fleet(0, 2, 1)


def test_the_decisions_are_the_shipped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reconciler that starts one worker less, and a rule by which nobody leaves, show."""
    now = moment(available=(3,))
    update = PoolReconciler.update

    def one_less(self: PoolReconciler, roster: Roster, now: float) -> None:
        update(self, Roster(mark=roster.mark, wanted=max(roster.wanted - 1, 0), leaving=roster.leaving), now)

    with monkeypatch.context() as patched:
        patched.setattr(PoolReconciler, "update", one_less)
        assert PoolsOfRun(3).decide(now) == fleet(2)
    monkeypatch.setattr(f"{PoolsOfRun.__module__}.surplus", lambda workers, _: workers[:0])
    pools = PoolsOfRun(3)
    after = next_moment(now, pools.decide(now), (3,))
    assert pools.decide(after, on_demand=1) == fleet(3, on_demand=1)
    assert scaling.surplus(["a", "b", "c"], 1) == ["b", "c"]
