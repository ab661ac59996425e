"""When silence counts as frozen: by the time that whoever listens has run itself."""

from __future__ import annotations

import asyncio
import socket

import pytest

from farandole.cli import supervisor
from farandole.cli.supervisor import START_S, SilenceClock, until_silent
from farandole.control.ticket import Ticket, new_secret


def misses(silence: SilenceClock, took_s: float) -> int:
    """How many tries without an answer are enough."""
    for number in range(1, 1000):
        if silence.missed(took_s):
            return number
    raise AssertionError("never")


def listening() -> SilenceClock:
    silence = SilenceClock(15.0)
    silence.record_answer()
    return silence


def test_fifteen_seconds_without_an_answer() -> None:
    assert misses(listening(), 3.0) == 5
    assert misses(listening(), 1.0) == 15, "connections that are refused at once"


def test_an_answer_begins_it_anew() -> None:
    silence = listening()
    assert not any(silence.missed(3.0) for _ in range(4))
    silence.record_answer()
    assert misses(silence, 3.0) == 5


def test_a_machine_that_was_suspended_has_not_waited() -> None:
    silence = listening()
    assert not silence.missed(3600.0), "one long try is one try"
    assert not silence.missed(3600.0)


def test_one_that_starts_has_longer() -> None:
    assert misses(SilenceClock(15.0), 1.0) == START_S


def test_a_socket_that_accepts_and_never_answers_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASK_S", "ANSWER_S", "START_S"):
        monkeypatch.setattr(supervisor, name, 0.01)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        ticket = Ticket(address=f"http://127.0.0.1:{frozen.getsockname()[1]}", secret=new_secret(), run="r")
        asyncio.run(until_silent(ticket, 0.05))
