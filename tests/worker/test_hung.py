"""Who answers the wish for the last checkpoint when the training thread may hang: truth table of the hand-over."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from farandole.platform import output
from farandole.protocol import messages as m
from farandole.protocol.worker.state_machine import Exit, Save
from farandole.worker import hung
from farandole.worker.context import NoTraining
from farandole.worker.fake import FakeContext


class Saves(NoTraining):
    """A training side that can save, and notes when it is asked to."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def saved(self, between: bool) -> m.Saved:
        self.asked.append(between)
        return m.Saved(path="checkpoint")


@dataclass(frozen=True)
class Case:
    remark: str
    at_step_start: bool = True
    begun: int = 7  # the member is in round 7
    taken: bool = False  # by the training thread
    between: bool = False
    saves: bool = True


CASES = (
    Case("within a step: nothing writes to the state"),
    Case("it has reacted", taken=True, saves=False),
    Case("the round has ended: it is on its way to the update", begun=6, saves=False),
    Case("between two steps: the answer is that", at_step_start=False, begun=6),
    Case("... or, if nobody has better, what is there", at_step_start=False, begun=6, between=True),
    Case("evaluating, between two steps", at_step_start=False),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.remark)
@pytest.mark.failure(
    "Standing still",
    "`farandole stop`, Ctrl-C or SIGTERM while the script hangs within a step",
)
def test_who_saves(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Save] = []
    context, training, wanted = FakeContext(), Saves(), Save(save=True, allow_between=case.between)
    context.state_machine.round, context.begun, context.at_step_start = 7, case.begun, case.at_step_start
    context.instructions.save = None if case.taken else wanted
    monkeypatch.setattr(hung, "save_aside", lambda _, __, save: again.append(save))
    hung._take_up(context, training, wanted)
    assert training.asked == ([case.between] if case.saves else [])
    assert context.messages == ([m.Saved(path="checkpoint")] if case.saves else [])
    waits = not case.saves and not case.taken
    assert again == ([wanted] if waits else []), "it is looked at again"
    assert context.instructions.save is (wanted if waits else None)


def test_another_thread_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hung, "REACT_S", 0.01)
    context, wanted, done = FakeContext(), Save(save=True, allow_between=False), threading.Event()
    context.state_machine.round = context.begun = 7
    context.at_step_start, context.instructions.save = True, wanted

    class Late(Saves):
        def saved(self, between: bool) -> m.Saved:
            done.set()
            return super().saved(between)

    hung.save_aside(context, Late(), wanted)
    assert done.wait(200)
    assert context.instructions.save is None


@dataclass(frozen=True)
class Going:
    remark: str
    at_step_start: bool = True
    begun: int = 7  # the member is in round 7
    save_before_exit: bool = True
    proven: bool = True
    saves: bool = False
    goes: bool = True


GOING = (
    Going("within a step: nothing writes to the state", saves=True),
    Going("the training thread is at it", save_before_exit=False, goes=False),
    Going("the round has ended: it is on its way to the update", begun=6, goes=False),
    Going("in an evaluation, between two steps", at_step_start=False),
    Going("a joiner in its first round, whose state may be torn", proven=False),
)


@pytest.mark.parametrize("case", GOING, ids=lambda case: case.remark)
def test_who_has_a_deadline_saves_and_goes(case: Going, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Exit] = []
    left: list[int] = []
    context, training, exit_ = FakeContext(), Saves(), Exit("it goes", 0, save=True, within_s=2.0)
    context.state_machine.round, context.begun, context.at_step_start = 7, case.begun, case.at_step_start
    context.fully_loaded, context.instructions.save_before_exit = case.proven, case.save_before_exit
    monkeypatch.setattr(hung, "leave_aside", lambda _, __, exit_: again.append(exit_))
    monkeypatch.setattr(hung, "leave", left.append)
    hung._save_and_go(context, training, exit_)
    assert training.asked == ([False] if case.saves else [])
    assert context.messages == ([m.Lapsed()] if case.goes else [])
    assert left == ([0] if case.goes else [])
    assert again == ([exit_] if not case.goes and case.save_before_exit else []), "it is looked at again"


def test_who_has_none_is_left_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Timer", None)
    hung.leave_aside(FakeContext(), Saves(), Exit("no coordinator", 4, save=True))


def test_stacks_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    output.show(0)
    why = "step 5 has stood for 60 s"
    hung.write_stacks(why)
    said = capfd.readouterr().err
    assert said.startswith(f"farandole: {why}")
    assert "test_stacks_go_to_standard_error" in said
