"""Mutants of the protocol: each breaks one rule, in a subclass.

Others have one wrong decision (`decisions.py`), or a bug in a shipped file (`planted_bugs.py`, `driver_bugs.py`).
`test_schedules.py` shows that the random schedules find every one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from farandole.plan.shards import assign
from farandole.protocol import messages as m
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import Removal
from farandole.protocol.values import NOTHING
from farandole.protocol.view import CommitMessage, View
from farandole.protocol.worker.state_machine import Action, WorkerStateMachine
from farandole.simulate.exchange import SimulatedExchange
from farandole.simulate.worker import SimulatedWorker

# --- mutants: the worker's data plane and training thread ------------------------------------------------------


class AbandonedThreadHolds(SimulatedWorker):
    """The thread of an abandoned exchange, handed garbage by `release_peers`, makes the member hold the round."""

    def make_commit_message(self, exchange: SimulatedExchange) -> CommitMessage | None:
        del exchange
        number = self.state_machine.view.number if self.state_machine.view else 0
        return self.state_machine.commit_message(view=number, round_=self.state_machine.round, compute_us=0, shards=0)


class WordsBeforeLevel(SimulatedWorker):
    def may_commit(self, exchange: SimulatedExchange) -> bool:
        del exchange
        return True

    def make_commit_message(self, exchange: SimulatedExchange) -> CommitMessage | None:
        synced, self.state_machine.synced = self.state_machine.synced, True
        try:
            return super().make_commit_message(exchange)
        finally:
            self.state_machine.synced = synced


class DealsByTheViewInForce(SimulatedWorker):
    """And not by the shares by which the round was dealt."""

    def _assigned(self, exchange: SimulatedExchange, worker: str) -> tuple[int, ...]:
        sets, view = exchange.lineage.sets, exchange.view
        known = dict(zip(view.members, view.shares, strict=False))
        shares = tuple(known.get(w, 1000) for w in sets[0]) if known else ()
        return assign(exchange.shards, sets, shares).get(worker, ()) if exchange.shards else ()


# --- mutants: the member -----------------------------------------------------------------------------------------


class AppliesWhatOneNames(WorkerStateMachine):
    def end_round(self, commits: Sequence[CommitMessage]) -> bool:
        newest = max(commit.prepared for commit in commits)
        return super().end_round([msgspec.structs.replace(commit, prepared=newest) for commit in commits])


class OverlooksTheDigests(WorkerStateMachine):
    def end_round(self, commits: Sequence[CommitMessage]) -> bool:
        return super().end_round([msgspec.structs.replace(commit, digest=0) for commit in commits])


class SwitchesInEvaluations(WorkerStateMachine):
    def begin_round(self, step: int, *, may_switch: bool, call: m.Call = NOTHING) -> list[Action] | None:
        return super().begin_round(step, may_switch=may_switch or int(self.worker[1:]) % 2 == 0, call=call)


class ReportsHoldsTooEarly(WorkerStateMachine):
    def on_message(self, message: m.Message) -> list[Action]:
        actions = super().on_message(message)
        for action in actions:
            if isinstance(action, m.Stopped):
                action.has_result = action.synced
        return actions


class IgnoresStop(WorkerStateMachine):
    def on_message(self, message: m.Message) -> list[Action]:
        phase = self.phase
        actions = super().on_message(message)
        if isinstance(message, m.Stop):
            self.phase = phase
        return actions


class PreparedBeforeConnected(WorkerStateMachine):
    def on_message(self, message: m.Message) -> list[Action]:
        actions = super().on_message(message)
        return [*actions, *self.connected(message.view)] if isinstance(message, m.Propose) else actions


class RemembersTheAgreement(WorkerStateMachine):
    """A view agreed on before a stop is applied after it."""

    def on_message(self, message: m.Message) -> list[Action]:
        agreed = self.agreed
        actions = super().on_message(message)
        if isinstance(message, m.Resume):
            self.agreed = agreed
        return actions


class KeepsItsOwnLineage(WorkerStateMachine):
    def on_message(self, message: m.Message) -> list[Action]:
        lineage, round_ = self.lineage, self.round
        actions = super().on_message(message)
        if isinstance(message, m.Resume) and self.round == round_:
            self.lineage = lineage
        return actions


class DealsByTheOldSharesOnceMore(WorkerStateMachine):
    """In the first round after they have changed, and only on some workers."""

    def begin_round(self, step: int, *, may_switch: bool, call: m.Call = NOTHING) -> list[Action] | None:
        old = self.view
        actions = super().begin_round(step, may_switch=may_switch, call=call)
        if old and self.view is not old and self.view and self.view.members == old.members:
            self.lineage = old.lineage(old.members) if int(self.worker[1:]) % 2 == 0 else self.lineage
        return actions


class SwitchesSharesWhenToldOf(WorkerStateMachine):
    """Other shares among the same members look harmless: it does not wait until all agree."""

    def connected(self, view: View) -> list[Action]:
        actions = super().connected(view)
        if self.view and view.members == self.view.members and self.phase == "member":
            self.agreed, self.pending, self.prepared = view, None, 0
        return actions


class TakesWordsOfOtherCalls(WorkerStateMachine):
    def end_round(self, commits: Sequence[CommitMessage]) -> bool:
        return super().end_round([msgspec.structs.replace(commit, call=self.call.number) for commit in commits])


# --- mutants: the coordinator ------------------------------------------------------------------------------------


class LetsLeaversGoAtOnce(Coordinator):
    def on_message(self, worker: str, message: m.Message, now: float) -> None:
        super().on_message(worker, message, now)
        leaves = self.proposed and worker in self.workers and worker not in self.proposed.members
        if isinstance(message, m.Switched) and leaves and not self.over:
            self.remove(worker, Removal.LEFT, "left at once")


class LeavesTheFinishedWaiting(Coordinator):
    """The death of the last worker that had not finished ends nothing."""

    losing = False

    def on_disconnect(self, worker: str, now: float) -> None:
        self.losing = True
        super().on_disconnect(worker, now)
        self.losing = False

    def _next_decision(self, now: float) -> None:
        if not (self.losing and self.everyone_finished()):
            super()._next_decision(now)

    def on_pool_message(self, pool: str, host: str, message: m.FromPool, now: float) -> None:
        self.losing = True
        super().on_pool_message(pool, host, message, now)
        self.losing = False

    def tick(self, now: float) -> None:
        self.losing = True
        super().tick(now)
        self.losing = False


class DecidesBeforeAllHaveReported(Coordinator):
    def on_message(self, worker: str, message: m.Message, now: float) -> None:
        if isinstance(message, m.Stopped) and self.stopping and len(self.stopping.unanswered) == 2 and message.synced:
            (other,) = self.stopping.unanswered - {worker}
            if other in self.workers:
                self.stopping.unanswered.discard(other)
                self.stopping.reports[other] = message
        super().on_message(worker, message, now)


class TrustsTheFrozen(Coordinator):
    def tick(self, now: float) -> None:
        for worker in self.workers.values():
            self.failure_detector.begin(worker.silence, now)
        super().tick(now)


class TakesClosedForDead(Coordinator):
    def on_disconnect(self, worker: str, now: float) -> None:
        if worker in self.workers:
            self.mark_dead(worker)
        super().on_disconnect(worker, now)


MUTANTS = (
    {"worker": AbandonedThreadHolds},
    {"worker": WordsBeforeLevel},
    {"worker": DealsByTheViewInForce},
    {"member": OverlooksTheDigests, "drift": True},
    {"member": AppliesWhatOneNames},
    {"member": SwitchesInEvaluations},
    {"member": ReportsHoldsTooEarly},
    {"member": IgnoresStop},
    {"member": PreparedBeforeConnected},
    {"member": RemembersTheAgreement},
    {"member": KeepsItsOwnLineage},
    {"member": DealsByTheOldSharesOnceMore},
    {"member": SwitchesSharesWhenToldOf},
    {"member": TakesWordsOfOtherCalls, "focus": ("stray",)},
    {"coordinator": LetsLeaversGoAtOnce},
    {"coordinator": LeavesTheFinishedWaiting, "focus": ("kill",)},
    {"coordinator": DecidesBeforeAllHaveReported},
    {"coordinator": TrustsTheFrozen},
    {"coordinator": TakesClosedForDead},
)
