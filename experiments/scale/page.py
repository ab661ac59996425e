"""The results and the tables of README.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from experiments.scale.events import Failing, GoodputRow, elastic_goodput, failure_times, goodput_row
from experiments.scale.history import HistoryRow
from experiments.scale.machines import CHANGES, STEP_S, MachinesRow, failures
from experiments.tables import filled

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE / "README.md"
DAY_S = 86_400.0
Row = TypeVar("Row")


class FailuresRow(msgspec.Struct, frozen=True, kw_only=True):
    """The goodputs of a run with failures, with every message and by events only, on the same failures."""

    workers: int
    mean_s: float
    failures: int
    messages: float
    events: float


def read(name: str, kind: type[Row]) -> list[Row]:
    """Return the rows of a file of results; none if there is no file."""
    path = RESULTS / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=list[kind]) if path.exists() else []


def save(name: str, rows: Sequence[object]) -> None:
    (RESULTS / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


# --- runs -------------------------------------------------------------------------------------------------------------

CLASSES = ("start", "compute", "again", "wait")
JOIN_S = 1.5 * STEP_S  # a new worker starts within a second, and joins between two steps
KILLED_PAUSE_S = 0.2  # of a killed worker, as `machines` measures it


def both_levels(workers: int, mean_s: float, steps: int) -> FailuresRow:
    row = failures(workers, mean_s, steps)
    elapsed_s = row.steps * row.step_s / row.goodput
    job = Failing(workers=workers, start_s=JOIN_S, pause_s=KILLED_PAUSE_S)
    return FailuresRow(
        workers=workers, mean_s=mean_s, failures=row.failures, messages=row.goodput,
        events=elastic_goodput(job, failure_times(mean_s, elapsed_s, 1), elapsed_s),
    )  # fmt: skip


def published() -> Iterator[GoodputRow]:
    """The published failures: 419 in 54 days on 16,384 GPUs; a failure takes a host of eight."""
    yield goodput_row(Failing(workers=16_384, lost=8), 54 * DAY_S / 419, 54 * DAY_S)


def curve() -> Iterator[GoodputRow]:
    """4,096 workers over the time of a thousand failures."""
    for mean_s in (60.0, 600.0, 3600.0, 6 * 3600.0, DAY_S):
        yield goodput_row(Failing(workers=4_096, lost=8), mean_s, 1000 * mean_s)


# --- tables -----------------------------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """Return the tables by name."""
    return {
        "machines": _table(
            ("workers", "a step, s", "killed, s", "silent, s", "notice, s", "join, s", "peers", "messages a step",
             "heartbeats/s", "coordinator, ms/s", "simulated in, s"),
            (
                (f"{row.workers}", f"{row.step_s:.2f}", *(_pause(row, kind) for kind in (*CHANGES, "join")),
                 f"{row.peers:.0f}", f"{row.sent:.0f}", f"{row.heartbeats_per_s:,.0f}", f"{row.coordinator_ms:.1f}",
                 f"{row.seconds:,.0f}")
                for row in read("machines", MachinesRow)
            ),
        ),
        "failures": _table(
            ("workers", "a failure in, s", "failures", "goodput, every message", "by events"),
            (
                (f"{row.workers}", f"{row.mean_s:g}", f"{row.failures}", f"{row.messages:.1%}", f"{row.events:.1%}")
                for row in read("failures", FailuresRow)
            ),
        ),
        "history": _table(
            ("history", "taken back", "seconds of machines", *(f"`{name}`" for name in CLASSES), "done after, s"),
            (
                (f"{row.seed}", f"{row.lost}", *(_both(row, name) for name in ("paid_s", *CLASSES, "done_s")))
                for row in read("history", HistoryRow)
            ),
        ),
        "events": _table(
            ("workers", "a failure in", "failures", "farandole", "restarts in 3 min", "restarts in 10 min"),
            (
                (f"{row.workers:,}", _time(row.mean_s), f"{row.failures:,}", f"{row.elastic:.1%}",
                 f"{row.restart_3m:.1%}", f"{row.restart_10m:.1%}")
                for row in read("events", GoodputRow)
            ),
        ),
    }  # fmt: skip


def write() -> None:
    """Put the tables into README.md."""
    PAGE.write_text(filled(PAGE.read_text(), tables()))


def _both(row: HistoryRow, name: str) -> str:
    """Return a figure with every message, and by events."""
    return f"{getattr(row.messages, name):,.0f} / {getattr(row.events, name):,.0f}"


def _pause(row: MachinesRow, kind: str) -> str:
    return f"{max(row.pauses_s[kind], 0.0):.2f}" if kind in row.pauses_s else ""


def _time(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds < 3600 else f"{seconds / 3600:.3g} h"


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [heads, ["---:"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
