"""Processes of agents are found by their mark, and nothing else is ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from farandole.control.ticket import Ticket
from farandole.pool import agent
from farandole.pool.agent import mark

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc"),
]
SLEEPS = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]


def started(*words: str, **environ: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*SLEEPS, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environ},
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_what_has_the_mark_is_ended_and_nothing_else() -> None:
    ours = [started(FARANDOLE_AGENT="one"), started(FARANDOLE_AGENT="two", FARANDOLE_WORKER="w1")]
    others = [
        started(FARANDOLE_AGENT="three"),
        started(FARANDOLE_AGENT="one-more"),
        started(FARANDOLE_AGENT=""),
        started("FARANDOLE_AGENT=one"),
        started(FARANDOLE_OTHER="FARANDOLE_AGENT=one"),
        started(),
    ]
    try:
        ended = agent.kill_agents(["one", "two"])
        assert set(ended) == {process.pid for process in ours}
        assert all("sys.stdin.read" in command for command in ended.values())
        assert [process.wait(200) for process in ours] == [-9, -9]
        assert [process.poll() for process in others] == [None] * len(others)
        assert agent.kill_agents(["one", "two"]) == {}
    finally:
        for process in (*ours, *others):
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("environ", "agents", "expected"),
    [
        (b"A=1\0FARANDOLE_AGENT=one\0B=2\0", ["one"], True),
        (b"FARANDOLE_AGENT=one", ["two", "one"], True),
        (b"FARANDOLE_AGENT=one", [], False),
        (b"A=FARANDOLE_AGENT=one\0", ["one"], False),
        (b"FARANDOLE_AGENT=\0", [""], False),
        (b"A=1\0", [""], False),
        (b"", [""], False),
    ],
)
def test_whose_a_process_is(environ: bytes, agents: list[str], expected: bool) -> None:
    assert agent.belongs_to(environ, agents) is expected


def test_other_runs_are_counted_once_each_and_not_the_agents_own() -> None:
    def ticket(secret: str) -> Ticket:
        return Ticket(address="http://127.0.0.1:1", secret=secret, run="r")

    def environ(of: str) -> bytes:
        return f"A=1\0FARANDOLE_AGENT={of}\0".encode()

    own = mark(ticket("one"), "rack", "north")
    same = [mark(ticket("one"), "rack", "south"), mark(ticket("one"), "lent", "north")]
    others = [
        mark(ticket("two"), "rack", "north"),
        mark(ticket("two"), "rack", "south"),
        mark(ticket("three"), "", "x"),
    ]
    assert agent.other_runs(own, [b"A=1\0", *map(environ, [own, *same])]) == 0
    assert agent.other_runs(own, [b"A=1\0", *map(environ, [own, *same, *others])]) == 2
    assert len({own, *same, *others}) == 6
