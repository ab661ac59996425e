"""Mutants of the protocol: each breaks one rule, in a subclass, through one patched decision, or by a bug planted in a
shipped file.

`test_schedules.py` shows that the random schedules find every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from types import ModuleType
from typing import Any

import msgspec

from farandole.collective import order, tags
from farandole.membership import (
    calls,
    decision,
    ending,
    issued,
    member,
    plausible,
    reconnection,
    recovery,
    replicas,
    saving,
    session,
    suspicion,
    testimony,
    unplanned,
)
from farandole.membership import messages as m
from farandole.membership.books import Books
from farandole.membership.coordinator import Coordinator
from farandole.membership.member import Action, Member
from farandole.membership.plausible import Outvoted
from farandole.membership.suspicion import Conviction
from farandole.membership.values import NOTHING
from farandole.membership.view import Lineage, View, Word
from farandole.plan.shards import assign
from farandole.simulate.exchange import Exchange
from farandole.simulate.network import Network
from farandole.simulate.training import Worker

# --- mutants: the worker's data plane and training thread ------------------------------------------------------


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
        synced, self.member.synced = self.member.synced, True
        try:
            return super().say_word(exchange)
        finally:
            self.member.synced = synced


class IdlesByItsOwnView(Worker):
    """Whether a round is idle depends on when a worker begins it."""

    def is_idle(self, view: View, lineage: Lineage) -> bool:
        del lineage
        return view.size < self.world.settings.minimum


class SavesWhatIsNotProven(Worker):
    """An orphan that was given up in its first round may hold a torn state."""

    def _obey(self) -> None:
        self.whole = self.whole or self.member.synced
        super()._obey()


class DealsByTheViewInForce(Worker):
    """And not by the shares by which the round was dealt."""

    def _assigned(self, exchange: Exchange, worker: str) -> tuple[int, ...]:
        sets, view = exchange.lineage.sets, exchange.view
        known = dict(zip(view.members, view.shares, strict=False))
        shares = tuple(known.get(w, 1000) for w in sets[0]) if known else ()
        return assign(exchange.shards, sets, shares).get(worker, ()) if exchange.shards else ()


# --- mutants: the member -----------------------------------------------------------------------------------------


class AppliesWhatOneNames(Member):
    def end_round(self, words: Sequence[Word]) -> bool:
        newest = max(word.prepared for word in words)
        return super().end_round([msgspec.structs.replace(word, prepared=newest) for word in words])


class OverlooksTheDigests(Member):
    def end_round(self, words: Sequence[Word]) -> bool:
        return super().end_round([msgspec.structs.replace(word, digest=0) for word in words])


class SwitchesInEvaluations(Member):
    def begin_round(self, step: int, *, may_switch: bool, call: m.Call = NOTHING) -> list[Action] | None:
        return super().begin_round(step, may_switch=may_switch or int(self.worker[1:]) % 2 == 0, call=call)


class ReportsHoldsTooEarly(Member):
    def receive(self, message: m.Message) -> list[Action]:
        actions = super().receive(message)
        for action in actions:
            if isinstance(action, m.Stopped):
                action.holds = action.synced
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


class DealsByTheOldSharesOnceMore(Member):
    """In the first round after they have changed, and only on some workers."""

    def begin_round(self, step: int, *, may_switch: bool, call: m.Call = NOTHING) -> list[Action] | None:
        old = self.view
        actions = super().begin_round(step, may_switch=may_switch, call=call)
        if old and self.view is not old and self.view and self.view.members == old.members:
            self.lineage = old.lineage(old.members) if int(self.worker[1:]) % 2 == 0 else self.lineage
        return actions


class SwitchesSharesWhenToldOf(Member):
    """Other shares among the same members look harmless: it does not wait until all agree."""

    def connected(self, view: View) -> list[Action]:
        actions = super().connected(view)
        if self.view and view.members == self.view.members and self.phase == "member":
            self.agreed, self.pending, self.prepared = view, None, 0
        return actions


class TakesWordsOfOtherCalls(Member):
    def end_round(self, words: Sequence[Word]) -> bool:
        return super().end_round([msgspec.structs.replace(word, call=self.call.number) for word in words])


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

    def from_pool(self, pool: str, host: str, message: m.FromPool, now: float) -> None:
        self.losing = True
        super().from_pool(pool, host, message, now)
        self.losing = False

    def tick(self, now: float) -> None:
        self.losing = True
        super().tick(now)
        self.losing = False


class DecidesBeforeAllHaveReported(Coordinator):
    def receive(self, worker: str, message: m.Message, now: float) -> None:
        if isinstance(message, m.Stopped) and self.stopping and len(self.stopping.waiting) == 2 and message.synced:
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


class TakesClosedForDead(Coordinator):
    def disconnected(self, worker: str, now: float) -> None:
        if worker in self.workers:
            self.forget(worker)
        super().disconnected(worker, now)


Decide = Callable[..., recovery.Outcome]


def commits_if_one_holds(decide: Decide) -> Decide:
    def mutant(reports: Any) -> recovery.Outcome:
        outcome = decide(reports)
        at_last = [reports[w] for w in outcome.members if reports[w].round == outcome.round]
        return changed(outcome, commit=len(at_last) == len(outcome.members) and any(r.holds for r in at_last))

    return mutant


def always_redoes(decide: Decide) -> Decide:
    """Even what all hold, and somebody may have ended."""
    return lambda reports: changed(decide(reports), commit=False)


def deals_to_nobody(decide: Decide) -> Decide:
    """Some shards go to somebody who is not there."""

    def mutant(reports: Any) -> recovery.Outcome:
        outcome = decide(reports)
        return changed(outcome, lineage=Lineage(sets=((*outcome.members, "nobody"),)))

    return mutant


def forgets_the_shares(decide: Decide) -> Decide:
    """The survivors would have computed some shards twice, and others not at all."""

    def mutant(reports: Any) -> recovery.Outcome:
        outcome = decide(reports)
        return changed(outcome, lineage=Lineage(sets=outcome.lineage.sets))

    return mutant


def convicts_nobody(convict: Any) -> Any:
    return lambda *_: convict((), (), ())


def believes_any_report(denied: Any) -> Any:
    """Of views and dealings that nobody issued."""
    del denied
    return lambda *_: ""


def outvotes_nobody(outvoted: Any) -> Any:
    """Whoever is furthest is right."""
    del outvoted
    return lambda *_: ()


def outvotes_who_is_behind(outvoted: Any) -> Any:
    """As before there were votes."""
    del outvoted

    def mutant(reports: Any, *_: Any) -> Any:
        synced = {worker: report for worker, report in reports.items() if report.synced}
        last = max((report.round for report in synced.values()), default=0)
        behind = [w for w, r in synced.items() if r.round < last - 1 or (r.round == last - 1 and not r.holds)]
        return tuple(Outvoted(worker=w, others=("the", "others"), reason="say otherwise") for w in behind)

    return mutant


def convicts_the_accused(convict: Any) -> Any:
    """One that accuses several puts them all out."""
    del convict

    def mutant(accusations: Any, answered: Any, *_: Any) -> Any:
        accused = dict.fromkeys(b for a, b in accusations if a in answered and b in answered and a != b)
        return tuple(Conviction(worker=worker, others=("?",), alone=True) for worker in accused)

    return mutant


def one_is_enough(enough: Any) -> Any:
    """What one says that all should have seen."""
    del enough
    return lambda _: 1


def hears_no_difference(heard: Any) -> Any:
    del heard
    return lambda *_: None


def goes_on_without_a_fence(fenced: Any) -> Any:
    del fenced
    return lambda *_: True


def lets_the_returned_go_on(returned: Any) -> Any:
    """Whoever comes back is not stopped, though it may have missed anything."""

    def mutant(books: Books, worker: Any, now: float) -> None:
        worker.connected, worker.seen = True, now
        if books.stopping:
            returned(books, worker, now)

    return mutant


def does_not_hear_that_they_differ(differs: Any) -> Any:
    del differs
    return lambda *_: None


def saves_one_that_differs(compared: Any) -> Any:
    """As if its replica were the run's."""
    del compared
    return lambda _: True


def forgets(**fields: Callable[[Books], Any]) -> Callable[[Any], Any]:
    """The journal holds something else than the books."""

    def mutate(durable: Any) -> Any:
        def mutant(books: Books) -> reconnection.Durable:
            values = {name: value(books) for name, value in fields.items()}
            return msgspec.structs.replace(durable(books), **values)

        return mutant

    mutate.__name__ = f"forgets_{'_'.join(fields)}"
    return mutate


def keeps_the_journal_late(flush: Any) -> Any:
    """Messages go out before the journal is written."""

    def mutant(self: Network) -> None:
        before, up = self.journal, self.up
        flush(self)
        if up and not self.up:
            self.journal = before

    return mutant


def saves_nothing(save: Any) -> Any:
    """A run that has finished is over, and its final state is nowhere."""

    def mutant(books: Books) -> None:
        if books.ending and books.ending.finished:
            ending.end(books)
        else:
            save(books)

    return mutant


def by_rank_alone(able: Any) -> Any:
    """Who writes checkpoints."""
    del able

    def mutant(books: Books) -> list[str]:
        members = books.view.members if books.view else ()
        return [w for w in members if w in books.workers and w not in books.unsynced]

    return mutant


def forgets_who_has_finished(durable: Any) -> Any:
    """The next coordinator compares the final states once more."""

    def mutant(books: Books) -> reconnection.Durable:
        known = durable(books)
        if known.ending is None:
            return known
        return msgspec.structs.replace(known, ending=msgspec.structs.replace(known.ending, finished=False))

    return mutant


def before_it_is_level(able: Any) -> Any:
    """A joiner writes checkpoints."""
    del able

    def mutant(books: Books) -> list[str]:
        return [w for w in reversed(books.view.members if books.view else ()) if books.workers[w].reaches]

    return mutant


MUTANTS = (
    {"worker": AbandonedThreadHolds},
    {"worker": WordsBeforeLevel},
    {"worker": IdlesByItsOwnView},
    {"worker": DealsByTheViewInForce},
    {"worker": SavesWhatIsNotProven, "focus": ("freeze", "dumb", "reset")},
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
    {"coordinator": LeavesTheFinishedWaiting},
    {"coordinator": DecidesBeforeAllHaveReported},
    {"coordinator": TrustsTheFrozen},
    {"coordinator": TakesClosedForDead},
)
PATCHES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (recovery, "decide", commits_if_one_holds),
    (recovery, "decide", always_redoes),
    (recovery, "decide", deals_to_nobody),
    (recovery, "decide", forgets_the_shares),
    (suspicion, "convict", convicts_nobody),
    (issued, "denied", believes_any_report),
    (plausible, "outvoted", outvotes_nobody),
    (plausible, "outvoted", outvotes_who_is_behind),
    (suspicion, "convict", convicts_the_accused),
    (testimony, "enough", one_is_enough),
    (calls, "calls_differ", hears_no_difference),
    (calls, "_went_on", hears_no_difference),
    (decision, "differing", hears_no_difference),
    (decision, "_fenced", goes_on_without_a_fence),
    (reconnection, "returned", lets_the_returned_go_on),
    (unplanned, "differs", does_not_hear_that_they_differ),
    (replicas, "compared", saves_one_that_differs),
    (reconnection, "durable", forgets(number=lambda books: books.view.number if books.view else 0)),
    (reconnection, "durable", forgets(proposed=lambda _: None)),
    (reconnection, "durable", forgets(issued=lambda books: tuple(books.issued[-1:]))),
    (reconnection, "durable", forgets(departed=lambda _: {})),
    (reconnection, "durable", forgets(parts=lambda _: ())),
    (reconnection, "durable", forgets(ending=lambda _: None)),
    (reconnection, "durable", forgets_who_has_finished),
    (ending, "save", saves_nothing),
    (saving, "_able", by_rank_alone),
    (saving, "_able", before_it_is_level),
    (Network, "flush", keeps_the_journal_late),
)
SERVE = "serve += [Await(bucket), Take(landing[bucket]), Add(bucket, *cut(bucket, worker), landing[bucket])]"
WORDS = "serve += [*map(Take, gathered), Vouch(), Send(words), Take(words), End()]"
OWN = "serve.append(Send(sums(bucket, own=True)))"
POST = "serve.append(Post(landing[bucket + LANDINGS]))"
SCATTER = "scatter=tuple(scattered(bucket) for bucket in numbers),"
IN_THE_ORDER = (
    ("if isinstance(act, Send):", "if False:  # settles no slice and no word"),
    ("if not scattered[bucket]:", "if False:  # settles no partial sum"),
    ("self.serve[served:]", "self.serve[served + 1 :]"),
    (SERVE, SERVE.replace("Take(landing[bucket]), ", "")),
    (SERVE, f"serve.append(Send(sums(bucket, own=True))); {SERVE}"),
    (OWN, "serve.append(Send(sums(bucket, own=False)))"),
    (OWN, "serve += [Send(sums(bucket, own=True))][:bucket]"),
    (POST, "serve.insert(-1, Post(landing[bucket + LANDINGS]))"),
    ("in enumerate(own)", "in enumerate(reversed(own))"),
    ("*cut(bucket, worker), node, landing)", "*cut(bucket, worker), node, min(landing, 1))"),
    ("*cut(bucket, worker), node, landing)", "*cut(bucket, peer), node, landing)"),
    ("held = lineage.assign(shards) if", "held = view.lineage(view.members).assign(shards) if"),
    (SCATTER, SCATTER.replace("for bucket", "if len(lineage.sets) < 2 else () for bucket")),
    (WORDS, "serve += [Vouch(), *map(Take, gathered), Send(words), Take(words), End()]"),
    (WORDS, "serve += [*map(Take, gathered[:-1]), Vouch(), Send(words), Take(words), End()]"),
    (WORDS, "serve += [*map(Take, gathered), Vouch(), Send(words), End()]"),
)
PLANTED: tuple[tuple[ModuleType, str, str, dict[str, Any]], ...] = (  # a module, a place in it, a bug, options
    (member, "if (view, round_) != (self.view.number, self.round):", "if round_ != self.round:", {}),
    (member, "self.round, self.holds, self.lineage = message.round + 1, False, None", "self.lineage = None", {}),
    *((order, place, by, {}) for place, by in IN_THE_ORDER),
    (tags, "view.number % VIEWS << 21 | ", "", {}),
    (tags, "bucket << 9 | ", "", {}),
)
PLANTED += (
    (session, "return self._lease.over(now)", "return False", {}),
    (
        session, "if stands and message not in self._standing:",
        "if stands and not isinstance(message, m.Differs):", {"focus": ("resets", "coordinator"), "drift": True},
    ),
    (session, "self._outgoing.extend(self._standing)", "pass", {}),
    (session, "self.attempt += 1", "self.attempt = 1", {"focus": ("reset", "dumb")}),
)  # fmt: skip
MISTAKES = (issued, plausible, suspicion, testimony)  # show where a member is wrong
DRIFT = (does_not_hear_that_they_differ, saves_one_that_differs)  # shows where a replica drifts
