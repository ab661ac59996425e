"""Wrong decisions of the protocol: each takes the place of one shipped function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed
from typing import Any

import msgspec

from farandole.protocol.coordinator import disputes, reconnection, recovery, shutdown, view_changes
from farandole.protocol.coordinator.disputes import Conviction, Outvoted
from farandole.protocol.coordinator.state import CoordinatorState
from farandole.protocol.view import Lineage
from farandole.simulate.network import Network

Decide = Callable[..., recovery.Outcome]


def commits_if_one_holds(decide: Decide) -> Decide:
    def mutant(reports: Any, *, must_redo: bool) -> recovery.Outcome:
        outcome = decide(reports, must_redo=must_redo)
        at_last = [reports[w] for w in outcome.members if reports[w].round == outcome.round]
        return changed(outcome, commit=len(at_last) == len(outcome.members) and any(r.has_result for r in at_last))

    return mutant


def always_redoes(decide: Decide) -> Decide:
    """Even what all hold, and somebody may have ended."""
    return lambda reports, must_redo: changed(decide(reports, must_redo=must_redo), commit=False)


def deals_to_nobody(decide: Decide) -> Decide:
    """Some shards go to somebody who is not there."""

    def mutant(reports: Any, *, must_redo: bool) -> recovery.Outcome:
        outcome = decide(reports, must_redo=must_redo)
        return changed(outcome, lineage=Lineage(sets=((*outcome.members, "nobody"),)))

    return mutant


def forgets_the_shares(decide: Decide) -> Decide:
    """The survivors would have computed some shards twice, and others not at all."""

    def mutant(reports: Any, *, must_redo: bool) -> recovery.Outcome:
        outcome = decide(reports, must_redo=must_redo)
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
        behind = [w for w, r in synced.items() if r.round < last - 1 or (r.round == last - 1 and not r.has_result)]
        return tuple(Outvoted(worker=w, others=("the", "others"), reason="contradiction") for w in behind)

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

    def mutant(state: CoordinatorState, worker: Any, now: float, *, synced: bool) -> None:
        worker.connected = True
        state.failure_detector.begin(worker.silence, now)
        if state.stopping:
            returned(state, worker, now, synced=synced)

    return mutant


def does_not_hear_that_they_differ(differs: Any) -> Any:
    del differs
    return lambda *_: None


def saves_one_that_differs(compared: Any) -> Any:
    """As if its replica were the run's."""
    del compared
    return lambda _: True


def forgets(**fields: Callable[[CoordinatorState], Any]) -> Callable[[Any], Any]:
    """The journal holds something else than the state."""

    def mutate(durable: Any) -> Any:
        def mutant(state: CoordinatorState) -> reconnection.Durable:
            values = {name: value(state) for name, value in fields.items()}
            return msgspec.structs.replace(durable(state), **values)

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

    def mutant(state: CoordinatorState) -> None:
        if state.ending and state.ending.finished:
            shutdown.end(state)
        else:
            save(state)

    return mutant


def by_rank_alone(able: Any) -> Any:
    """Who writes checkpoints."""
    del able

    def mutant(state: CoordinatorState) -> list[str]:
        members = state.view.members if state.view else ()
        return [w for w in members if w in state.workers and w not in state.unsynced]

    return mutant


def forgets_who_has_finished(durable: Any) -> Any:
    """The next coordinator compares the final states once more."""

    def mutant(state: CoordinatorState) -> reconnection.Durable:
        known = durable(state)
        if known.ending is None:
            return known
        return msgspec.structs.replace(known, ending=msgspec.structs.replace(known.ending, finished=False))

    return mutant


def ends_during_a_stop(advance: Any) -> Any:
    """The run ends once the members that the coordinator knows of have finished, whoever else the stop would find."""

    def mutant(state: CoordinatorState, now: float) -> bool:
        if state.stopping and state.everyone_finished() and not state.savers:
            shutdown.on_all_scripts_ended(state)
            return True
        return advance(state, now)

    return mutant


WRONG_MEMBER: dict[str, Any] = {"focus": ("mistake",)}
COMES_BACK: dict[str, Any] = {"focus": ("coordinator", "dumb")}
DRIFTS: dict[str, Any] = {"drift": True}

PATCHES: tuple[tuple[Any, str, Callable[[Any], Any], dict[str, Any]], ...] = (  # where, which, by what, options
    (recovery, "decide", commits_if_one_holds, {}),
    (recovery, "decide", always_redoes, {}),
    (recovery, "decide", deals_to_nobody, {}),
    (recovery, "decide", forgets_the_shares, {}),
    (disputes, "convict", convicts_nobody, WRONG_MEMBER),
    (recovery, "issued_denial", believes_any_report, WRONG_MEMBER),
    (disputes, "outvoted", outvotes_nobody, WRONG_MEMBER),
    (disputes, "outvoted", outvotes_who_is_behind, WRONG_MEMBER),
    (disputes, "convict", convicts_the_accused, WRONG_MEMBER),
    (disputes, "majority", one_is_enough, WRONG_MEMBER),
    (view_changes, "calls_differ", hears_no_difference, {"focus": ("stray", "kill")}),
    (view_changes, "_went_on", hears_no_difference, {"focus": ("resets",)}),
    (recovery, "differing", hears_no_difference, {"focus": ("stray", "reset")}),
    (recovery, "_fenced", goes_on_without_a_fence, {}),
    (reconnection, "on_return", lets_the_returned_go_on, {"focus": ("reset",)}),
    (recovery, "on_differs", does_not_hear_that_they_differ, DRIFTS),
    (disputes, "compare_when_complete", saves_one_that_differs, DRIFTS),
    (reconnection, "to_durable", forgets(number=lambda state: state.view.number if state.view else 0), COMES_BACK),
    (reconnection, "to_durable", forgets(proposed=lambda _: None), COMES_BACK),
    (reconnection, "to_durable", forgets(issued=lambda state: tuple(state.issued[-1:])), COMES_BACK),
    (reconnection, "to_durable", forgets(waited_for=lambda _: ()), COMES_BACK),
    (reconnection, "to_durable", forgets(ending=lambda _: None), COMES_BACK),
    (reconnection, "to_durable", forgets_who_has_finished, COMES_BACK),
    (shutdown, "ask_to_save", saves_nothing, {}),
    (shutdown, "_able", by_rank_alone, {}),
    (shutdown, "advance", ends_during_a_stop, DRIFTS),
    (Network, "flush", keeps_the_journal_late, COMES_BACK),
)
