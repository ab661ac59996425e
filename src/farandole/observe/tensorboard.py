"""Exports a run to TensorBoard while it runs: event files, written with the record writer of package `tensorboard`.

    step/...    the numbers of each step, all of a step in one record (see `export_common.py`)
    NAME        values of `run.log`, under their own names; texts too
    events      the newest events as one text, rewritten when there are more

If steps are faster, one step in `LEAST_S` is written (`export_common.py`), because a record costs 0.12 ms. **Each
step once.** Of a repeated step, as after a resume, the last values count. TensorBoard drops its values of step N and
later when a record states that a session begins at step N. Such a record is written when the run resumes at a step,
and at the start of each file, so also after a crash of this process or of the run; its step is the one from which
lines are read again. The *mark* beside the files (`export_common.py`) holds that: the position of the newest written
step's line, and its number. All lines before it belong to earlier steps or were written with an earlier step's
number; all lines from it on are written again.

A file's name begins with a number that grows from file to file, even if the clock goes back: TensorBoard reads files in
that order. If a full disk tears a record, the file is abandoned, and a new one is started.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import msgspec

from farandole.control.run_folder import Observer
from farandole.errors import UsageError
from farandole.observe.export_common import Mark, Numbers, Spacing, Texts, before, load, of_log, of_step
from farandole.observe.text import describe
from farandole.platform import files
from farandole.platform.extras import how_to_install
from farandole.protocol import events
from farandole.protocol.metrics import Line, LogLine, StepLine, time_of

# --- records ----------------------------------------------------------------------------------------------------------
#
# The records of TensorBoard's event files, as bytes: what the `tensorboard` package's own messages give.


def require_tensorboard() -> None:
    """Raises `UsageError` if tensorboard is not installed."""
    if find_spec("tensorboard") is None:
        raise UsageError(
            f"--tensorboard: the package tensorboard, which writes event files, is not installed: "
            f"{how_to_install('tensorboard')}"
        )


def writer(file: BinaryIO) -> Any:
    """Returns a writer; its `write` adds one record to `file` and may raise OSError."""
    return import_module("tensorboard.summary.writer.record_writer").RecordWriter(file)


def version(time: float) -> bytes:
    """Returns the first record of a file."""
    return _proto().Event(wall_time=time, file_version="brain.Event:2").SerializeToString()


def session_begins(step: int, time: float) -> bytes:
    """Returns a record that makes TensorBoard drop this step and later ones."""
    proto = _proto()
    start = proto.SessionLog(status=proto.SessionLog.START)
    return proto.Event(wall_time=time, step=step, session_log=start).SerializeToString()


def values(step: int, time: float, numbers: Mapping[str, float], texts: Mapping[str, str]) -> bytes:
    """Returns one record with all values of a step."""
    proto = _proto()
    summary = [proto.Summary.Value(tag=_valid(name), simple_value=_single(value)) for name, value in numbers.items()]
    summary += [_text(_valid(name), text) for name, text in texts.items()]
    return proto.Event(wall_time=time, step=step, summary=proto.Summary(value=summary)).SerializeToString()


def _text(name: str, text: str) -> Any:
    """Returns an indented text: TensorBoard reads texts as Markdown, where indented text is shown unchanged."""
    proto = _proto()
    as_it_is = "\n".join(f"    {line}" for line in text.splitlines() or [""])
    shape = proto.TensorShapeProto(dim=[proto.TensorShapeProto.Dim(size=1)])
    tensor = proto.TensorProto(
        dtype=proto.DT_STRING, string_val=[as_it_is.encode(errors="replace")], tensor_shape=shape
    )
    plugin = proto.SummaryMetadata.PluginData(plugin_name="text")
    metadata = proto.SummaryMetadata(plugin_data=plugin, data_class=proto.DATA_CLASS_TENSOR)
    return proto.Summary.Value(tag=name, metadata=metadata, tensor=tensor)


def _single(value: float) -> float:
    """Returns the value in single precision, limited to its range."""
    return value if abs(value) < 3.4e38 or not math.isfinite(value) else math.copysign(math.inf, value)


def _valid(name: str) -> str:
    return name.encode(errors="replace").decode()


@cache
def _proto() -> SimpleNamespace:
    """Returns the module with the messages, whose place depends on the package's version."""
    event = import_module("tensorboard.compat.proto.event_pb2")
    summary = import_module("tensorboard.compat.proto.summary_pb2")
    return SimpleNamespace(
        Event=event.Event,
        SessionLog=event.SessionLog,
        Summary=summary.Summary,
        SummaryMetadata=summary.SummaryMetadata,
        DATA_CLASS_TENSOR=summary.DATA_CLASS_TENSOR,
        TensorProto=import_module("tensorboard.compat.proto.tensor_pb2").TensorProto,
        TensorShapeProto=import_module("tensorboard.compat.proto.tensor_shape_pb2").TensorShapeProto,
        DT_STRING=import_module("tensorboard.compat.proto.types_pb2").DT_STRING,
    )


# --- tensorboard ------------------------------------------------------------------------------------------------------

MARK = "farandole.json"
EVENTS = "events"
NEWEST = 100  # the newest events are shown
LEAST_S = 0.1  # least time between two steps that are written
EVENTS_S = 10.0  # least time between two texts of events, which have 10 kB
LONGEST = 2000  # characters of a logged text
PREFIX = "events.out.tfevents."


class TensorBoard(Observer):
    """Writes event files into `folder`, from the lines in the file `metrics`."""

    name = "TensorBoard"

    def __init__(self, folder: Path, metrics: Path) -> None:
        self._folder, self._metrics = folder, metrics
        self._file: BinaryIO | None = None
        self._writer: Any = None
        self._mark = Mark()
        self._step, self._time = 0, 0.0  # of the newest step's line
        self._is_discontinuous = False  # True: the state was lost, or the run was started again
        self._events = deque[str](maxlen=NEWEST)
        self._complete = True  # all events are in the files
        self._next_events_at = 0.0
        self._spacing = Spacing(LEAST_S)

    def begin(self) -> int:
        """Starts a file. Raises OSError, NotPrivate, or UsageError if the folder has another run."""
        self._leave()
        files.make(self._folder)
        self._mark = load(self._folder / MARK, self._metrics)
        run = self._metrics.absolute().parent
        if self._mark.run != run.name and not self._folder.is_relative_to(run):
            raise UsageError(f"{self._folder} has the run {self._mark.run}; name another folder for {run.name}")
        self._step, self._time = max(0, self._mark.step - 1), time.time()
        self._spacing = Spacing(LEAST_S)
        self._events.clear()
        for line in before(self._metrics, self._mark.at):
            self._note(line)
        self._complete, self._next_events_at = True, 0.0
        self._open()
        self._forget_from(self._mark.step)
        return self._mark.at

    def take(self, line: Line, at: int = 0) -> None:
        match line:
            case StepLine():
                if self._is_discontinuous:
                    self._continue_at(line.step, line.time)
                self._step, self._time = line.step, line.time
                if not self._spacing.admits(line):
                    return
                if line.step:  # values before the first step have its number
                    self._mark = msgspec.structs.replace(self._mark, at=at, step=line.step)
                self._put(of_step(line), {})
            case LogLine():
                numbers, texts = of_log(line)
                self._put(numbers, {name: text[:LONGEST] for name, text in texts.items()})
            case events.ResumedEvent():
                self._continue_at(max(0, line.step), line.time)
                self._note(line)
            case events.StateLostEvent() | events.RunStartedEvent():  # the next line shows where the run continues
                self._is_discontinuous = True
                self._note(line)
            case _:
                self._note(line)

    def flush(self) -> None:
        if not self._complete and time.monotonic() >= self._next_events_at:
            self._next_events_at = time.monotonic() + EVENTS_S
            self._put({}, {EVENTS: "\n".join(self._events)})
            self._complete = True
        assert self._file is not None
        self._file.flush()
        self._mark.save(self._folder / MARK)

    def close(self) -> None:
        if self._file is not None:
            self._next_events_at = 0.0
            self.flush()
        self._leave()

    # --- records -----------------------------------------------------------------------------------------------

    def _note(self, line: Line) -> None:
        if isinstance(line, StepLine | LogLine):
            return
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_of(line)))
        self._events.append(f"{when}  step {self._step}  {describe(line)}")
        self._complete = False

    def _put(self, numbers: Numbers, texts: Texts) -> None:
        """Writes values of the current step."""
        if numbers or texts:
            self._write(values(self._step, self._time, numbers, texts))

    def _continue_at(self, step: int, time: float) -> None:
        """Makes TensorBoard drop `step` and later steps, which the run repeats."""
        self._is_discontinuous = False
        self._forget_from(step)
        self._spacing = Spacing(LEAST_S)
        self._step, self._time = max(0, step - 1), time

    def _forget_from(self, step: int) -> None:
        self._write(session_begins(step, self._time))

    def _write(self, record: bytes) -> None:
        assert self._writer is not None
        self._writer.write(record)

    # --- files -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        number = max(int(time.time()), _newest(self._folder) + 1)
        path = self._folder / f"{PREFIX}{number:010d}.{socket.gethostname()}.{os.getpid()}.farandole"
        self._file = open(path, "xb", opener=files.opener)  # noqa: SIM115  it is written to as steps come
        self._writer = writer(self._file)
        self._write(version(self._time))

    def _leave(self) -> None:
        file, self._file, self._writer = self._file, None, None
        if file is not None:
            try:
                file.close()
            except OSError:  # the disk is full; the next file will have what this one lacks
                return


def _newest(folder: Path) -> int:
    """Returns the greatest number of an existing file, 0 if there is none."""
    numbers = (path.name.removeprefix(PREFIX).partition(".")[0] for path in folder.glob(f"{PREFIX}*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
