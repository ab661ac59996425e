"""A run as TensorBoard shows it, while it runs: event files, written with the `tensorboard` package's record writer.

    step/...    the numbers of each step, all of a step in one record (see `values.py`)
    NAME        what the script gives to `run.log`, under its own names; texts too
    events      the newest of what has happened, in plain words, as one text, written anew when there is more

Of steps that come faster, one in `LEAST_S` is written (`spacing.py`), for a record costs 0.12 ms.
**Each step once.** Of a step that is taken twice, as after a resume, the last counts. TensorBoard forgets what it has
of the steps from N on when a record says that a session begins at step N. Such a record is written where the run says
that it goes on at a step, and whenever a file is begun, which is so after a crash of this process or of the run: with
the step from which on lines are read again. That is what the *mark* beside the files says (`mark.py`): the place of the
newest written step's line, and its number. Everything before that line is of steps before it, or was written with an
earlier one's number; everything from it on is written again.

A file's name begins with a number that grows from file to file, also where the clock goes back: TensorBoard reads them
in that order. A file in which a record is torn, by a full disk, is left, and another one begun.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from farandole.control.run_folder import Observer
from farandole.errors import UsageError
from farandole.membership import events
from farandole.membership.metrics import Line, LogLine, StepLine, time_of
from farandole.observe.exports import records
from farandole.observe.exports.cursor import before
from farandole.observe.exports.mark import Mark, load
from farandole.observe.exports.spacing import Spacing
from farandole.observe.exports.values import Numbers, Texts, of_log, of_step
from farandole.observe.words import describe
from farandole.platform import files

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
            case events.Resumed():
                self._goes_on(max(0, line.step), line.time)
                self._note(line)
            case events.StateLost() | events.RunStarted():  # from where it goes on, what comes next says
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
            self._write(records.values(self._step, self._time, numbers, texts))

    def _goes_on(self, step: int, time: float) -> None:
        """What was there of `step` and later ones is taken again."""
        self._lost = False
        self._forget_from(step)
        self._spacing = Spacing(LEAST_S)
        self._step, self._time = max(0, step - 1), time

    def _forget_from(self, step: int) -> None:
        self._write(records.session_begins(step, self._time))

    def _write(self, record: bytes) -> None:
        assert self._writer is not None
        self._writer.write(record)

    # --- files -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        number = max(int(time.time()), _newest(self._folder) + 1)
        path = self._folder / f"{PREFIX}{number:010d}.{socket.gethostname()}.{os.getpid()}.farandole"
        self._file = open(path, "xb", opener=files.opener)  # noqa: SIM115  it is written to as steps come
        self._writer = records.writer(self._file)
        self._write(records.version(self._time))

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
