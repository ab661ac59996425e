"""Admission: compares a worker that has built its model and opened its data with the run, and admits or refuses it.

What the run executes is known from its start, from the copy that `farandole run` made; the rest is what the first
worker of a pool brings. A faster external worker waits for that one. Otherwise the run's own worker could be refused
for differing from an external one. `--bits` decides about a worker that differs in numerics alone (numeric_facts.py).
See docs/protocol.md, Admission.
"""

from __future__ import annotations

from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import failures
from farandole.protocol.coordinator.state import CoordinatorState, Worker
from farandole.protocol.difference import first_difference, in_words, other_code, without_code
from farandole.protocol.numeric_facts import numeric_differences, numerics, numerics_refusal, without_numerics

# --- admission --------------------------------------------------------------------------------------------------------

MOST_TOLD = 100  # alterations of settings, and operators: a script that alters one in each step is not told for ever


def on_ready(state: CoordinatorState, worker: Worker, message: m.Ready) -> None:
    """The worker asks in: from now on it is a candidate, or is refused and told why."""
    if worker.state != "starting":
        return
    signature = message.signature
    code = _other_code(state, signature)
    if code and not state.settings.other_code:
        _refuse(state, worker, f"{in_words(code)}: not what the run executes, which is in its folder's code/")
        return
    if state.signature is None and state.settings.code and not worker.pool:
        if worker.id not in state.early_external:
            state.record(events.WaitsEvent(worker=worker.id, host=worker.host))
        state.early_external[worker.id] = message
        return
    if state.signature is None:
        state.signature = without_code(signature) if code else signature
        state.record(events.NumericsEvent(worker=worker.id, facts=numerics(signature.facts)))
    found = numeric_differences(state.signature.facts, signature.facts)
    expected, got = without_numerics(state.signature), without_numerics(signature)
    if unlike := numerics_refusal(found, state.settings.bits):
        _refuse(state, worker, unlike, of_its_host=True)
        return
    if difference := first_difference(expected, got):
        _refuse(state, worker, difference)
        return
    if code:
        state.record(events.OtherCodeEvent(worker=worker.id, what=tuple(code)))
    if found.bits:
        state.unpromised = state.reached if state.unpromised is None else state.unpromised
        state.record(events.BitsNotPromisedEvent(worker=worker.id, step=state.reached, what=found.words()))
    elif found.versions:
        state.record(events.OtherVersionsEvent(worker=worker.id, what=found.words()))
    worker.state, worker.unreached = "ready", message.unreached
    state.record(events.ReadyEvent(worker=worker.id, host=worker.host, pid=worker.pid, unreached=worker.unreached))
    early, state.early_external = state.early_external, {}
    for guest in [guest for guest in early if guest in state.workers]:
        on_ready(state, state.workers[guest], early[guest])


def on_setting_changed(state: CoordinatorState, worker: Worker, message: m.SettingChanged) -> None:
    """The script has altered a setting of torch's. Everyone says so; who does alone is found by the step's digest."""
    told = (message.step, message.now)
    if not state.has_part(worker.id) or state.altered.get(message.setting) == told or state.alterations >= MOST_TOLD:
        return
    state.altered[message.setting] = told
    state.alterations += 1
    state.record(
        events.SettingChangedEvent(
            worker=worker.id, step=message.step, setting=message.setting, before=message.before, now=message.now
        )
    )


def on_unknown_operator(state: CoordinatorState, worker: Worker, message: m.UnknownOperator) -> None:
    """It has run one that is not known to be portable: told once."""
    if message.operator not in state.unknown_operators and len(state.unknown_operators) < MOST_TOLD:
        state.unknown_operators.add(message.operator)
        state.record(events.UnknownOperatorEvent(worker=worker.id, operator=message.operator))


def _refuse(state: CoordinatorState, worker: Worker, difference: str, *, of_its_host: bool = False) -> None:
    del state.workers[worker.id]
    state.record(events.RefusedEvent(worker=worker.id, host=worker.host, reason=difference))
    state.send(worker.id, m.JoinRefused(reason=difference))
    state.record_departure(worker, difference, 1, started=False, refused=not of_its_host)
    if not of_its_host:
        failures.on_refused(state, worker, difference)


def _other_code(state: CoordinatorState, signature: m.Signature) -> list[str]:
    expected = (*state.settings.code, *(state.signature.facts if state.signature else ()))
    return list(dict.fromkeys(other_code(expected, signature.facts)))
