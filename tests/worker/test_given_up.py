"""A view that is given up, its connections closed, between this worker's look at it and what it does for it."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.collective.buckets import Layout, Partials
from farandole.collective.fake import FakeNetwork
from farandole.plan.shards import Position
from farandole.protocol import messages as m
from farandole.protocol.view import View
from farandole.protocol.worker.driver import Task
from farandole.worker import rounds
from farandole.worker.fake import FakeContext
from farandole.worker.rounds import Receiver, Rounds, send_state_to_joiners, step_task
from tests.support.linking import in_memory

pytestmark = pytest.mark.timeout(30)
ALONE = View(number=1, members=("w1",), group=1)
TWO = View(number=2, members=("w1", "w2"), group=2, joining=("w2",))


def step(position: Position, flags: object = None) -> Task:
    del flags
    return step_task(Partials(Layout([], 0)), lambda _: 1, position)


class Nothing:
    """What a worker holds here."""

    def snapshot(self) -> object:
        return {}

    def renew(self, state: object) -> None:
        raise AssertionError(state)

    def save(self, between: bool) -> m.Saved:
        del between
        return m.Saved()

    def digest(self) -> int:
        return 0

    def digests(self) -> m.Digests:
        return m.Digests(0, (), ())


def worker(name: str) -> tuple[FakeContext, Rounds]:
    """It never gets a connection: they are gone when it looks for them."""
    it = FakeContext(name)
    made = Rounds(it, Nothing)
    return it, made


def enter(it: Rounds) -> list[View]:
    """The views that it was to begin the run in."""
    begun: list[View] = []

    def restore(view: View) -> Position:
        begun.append(view)
        return Position()

    it.enter(lambda _: None, step, lambda: None, restore, 0)
    return begun


def compute(it: Rounds) -> bool:
    for shard in it.todo():
        it.open(shard)
        it.close(shard)
    return it.wait_for_round_end()


def test_a_joiner_waits_for_the_next_view(monkeypatch: pytest.MonkeyPatch) -> None:
    it, its_rounds = worker("w2")
    next_ = View(number=3, members=("w2",), group=3)

    def late(*args: Any) -> Receiver:
        it.hear(m.ViewWithdrawn())
        it.hear(m.Propose(view=next_))
        return Receiver(*args)

    monkeypatch.setattr(rounds, "Receiver", late)
    it.hear(m.Propose(view=TWO))
    assert enter(its_rounds) == [next_]
    assert compute(its_rounds)


def test_a_veteran_goes_on_in_the_view_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    it, its_rounds = worker("w1")
    next_ = View(number=3, members=("w1",), group=3)
    handed: list[View] = []

    def late(context: FakeContext, view: View, *args: Any) -> None:
        it.hear(m.Stop(stop=1))
        it.hear(m.Resume(view=next_, round=2, commit=False, lineage=next_.lineage(("w1",))))
        handed.append(view)
        send_state_to_joiners(context, view, *args)

    monkeypatch.setattr(rounds, "send_state_to_joiners", late)
    it.hear(m.Propose(view=ALONE))
    assert enter(its_rounds) == [ALONE]
    assert compute(its_rounds)
    it.hear(m.Propose(view=TWO))
    its_rounds.begin(step(Position(step=1)))
    assert compute(its_rounds)
    its_rounds.begin(step(Position(step=2)))
    assert handed == [TWO]
    assert not compute(its_rounds), "there are no connections to end it over"
    assert its_rounds.view == next_
    assert compute(its_rounds)
    assert it.state_machine.round == 3


def test_memory_for_the_state_is_used_once_and_none_is_kept_where_nobody_hands_one_over() -> None:
    """Of a view that was given up something may still be written into it."""
    joiner, _ = worker("w2")
    joiner.groups[TWO.group] = in_memory(FakeNetwork(), ALONE)[0]
    joiner.make_room(1 << 20)
    Receiver(TWO, joiner, 0)
    assert joiner.room is None
    first, made = worker("w1")
    first.make_room(1 << 20)
    first.state_machine.on_message(m.Propose(view=ALONE))
    first.state_machine.connected(ALONE)
    assert enter(made) == [ALONE]
    assert first.room is None
