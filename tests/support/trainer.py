"""A real `Connected` with a training thread that computes nothing: rounds, control words, switches, lines of metrics.

The words go through a `Board` instead of Gloo. Every round is a step, so `step` says how far the training is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from farandole.control.ticket import Ticket
from farandole.protocol import messages as m
from farandole.protocol.view import CommitMessage, View
from farandole.settings import Settings
from farandole.worker.connection import Connected
from tests.support.metric_lines import stepped

SIGNATURE = m.Signature(facts=(("torch", "none"),))
PACE_S = 0.02


class Board:
    """Where the workers of one test leave their control words, and joiners learn in which round their view begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words: dict[tuple[int, int], dict[str, CommitMessage]] = {}
        self._begins: dict[int, int] = {}

    def begin(self, view: int, round_: int) -> None:
        with self._lock:
            self._begins.setdefault(view, round_)

    def begins(self, view: int) -> int | None:
        with self._lock:
            return self._begins.get(view)

    def exchange(self, worker: str, word: CommitMessage, view: View) -> list[CommitMessage] | None:
        """Leave a word, the first of a round counts; all words of the round, once they are there."""
        with self._lock:
            words = self._words.setdefault((word.view, word.round), {})
            words.setdefault(worker, word)
            return list(words.values()) if len(words) == view.size else None


class Trainer:
    """Built connected and asking in; blocks until then."""

    def __init__(self, ticket: Ticket, board: Board, worker: str, *, pool: str = "") -> None:
        settings = Settings(worker=worker, host="here", pool=pool)
        self.client = Connected(ticket, settings, leave=_stay)  # its watchdog would end the process of the tests
        self._board = board
        self._written = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._train, name=worker)
        self._thread.start()
        self.client.ask_in(SIGNATURE)

    @property
    def step(self) -> int:
        return self.client.state_machine.round

    @property
    def view(self) -> View | None:
        return self.client.state_machine.view

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
        self.client.close()

    def _train(self) -> None:
        client = self.client
        while client.instructions.exit is None and not self._stopping:
            with client.condition:
                client.condition.wait(PACE_S)
                save, client.instructions.save = client.instructions.save, None
                if client.state_machine.phase == "candidate":
                    self._enter()
                elif client.state_machine.phase == "member":
                    self._round()
                self._write_lines()
            if save is not None:
                client.tell(m.Saved(path="checkpoint"))

    def _enter(self) -> None:
        member, view = self.client.state_machine, self.client.state_machine.pending
        if view is None or member.prepared != view.number:
            return
        joins = self.client.worker in view.joining
        begin = self._board.begins(view.number) if joins else 0
        if begin is not None and self._say(member.enter_view(begin, begin, view=view.number)):
            self._written = begin
            if joins:
                self._say(member.become_synced())

    def _round(self) -> None:
        client, member = self.client, self.client.state_machine
        begun = self._say(member.begin_round(member.round, may_switch=True))
        if not begun or member.phase != "member" or member.view is None:
            return
        view, round_ = member.view, member.round
        self._board.begin(view.number, round_)
        word = client.commit_message(view=view.number, round_=round_, compute_us=0, shards=1)
        words = self._board.exchange(client.worker, word, view) if word else None
        if words is not None:
            client.end_round(words)

    def _say(self, messages: Sequence[m.Message] | None) -> bool:
        """False: the member refuses."""
        for message in messages or ():
            self.client.tell(message)
        return messages is not None

    def _write_lines(self) -> None:
        while self._written < self.client.state_machine.round:
            self.client.add_line(stepped(self._written, seconds=PACE_S, time=time.time()))
            self._written += 1


def _stay(code: int, **why: bool) -> None:
    del code, why
