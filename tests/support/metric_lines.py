"""Lines of metrics, for tests to which most of the values do not matter."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any, TypeVar, get_args

import msgspec

from farandole.coordinator.journal import Journal
from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.events import Recorded, WorkerTime
from farandole.protocol.metrics import Line, LogLine, StepLine, as_written, metrics_line, parse_line

E = TypeVar("E", bound=Recorded)
KINDS: dict[str, type[Recorded]] = {events.name_of(kind): kind for kind in get_args(events.Event)}
TIMES = WorkerTime(host="h", pool="local", step=3, seconds={"start": 1.5, "compute": 2.0})
PLAUSIBLE: dict[str, Any] = {  # by the field's type
    "str": "x", "Names": ("w1", "w2"), "bool": True, "dict[str, Share]": {"w1": 1000, "w2": 480},
    "dict[str, str]": {"device": "CPU"}, "dict[str, WorkerTime]": {"w1": TIMES}, "Dollars | None": 0.5,
    "Count": 3, "Step": 3, "Code": 3, "Seconds": 1.5,
}  # fmt: skip


def stepped(step: int, **fields: Any) -> m.Line:
    """The line of a step, as a worker tells it."""
    plausible = {"epoch": 0, "samples": 10, "loss": 0.5, "seconds": 0.1, "samples_per_s": 100.0, "view": 1}
    return m.Line(step=step, index=0, fields=m.Metrics(**{**plausible, "workers": 1, "time": 9.0, **fields}))


def logged(step: int, index: int, **fields: Any) -> m.Line:
    """The line of a call of `run.log` after it."""
    return m.Line(step=step, index=index, fields=fields)


def step_line(step: int, **fields: Any) -> StepLine:
    """... as it is read from the file, where a loss that is not finite is None."""
    line = parse_line(as_written(metrics_line(stepped(step, **fields))))
    assert isinstance(line, StepLine)
    return line


def an(event: type[E], **fields: Any) -> E:
    """That event, with plausible values for what is not given."""
    wanted = {f.name: f for f in msgspec.structs.fields(event) if f.name not in fields and f.required}
    return event(**{"time": 9.0, **{name: PLAUSIBLE[event.__annotations__[name]] for name in wanted}, **fields})


def made(line: dict[str, Any]) -> Line:
    """A line of which `line` says what matters."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in line.items()}
    name = fields.pop("event", None)
    if name is None:
        return step_line(**fields)
    return LogLine(step=fields.pop("step"), fields=fields) if name == "log" else an(KINDS[name], **fields)  # type: ignore[return-value]


def write(journal: Journal, line: Line) -> None:
    """Write it and wait. Raises what the journal told of it."""
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    assert journal.write(line, ended.put)
    if error := ended.get():
        raise error
