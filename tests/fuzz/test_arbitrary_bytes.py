"""Arbitrary and nearly right bytes at every place where bytes from others come in: nothing but errors of ours.

The table of places is in `fuzz/targets.py`. Here hypothesis feeds it; `make fuzz` and the last test do so guided by
coverage, where atheris is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attack.lines import NONE_AT_ALL
from farandole.errors import UsageError
from farandole.protocol import messages as m
from farandole.protocol.values import MAX_TEXT
from tests.fuzz.files import FILES
from tests.fuzz.targets import Target, targets
from tests.fuzz.wire import Wire
from tests.support.any_message import MESSAGES
from tests.support.metric_lines import logged

NAMES = (
    "message", "answer", "ticket", "tickets", "listen", "body", "state", "ends", "head", "stranger", "lines", "metrics",
    *FILES, "request", "frames", "hello",
)  # fmt: skip
ROOT = Path(__file__).parents[2]
FUZZ_S = 10


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, Target]]:
    wire = Wire()
    yield targets(wire)
    wire.close()


@st.composite
def mutated(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A seed with a few bytes changed, cut out, put in or said twice."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        until = min(len(data), at + draw(st.integers(0, 8)))
        data[at:until] = draw(st.one_of(st.binary(max_size=8), st.just(bytes(data[at:until]) * 2), st.just(b"")))
    return bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_errors_of_ours(table: dict[str, Target], name: str) -> None:
    target = table[name]

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.one_of(st.binary(max_size=200), mutated(target.seeds)))
    def feed(data: bytes) -> None:
        target.feed(data)

    for seed in target.seeds:
        target.feed(seed)
    feed()


def test_nonsense_over_the_wire_ends_no_coordinator() -> None:
    """Of ticket holders: well-formed messages out of all order, from three workers at once, with a real journal."""
    wire = Wire()

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(said=st.lists(st.tuples(st.integers(0, 2), MESSAGES), max_size=15))
    def converse(said: list[tuple[int, m.Message]]) -> None:
        wire.converse(said)

    converse()
    wire.close()


def test_the_table_is_whole(table: dict[str, Target]) -> None:
    assert tuple(table) == NAMES
    [given] = re.findall(r"for target in (.*?); do", (ROOT / "Makefile").read_text(), re.DOTALL)
    assert tuple(given.replace("\\\n", " ").split()) == NAMES


DEEP = b"\x81\xa1x" * 100_000
BEYOND = [
    pytest.param(m.Hello(kind="worker", worker="x" * 257), id="a name too long"),
    pytest.param(m.Hello(kind="worker", worker="\x1b[2J"), id="a name that clears the terminal"),
    pytest.param(m.Hello(kind="worker", pid=2**63), id="a number too large for the journal"),
    pytest.param(m.Hello(kind="worker", pid=-1), id="a number below zero"),
    pytest.param(m.ScriptFailed(traceback="x" * (MAX_TEXT + 1)), id="a text too long"),
]


@pytest.mark.parametrize("message", BEYOND)
def test_what_goes_beyond_a_field_is_refused(message: m.Message) -> None:
    with pytest.raises(msgspec.ValidationError):
        m.decode_from_worker(m.encode(message))


@pytest.mark.parametrize("message", NONE_AT_ALL, ids=lambda message: message[80:140].hex())
def test_a_line_that_is_none_is_no_message(message: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        m.decode_from_worker(message)


@pytest.mark.parametrize("value", [DEEP, b"\xc1", b"\xd4\x05x", b"\x91\x00"], ids=["deep", "none", "extension", "list"])
def test_a_line_of_metrics_holds_nothing_nested(value: bytes) -> None:
    head = m.encode(m.Heartbeat(lines=(logged(1, 1, loss=77),)))
    [at] = [i for i in range(len(head)) if head[i : i + 6] == b"\xa4loss\x4d"]
    with pytest.raises(msgspec.MsgspecError):
        m.decode_from_worker(head[: at + 5] + value + head[at + 6 :])


def test_all_that_an_honest_worker_may_have_to_say_at_once_can_be_said() -> None:
    """A worker keeps so many lines, and becomes rank 0 with all of them unsent."""

    def line(size: int) -> m.Line:
        return logged(2**40, 1, text="x" * size)

    [largest] = [size for size in range(3900, 4000) if fits(line, size) and not fits(line, size + 1)]
    beat = m.Heartbeat(view=2**40, round=2**40, step=2**40, lines=(line(largest),) * m.MAX_LINES)
    assert len(m.encode(beat)) < m.MAX_MESSAGE_BYTES
    assert m.decode_from_worker(m.encode(beat)) == beat
    with pytest.raises(UsageError, match=r"\d+ bytes.*\b4000\b"):
        line(largest + 1)
    with pytest.raises(UsageError, match=str(2**64)):
        m.Line(step=1, index=1, fields={"n": 2**64})


def fits(line: Callable[[int], m.Line], size: int) -> bool:
    try:
        line(size)
    except UsageError:
        return False
    return True


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no build for this Python")
def test_a_few_seconds_guided_by_coverage(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.harness", "all", str(FUZZ_S)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Done " in done.stderr, done.stderr[-3000:]
