"""Who answers the wish for the last checkpoint when the training thread may hang: truth table of the hand-over."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from farandole.membership import messages as m
from farandole.membership.member import Save
from farandole.worker import hung
from farandole.worker.participant import Participant


class Told(Participant):
    """A client that keeps what it is to send, and notes what is asked of the state."""

    def __init__(self) -> None:
        super().__init__("w1")
        self.messages: list[m.Message] = []
        self.asked: list[bool] = []
        self.saved = self._saved

    def tell(self, message: m.Message) -> None:
        self.messages.append(message)

    def _saved(self, between: bool) -> m.Saved:
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
    client, wanted = Told(), Save(save=True, between=case.between)
    client.member.round, client.begun, client.whole = 7, case.begun, case.whole
    client.save = None if case.taken else wanted
    monkeypatch.setattr(hung, "save_aside", lambda _, save: again.append(save))
    hung._take_up(client, wanted)
    assert client.asked == ([case.between] if case.saves else [])
    assert client.messages == ([m.Saved(path="checkpoint")] if case.saves else [])
    waits = not case.saves and not case.taken
    assert again == ([wanted] if waits else []), "it is looked at again"
    assert client.save is (wanted if waits else None)


def test_another_thread_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hung, "REACT_S", 0.01)
    client, wanted = Told(), Save(save=True, between=False)
    client.member.round = client.begun = 7
    client.whole, client.save = True, wanted
    done = threading.Event()
    client.tell = lambda _: done.set()
    hung.save_aside(client, wanted)
    assert done.wait(10)
    assert client.save is None


def test_stacks_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    hung.write_stacks("step 5 has stood for 60 s")
    said = capfd.readouterr().err
    assert said.startswith("farandole: step 5 has stood for 60 s; the stacks of all threads of this worker:")
    assert "test_stacks_go_to_standard_error" in said
