"""A worker context whose coordinator is the caller, for tests of training code: this package's and its users'.

It records the messages of the worker, and performs the member's actions at once: a proposed view is connected and
prepared when `hear` returns. It has no thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from farandole.errors import CheckpointsGone
from farandole.protocol import messages as m
from farandole.protocol.view import CommitMessage, View
from farandole.protocol.worker.driver import Instructions
from farandole.protocol.worker.state_machine import Action, CompareDigests, Connect, Exit, Save, WorkerStateMachine
from farandole.worker.context import NoTraining, Training, WorkerContext


@final
class FakeContext(WorkerContext):
    """One worker of a run that the caller simulates.

    Attributes:
        messages: the messages that it has sent to the coordinator, in order.
        lines: its lines of metrics.
        lapsed: True if its lease has ended.
    """

    def __init__(self, worker: str = "w1", terms: m.RunTerms | None = None) -> None:
        super().__init__(WorkerStateMachine(worker), Instructions())
        self.messages: list[m.Message] = []
        self.lines: list[m.Line] = []
        self.lapsed = False
        self._terms = terms or m.RunTerms()
        self._training: Training = NoTraining()

    def hear(self, message: m.Message) -> None:
        """Delivers a message of the coordinator."""
        with self.condition:
            self._perform(self.state_machine.on_message(message))
            self.condition.notify_all()

    @property
    def terms(self) -> m.RunTerms:
        return self._terms

    def set_training(self, training: Training) -> None:
        self._training = training

    def ask_in(self, signature: m.Signature, unreached: str = "") -> None:
        self.tell(m.Ready(signature=signature, unreached=unreached))

    def short(self, view: View, error: CheckpointsGone) -> None:
        self.tell(m.CannotStart(view=view.number, reason=str(error)))

    def tell(self, message: m.Message) -> None:
        self.messages.append(message)

    def add_line(self, line: m.Line) -> None:
        self.lines.append(line)

    def report_script_end(self, fingerprint: str, after: m.StepTime) -> None:
        self.tell(self.state_machine.script_end_report(fingerprint, after))

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def _commit_message(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None:
        return (
            None
            if self.lapsed
            else self.state_machine.commit_message(view=view, round_=round_, compute_us=compute_us, shards=shards)
        )

    def _end_round(self, commits: Sequence[CommitMessage]) -> bool:
        return not self.lapsed and self.state_machine.end_round(commits)

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Connect(view):
                    self._training.prepare(view)
                    self._perform(self.state_machine.connected(view))
                case Exit():
                    self.instructions.leave(action)
                case Save():
                    self.instructions.save = action
                case CompareDigests():
                    self.tell(self._training.digests())
                case _:
                    self.tell(action)
