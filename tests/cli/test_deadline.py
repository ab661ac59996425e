"""`farandole run --deadline`: the target of the pool of on-demand machines, and which pools a run must have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.cli import deadline
from farandole.cli.deadline import (
    LONGEST_FIRST_START_S,
    MARGIN,
    OnDemandDecision,
    OnDemandTarget,
    checked_speeds,
    meet_deadline,
)
from farandole.control.api import Api
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable, UsageError
from farandole.protocol.events import CoordinatorBackEvent, ViewEvent
from farandole.protocol.metrics import StepLine
from farandole.protocol.settings import PoolTerms
from tests.support.mentioned import mentions

LINEAR = tuple(float(n) for n in range(1, 17))
SPOT, RESERVE = PoolTerms(name="spot", size=4), PoolTerms(name="reserve", size=2)


def line(step: int, total: int, when: float, seconds: float, workers: int, samples: int = 8) -> StepLine:
    return StepLine(
        step=step, epoch=0, samples=samples, loss=1.0, seconds=seconds, samples_per_s=None, view=1, workers=workers,
        time=when, total=total, factor=None,
    )  # fmt: skip


def view(members: Sequence[str], when: float) -> ViewEvent:
    return ViewEvent(view=1, members=tuple(members), round=0, step=0, cause="", time=when)


class PlayedRun:
    """A run of `total` steps that takes `step_s` seconds a step with one worker, second by second.

    `spot`: how many workers the other pools have, by the second. A worker of the last pool takes `start_s`.
    """

    def __init__(
        self, total: int, deadline: float, spot: Callable[[int], int], *, most: int = 4, start_s: int = 5,
        step_s: float = 1.0, speeds: Sequence[float] = LINEAR, known: bool = False,
    ) -> None:  # fmt: skip
        self.target = OnDemandTarget(
            pool="reserve", most=most, start_s=start_s, begins=0.0, deadline=deadline, speeds=speeds if known else ()
        )
        self.counts, self.late = list[int](), list[float]()
        self.done_s: float | None = None
        starts, done, written, members = list[int](), 0.0, -1, -1
        for now in range(10_000):
            decision = self.target.decide(now)
            self.counts.append(decision.count)
            self.late.append(decision.late_s)
            starts = [*starts[: decision.count], *[now + start_s] * (decision.count - len(starts))]
            running = sum(start <= now for start in starts)
            workers = running + spot(now)
            if members != (members := running):
                self.target.take(view([f"reserve-w{n}" for n in range(running)], now))
            speed = speeds[workers - 1] / step_s if workers else 0.0
            before, done = done, done + speed
            while written < min(int(done), total) - 1:
                written += 1
                self.target.take(line(written, total, now + 1.0, 1 / speed, workers))
            if done >= total:
                self.done_s = now + (total - before) / speed
                return


def test_a_run_that_spot_machines_finish_in_time_has_no_on_demand_machine() -> None:
    run = PlayedRun(100, 400, lambda _now: 2)
    assert set(run.counts) == {0}
    assert run.done_s == 50


def test_on_demand_machines_come_late_when_spot_machines_are_gone() -> None:
    run = PlayedRun(100, 300, lambda now: int(now < 50))
    assert run.done_s is not None
    assert run.done_s <= 300
    first = next(now for now, count in enumerate(run.counts) if count)
    assert 50 < first < 300 - 50 / 2, "two machines do 50 steps in 25 s"
    assert run.done_s > 250


def test_they_are_given_back_when_spot_machines_return() -> None:
    run = PlayedRun(200, 220, lambda now: 1 if now < 20 else 0 if now < 150 else 8)
    assert max(run.counts[:150]) > 0
    assert run.counts[-1] == 0
    assert run.done_s is not None
    assert run.done_s <= 220


def test_a_deadline_that_cannot_be_met_is_said_and_all_are_requested() -> None:
    run = PlayedRun(1_000, 100, lambda _now: 1, most=4)
    first = next(now for now, late in enumerate(run.late) if late)
    assert first < 10
    assert set(run.counts[first:]) == {4}
    # at `first`, 4 workers that begin 5 s later, do 4 steps a second
    left = 1_000 - first
    assert run.late[first] == pytest.approx((left - 4 * (100 - first - 5)) / 4, abs=5)


def test_without_a_step_one_worker_is_requested_after_a_part_of_the_time() -> None:
    run = OnDemandTarget(pool="reserve", most=4, start_s=1.0, begins=1_000.0, deadline=2_000.0)
    assert run.decide(1_099.0).count == 0
    assert run.decide(1_100.0).count == 1
    long = OnDemandTarget(pool="reserve", most=4, start_s=1.0, begins=0.0, deadline=1e6)
    assert long.decide(LONGEST_FIRST_START_S - 1).count == 0
    assert long.decide(LONGEST_FIRST_START_S).count == 1


def test_measured_speeds_count_where_more_workers_are_not_faster() -> None:
    """Three workers are as fast as two. With the speeds, it is known from the beginning."""
    speeds = (1.0, 2.0, 2.0, 4.0)
    known = PlayedRun(400, 210, lambda now: int(now < 60), most=3, speeds=speeds, known=True)
    assert known.done_s is not None
    assert known.done_s <= 210
    assert not any(known.late)


def test_samples_count_where_the_batch_follows_the_workers() -> None:
    """Two workers have steps of twice the samples, and half as many of them: they are twice as fast."""
    target = OnDemandTarget(pool="reserve", most=2, start_s=1.0, begins=0.0, deadline=1_000.0)
    for step in range(10):
        target.take(line(step, 1_000, step + 1.0, 1.0, 1, samples=8))
    for step in range(10, 20):
        target.take(line(step, 505, step + 1.0, 1.0, 2, samples=16))
    assert target.decide(20.0).count == 0, "485 steps of one second with two workers, in 980 s"
    assert target.decide(20.0).late_s == 0


def test_a_short_last_batch_of_an_epoch_does_not_count_for_all() -> None:
    target = OnDemandTarget(pool="reserve", most=1, start_s=1.0, begins=0.0, deadline=95.0)
    for step in range(9):
        target.take(line(step, 90, step + 1.0, 1.0, 1, samples=8))
    target.take(line(9, 90, 10.0, 1.0, 1, samples=1))
    assert target.decide(10.0).count == 1, "80 steps of a second in 85 s, with the start of 1 s and the margin"


def test_workers_of_a_pool_whose_name_begins_the_same_do_not_count() -> None:
    """With one worker of its own the pool would be in time; it has none, and another one comes too late."""
    target = with_steps_left(50, 60.0, most=1)
    target.take(view(["w1", "reserve-spot-w1"], 0.0))
    assert target.decide(5.9).late_s > 0
    target.take(view(["w1", "reserve-w1"], 5.9))
    assert target.decide(5.9).late_s == 0


def test_a_step_without_samples_says_nothing_about_the_speed() -> None:
    target = OnDemandTarget(pool="reserve", most=2, start_s=1.0, begins=0.0, deadline=1_000.0)
    target.take(line(0, 100, 1.0, 1.0, 1, samples=0))
    assert target.decide(1.0).left is None
    target.take(line(1, 100, 2.0, 1.0, 1))
    assert (target.decide(2.0).count, target.decide(2.0).left) == (0, 98)


def test_after_a_takeover_the_workers_are_those_that_came_back() -> None:
    target = OnDemandTarget(pool="reserve", most=1, start_s=1.0, begins=0.0, deadline=10.0 + 20 * MARGIN)
    target.take(CoordinatorBackEvent(workers=("w1", "reserve-w4"), time=9.0))
    target.take(line(79, 100, 10.0, 1.0, 1))
    decision = target.decide(10.0)
    assert (decision.count, decision.late_s, decision.left) == (1, 0.0, 20)


def with_steps_left(left: int, deadline: float, most: int) -> OnDemandTarget:
    """A run that has `left` steps left at 0.0, of a second with one worker. A worker of the pool starts in 5 s."""
    target = OnDemandTarget(pool="reserve", most=most, start_s=5.0, begins=-5.0, deadline=deadline)
    target.take(line(0, left + 1, 0.0, 1.0, 1))
    return target


def test_a_worker_that_has_been_requested_will_be_there() -> None:
    target = with_steps_left(50, 60.0, most=1)
    assert target.decide(1.0).count == 0, "53 s for it, if it is requested in a second"
    assert target.decide(2.0).count == 1
    assert target.decide(5.9).late_s == 0, "it computes in 1.1 s; another one that is requested now would be too late"
    assert with_steps_left(50, 60.0, most=1).decide(5.9).late_s > 0


def test_a_worker_that_does_not_come_counts_as_a_new_one() -> None:
    target = with_steps_left(50, 60.0, most=2)
    assert target.decide(28.0).count == 1
    target.take(line(19, 51, 38.5, 1.0, 1))
    assert target.decide(37.9).count == 1, "31 steps: one worker now, and one in 6 s"
    assert target.decide(39.0).count == 2


def test_a_worker_is_given_back_only_with_time_to_spare() -> None:
    target = with_steps_left(100, 130.0, most=1)
    target.take(view(["w1", "reserve-w1"], 0.0))
    assert target.decide(18.0).count == 1, "another one would be in time: it has 106 s for 105 s of work"
    assert target.decide(0.0).count == 0


def test_if_twice_the_machines_are_not_enough_there_are_more() -> None:
    assert with_steps_left(100, 200.0, most=4).decide(160.0).count == 2, "four would be in time a second later, too"
    assert with_steps_left(100, 200.0, most=4).decide(168.5).count == 3
    assert with_steps_left(100, 200.0, most=4).decide(171.0).count == 4


@given(
    spot=st.lists(st.integers(0, 3), min_size=1, max_size=30), total=st.integers(50, 400), start_s=st.integers(1, 30),
    most=st.integers(1, 6), slack=st.floats(1.15, 4.0), known=st.booleans(),
)  # fmt: skip
def test_the_deadline_is_met_whatever_the_spot_market_does(
    spot: list[int], total: int, start_s: int, most: int, slack: float, known: bool
) -> None:
    """Some spot machines are there at first, so that the speed is known. Without them the pool alone is in time."""
    first = start_s + 2
    deadline = first + slack * MARGIN * (total / most) + 2 * start_s

    def there(now: int) -> int:
        return 1 if now < first else spot[(now - first) // 7 % len(spot)]

    run = PlayedRun(total, deadline, there, most=most, start_s=start_s, known=known)
    assert run.done_s is not None
    assert run.done_s <= deadline


# --- the target of the pool -------------------------------------------------------------------------------------------


class ScriptedTarget(OnDemandTarget):
    """Decides as it is told, then as last."""

    def __init__(self, *decisions: OnDemandDecision) -> None:
        super().__init__(pool="reserve", most=4, start_s=1.0, begins=0.0, deadline=1.0)
        self.decisions, self.last = list(decisions), decisions[0]
        self.ended = asyncio.Event()

    def decide(self, now: float) -> OnDemandDecision:
        del now
        if not self.decisions:
            self.ended.set()  # the last one was carried out
            return self.last
        self.last = self.decisions.pop(0)
        return self.last


class ScriptedApi(Api):
    """Fails as it is told, once for each item; then it records the target."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(Ticket(address="http://127.0.0.1:1", secret="", run="r"))
        self.errors, self.scaled = list(errors), list[tuple[int, str]]()

    def scale(self, wanted: int, pool: str = "") -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.scaled.append((wanted, pool))


def decided(count: int, late_s: float = 0.0, left: int | None = 100) -> OnDemandDecision:
    return OnDemandDecision(count=count, late_s=late_s, left=left)


def met(
    monkeypatch: pytest.MonkeyPatch, target: ScriptedTarget, api: ScriptedApi, current: int | None = 0
) -> list[str]:  # fmt: skip
    """The lines that are shown until all decisions are made."""
    monkeypatch.setattr(deadline, "DECISION_S", 0.001)
    shown = list[str]()

    async def meet() -> None:
        task = asyncio.create_task(meet_deadline("reserve", api, target, shown.append, current))
        await target.ended.wait()
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(meet())
    return shown


def test_the_target_is_set_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ScriptedApi()
    shown = met(monkeypatch, ScriptedTarget(decided(0), decided(2), decided(2), decided(1), decided(1)), api)
    assert api.scaled == [(2, "reserve"), (1, "reserve")]
    assert len(shown) == 2
    assert mentions(shown[0], "reserve", 2, 0, 100)


def test_a_target_that_is_not_known_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ScriptedApi()
    met(monkeypatch, ScriptedTarget(decided(0), decided(0)), api, current=None)
    assert api.scaled == [(0, "reserve")]


def test_at_the_end_of_the_run_the_target_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ScriptedApi()
    met(monkeypatch, ScriptedTarget(decided(2), decided(0, left=0), decided(0, left=0)), api)
    assert api.scaled == [(2, "reserve")]


def test_a_coordinator_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ScriptedApi(CoordinatorUnreachable("gone"), CoordinatorUnreachable("gone"))
    shown = met(monkeypatch, ScriptedTarget(*[decided(2)] * 4), api)
    assert api.scaled == [(2, "reserve")]
    assert len(shown) == 1


def test_a_refusal_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ScriptedApi(UsageError("above --max 3"), UsageError("above --max 3"))
    shown = met(monkeypatch, ScriptedTarget(*[decided(2)] * 4), api)
    assert [mentions(line, "--max 3") for line in shown] == [True, False]


def test_a_run_that_is_late_says_so_once_and_that_it_is_not_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    late = decided(4, late_s=90.0)
    shown = met(monkeypatch, ScriptedTarget(late, late, decided(4), decided(4)), ScriptedApi(), current=4)
    assert [mentions(line, 90) for line in shown] == [True, False]


def test_the_pool_begins_without_workers_as_soon_as_the_coordinator_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "DECISION_S", 0.001)
    api = ScriptedApi(CoordinatorUnreachable("not yet"))
    asyncio.run(deadline.begin_without("reserve", api))
    assert api.scaled == [(0, "reserve")]


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pools", "named"),
    [
        ((), ("--deadline", "--pool")),
        ((SPOT,), ("--deadline", "--pool", "1")),
        ((SPOT, PoolTerms(name="own", kind="ec2")), ("--deadline", "own", "size", "--pool ec2,name=own,size=4")),
    ],
)
def test_a_deadline_needs_a_pool_of_on_demand_machines(pools: tuple[PoolTerms, ...], named: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        checked_speeds(None, None, "24h", pools, 1)
    assert mentions(str(caught.value), *named)


def test_speeds_of_a_file_for_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps([{"run": {"workers": n}, "samples_per_s": 9.0 * n} for n in (1, 2)]))
    assert checked_speeds(path, None, "24h", (SPOT, RESERVE), 4) == pytest.approx(LINEAR[:6])
    assert checked_speeds(None, "3m", "24h", (SPOT, RESERVE), 4) == ()
    assert checked_speeds(None, None, None, (), 1) == ()


def test_options_for_a_deadline_need_one(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    with pytest.raises(UsageError) as caught:
        checked_speeds(path, None, None, (SPOT, RESERVE), 1)
    assert mentions(str(caught.value), "--speeds", "--deadline", "scaling.json")
    with pytest.raises(UsageError) as caught:
        checked_speeds(None, "3m", None, (SPOT, RESERVE), 1)
    assert mentions(str(caught.value), "--start", "3m", "--deadline")


def test_the_other_pools_must_have_the_smallest_number_of_workers() -> None:
    with pytest.raises(UsageError) as caught:
        checked_speeds(None, None, "24h", (SPOT, RESERVE), 5)
    assert mentions(str(caught.value), "--deadline", "reserve", "--min 5")
