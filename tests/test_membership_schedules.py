"""Random schedules through the real state machines; and mutants, to show that the schedules would find a bug.

Each mutant breaks one rule of the protocol, in a subclass or through one patched decision, and must be caught within
`WITHIN` schedules. FARANDOLE_SEEDS=100000 runs more schedules than the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from typing import Any

import msgspec
import pytest
from protocol import Violation, simulate
from protocol_ledger import alone
from protocol_process import WORD, Exchange
from protocol_training import Worker

from farandole.membership import messages as m
from farandole.membership import recovery
from farandole.membership.coordinator import Coordinator
from farandole.membership.member import Action, Member
from farandole.membership.view import View, Word

SEEDS = int(os.environ.get("FARANDOLE_SEEDS", "3000"))
PARTS = 6
WITHIN = 1500


@pytest.mark.parametrize("part", range(PARTS))
def test_schedules(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        simulate(seed)


def test_a_schedule_is_repeatable() -> None:
    first, second = simulate(7), simulate(7)
    assert (first.events, first.now, first.records) == (second.events, second.now, second.records)


def test_the_reference_depends_on_every_step() -> None:
    assert len({alone(steps) for steps in range(10)}) == 10


# --- mutants: the worker's data plane and training thread ------------------------------------------------------


class EndsWithoutAllWords(Worker):
    def has_all_words(self, exchange: Exchange) -> bool:
        return len(self.mail[exchange.key][WORD]) >= len(exchange.peers) - 1


class CountsStaleWords(Worker):
    def has_all_words(self, exchange: Exchange) -> bool:
        words = self.mail[exchange.key][WORD]
        for (_, round_), mail in self.mail.items():
            for sender, word in mail[WORD].items() if round_ == exchange.round else ():
                if sender in exchange.peers:
                    words.setdefault(sender, msgspec.structs.replace(word, view=exchange.view.number, round=round_))
        return super().has_all_words(exchange)


class AbandonedThreadHolds(Worker):
    """The thread of an abandoned exchange, handed garbage by `settle`, makes the member hold the round."""

    def say_word(self, exchange: Exchange) -> Word | None:
        del exchange
        number = self.member.view.number if self.member.view else 0
        return self.member.word(view=number, round_=self.member.round, compute_us=0, shards=0)


class WordsBeforeLevel(Worker):
    def may_word(self, exchange: Exchange) -> bool:
        del exchange
        return True

    def say_word(self, exchange: Exchange) -> Word | None:
        level, self.member.level = self.member.level, True
        try:
            return super().say_word(exchange)
        finally:
            self.member.level = level


class IdlesByItsOwnView(Worker):
    """Whether a round is idle depends on when a worker begins it."""

    def is_idle(self, view: View, lineage: tuple[tuple[str, ...], ...]) -> bool:
        del lineage
        return view.size < self.world.settings.minimum


# --- mutants: the member -----------------------------------------------------------------------------------------


class AppliesWhatOneNames(Member):
    def end_round(self, words: Sequence[Word]) -> bool:
        newest = max(word.prepared for word in words)
        return super().end_round([msgspec.structs.replace(word, prepared=newest) for word in words])


class SwitchesInEvaluations(Member):
    def begin_round(self, step: int, *, may_switch: bool) -> list[Action] | None:
        return super().begin_round(step, may_switch=may_switch or int(self.worker[1:]) % 2 == 0)


class ReportsHoldsTooEarly(Member):
    def receive(self, message: m.Message) -> list[Action]:
        actions = super().receive(message)
        for action in actions:
            if isinstance(action, m.Stopped):
                action.holds = action.level
        return actions


class IgnoresStop(Member):
    def receive(self, message: m.Message) -> list[Action]:
        phase = self.phase
        actions = super().receive(message)
        if isinstance(message, m.Stop):
            self.phase = phase
        return actions


class PreparedBeforeConnected(Member):
    def receive(self, message: m.Message) -> list[Action]:
        actions = super().receive(message)
        return [*actions, *self.connected(message.view)] if isinstance(message, m.Propose) else actions


class RemembersTheAgreement(Member):
    """A view agreed on before a stop is applied after it."""

    def receive(self, message: m.Message) -> list[Action]:
        agreed = self.agreed
        actions = super().receive(message)
        if isinstance(message, m.Resume):
            self.agreed = agreed
        return actions


class KeepsItsOwnLineage(Member):
    def receive(self, message: m.Message) -> list[Action]:
        lineage, round_ = self.lineage, self.round
        actions = super().receive(message)
        if isinstance(message, m.Resume) and self.round == round_:
            self.lineage = lineage
        return actions


# --- mutants: the coordinator ------------------------------------------------------------------------------------


class LetsLeaversGoAtOnce(Coordinator):
    def receive(self, worker: str, message: m.Message, now: float) -> None:
        super().receive(worker, message, now)
        leaves = self.proposed and worker in self.workers and worker not in self.proposed.members
        if isinstance(message, m.Switched) and leaves and not self.over:
            self.dismiss(worker, "left at once")


class LeavesTheFinishedWaiting(Coordinator):
    """The death of the last worker that had not finished ends nothing."""

    losing = False

    def disconnected(self, worker: str, now: float) -> None:
        self.losing = True
        super().disconnected(worker, now)
        self.losing = False

    def _settle(self, now: float) -> None:
        if not (self.losing and self.everyone_finished()):
            super()._settle(now)

    def tick(self, now: float) -> None:
        self.losing = True
        super().tick(now)
        self.losing = False


class DecidesBeforeAllHaveReported(Coordinator):
    def receive(self, worker: str, message: m.Message, now: float) -> None:
        if isinstance(message, m.Stopped) and self.stopping and len(self.stopping.waiting) == 2 and message.level:
            (other,) = self.stopping.waiting - {worker}
            if other in self.workers:
                self.stopping.waiting.discard(other)
                self.stopping.reports[other] = message
        super().receive(worker, message, now)


class TrustsTheFrozen(Coordinator):
    def tick(self, now: float) -> None:
        for worker in self.workers.values():
            worker.seen = now
        super().tick(now)


Decide = Callable[..., recovery.Outcome]


def commits_if_one_holds(decide: Decide) -> Decide:
    def mutant(reports: Any, views: Any) -> recovery.Outcome:
        outcome = decide(reports, views)
        at_last = [reports[w] for w in outcome.members if reports[w].round == outcome.round]
        return changed(outcome, commit=len(at_last) == len(outcome.members) and any(r.holds for r in at_last))

    return mutant


def always_redoes(decide: Decide) -> Decide:
    """Even what all hold, and somebody may have ended."""
    return lambda reports, views: changed(decide(reports, views), commit=False)


def deals_to_nobody(decide: Decide) -> Decide:
    """Some shards go to somebody who is not there."""

    def mutant(reports: Any, views: Any) -> recovery.Outcome:
        outcome = decide(reports, views)
        return changed(outcome, lineage=((*outcome.members, "nobody"),))

    return mutant


def convicts_nobody(convict: Any) -> Any:
    return lambda *_: convict({}, (), ())


MUTANTS = (
    {"worker": EndsWithoutAllWords},
    {"worker": CountsStaleWords},
    {"worker": AbandonedThreadHolds},
    {"worker": WordsBeforeLevel},
    {"worker": IdlesByItsOwnView},
    {"member": AppliesWhatOneNames},
    {"member": SwitchesInEvaluations},
    {"member": ReportsHoldsTooEarly},
    {"member": IgnoresStop},
    {"member": PreparedBeforeConnected},
    {"member": RemembersTheAgreement},
    {"member": KeepsItsOwnLineage},
    {"coordinator": LetsLeaversGoAtOnce},
    {"coordinator": LeavesTheFinishedWaiting},
    {"coordinator": DecidesBeforeAllHaveReported},
    {"coordinator": TrustsTheFrozen},
)
PATCHES = (
    ("decide", commits_if_one_holds),
    ("decide", always_redoes),
    ("decide", deals_to_nobody),
    ("convict", convicts_nobody),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: next(iter(mutant.values())).__name__)
def test_a_mutant_is_caught(mutant: dict[str, Any]) -> None:
    assert caught(**mutant) is not None


@pytest.mark.parametrize(("name", "mutate"), PATCHES, ids=[mutate.__name__ for _, mutate in PATCHES])
def test_a_wrong_decision_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, mutate: Any) -> None:
    monkeypatch.setattr(recovery, name, mutate(getattr(recovery, name)))
    assert caught() is not None


def caught(**classes: Any) -> int | None:
    """The first seed with which the schedules find it; a crash of the machines comes out as a Violation too."""
    for seed in range(WITHIN):
        try:
            simulate(seed, **classes)
        except Violation:
            return seed
    return None
