"""Admission: compares a worker that has built its model and opened its data with the run, and admits or refuses it.

What the run executes is known from its start, from the copy that `farandole run` made; the rest is what the first
worker of a pool brings. A faster external worker waits for that one. Otherwise the run's own worker could be refused
for differing from an external one. `--bits` decides about a worker that differs in numerics alone (numeric_facts.py).
A worker that differs in code is refused unless `--other-code` is given. Code, data and shapes are compared whatever
`--bits` says.
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

MOST_TOLD = 100  # recorded changes of settings, and operators: a script may change a setting in each step


def on_ready(state: CoordinatorState, worker: Worker, message: m.Ready) -> None:
    """Admit the worker as a candidate, or refuse it with a reason. An external worker may have to wait."""
    if worker.state != "starting":
        return
    signature = message.signature
    code = _other_code(state, signature)
    if code and not state.settings.other_code:
        _refuse(state, worker, f"{in_words(code)}: this is not the code of the run, which is in code/ of its folder")
        return
    if state.signature is None and state.settings.code and not worker.pool:
        if worker.id not in state.early_external:
            state.record(events.WaitsEvent(worker=worker.id, host=worker.host))
        state.early_external[worker.id] = message
        return
    if state.signature is None:
        state.signature = without_code(signature) if code else signature
        state.record(events.NumericsEvent(worker=worker.id, facts=numerics(signature.facts)))
    differences = numeric_differences(state.signature.facts, signature.facts)
    expected, got = without_numerics(state.signature), without_numerics(signature)
    if refusal := numerics_refusal(differences, state.settings.bits):
        _refuse(state, worker, refusal, of_its_host=True)
        return
    if refusal := _other_zone(state, worker):
        _refuse(state, worker, refusal, of_its_host=True)
        return
    if difference := first_difference(expected, got):
        _refuse(state, worker, difference)
        return
    if code:
        state.record(events.OtherCodeEvent(worker=worker.id, what=tuple(code)))
    if differences.bits:
        state.unpromised = state.reached if state.unpromised is None else state.unpromised
        state.record(events.BitsNotPromisedEvent(worker=worker.id, step=state.reached, what=differences.words()))
    elif differences.versions:
        state.record(events.OtherVersionsEvent(worker=worker.id, what=differences.words()))
    worker.state, worker.unreached = "ready", message.unreached
    state.record(events.ReadyEvent(worker=worker.id, host=worker.host, pid=worker.pid, unreached=worker.unreached))
    early, state.early_external = state.early_external, {}
    for external in [external for external in early if external in state.workers]:
        on_ready(state, state.workers[external], early[external])


def on_setting_changed(state: CoordinatorState, worker: Worker, message: m.SettingChanged) -> None:
    """Record that the script has changed a torch setting.

    All workers report it. A worker whose script alone does so is found by the digest of the step.
    """
    change = (message.step, message.now)
    if (
        not state.is_waited_for(worker.id)
        or state.altered.get(message.setting) == change
        or state.alterations >= MOST_TOLD
    ):
        return
    state.altered[message.setting] = change
    state.alterations += 1
    state.record(
        events.SettingChangedEvent(
            worker=worker.id, step=message.step, setting=message.setting, before=message.before, now=message.now
        )
    )


def on_unknown_operator(state: CoordinatorState, worker: Worker, message: m.UnknownOperator) -> None:
    """Record once that an operator was run that is not known to be portable."""
    if message.operator not in state.unknown_operators and len(state.unknown_operators) < MOST_TOLD:
        state.unknown_operators.add(message.operator)
        state.record(events.UnknownOperatorEvent(worker=worker.id, operator=message.operator))


def _refuse(state: CoordinatorState, worker: Worker, difference: str, *, of_its_host: bool = False) -> None:
    """Take a candidate out. `of_its_host` means that its host is the cause, so this does not count as a refusal."""
    del state.workers[worker.id]
    state.record(events.RefusedEvent(worker=worker.id, host=worker.host, reason=difference))
    state.send(worker.id, m.JoinRefused(reason=difference))
    state.dismiss(worker, difference, 1, started=False, refused=not of_its_host)
    if not of_its_host:
        failures.on_refused(state, worker, difference)


def _other_zone(state: CoordinatorState, worker: Worker) -> str:
    """Return why the worker's zone is refused: an admitted worker of its host has another one. "" if none has."""
    for other in state.workers.values():
        if other.state != "starting" and other.host == worker.host and other.zone != worker.zone:
            return (
                f"it reports zone {worker.zone!r} for host {worker.host}, and {other.id} on the same host reports "
                f"{other.zone!r}: set the same FARANDOLE_ZONE for all workers of a host"
            )
    return ""


def _other_code(state: CoordinatorState, signature: m.Signature) -> list[str]:
    """Return how the code of a worker differs from the code of the run, each difference once."""
    expected = (*state.settings.code, *(state.signature.facts if state.signature else ()))
    return list(dict.fromkeys(other_code(expected, signature.facts)))
