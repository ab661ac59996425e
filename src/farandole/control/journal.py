"""The run's record: `journal.sqlite` holds every event, `metrics.jsonl` every event and every step's metrics.

An event is committed before the next one is written. SQLite runs in WAL mode with `synchronous=NORMAL`: a killed
process loses nothing, a host that loses power may lose the last events, and a commit takes no fsync (some tens of
microseconds instead of milliseconds, in the process that hands out views). metrics.jsonl gets one line a write, so a
reader sees whole lines.

    event line   {"event": name, "time": unix, **fields}
    step line    {"step": number, **fields}
    run.log line {"event": "log", "step": number, **fields}
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from farandole.control.paths import JOURNAL, METRICS
from farandole.membership.messages import Line

SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    event TEXT NOT NULL,
    view INTEGER,
    step INTEGER,
    worker TEXT,
    detail TEXT NOT NULL
)
"""


def event_line(event: str, fields: dict[str, Any], time: float) -> dict[str, Any]:
    """An event as a line of metrics.jsonl. `time` is Unix time."""
    return _headed({"event": event, "time": time}, fields)


def metrics_line(line: Line) -> dict[str, Any]:
    """A worker's line of metrics as a line of metrics.jsonl: a step, or what `run.log` was given after it."""
    head: dict[str, Any] = {"step": line.step} if line.index == 0 else {"event": "log", "step": line.step}
    return _headed(head, line.fields)


def _headed(head: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """`head` first, for whoever reads the file; its names beat equal ones that a user gave to `run.log`."""
    return {**head, **fields, **head}


class Journal:
    """Writes both files of a run's folder. The coordinator's process only."""

    def __init__(self, folder: Path) -> None:
        self._database = sqlite3.connect(folder / JOURNAL, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.execute(SCHEMA)
        self._metrics = (folder / METRICS).open("ab", buffering=0)

    def write(self, line: dict[str, Any]) -> None:
        """One line as `event_line` or `metrics_line` made it; events other than run.log's also go to the table."""
        self._metrics.write(msgspec.json.encode(line) + b"\n")
        event = line.get("event", "log")
        if event != "log":
            detail = {k: v for k, v in line.items() if k not in ("event", "time", "view", "step", "worker")}
            self._database.execute(
                "INSERT INTO events (time, event, view, step, worker, detail) VALUES (?, ?, ?, ?, ?, ?)",
                (
                    line["time"],
                    event,
                    line.get("view"),
                    line.get("step"),
                    line.get("worker"),
                    msgspec.json.encode(detail).decode(),
                ),
            )

    def close(self) -> None:
        self._database.close()
        self._metrics.close()
