"""Who answers the wish for the last checkpoint when the training thread may hang: truth table of the hand-over."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from farandole.membership import messages as m
from farandole.membership.member import Save
from farandole.platform import logs
from farandole.worker import hung
from farandole.worker.fake import FakeParticipant
from farandole.worker.participant import NoTraining


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
    whole: bool = True
    begun: int = 7  # the member is in round 7
    taken: bool = False  # by the training thread
    between: bool = False
    saves: bool = True


CASES = (
    Case("within a step: nothing writes to the state"),
    Case("it has reacted", taken=True, saves=False),
    Case("the round has ended: it is on its way to the update", begun=6, saves=False),
    Case("between two steps: the answer is that", whole=False, begun=6),
    Case("... or, if nobody has better, what is there", whole=False, begun=6, between=True),
    Case("evaluating, between two steps", whole=False),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.remark)
def test_who_saves(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Save] = []
    participant, training, wanted = FakeParticipant(), Saves(), Save(save=True, between=case.between)
    participant.member.round, participant.begun, participant.whole = 7, case.begun, case.whole
    participant.told.save = None if case.taken else wanted
    monkeypatch.setattr(hung, "save_aside", lambda _, __, save: again.append(save))
    hung._take_up(participant, training, wanted)
    assert training.asked == ([case.between] if case.saves else [])
    assert participant.messages == ([m.Saved(path="checkpoint")] if case.saves else [])
    waits = not case.saves and not case.taken
    assert again == ([wanted] if waits else []), "it is looked at again"
    assert participant.told.save is (wanted if waits else None)


def test_another_thread_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hung, "REACT_S", 0.01)
    participant, wanted, done = FakeParticipant(), Save(save=True, between=False), threading.Event()
    participant.member.round = participant.begun = 7
    participant.whole, participant.told.save = True, wanted

    class Late(Saves):
        def saved(self, between: bool) -> m.Saved:
            done.set()
            return super().saved(between)

    hung.save_aside(participant, Late(), wanted)
    assert done.wait(10)
    assert participant.told.save is None


def test_stacks_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    logs.show(0)
    hung.write_stacks("step 5 has stood for 60 s")
    said = capfd.readouterr().err
    assert said.startswith("farandole: step 5 has stood for 60 s; the stacks of all threads of this worker:")
    assert "test_stacks_go_to_standard_error" in said
