"""A ticket holder that talks nonsense: well-formed messages in an order that no worker of ours would send.

It holds the ticket, so the bits are at its mercy; the coordinator's process is not. Whatever comes, the state machine
raises nothing, keeps its state in order, and everything that it hands out can be written down and sent. Honest answers
are mixed in, so that nonsense meets proposed, stopped, failed and ending views too, and not only the first Hello.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farandole.errors import UsageError
from farandole.protocol import messages as m
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import Log, Record, RunSettings, Send
from farandole.protocol.metrics import as_written, metrics_line, parse_line
from farandole.protocol.view import Lineage, View
from tests.support.any_message import (
    MESSAGES,
    WORKERS,
    names,
)

ACTS = st.one_of(
    st.tuples(st.just("say"), st.sampled_from(WORKERS), MESSAGES),
    st.tuples(st.just("answer"), st.integers(1, 30)),
    st.tuples(st.just("come"), st.sampled_from(WORKERS)),
    st.tuples(st.just("go"), st.sampled_from(WORKERS)),
    st.tuples(st.just("tick"), st.sampled_from((0.1, 2.0, 31.0))),
    st.tuples(st.just("scale"), st.integers(0, 5)),
    st.tuples(st.just("release"), names),
    st.tuples(st.just("stop"), st.integers(0, 2)),
)


class Play:
    """A coordinator, its clock, and what it has said to whom that nobody has answered yet."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(RunSettings(run="r", wanted=2, minimum=1, maximum=3))
        self.now = 0.0
        self.unanswered: deque[Send] = deque(maxlen=200)
        self.views: dict[str, View] = {}
        for worker in WORKERS[:3]:
            self.come(worker)

    def act(self, kind: str, *arguments: Any) -> None:
        try:
            getattr(self, kind)(*arguments)
        except UsageError:
            assert kind in ("scale", "release"), "people are told; a worker's message raises nothing"
        self.drain()
        self.check()

    def say(self, worker: str, message: m.Message) -> None:
        decoded = m.decode_from_worker(m.encode(message))
        self.coordinator.on_message(worker, decoded, self.now)

    def come(self, worker: str) -> None:
        if worker not in self.coordinator.workers:
            self.coordinator.hello(m.Hello(kind="worker", worker=worker, host="here", pool="local"), self.now)

    def go(self, worker: str) -> None:
        self.coordinator.on_disconnect(worker, self.now)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.coordinator.tick(self.now)

    def scale(self, wanted: int) -> None:
        self.coordinator.scale(wanted, self.now)

    def release(self, name: str) -> None:
        self.coordinator.release(name, self.now)

    def stop(self, code: int) -> None:
        self.coordinator.request_end("enough", code, self.now)

    def answer(self, count: int) -> None:
        """As an honest worker does."""
        for _ in range(count):
            self.drain()
            if not self.unanswered:
                return
            send = self.unanswered.popleft()
            for message in self.honest(send.worker, send.message):
                self.coordinator.on_message(send.worker, message, self.now)

    def honest(self, worker: str, message: m.Message) -> list[m.Message]:
        view = self.views.get(worker)
        match message:
            case m.Welcome():
                return [m.Ready(signature=m.Signature(facts=()))]
            case m.Propose(view=proposed):
                self.views[worker] = proposed
                number = proposed.number
                return [m.Prepared(view=number), m.Switched(view=number, round=1, step=1), m.Synced(view=number)]
            case m.Stop(stop=stop):
                lineage = view.lineage(view.members) if view else Lineage(sets=())
                report = m.Stopped(
                    stop=stop, view=view, round=1, step=1, has_result=True, synced=view is not None, lineage=lineage
                )
                return [report]
            case m.Resume(view=resumed):
                self.views[worker] = resumed
                return []
            case m.End():
                return [m.Saved(path="there")]
            case _:
                return []

    def drain(self) -> None:
        for action in self.coordinator.drain():
            match action:
                case Send():
                    assert msgspec.msgpack.Decoder(m.FromCoordinator).decode(m.encode(action.message))
                    self.unanswered.append(action)
                case Record(event):
                    assert parse_line(as_written(msgspec.structs.replace(event, time=9.0))) is not None, event
                case Log(line):
                    assert parse_line(as_written(metrics_line(line))) is not None, line
                case _:
                    pass

    def check(self) -> None:
        state = self.coordinator
        if state.view and not state.over:
            assert len(set(state.view.members)) == len(state.view.members)
        m.encode(state.roster())


@given(acts=st.lists(ACTS, min_size=1, max_size=40))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nonsense_raises_nothing_and_keeps_the_books_in_order(acts: list[tuple[Any, ...]]) -> None:
    play = Play()
    for act in acts:
        play.act(*act)


@given(acts=st.lists(ACTS, max_size=15), nonsense=MESSAGES)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("answers", [20, 60])
def test_nonsense_in_the_middle_of_honest_training(
    answers: int, acts: list[tuple[Any, ...]], nonsense: m.Message
) -> None:
    play = Play()
    play.act("answer", answers)
    assert play.coordinator.view is not None
    play.act("go", "w2")
    play.act("say", "w1", nonsense)
    for act in acts:
        play.act(*act)
        play.act("answer", 3)
