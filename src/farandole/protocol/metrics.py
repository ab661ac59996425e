"""The lines of metrics.jsonl: writes each kind of line, and validates the lines of a file.

    event line   {"event": name, "time": unix, **fields}
    step line    {"step": number, **fields}
    run.log line {"event": "log", "step": number, **fields}

The file outlives the coordinator that wrote it, and may have been damaged or changed since: by a torn write, a disk,
another version of farandole, another program. So all readers get their lines from `parse_line`. It returns one of the
structs below, with all fields and with valid types. Any other line is damaged: readers skip and count it. They never
use its values, and it never causes an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from farandole.platform.output import escaped
from farandole.protocol import events
from farandole.protocol.values import Count, Metrics, Seconds, Value, Workers
from farandole.protocol.values import Line as WireLine


class StepLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A step, with the fields of `Metrics`. A number that is not finite is null: JSON has no such numbers."""

    step: Count
    epoch: Count
    samples: Count
    loss: float | None
    seconds: Seconds
    samples_per_s: float | None
    view: Count
    workers: Workers
    time: Seconds
    total: Count | None
    skipped: Count = 0
    left_out: Count = 0
    learning_rate: float | None = None
    factor: float | None
    evaluation_s: Seconds = 0.0
    once_s: Seconds = 0.0
    pause_s: Seconds = 0.0

    @property
    def training_s(self) -> float:
        """The step's time without evaluations, `run.once` and pauses."""
        return max(0.0, self.seconds - self.evaluation_s - self.once_s - self.pause_s)


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a call of `run.log` after `step`."""

    step: Count
    fields: Mapping[str, Value]


Line = StepLine | LogLine | events.Event


class _Kind(msgspec.Struct):
    event: str | msgspec.UnsetType | None = msgspec.UNSET


LOG = "log"
PARTS = ("evaluation_s", "once_s", "pause_s")  # of a step's time; not in the file where they are 0
_HEAD = ("event", "step")
_kind = msgspec.json.Decoder(_Kind).decode
_step = msgspec.json.Decoder(StepLine).decode
_log = msgspec.json.Decoder(dict[str, Value]).decode


def metrics_line(line: WireLine) -> StepLine | LogLine:
    """Return a worker's line of metrics as a line of metrics.jsonl: a step, or the values of `run.log` after it."""
    if isinstance(line.fields, Metrics):
        fields = msgspec.structs.asdict(line.fields)
        return StepLine(step=line.step, **{name: value for name, value in fields.items() if value or name not in PARTS})
    assert isinstance(line.fields, Mapping)  # missing lines become an event
    return LogLine(step=line.step, fields=line.fields)


def time_of(line: Line) -> float:
    """Return the Unix time of a line in seconds; 0.0 for a line of `run.log`, which has none."""
    return 0.0 if isinstance(line, LogLine) else line.time


def as_written(line: Line) -> bytes:
    """Return a line as the file holds it, escaped: text of workers can't control the terminal of a reader."""
    flat = {"event": LOG, "step": line.step, **line.fields} if isinstance(line, LogLine) else line
    return escaped(msgspec.json.encode(flat).decode()).encode() + b"\n"


def parse_line(line: bytes) -> Line | None:
    """Parse a line of metrics.jsonl. Returns None if it is damaged."""
    try:
        kind = _kind(line).event
        if kind is msgspec.UNSET:
            return _step(line)
        if kind != LOG:
            event = events.decode(line)
            return event if event.time else None  # the coordinator never writes an event without a time
        fields = _log(line)
        step = msgspec.convert(fields.get("step"), Count)
        return LogLine(step=step, fields={name: value for name, value in fields.items() if name not in _HEAD})
    except (ValueError, RecursionError):  # msgspec's own errors among them, and text that is no UTF-8
        return None


def parse_lines(lines: Iterable[bytes]) -> tuple[list[Line], int]:
    """Return the valid lines, and the number of damaged ones."""
    parsed = [parse_line(line) for line in lines]
    valid = [line for line in parsed if line is not None]
    return valid, len(parsed) - len(valid)
