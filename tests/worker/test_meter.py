"""The meter of a worker's time: no moment is in two classes, and none in none."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from farandole.platform.process import age_s
from farandole.protocol.values import SAID
from farandole.worker.timing import Meter


class Clock:
    """In nanoseconds, as it is set."""

    def __init__(self) -> None:
        self.now = 5_000_000_000

    def __call__(self) -> int:
        return self.now


moves = st.lists(st.tuples(st.sampled_from(SAID), st.integers(0, 10**12)), max_size=30)


@given(moves, st.integers(0, 1000))
def test_the_classes_add_up_to_the_time(moves: list[tuple[str, int]], already_s: int) -> None:
    clock = Clock()
    meter = Meter(float(already_s), clock)
    expected = dict.fromkeys(SAID, 0)
    expected["start"], current, before = already_s * 10**9, "start", meter.said()
    for name, ns in moves:
        clock.now += ns
        expected[current] += ns
        said = meter.said()
        assert all(new >= old for new, old in zip(said, before, strict=True)), "a class never shrinks"
        meter.enter(name)  # type: ignore[arg-type]
        assert meter.said() == said, "to change takes no time"
        current, before = name, said
    assert meter.said() == tuple(expected[name] // 1000 for name in SAID)
    wall_us = (clock.now - 5_000_000_000) // 1000 + already_s * 10**6
    assert wall_us - len(SAID) <= sum(meter.said()) <= wall_us, "to the microsecond of each class"


def test_it_is_read_while_it_is_written() -> None:
    """Sums that are read in between never shrink, and never hold a moment twice."""
    meter, over = Meter(), threading.Event()

    def write() -> None:
        while not over.is_set():
            for name in ("data", "compute", "exchange"):
                meter.enter(name)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        first, least = Meter(), meter.said()
        for _ in range(3000):
            said = meter.said()
            assert all(new >= old for new, old in zip(said, least, strict=True))
            least = said
        assert sum(meter.said()) <= sum(first.said()) + sum(least), "no more than the time that has passed"
    finally:
        over.set()
        thread.join()


def test_the_system_knows_how_old_this_process_is() -> None:
    assert 0.0 < age_s() < 86400.0
    assert age_s() <= age_s()
