"""A coordinator without state meets workers that hold a state: they save it and go."""

from __future__ import annotations

from farandole.protocol import messages as m
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import RunSettings, Send
from farandole.protocol.worker.state_machine import Exit, WorkerStateMachine


def test_who_holds_a_state_that_is_not_known_saves_it_and_goes() -> None:
    coordinator = Coordinator(RunSettings(run="r"))
    worker = coordinator.hello(m.Hello(kind="worker", worker="w1", session="s", attempt=2, synced=True), 0.0)
    [goodbye] = [action.message for action in coordinator.drain() if isinstance(action, Send)]
    assert isinstance(goodbye, m.Goodbye)
    assert (goodbye.code, goodbye.save) == (3, True)
    assert worker not in coordinator.workers, "it has no part in the run"
    member = WorkerStateMachine("w1")
    assert member.on_message(goodbye) == [Exit(goodbye.reason, 3, save=True)]
    assert member.phase == "out", "it gives no word any more"


def test_who_holds_none_is_let_in() -> None:
    coordinator = Coordinator(RunSettings(run="r"))
    assert coordinator.hello(m.Hello(kind="worker", worker="w1", session="s", attempt=2), 0.0) in coordinator.workers
