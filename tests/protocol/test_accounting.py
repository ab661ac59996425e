"""What the coordinator keeps of its workers' time: whole, bounded by its own clock, written down once at the end."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol import events
from farandole.protocol.coordinator import accounting
from farandole.protocol.coordinator.accounting import EARLY_S, MICRO, PERIOD_S
from farandole.protocol.coordinator.state import (
    EXIT_EVICTED,
    CoordinatorState,
    Departed,
    Ending,
    Record,
    RunSettings,
    Worker,
)
from farandole.protocol.failure_detector import Silence
from farandole.protocol.messages import Heartbeat
from farandole.protocol.values import CLASSES, MEANING, SAID, LinkUse

LATE_S = 5.0


def state(*workers: str) -> CoordinatorState:
    made = CoordinatorState(RunSettings(run="r", heartbeat_timeout_s=LATE_S))
    for worker in workers:
        come(made, worker)
    return made


def come(made: CoordinatorState, worker: str, session: str = "s", attempt: int = 1) -> Worker:
    made.workers[worker] = Worker(
        id=worker, host="h", pid=1, pool="local", silence=Silence(), session=session, attempt=attempt
    )
    return made.workers[worker]


def beat(step: int = 3, **seconds: float) -> Heartbeat:
    return Heartbeat(view=1, step=step, time_us=tuple(round(MICRO * seconds.get(name, 0.0)) for name in SAID))


def written(made: CoordinatorState) -> list[events.TimeSpentEvent]:
    found = [a.event for a in made.actions if isinstance(a, Record) and isinstance(a.event, events.TimeSpentEvent)]
    made.actions.clear()
    return found


def say(made: CoordinatorState, worker: str, now: float, **seconds: float) -> None:
    accounting.on_heartbeat(made, made.workers[worker], beat(**seconds), now)


def last(made: CoordinatorState, worker: str) -> dict[str, float]:
    return dict(written(made)[-1].workers[worker].seconds)


def test_every_class_has_a_meaning() -> None:
    assert tuple(MEANING) == CLASSES == (*SAID, "lost")


def test_it_is_written_down_from_time_to_time_and_only_what_is_new() -> None:
    made = state("a", "b")
    say(made, "a", 0.0, start=1.5)
    say(made, "b", 0.0, start=2.0)
    accounting.tick(made, 0.1)
    (line,) = written(made)
    assert {w: dict(t.seconds) for w, t in line.workers.items()} == {"a": {"start": 1.5}, "b": {"start": 2.0}}
    assert line.ended == ()
    say(made, "a", 5.0, start=1.5, compute=5.0)
    accounting.tick(made, PERIOD_S)
    assert not written(made), "not yet"
    accounting.tick(made, PERIOD_S + 0.2)
    (line,) = written(made)
    assert list(line.workers) == ["a"]
    assert (line.workers["a"].host, line.workers["a"].pool, line.workers["a"].step) == ("h", "local", 3)
    accounting.tick(made, 3 * PERIOD_S)
    assert not written(made), "nothing is new"


def test_with_many_workers_lines_are_rarer() -> None:
    made = state(*(f"w{n}" for n in range(1000)))
    for n in range(1000):
        say(made, f"w{n}", 0.0, start=1.0)
    accounting.tick(made, 0.1)
    written(made)
    say(made, "w1", 20.0, start=1.0, compute=20.0)
    accounting.tick(made, 50.0)
    assert not written(made)
    accounting.tick(made, 101.0)
    assert written(made)


@pytest.mark.parametrize(
    ("departed", "rest"),
    [
        (None, "lost"),  # its process has ended
        (Departed(session="s", reason="left gracefully", code=0, started=True), "end"),
        (Departed(session="s", reason="evicted: no heartbeat", code=EXIT_EVICTED, started=True), "lost"),
    ],
)
def test_what_it_could_not_say_any_more_is_added(departed: Departed | None, rest: str) -> None:
    made = state("a", "b")
    say(made, "a", 0.0, start=2.0)
    say(made, "a", 7.0, start=2.0, compute=7.0)
    accounting.tick(made, 7.1)
    written(made)
    del made.workers["a"]
    if departed:
        made.departed["a"] = departed
    accounting.tick(made, 8.25)
    (line,) = written(made)
    assert line.ended == ("a",)
    assert dict(line.workers["a"].seconds) == {"start": 2.0, "compute": 7.0, rest: 1.25}
    accounting.tick(made, 20.0)
    assert not written(made), "once"


def test_when_the_run_is_over_all_have_their_last_word() -> None:
    made = state("a", "b")
    for worker in "ab":
        say(made, worker, 1.0, start=2.0, end=0.5)
    made.clock, made.over = 1.5, Ending(code=0, reason="done", failed=False)
    accounting.close(made)
    (line,) = written(made)
    assert line.ended == ("a", "b")
    assert {w: dict(t.seconds) for w, t in line.workers.items()} == {w: {"start": 2.0, "end": 1.0} for w in "ab"}
    say(made, "a", 1.6, start=2.0, end=1.1)
    accounting.close(made)
    assert not written(made), "what is said afterwards is nobody's"


# --- what can't be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [
        {"start": 1.0, "compute": 1e6},  # more than the time that has passed
        {"start": 0.5, "compute": 4.0},  # a class has shrunk
        {},
    ],
)
def test_what_can_not_be_is_passed_over(lie: dict[str, float]) -> None:
    made = state("a")
    say(made, "a", 0.0, start=1.0)
    say(made, "a", 3.0, start=1.0, compute=3.0)
    say(made, "a", 4.0, **lie)
    made.workers.clear()
    accounting.tick(made, 5.0)
    assert last(made, "a") == {"start": 1.0, "compute": 3.0, "lost": 2.0}


def test_a_word_of_another_length_says_nothing() -> None:
    made = state("a")
    accounting.on_heartbeat(made, made.workers["a"], Heartbeat(time_us=(1, 2)), 0.0)
    accounting.on_heartbeat(made, made.workers["a"], Heartbeat(), 0.0)
    accounting.tick(made, 0.1)
    assert not written(made)


def test_nobody_has_lasted_for_long_before_its_first_word() -> None:
    made = state("a")
    say(made, "a", 0.0, start=EARLY_S + 1.0)
    accounting.tick(made, 0.1)
    assert not written(made)
    say(made, "a", 1.0, start=3.0)
    made.workers.clear()
    accounting.tick(made, 1.0)
    assert last(made, "a") == {"start": 3.0}


def test_a_coordinator_that_is_back_hears_all_of_it_again() -> None:
    made = state()
    come(made, "a", attempt=4)
    say(made, "a", 0.0, start=2.0, compute=1e6)
    made.workers.clear()
    accounting.tick(made, 0.5)
    assert last(made, "a") == {"start": 2.0, "compute": 1e6, "lost": 0.5}


def test_another_process_of_that_name_has_a_time_of_its_own() -> None:
    made = state("a")
    say(made, "a", 0.0, start=2.0)
    say(made, "a", 4.0, start=2.0, compute=4.0)
    come(made, "a", session="another")
    say(made, "a", 10.0, start=1.0)
    (line,) = written(made)
    assert line.ended == ("a",)
    assert dict(line.workers["a"].seconds) == {"start": 2.0, "compute": 4.0, "lost": 6.0}
    made.workers.clear()
    accounting.tick(made, 10.0)
    assert last(made, "a") == {"start": 1.0}


words = st.lists(
    st.tuples(st.floats(0.01, 20.0), st.lists(st.integers(0, 2**53), min_size=len(SAID), max_size=len(SAID))),
    max_size=12,
)


@given(words, st.floats(0.0, 100.0))
def test_whatever_is_said_no_one_has_more_time_than_there_was(words: list[tuple[float, list[int]]], end: float) -> None:
    made, now, first = state("a"), 100.0, None
    for passes, said in words:
        now += passes
        accounting.on_heartbeat(made, made.workers["a"], Heartbeat(time_us=tuple(said)), now)
        if first is None and "a" in made.reported_times:
            first = (now, sum(said) / MICRO)
    made.workers.clear()
    accounting.tick(made, now + end)
    if first is None:
        assert not written(made)
        return
    total = sum(last(made, "a").values())
    began, early = first
    assert early <= EARLY_S
    assert total <= early + (now + end - began) + LATE_S + 1e-3


# --- bytes between hosts ----------------------------------------------------------------------------------------------


def use(made: CoordinatorState, worker: str, now: float, *links: LinkUse, seconds: float = 1.0) -> None:
    told = msgspec.structs.replace(beat(compute=seconds), links=links)
    accounting.on_heartbeat(made, made.workers[worker], told, now)


def sent_by(made: CoordinatorState, worker: str) -> dict[str, tuple[int, int]] | None:
    sent = written(made)[-1].workers[worker].sent
    return None if sent is None else {host: (each.exchange, each.state) for host, each in sent.items()}


def test_bytes_are_written_with_the_times() -> None:
    made = state("a")
    say(made, "a", 0.0, compute=1.0)
    accounting.tick(made, 0.0)
    assert sent_by(made, "a") is None, "it has not reported them"
    use(made, "a", 1.0, LinkUse(host="x", exchange_bytes=5, state_bytes=2), LinkUse(host="y"), seconds=2.0)
    say(made, "a", 2.0, compute=3.0)  # this heartbeat has none
    accounting.tick(made, PERIOD_S)
    assert sent_by(made, "a") == {"x": (5, 2), "y": (0, 0)}
    del made.workers["a"]
    accounting.tick(made, PERIOD_S + 1)
    assert sent_by(made, "a") == {"x": (5, 2), "y": (0, 0)}
    assert made.links.links() == ()


def test_the_zone_is_written_with_the_times() -> None:
    made = state("a", "b")
    made.workers["b"].zone = "east"
    for worker in "ab":
        say(made, worker, 0.0, compute=1.0)
    accounting.tick(made, 0.0)
    assert {worker: each.zone for worker, each in written(made)[-1].workers.items()} == {"a": "", "b": "east"}


@pytest.mark.parametrize(
    "links",
    [
        (LinkUse(host="x", exchange_bytes=4, state_bytes=2),),  # shrunk
        (LinkUse(host="x", exchange_bytes=5, state_bytes=1),),
        (LinkUse(host="y", exchange_bytes=9),),  # x is gone
        (),
        (LinkUse(host="x", exchange_bytes=5, state_bytes=2), LinkUse(host="h", exchange_bytes=1)),  # its own host
        (LinkUse(host="x", exchange_bytes=5, state_bytes=2),) * 2,
    ],
)
def test_impossible_bytes_are_passed_over(links: tuple[LinkUse, ...]) -> None:
    made = state("a")
    use(made, "a", 0.0, LinkUse(host="x", exchange_bytes=5, state_bytes=2))
    use(made, "a", 1.0, *links, seconds=2.0)
    accounting.tick(made, 1.0)
    assert sent_by(made, "a") == {"x": (5, 2)}


def test_a_coordinator_that_is_restarted_hears_the_sums_again() -> None:
    made = state()
    come(made, "a", attempt=2)
    use(made, "a", 0.0, LinkUse(host="x", exchange_bytes=10**12), seconds=10_000.0)
    accounting.tick(made, 0.0)
    assert sent_by(made, "a") == {"x": (10**12, 0)}


def test_another_process_of_that_name_begins_at_nothing() -> None:
    made = state("a")
    use(made, "a", 0.0, LinkUse(host="x", exchange_bytes=5), seconds=3.0)
    come(made, "a", session="t")
    use(made, "a", 1.0, LinkUse(host="x", exchange_bytes=1), seconds=0.5)
    assert sent_by(made, "a") == {"x": (5, 0)}
    accounting.close(made)
    assert sent_by(made, "a") == {"x": (1, 0)}
