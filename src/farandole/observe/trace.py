"""Merges the workers' reports about the same few steps into one trace for ui.perfetto.dev and chrome://tracing.

Pure: answers in, events out. In the trace each host is a process and each worker is a thread of it. A worker's line
shows its steps, their phases (the classes of `protocol/values.py`) and, in an exchange, the peers that it waited for.
Waits that overlap with computation are left out, since they cost nothing.

**Which steps.** The workers were asked at nearly the same time, but not in the same step. The trace has as many steps
as requested, from the first one that most workers have. A worker with fewer steps is shown with those.

**Clocks.** Each worker gives its times by its own wall clock, and those of hosts differ, by seconds where nobody sets
them. But a round ends everywhere at nearly the same moment: when a worker holds the control words of all others (R1),
of which the last one arrives at all of them at once. So the ends of the same round, as two workers saw them,
differ by how their clocks differ, give or take what a message takes on its way and a thread to wake up. Each worker is
shifted by the median of these differences over the steps that it shares with the first worker: so a single round that
was seen late moves nothing, and what remains is about a message's time, far less than a step's.

Names come from the workers; they are only used as JSON strings.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median_low
from typing import Any

import msgspec

from farandole.protocol.messages import Spans
from farandole.protocol.values import SAID

Event = dict[str, Any]
EXCHANGE = SAID.index("exchange")


@dataclass(frozen=True, kw_only=True)
class TraceTable:
    """`steps`: which are shown; `lacking`: who has not told of the whole of each. `waited_us`: how long each worker
    waited for each of its peers, in `length_us`; `full`: who had more to tell than fits.
    """

    events: Sequence[Event]
    steps: range
    length_us: int = 0
    waited_us: Mapping[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    lacking: tuple[str, ...] = ()
    full: tuple[str, ...] = ()

    def json(self) -> bytes:
        """The file's content, in the Chrome trace event format."""
        return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": self.events}) + b"\n"


def trace(answers: Mapping[str, Spans], hosts: Mapping[str, str], steps: int) -> TraceTable:
    """Of `steps` steps, where so many are there. `hosts`: on which each worker is."""
    told = {worker: _Told(spans) for worker, spans in answers.items() if spans.steps}
    shown = _common(list(told.values()), steps)
    shifts = _shifts(list(told.values()))
    rooms = {host: number for number, host in enumerate(dict.fromkeys(hosts.get(w, "") for w in told), 1)}
    events: list[Event] = []
    waited: dict[str, Counter[str]] = {}
    for row, (worker, its) in enumerate(told.items(), 1):
        host = hosts.get(worker, "")
        at = {"pid": rooms[host], "tid": row}
        events += _names(at, host, worker)
        waited[worker] = Counter()
        for name, kind, step, began, ended in its.slices(shown):
            if kind == "wait":
                waited[worker][name] += ended - began
                name = f"waits for {name}"
            events.append({"ph": "X", "name": name, "cat": kind, "ts": began + shifts[row - 1], "dur": ended - began,
                           **at, "args": {"step": step}})  # fmt: skip
    first = min((event["ts"] for event in events if event["ph"] == "X"), default=0)
    for event in events:
        if event["ph"] == "X":
            event["ts"] -= first
    return TraceTable(
        events=events,
        steps=shown,
        length_us=max((event["ts"] + event["dur"] for event in events if event["ph"] == "X"), default=0),
        waited_us=waited,
        lacking=tuple(worker for worker in answers if worker not in told or not set(shown) <= told[worker].ends.keys()),
        full=tuple(worker for worker, spans in answers.items() if spans.full),
    )


def _names(at: Event, host: str, worker: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", **at, "args": {"name": host or "host"}}
    yield {"ph": "M", "name": "thread_name", **at, "args": {"name": worker}}
    yield {"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": at["tid"]}}


class _Told:
    """One worker's answer, on its wall clock, in microseconds. `ends`: of the rounds that have ended, by step."""

    def __init__(self, spans: Spans) -> None:
        wall = spans.wall_us
        self._begins = [(began + wall, step) for step, began, _ in sorted(spans.steps, key=lambda each: each[1])]
        self._spans = sorted((began + wall, began + wall + took, kind) for kind, began, took in spans.spans)
        self._waits = sorted(
            (began + wall, began + wall + took, spans.peers[peer])
            for peer, began, took in spans.waits
            if peer < len(spans.peers)
        )
        self._passed = 0  # waits that are over
        self.ends = {step: ended + wall for step, _, ended in spans.steps if ended}

    @property
    def steps(self) -> set[int]:
        return {step for _, step in self._begins}

    @property
    def first(self) -> int:
        return min(self.steps)

    def slices(self, shown: range) -> Iterator[tuple[str, str, int, int, int]]:
        """Name, kind, step, beginning and end of what lies in these steps; what encloses others before them."""
        rows: list[tuple[int, int, int, str, str, int]] = []
        of_steps: dict[int, tuple[int, int]] = {}
        before = 0  # where the newest wait has ended: they nest, whatever was said
        for began, ended, kind in self._spans:
            place = bisect_right(self._begins, began, key=lambda each: each[0]) - 1
            step = self._begins[max(place, 0)][1]
            if step not in shown:
                continue
            rows.append((began, -ended, 1, SAID[kind], "phase", step))
            of_steps[step] = min(began, of_steps.get(step, (began, 0))[0]), ended
            for wait_began, wait_ended, peer in self._within(began, ended) if kind == EXCHANGE else ():
                wait_began = max(wait_began, before)
                if wait_began < wait_ended:
                    rows.append((wait_began, -wait_ended, 2, peer, "wait", step))
                    before = wait_ended
        rows += [(began, -ended, 0, f"step {step}", "step", step) for step, (began, ended) in of_steps.items()]
        for began, minus, _, name, kind, step in sorted(rows):
            yield name, kind, step, began, -minus

    def _within(self, began: int, ended: int) -> Iterator[tuple[int, int, str]]:
        """The waits in that time, cut to it. To be asked for in order."""
        while self._passed < len(self._waits) and self._waits[self._passed][1] <= began:
            self._passed += 1
        for wait_began, wait_ended, peer in islice(self._waits, self._passed, None):
            if wait_began >= ended:
                return
            if wait_ended > began:
                yield max(wait_began, began), min(wait_ended, ended), peer


def _common(told: Sequence[_Told], steps: int) -> range:
    """From the last first step that more than half of them have: what a single one makes up moves nothing."""
    counts = Counter(step for its in told for step in its.steps)
    most = {step for step, count in counts.items() if 2 * count > len(told)} or set(counts)
    first = max((its.first for its in told if its.first in most), default=min(most, default=0))
    return range(first, max((step + 1 for step in most if step < first + steps), default=first))


def _shifts(told: Sequence[_Told]) -> list[int]:
    """What is to be added to each one's times, for the first one's clock. See the module's head."""
    return [median_low(differences) if (differences := _differences(told[0].ends, its.ends)) else 0 for its in told]


def _differences(ends: Mapping[int, int], others: Mapping[int, int]) -> list[int]:
    return [ends[step] - others[step] for step in ends.keys() & others.keys()]
