"""A run as TensorBoard shows it, while it runs: event files, written with the `tensorboard` package's record writer.

    step/...    the numbers of each step, all of a step in one record (see `values.py`)
    NAME        what the script gives to `run.log`, under its own names; texts too
    events      the newest of what has happened, in plain words, as one text, written anew when there is more

Of steps that come faster, one in `LEAST_S` is written (`export_common.py`), for a record costs 0.12 ms.
**Each step once.** Of a step that is taken twice, as after a resume, the last counts. TensorBoard forgets what it has
of the steps from N on when a record says that a session begins at step N. Such a record is written where the run says
that it goes on at a step, and whenever a file is begun, which is so after a crash of this process or of the run: with
the step from which on lines are read again. That is what the *mark* beside the files says (`export_common.py`): the
place of the newest written step's line, and its number. Everything before that line is of steps before it, or was
written with an earlier one's number; everything from it on is written again.

A file's name begins with a number that grows from file to file, also where the clock goes back: TensorBoard reads them
in that order. A file in which a record is torn, by a full disk, is left, and another one begun.
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
    """Raises `UsageError` where tensorboard is not installed."""
    if find_spec("tensorboard") is None:
        raise UsageError(
            f"--tensorboard: its event files are written with the package tensorboard, which is not installed: "
            f"{how_to_install('tensorboard')}"
        )


def writer(file: BinaryIO) -> Any:
    """Whose `write` puts one record into `file`. Raises OSError there."""
    return import_module("tensorboard.summary.writer.record_writer").RecordWriter(file)


def version(time: float) -> bytes:
    """A file's first record."""
    return _proto().Event(wall_time=time, file_version="brain.Event:2").SerializeToString()


def session_begins(step: int, time: float) -> bytes:
    """Who reads it forgets what it has of this step and later ones."""
    proto = _proto()
    start = proto.SessionLog(status=proto.SessionLog.START)
    return proto.Event(wall_time=time, step=step, session_log=start).SerializeToString()


def values(step: int, time: float, numbers: Mapping[str, float], texts: Mapping[str, str]) -> bytes:
    """All of a step in one record."""
    proto = _proto()
    found = [proto.Summary.Value(tag=_valid(name), simple_value=_single(value)) for name, value in numbers.items()]
    found += [_text(_valid(name), text) for name, text in texts.items()]
    return proto.Event(wall_time=time, step=step, summary=proto.Summary(value=found)).SerializeToString()


def _text(name: str, text: str) -> Any:
    """Indented: TensorBoard takes texts for Markdown, in which that means "as it is"."""
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
    """In single precision, which has no larger ones."""
    return value if abs(value) < 3.4e38 or not math.isfinite(value) else math.copysign(math.inf, value)


def _valid(name: str) -> str:
    return name.encode(errors="replace").decode()


@cache
def _proto() -> SimpleNamespace:
    """The messages, from where the package has them."""
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
NEWEST = 100  # events that are shown
LEAST_S = 0.1  # between two steps that are written
TELL_S = 10.0  # between two such texts, which are 10 kB
LONGEST = 2000  # characters of a logged text
PREFIX = "events.out.tfevents."


class TensorBoard(Observer):
    """Writes event files into `folder` of the lines in the file `metrics`."""

    name = "TensorBoard"

    def __init__(self, folder: Path, metrics: Path) -> None:
        self._folder, self._metrics = folder, metrics
        self._file: BinaryIO | None = None
        self._writer: Any = None
        self._mark = Mark()
        self._step, self._time = 0, 0.0  # those of the newest step's line
        self._lost = False  # the state is
        self._events = deque[str](maxlen=NEWEST)
        self._told = True  # all events are in the files
        self._tell_at = 0.0
        self._spacing = Spacing(LEAST_S)

    def begin(self) -> int:
        """Begin a file. Raises OSError, NotPrivate; UsageError: the folder has another run."""
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
        self._told, self._tell_at = True, 0.0
        self._open()
        self._forget_from(self._mark.step)
        return self._mark.at

    def take(self, line: Line, at: int = 0) -> None:
        match line:
            case StepLine():
                if self._lost:
                    self._goes_on(line.step, line.time)
                self._step, self._time = line.step, line.time
                if not self._spacing.admits(line):
                    return
                if line.step:  # what was before the first step has its number
                    self._mark = msgspec.structs.replace(self._mark, at=at, step=line.step)
                self._put(of_step(line), {})
            case LogLine():
                numbers, texts = of_log(line)
                self._put(numbers, {name: text[:LONGEST] for name, text in texts.items()})
            case events.ResumedEvent():
                self._goes_on(max(0, line.step), line.time)
                self._note(line)
            case events.StateLostEvent() | events.RunStartedEvent():  # from where it goes on, what comes next says
                self._lost = True
                self._note(line)
            case _:
                self._note(line)

    def flush(self) -> None:
        if not self._told and time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + TELL_S
            self._put({}, {EVENTS: "\n".join(self._events)})
            self._told = True
        assert self._file is not None
        self._file.flush()
        self._mark.save(self._folder / MARK)

    def close(self) -> None:
        if self._file is not None:
            self._tell_at = 0.0
            self.flush()
        self._leave()

    # --- records -----------------------------------------------------------------------------------------------

    def _note(self, line: Line) -> None:
        if isinstance(line, StepLine | LogLine):
            return
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_of(line)))
        self._events.append(f"{when}  step {self._step}  {describe(line)}")
        self._told = False

    def _put(self, numbers: Numbers, texts: Texts) -> None:
        """Of the step in hand."""
        if numbers or texts:
            self._write(values(self._step, self._time, numbers, texts))

    def _goes_on(self, step: int, time: float) -> None:
        """What was there of `step` and later ones is taken again."""
        self._lost = False
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
            except OSError:  # the disk is full; what this file lacks, the next one has
                return


def _newest(folder: Path) -> int:
    """The greatest number of a file that is there, 0 without any."""
    numbers = (path.name.removeprefix(PREFIX).partition(".")[0] for path in folder.glob(f"{PREFIX}*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
