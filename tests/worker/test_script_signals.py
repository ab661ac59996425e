"""A handler that the script sets for a notice's signal takes nothing away from the notice."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from farandole.worker.process_exit import ScriptSignals

IT, OTHER = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    before = {number: signal.getsignal(number) for number in (IT, OTHER)}
    monkeypatch.setattr(signal, "signal", signal.signal)  # put back afterwards
    monkeypatch.setattr(signal, "getsignal", signal.getsignal)
    yield []
    monkeypatch.undo()
    for number, handler in before.items():
        signal.signal(number, handler)


def taken(notices: list[int]) -> ScriptSignals:
    def notice(number: int, frame: FrameType | None) -> None:
        del frame
        notices.append(number)

    return ScriptSignals({IT: notice})


def exits(*_: Any) -> None:
    sys.exit(0)


def raises(*_: Any) -> None:
    raise RuntimeError("a handler's own")


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the script or a library sets its own handler of SIGTERM, SIGINT or SIGHUP, and a worker gets that signal",
)
@pytest.mark.parametrize("handler", [exits, raises, signal.SIG_IGN, signal.SIG_DFL])
def test_the_notice_comes_and_the_script_goes_on(notices: list[int], handler: Any) -> None:
    signals = taken(notices)
    first = signal.getsignal(IT)
    assert signal.signal(IT, handler) == first
    assert signal.getsignal(IT) == handler
    os.kill(os.getpid(), IT)
    assert notices == [IT]
    signals.call_noted()  # whatever it raises


def test_the_scripts_handler_is_called_when_the_worker_has_left(notices: list[int]) -> None:
    signals, called = taken(notices), list[tuple[int, int]]()
    signal.signal(IT, lambda number, _frame: called.append((number, len(notices))))
    signals.call_noted()
    assert called == [], "no signal has arrived"
    os.kill(os.getpid(), IT)
    os.kill(os.getpid(), IT)
    assert called == []
    signals.call_noted()
    assert called == [(IT, 2)]


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the script or a library sets its own handler of SIGTERM, SIGINT or SIGHUP, and a worker gets that signal",
)
def test_a_handler_that_calls_the_one_before_it(notices: list[int]) -> None:
    signals = taken(notices)
    before: Callable[..., Any] = signal.getsignal(IT)  # type: ignore[assignment]
    signal.signal(IT, lambda number, frame: before(number, frame))
    os.kill(os.getpid(), IT)
    assert notices == [IT]
    signals.call_noted()
    assert set(notices) == {IT}


def test_a_handler_that_is_set_for_a_while_and_put_back(notices: list[int]) -> None:
    signals = taken(notices)
    before = signal.signal(IT, exits)
    signal.signal(IT, before)
    os.kill(os.getpid(), IT)
    signals.call_noted()
    assert notices == [IT]


def test_other_signals_and_forked_children_are_the_scripts_own(notices: list[int]) -> None:
    signals = taken(notices)
    signal.signal(OTHER, signal.SIG_IGN)
    assert OTHER not in signals.noted
    child = os.fork()
    if child == 0:
        signal.signal(IT, lambda *_: os._exit(7))
        os.kill(os.getpid(), IT)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_what_is_no_handler_is_refused_as_ever(notices: list[int]) -> None:
    taken(notices)
    with pytest.raises(TypeError):
        signal.signal(IT, "x")  # type: ignore[arg-type]
