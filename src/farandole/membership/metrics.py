"""The lines of metrics.jsonl: how each kind is made, and what counts as one when the file is read again.

    event line   {"event": name, "time": unix, **fields}
    step line    {"step": number, **fields}
    run.log line {"event": "log", "step": number, **fields}

The file outlives the coordinator that wrote it, and anything may have happened to it since: a torn write, a disk, an
older farandole, another program. So whoever reads it takes lines from `parse_line` alone. What that gives has the names
that readers go by, of the types that they rely on, and nothing nested deeper than lists and tables of plain values; a
line that is anything else is damaged: it is passed over and counted, never believed and never an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from farandole.membership.values import Count, Line, Metrics, Seconds, Value, Workers
from farandole.platform.plain import escaped

DAMAGED = "metrics damaged"  # the event that tells of such lines

Field = Value | list[Value] | dict[str, Value]


class StepLine(msgspec.Struct, omit_defaults=True):
    """A step, as far as anything reads it. A loss that is not finite is null: JSON has none."""

    step: Count
    epoch: Count = 0
    samples: Count = 0
    loss: float | None = None
    seconds: Seconds = 0.0
    samples_per_s: float | None = None
    workers: Workers = 1
    time: Seconds = 0.0
    total: Count | None = None


class LogLine(msgspec.Struct):
    """What `run.log` was given."""

    step: Count


class EventLine(msgspec.Struct):
    """An event: the names that some reader goes by, in whatever event they are."""

    event: str
    time: Seconds
    step: Annotated[int, msgspec.Meta(ge=-1, le=2**53)] = 0
    view: Count = 0
    worker: str = ""
    host: str = ""
    source: str = ""
    members: list[str] = []
    workers: list[str] = []
    shares: dict[str, Annotated[int, msgspec.Meta(ge=1)]] = {}
    files: list[str] = []
    what: list[str] = []
    differences: list[str] = []
    reason: str = ""
    cause: str = ""
    outcome: str = ""
    unreached: str = ""
    traceback: str = ""
    fingerprint: str = ""
    path: str = ""
    loss: str = ""
    last_finite: str | None = None
    code: Annotated[int, msgspec.Meta(ge=-255, le=255)] = 0
    lines: Count = 0
    equal: bool = False
    whole: bool = True
    finite: bool = True


NEEDS = {  # what readers rely on
    "view": ("view", "members", "step", "cause"),
    "proposed": ("view",),
    "shares": ("shares",),
    "resumed": ("step", "path"),
    "checkpoint": ("step", "path"),
    "saved": ("path", "whole"),
    "finished": ("fingerprint", "equal"),
    "failed": ("worker", "traceback"),
    "lost": ("worker",),
    "over": ("code", "reason"),
    DAMAGED: ("lines",),
}
_decode = msgspec.json.Decoder(dict[str, Field]).decode


def event_line(event: str, fields: dict[str, Any], time: float) -> dict[str, Any]:
    """An event as a line of metrics.jsonl. `time` is Unix time."""
    head = {"event": event, "time": time}
    return {**head, **fields, **head}


def metrics_line(line: Line) -> dict[str, Any]:
    """A worker's line of metrics as a line of metrics.jsonl: a step, or what `run.log` was given after it."""
    if not isinstance(line.fields, Metrics):
        return {"event": "log", "step": line.step, **line.fields}
    fields = msgspec.structs.asdict(line.fields)
    rare = {"skipped": 0, "left_out": 0, "learning_rate": None}  # not said where it is so
    return {"step": line.step, **{name: value for name, value in fields.items() if rare.get(name, ...) != value}}


def as_written(line: dict[str, Any]) -> bytes:
    """A line as the file holds it: who looks at that with a terminal is not steered by what workers have said."""
    return escaped(msgspec.json.encode(line).decode()).encode() + b"\n"


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl, None for one that is damaged."""
    try:
        found: dict[str, Any] = _decode(line)
        kind = StepLine if "event" not in found else LogLine if found["event"] == "log" else EventLine
        msgspec.convert(found, kind)
    except (ValueError, RecursionError):  # msgspec's own errors among them, and text that is no UTF-8
        return None
    return found if all(name in found for name in NEEDS.get(found.get("event", ""), ())) else None


def parse_lines(lines: Iterable[bytes]) -> tuple[list[dict[str, Any]], int]:
    """The lines that are some, and how many are not."""
    parsed = [parse_line(line) for line in lines]
    found = [line for line in parsed if line is not None]
    return found, len(parsed) - len(found)
