"""Who may enter: a worker that has built its model and opened its data, compared with the run.

What the run executes is known from its start, from the copy that `farandole run` made; the rest is what the first
worker of a pool brings. A guest that is faster waits for that one, lest the run's own be refused for differing from
a guest. Who differs in numerics alone is judged by the run's `--bits` (`protocol/numeric_facts.py`).
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


def on_ready(books: CoordinatorState, worker: Worker, message: m.Ready) -> None:
    """The worker asks in: from now on it is a candidate, or is refused and told why."""
    if worker.state != "starting":
        return
    signature = message.signature
    code = _other_code(books, signature)
    if code and not books.settings.other_code:
        _refuse(books, worker, f"{in_words(code)}: not what the run executes, which is in its folder's code/")
        return
    if books.signature is None and books.settings.code and not worker.pool:
        if worker.id not in books.early_external:
            books.record(events.WaitsEvent(worker=worker.id, host=worker.host))
        books.early_external[worker.id] = message
        return
    if books.signature is None:
        books.signature = without_code(signature) if code else signature
        books.record(events.NumericsEvent(worker=worker.id, facts=numerics(signature.facts)))
    found = numeric_differences(books.signature.facts, signature.facts)
    expected, got = without_numerics(books.signature), without_numerics(signature)
    if unlike := numerics_refusal(found, books.settings.bits):
        _refuse(books, worker, unlike, of_its_host=True)
        return
    if difference := first_difference(expected, got):
        _refuse(books, worker, difference)
        return
    if code:
        books.record(events.OtherCodeEvent(worker=worker.id, what=tuple(code)))
    if found.bits:
        books.unpromised = books.reached if books.unpromised is None else books.unpromised
        books.record(events.BitsNotPromisedEvent(worker=worker.id, step=books.reached, what=found.words()))
    elif found.versions:
        books.record(events.OtherVersionsEvent(worker=worker.id, what=found.words()))
    worker.state, worker.unreached = "ready", message.unreached
    books.record(events.ReadyEvent(worker=worker.id, host=worker.host, pid=worker.pid, unreached=worker.unreached))
    early, books.early_external = books.early_external, {}
    for guest in [guest for guest in early if guest in books.workers]:
        on_ready(books, books.workers[guest], early[guest])


def on_setting_changed(books: CoordinatorState, worker: Worker, message: m.SettingChanged) -> None:
    """The script has altered a setting of torch's. Everyone says so; who does alone is found by the step's digest."""
    told = (message.step, message.now)
    if not books.has_part(worker.id) or books.altered.get(message.setting) == told or books.alterations >= MOST_TOLD:
        return
    books.altered[message.setting] = told
    books.alterations += 1
    books.record(
        events.SettingChangedEvent(
            worker=worker.id, step=message.step, setting=message.setting, before=message.before, now=message.now
        )
    )


def on_unknown_operator(books: CoordinatorState, worker: Worker, message: m.UnknownOperator) -> None:
    """It has run one that is not known to be portable: told once."""
    if message.operator not in books.unknown_operators and len(books.unknown_operators) < MOST_TOLD:
        books.unknown_operators.add(message.operator)
        books.record(events.UnknownOperatorEvent(worker=worker.id, operator=message.operator))


def _refuse(books: CoordinatorState, worker: Worker, difference: str, *, of_its_host: bool = False) -> None:
    del books.workers[worker.id]
    books.record(events.RefusedEvent(worker=worker.id, host=worker.host, reason=difference))
    books.send(worker.id, m.JoinRefused(reason=difference))
    books.record_departure(worker, difference, 1, started=False, refused=not of_its_host)
    if not of_its_host:
        failures.on_refused(books, worker, difference)


def _other_code(books: CoordinatorState, signature: m.Signature) -> list[str]:
    expected = (*books.settings.code, *(books.signature.facts if books.signature else ()))
    return list(dict.fromkeys(other_code(expected, signature.facts)))
