"""Merges the workers' reports about the same few steps into one trace for ui.perfetto.dev and chrome://tracing.

Pure: it takes the workers' answers and returns events. In the trace each host is a process, and each worker is a thread
of it. A worker's line shows its steps, their phases (the classes of `protocol/values.py`) and, in an exchange, the
peers that it waited for. Waits that overlap with computation are left out, since they cost nothing.

**Which steps.** The workers were asked at nearly the same time, but not in the same step. The trace has as many steps
as requested, from the first one that most workers have. A worker with fewer steps is shown with those.

**Clocks.** Each worker reports times by the wall clock of its host. Clocks of hosts differ, by seconds if nothing
synchronizes them. But a round ends at all workers at nearly the same moment: when a worker has the commit messages of
all others (R1), the last of which arrives at all of them at once. So the ends of one round at two workers differ by the
difference of their clocks, plus or minus the time of a message and of waking up a thread. Each worker is shifted by the
median of these differences over the steps that it shares with the first worker. So a single round that ended late at
one worker has no effect, and the remaining error is about the time of a message, far less than that of a step.

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
    """A trace. `steps`: the steps that it has. `lacking`: workers that did not report all of these steps completely.
    `full`: workers whose report was cut because it was too large. `length_us`: the length of the trace. `waited_us`:
    the time that each worker waited for each of its peers. Times in microseconds.
    """

    events: Sequence[Event]
    steps: range
    length_us: int = 0
    waited_us: Mapping[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    lacking: tuple[str, ...] = ()
    full: tuple[str, ...] = ()

    def json(self) -> bytes:
        """Returns the content of the file, in the Chrome trace event format."""
        return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": self.events}) + b"\n"


def trace(answers: Mapping[str, Spans], hosts: Mapping[str, str], steps: int) -> TraceTable:
    """Returns the trace of `steps` steps, or of fewer if there are fewer. `hosts`: the host of each worker."""
    reports = {worker: _Report(spans) for worker, spans in answers.items() if spans.steps}
    shown = _common(list(reports.values()), steps)
    shifts = _shifts(list(reports.values()))
    process_ids = {host: number for number, host in enumerate(dict.fromkeys(hosts.get(w, "") for w in reports), 1)}
    events: list[Event] = []
    waited: dict[str, Counter[str]] = {}
    for row, (worker, report) in enumerate(reports.items(), 1):
        host = hosts.get(worker, "")
        at = {"pid": process_ids[host], "tid": row}
        events += _names(at, host, worker)
        waited[worker] = Counter()
        for name, kind, step, began, ended in report.slices(shown):
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
        lacking=tuple(
            worker for worker in answers if worker not in reports or not set(shown) <= reports[worker].ends.keys()
        ),
        full=tuple(worker for worker, spans in answers.items() if spans.full),
    )


def _names(at: Event, host: str, worker: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", **at, "args": {"name": host or "host"}}
    yield {"ph": "M", "name": "thread_name", **at, "args": {"name": worker}}
    yield {"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": at["tid"]}}


class _Report:
    """One worker's report, by its own wall clock, in microseconds. `ends`: the ends of finished rounds, by step."""

    def __init__(self, spans: Spans) -> None:
        wall = spans.wall_us
        self._step_starts = [(began + wall, step) for step, began, _ in sorted(spans.steps, key=lambda each: each[1])]
        self._spans = sorted((began + wall, began + wall + length, kind) for kind, began, length in spans.spans)
        self._waits = sorted(
            (began + wall, began + wall + length, spans.peers[peer])
            for peer, began, length in spans.waits
            if peer < len(spans.peers)
        )
        self._passed = 0  # number of waits that have ended
        self.ends = {step: ended + wall for step, _, ended in spans.steps if ended}

    @property
    def steps(self) -> set[int]:
        return {step for _, step in self._step_starts}

    @property
    def first(self) -> int:
        return min(self.steps)

    def slices(self, shown: range) -> Iterator[tuple[str, str, int, int, int]]:
        """Yields name, kind, step, start and end of each slice in these steps; enclosing slices before inner ones."""
        rows: list[tuple[int, int, int, str, str, int]] = []
        of_steps: dict[int, tuple[int, int]] = {}
        before = 0  # end of the newest wait, so that slices nest whatever was reported
        for began, ended, kind in self._spans:
            place = bisect_right(self._step_starts, began, key=lambda each: each[0]) - 1
            step = self._step_starts[max(place, 0)][1]
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
        """Yields the waits in this time, cut to it. Call it in the order of time."""
        while self._passed < len(self._waits) and self._waits[self._passed][1] <= began:
            self._passed += 1
        for wait_began, wait_ended, peer in islice(self._waits, self._passed, None):
            if wait_began >= ended:
                return
            if wait_ended > began:
                yield max(wait_began, began), min(wait_ended, ended), peer


def _common(reports: Sequence[_Report], steps: int) -> range:
    """Returns the steps of the trace.

    The first one is the latest of the workers' first steps that more than half of the workers have. So a single worker
    with invented steps has no effect.
    """
    counts = Counter(step for report in reports for step in report.steps)
    most = {step for step, count in counts.items() if 2 * count > len(reports)} or set(counts)
    first = max((report.first for report in reports if report.first in most), default=min(most, default=0))
    return range(first, max((step + 1 for step in most if step < first + steps), default=first))


def _shifts(reports: Sequence[_Report]) -> list[int]:
    """Returns what to add to each worker's times to get the first worker's clock; see the module's docstring."""
    ends = reports[0].ends if reports else {}
    return [median_low(differences) if (differences := _differences(ends, r.ends)) else 0 for r in reports]


def _differences(ends: Mapping[int, int], others: Mapping[int, int]) -> list[int]:
    return [ends[step] - others[step] for step in ends.keys() & others.keys()]
