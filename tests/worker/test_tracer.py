"""What a worker keeps of its steps while somebody asks, when it answers, and that it keeps nothing else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from farandole.collective.exchange import WaitRecord
from farandole.protocol import messages as m
from farandole.protocol.messages import MOST_TAKEN
from farandole.protocol.values import SAID, TimeClass
from farandole.worker.fake import FakeContext
from farandole.worker.timing import SPARE_S, Meter, Tracer

MS = 1_000_000


class Scene:
    """A worker that takes steps of 400 ms, on a clock of its own; `wait` of them it waits for its peer."""

    def __init__(self) -> None:
        self.now = 7_000 * MS
        self.meter = Meter(clock=lambda: self.now)
        self.told: list[m.Spans] = []
        self.tracer = Tracer(self.meter, self.told.append, wall_ns=lambda: self.now + 10**18)
        self.step = 0

    def take(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.tracer.begins(self.step)
            for name, ms in (("data", 100), ("compute", 100), ("exchange", 150)):
                self.enter(name, ms)
            self.tracer.waits.add("peer", self.now - 50 * MS, self.now)
            self.tracer.ended()
            self.enter("compute", 50)  # the update
            self.step += 1

    def enter(self, name: Any, ms: int) -> None:
        self.meter.enter(name)
        self.now += ms * MS


def test_it_tells_of_the_steps_that_were_asked_for_and_of_one_more() -> None:
    scene = Scene()
    scene.take(2)
    scene.tracer.ask(m.Trace(number=5, steps=3))
    scene.take(4)
    assert scene.told == []
    scene.take(2)
    [told] = scene.told
    assert told.number == 5
    assert told.steps == tuple((step, 400_000 * n, 400_000 * n + 350_000) for n, step in enumerate((2, 3, 4, 5, 6)))
    assert [(SAID[kind], began, took) for kind, began, took in told.spans[:4]] == [
        ("data", 0, 100_000), ("compute", 100_000, 100_000),
        ("exchange", 200_000, 150_000), ("compute", 350_000, 50_000),
    ]  # fmt: skip
    assert len(told.spans) == 4 * len(told.steps)
    assert told.peers == ("peer",)
    assert told.waits == tuple((0, 400_000 * n + 300_000, 50_000) for n in range(5))
    assert told.wall_us == (7_000 * MS + 2 * 400 * MS + 10**18) // 1000
    assert not told.full
    assert 400 * MS < 1e9 * SPARE_S < 800 * MS, "so it was two steps more here"


def test_the_spans_are_all_of_the_time_and_do_not_overlap() -> None:
    scene = Scene()
    scene.tracer.ask(m.Trace(number=1, steps=2))
    scene.take(6)
    [told] = scene.told
    at = 0
    for _, began, took in told.spans:
        assert began == at
        at += took
    assert at == 400_000 * len(told.steps)
    assert sum(scene.meter.said()) == (scene.now - 7_000 * MS) // 1000, "the account is what it is without"


def test_nothing_is_kept_before_nor_after() -> None:
    scene = Scene()
    scene.take(2)
    assert scene.tracer.waits.recorded is None
    scene.tracer.ask(m.Trace(number=1, steps=1))
    scene.take(4)
    assert len(scene.told) == 1
    assert scene.tracer.waits.recorded is None
    scene.take(3)
    assert len(scene.told) == 1
    scene.tracer.ask(m.Trace(number=1, steps=1))
    assert scene.told[1:] == scene.told[:1], "asked again: the connection had broken"


def test_asked_to_end_it_tells_what_it_has_and_whom_it_waits_for() -> None:
    scene = Scene()
    scene.tracer.ask(m.Trace(number=1, steps=900))
    scene.take(1)
    scene.tracer.begins(1)
    scene.enter("exchange", 200)
    scene.tracer.ask(m.Trace(number=1, steps=0), (3, "late", (scene.now - 150 * MS) / 1e9))
    [told] = scene.told
    assert told.steps[1:] == ((1, 400_000, 0),), "whose round has not ended"
    assert (SAID[told.spans[-1][0]], *told.spans[-1][1:]) == ("exchange", 400_000, 200_000)
    assert told.peers[told.waits[-1][0]] == "late"
    assert told.waits[-1][1:] == (450_000, 150_000)
    scene.take(3)
    assert len(scene.told) == 1


def test_one_that_has_not_begun_is_told_to_be_empty() -> None:
    scene = Scene()
    scene.tracer.ask(m.Trace(number=1, steps=0))
    scene.tracer.ask(m.Trace(number=2, steps=5))
    scene.tracer.closes()
    scene.tracer.ask(m.Trace(number=3, steps=5))
    assert scene.told == [m.Spans(number=1), m.Spans(number=2), m.Spans(number=3)]


def test_the_end_of_the_script_is_one_of_the_trace() -> None:
    scene = Scene()
    scene.tracer.ask(m.Trace(number=1, steps=900))
    scene.take(2)
    scene.tracer.closes()
    assert [step for step, _, _ in scene.told[0].steps] == [0, 1]


def test_a_newer_trace_takes_the_place_of_the_one_before() -> None:
    scene = Scene()
    scene.tracer.ask(m.Trace(number=1, steps=1))
    scene.take(2)
    scene.tracer.ask(m.Trace(number=2, steps=1))  # as the one before would be done, if slowly
    scene.take(5)
    [told] = scene.told
    assert (told.number, told.steps[0][0]) == (2, 2)


def test_it_keeps_no_more_than_it_may() -> None:
    scene = Scene()
    scene.tracer.ask(m.Trace(number=1, steps=900, most=10))
    scene.take(8)
    [told] = scene.told
    assert (len(told.spans), told.full) == (10, True)
    assert len(told.waits) <= 10
    waits = WaitRecord()
    waits.most, waits.recorded = 2, []
    for at in range(5):
        waits.add("peer", at * MS, at * MS + 15_000)
        waits.add("peer", at * MS, at * MS + 20_000)
    assert len(waits.recorded) == 2
    quick = Scene()
    quick.tracer.ask(m.Trace(number=1, steps=1))
    for step in range(MOST_TAKEN + 1):
        quick.now += 10
        quick.tracer.begins(step)
    [told] = quick.told
    assert len(told.steps) == MOST_TAKEN, "of steps that take next to nothing"


@given(st.lists(st.tuples(st.sampled_from(SAID), st.integers(0, 10**9), st.booleans()), max_size=30))
def test_a_meter_hands_over_each_span_once(moves: list[tuple[TimeClass, int, bool]]) -> None:
    now = 0
    meter = Meter(clock=lambda: now)
    kept: list[tuple[str, int, int]] = []
    begun = meter.cut(lambda *span: kept.append(span))
    for name, ns, cut in moves:
        now += ns
        if cut:
            assert meter.cut(lambda *span: kept.append(span)) == now
        meter.enter(name)
    ended = meter.cut(None)
    meter.enter("end" if meter.current != "end" else "data")
    assert sum(end - begin for _, begin, end in kept) == ended - begun
    assert all(one[2] == other[1] for one, other in pairwise(kept))
    assert all(begin < end for _, begin, end in kept)


def test_a_context_tells_the_coordinator() -> None:
    worker = FakeContext()
    worker.tracer.ask(m.Trace(number=4, steps=0))
    assert worker.messages == [m.Spans(number=4)]
