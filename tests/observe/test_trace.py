"""The trace that is made of what workers tell: which steps, on which clock, who waited for whom, what a liar gains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from farandole.observe.trace import TraceTable, trace
from farandole.protocol.messages import Spans
from farandole.protocol.values import SAID
from tests.support.every import every

DATA, COMPUTE, EXCHANGE = (SAID.index(name) for name in ("data", "compute", "exchange"))
WALL = 1_795_000_000_000_000
STEP_US = 1000


def told(*steps: int, compute: int = 300, clock: int = 0, waits_for: str = "slow", late: Sequence[int] = ()) -> Spans:
    """Of steps of a millisecond that end everywhere at once: data, compute, and waiting for the rest. Its clock is
    `clock` ahead; in the steps `late` it sees the end later.
    """
    spans: list[tuple[int, int, int]] = []
    waits: list[tuple[int, int, int]] = []
    origin = STEP_US * steps[0]
    for step in steps:
        at = STEP_US * step - origin
        spans += [(DATA, at, 100), (COMPUTE, at + 100, compute), (EXCHANGE, at + 100 + compute, 900 - compute)]
        waits.append((0, at + 50, 900))  # it begins beside the computing
    return Spans(
        number=1, wall_us=WALL + origin + clock, spans=tuple(spans), peers=(waits_for,), waits=tuple(waits),
        steps=tuple((s, STEP_US * s - origin, STEP_US * s - origin + 999 + 200 * (s in late)) for s in steps),
    )  # fmt: skip


def made(answers: dict[str, Spans], steps: int = 3) -> tuple[TraceTable, list[dict[str, Any]]]:
    """And its complete events, as a reader of the file gets them."""
    found = trace(answers, dict.fromkeys(answers, "here"), steps)
    whole = json.loads(found.json())
    assert whole["displayTimeUnit"] == "ms"
    assert all(isinstance(event[key], int) for event in whole["traceEvents"] for key in ("pid", "tid"))
    return found, [event for event in whole["traceEvents"] if event["ph"] == "X"]


def test_every_worker_has_the_same_steps_though_they_began_in_different_ones() -> None:
    found, events = made({"a": told(4, 5, 6, 7, 8), "b": told(5, 6, 7, 8), "slow": told(3, 4, 5, 6, 7)})
    assert found.steps == range(5, 8)
    assert (found.lacking, found.length_us) == ((), 3 * STEP_US)
    for tid in (1, 2, 3):
        phases = [event for event in events if event["tid"] == tid and event["cat"] == "phase"]
        assert [(event["args"]["step"], event["name"]) for event in phases] == [
            (step, name) for step in (5, 6, 7) for name in ("data", "compute", "exchange")
        ]
        assert [event["name"] for event in events if event["tid"] == tid and event["cat"] == "step"] == [
            "step 5", "step 6", "step 7"
        ]  # fmt: skip
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(phases))


def test_a_wait_lies_in_an_exchange_and_names_the_peer() -> None:
    found, events = made({"a": told(1, 2, 3), "slow": told(1, 2, 3, compute=900, waits_for="a")})
    waits = [event for event in events if event["cat"] == "wait"]
    assert {event["name"] for event in waits} == {"waits for slow"}, "the slow one's are beside its computing"
    assert [(event["ts"], event["dur"]) for event in waits] == [(400, 550), (1400, 550), (2400, 550)]
    assert found.waited_us == {"a": {"slow": 1650}, "slow": {}}


def test_waits_do_not_overlap_whatever_was_said() -> None:
    """As where a thread of an older view waits beside the newest one's."""
    spans = Spans(
        number=1, steps=((1, 0, 999),), spans=((EXCHANGE, 0, 1000),), peers=("b", "c"),
        waits=((0, 100, 600), (1, 200, 100), (1, 650, 100)),
    )  # fmt: skip
    _, events = made({"a": spans})
    waits = [(e["name"], e["ts"], e["dur"]) for e in events if e["cat"] == "wait"]
    assert waits == [("waits for b", 100, 600), ("waits for c", 700, 50)]


def test_workers_whose_clocks_differ_are_aligned_by_the_ends_of_rounds() -> None:
    """Also where one end is seen late: the median leaves it aside."""
    for clock in (-5_000_000, 70, 10**12):
        _, events = made({"a": told(1, 2, 3, late=(3,)), "b": told(1, 2, 3, clock=clock, late=(2,))})
        begins = {tid: [e["ts"] for e in events if e["tid"] == tid and e["cat"] == "step"] for tid in (1, 2)}
        assert begins[1] == begins[2] == [0, 1000, 2000], clock


def test_who_has_less_is_shown_with_that_and_told() -> None:
    found, events = made({"a": told(1, 2, 3), "b": told(1, 2, 3), "left": told(1, 2), "none": Spans(number=1)})
    assert (found.steps, found.lacking) == (range(1, 4), ("left", "none"))
    assert {e["args"]["step"] for e in events if e["tid"] == 3} == {1, 2}
    unfinished = msgspec.structs.replace(told(1, 2), steps=((1, 0, 999), (2, 1000, 0)))
    assert made({"a": told(1, 2), "b": unfinished})[0].lacking == ("b",)
    assert made({"a": told(1, 2)}, steps=900)[0].steps == range(1, 3), "the run has ended early"
    assert made({})[0].steps == range(0)
    assert made({"a": Spans(number=1)})[0].steps == range(0)


def test_hosts_are_processes_and_workers_their_threads() -> None:
    hosts = {"a": "h1", "b": 'h"2\u2028</script>', "c": "h1"}
    events = json.loads(trace(dict.fromkeys(hosts, told(1)), hosts, 1).json())["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if "name" in e["args"]}
    assert names == {
        ("process_name", 1, 1): "h1", ("thread_name", 1, 1): "a",
        ("process_name", 2, 2): 'h"2\u2028</script>', ("thread_name", 2, 2): "b",
        ("process_name", 1, 3): "h1", ("thread_name", 1, 3): "c",
    }  # fmt: skip


LIES = [
    told(10**15, 10**15 + 1), told(0), told(2, clock=2**50),
    Spans(number=1, steps=((2, 0, 5), (2, 0, 1), (0, 2**53, 2**53)), spans=((COMPUTE, 2**53, 2**53),)),
    Spans(number=1, steps=((1, 0, 9),), spans=((EXCHANGE, 0, 9), (EXCHANGE, 0, 9)), peers=("x",), waits=((7, 0, 9),)),
]  # fmt: skip


@every(range(len(LIES)))
def test_what_one_makes_up_moves_nothing_of_the_others(number: int) -> None:
    honest = {"a": told(1, 2, 3, 4), "b": told(2, 3, 4, 5)}
    truth, lied = trace(honest, {}, 3), trace({**honest, "liar": LIES[number]}, {}, 3)
    assert lied.steps == truth.steps == range(2, 5)
    for tid in (1, 2):
        one, other = ([e for e in t.events if e["tid"] == tid and e["ph"] == "X"] for t in (truth, lied))
        shift = other[0]["ts"] - one[0]["ts"]
        assert [{**event, "ts": event["ts"] + shift} for event in one] == other


counts = st.integers(0, 40) | st.just(2**53)
triples = st.lists(st.tuples(counts, counts, counts), max_size=5).map(tuple)
kinds = st.lists(st.tuples(st.integers(0, len(SAID) - 1), counts, counts), max_size=8).map(tuple)
anything = st.builds(
    Spans, number=st.just(1), wall_us=counts, steps=triples, spans=kinds, waits=triples,
    peers=st.lists(st.sampled_from(("a", "b", "\u202e")), max_size=2).map(tuple),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(("a", "b", "c")), anything), st.integers(1, 5))
def test_whatever_is_told_becomes_a_trace_whose_waits_do_not_overlap(answers: dict[str, Spans], steps: int) -> None:
    _, events = made(answers, steps)
    for tid in range(1, 4):
        waits = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == tid and e["cat"] == "wait")
        assert all(ts + dur <= after for (ts, dur), (after, _) in pairwise(waits))
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)
