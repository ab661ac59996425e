"""A world of one without a coordinator: the same code over a participant that agrees with itself.

With a folder it saves when the process ends, however it ends, as a run does: what the script left after its loop is the
final state; a step left in the middle is the state of its beginning; anything between two steps is called so. The
folder is this process's alone meanwhile, as it is `farandole run`'s for a run (`control/run_folder.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import final

import msgspec

from farandole import __version__
from farandole.checkpoint.owner import adopt, mark_inside, this_run
from farandole.checkpoint.reach import listed
from farandole.checkpoint.store import first_line, reaching
from farandole.control.run_folder import CHECKPOINTS, METRICS, hold
from farandole.errors import CheckpointsGone, UsageError
from farandole.membership import events, last_resort
from farandole.membership.accounting import PERIOD_S, worker_time
from farandole.membership.instructions import Instructions
from farandole.membership.member import Action, Exit, Member
from farandole.membership.messages import (
    Checkpointed,
    Line,
    LoaderEnded,
    Message,
    Newest,
    NotFinite,
    Propose,
    Restored,
    RunTerms,
    Saved,
    SettingChanged,
    Signature,
    StepTime,
    UnknownOperator,
    Unrecorded,
)
from farandole.membership.metrics import Line as MetricsLine
from farandole.membership.metrics import as_written, metrics_line
from farandole.membership.view import View, Word
from farandole.plan.shards import History
from farandole.platform.files import add, append, cut_torn, make, release_in_children
from farandole.platform.output import say
from farandole.platform.process import age_s
from farandole.worker.participant import Participant, Training

_log = logging.getLogger(__name__)

TAIL_BYTES = 1024 * 1024  # of metrics.jsonl, in which its last line is
QUIET = (
    events.Checkpoint, events.Finished, events.LoaderReplaced, events.Over, events.RunStarted, events.Saved,
    events.TimeSpent,
)  # fmt: skip


@final
class Alone(Participant):
    """A world of one without a coordinator. Its metrics go to FARANDOLE_FOLDER, or nowhere. `identity`: the run's that
    the folder holds, "" without one.

    `save` saves as the process ends; it gives False where it could not, and so does the exit code then. With a history,
    a file, it takes each step's batch as if that many workers had begun it: same bits as if they had.

    Raises:
        RunFolderInUse: another process trains in the folder, or accompanies a run there.
        NoFileLocks: the folder's file system keeps no locks.
        UsageError: what lies in the folder is another run's.
    """

    def __init__(self, folder: str, save: Callable[[], bool], history: str = "") -> None:
        told = Instructions(saves=True)
        stands_for = read_history(history) if history else None
        super().__init__(Member("alone"), told, history=stands_for, already_s=age_s())
        self._told_at = time.monotonic()  # of its time
        self._lock, self.identity = _take(Path(folder), _make(Path(folder))) if folder else (-1, "")
        self._newest = listed(Path(folder) / METRICS) if folder else Newest()
        self._file = _open_lines(Path(folder)) if folder else None
        self._writing = threading.RLock()  # who writes checkpoints tells of them too
        self._lost, self._why = 0, ""  # lines that could not be written, and are not told of
        self._save = save
        self._finished = False
        if folder:
            self._record(events.RunStarted(version=__version__))
            atexit.register(self._end, os.getpid())

    @property
    def terms(self) -> RunTerms:
        return RunTerms()

    def attend(self, training: Training) -> None:
        """There is nobody who could ask anything of it."""
        del training

    def make_room(self, size: int) -> None:
        """There are no others."""

    def ask_in(self, signature: Signature, unreached: str = "") -> None:
        del signature, unreached
        with self.condition:
            view = View(number=1, members=(self.worker,), group=1)
            self.member.receive(Propose(view=view, newest=self._newest))
            self._perform(self.member.connected(view))

    def short(self, view: View, error: CheckpointsGone) -> None:
        del view
        raise error

    def tell(self, message: Message) -> None:
        match message:
            case Checkpointed() | Restored() | LoaderEnded() | Unrecorded():
                for event in last_resort.told(self.worker, message):
                    self._record(event)
                if isinstance(message, Restored) and message.done:
                    reason = f"nothing is left to train: {message.path} is at the end of what the script asks for"
                    self.told.leave(Exit(reason, 0))
            case SettingChanged():
                fields = {name: getattr(message, name) for name in message.__struct_fields__}
                self._record(events.SettingChanged(worker=self.worker, **fields))
            case UnknownOperator():
                self._record(events.UnknownOperator(worker=self.worker, operator=message.operator))
            case NotFinite():
                self._record(events.NotFinite(worker=self.worker, step=message.step, loss=message.loss))
            case Saved(error=""):
                whole = not message.between
                self._record(
                    events.Saved(
                        worker=self.worker,
                        path=message.path,
                        whole=whole,
                        finite=message.finite,
                        seconds=message.seconds,
                    )
                )
            case Saved():
                self._record(events.NotSaved(worker=self.worker, reason=message.error))
            case _:
                pass

    def finish(self, fingerprint: str, after: StepTime) -> None:
        self._finished = True
        self._record(events.Finished(fingerprint=fingerprint, equal=True, **after.written()))

    def add_line(self, line: Line) -> None:
        if self._file:
            self._write(metrics_line(line))
            if time.monotonic() - self._told_at >= PERIOD_S:
                self._tell_time(line.step)

    def close(self) -> None:
        """There is no connection."""

    def _word(self, *, view: int, round_: int, compute_us: int, shards: int) -> Word | None:
        return self.member.word(view=view, round_=round_, compute_us=compute_us, shards=shards)

    def _end_round(self, words: Sequence[Word]) -> bool:
        return self.member.end_round(words)

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Message):
                self.tell(action)

    def _record(self, event: events.Event) -> None:
        if not isinstance(event, QUIET):
            _log.warning("%s: %s", events.name_of(event), events.fields_of(event))
        if self._file:
            self._write(msgspec.structs.replace(event, time=time.time()))

    def _write(self, line: MetricsLine) -> None:
        """A full disk costs lines, which are counted, and not the training."""
        assert self._file is not None
        with self._writing:
            try:
                add(self._file, as_written(line))
            except OSError as error:
                if not self._lost:
                    _log.error("metrics.jsonl can't be written: %s; the training goes on", error)
                self._lost += 1
                self._why = str(error)
            else:
                if lost := self._lost:
                    self._lost = 0
                    self._record(events.LinesLost(worker=self.worker, lines=lost, reason=self._why))

    def _tell_time(self, step: int, *ended: str) -> None:
        self._told_at = time.monotonic()
        spent = worker_time(self.meter.said(), host=socket.gethostname(), pool="", step=step)
        self._record(events.TimeSpent(workers={self.worker: spent}, ended=ended))

    def _end(self, process: int) -> None:
        """At the process's exit; not at that of what it forked."""
        if os.getpid() != process:
            return
        saved = False
        try:
            saved = self._save()
            self._tell_time(self.member.step, self.worker)
            if self._finished:
                reason = "the script has run to its end" + ("" if saved else ", but its state could not be saved")
                self._record(events.Over(code=0 if saved else 1, reason=reason))
            if self._lost:
                say(f"farandole: {self._lost} lines of metrics.jsonl are lost: {self._why}")
        except BaseException as error:  # noqa: BLE001  Python would print it, and end with exit code 0
            saved = False
            say(f"farandole: error: the end of this process is not in order: {first_line(error)}")
        finally:
            if not saved:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(Exception):
                        stream.flush()
                os._exit(1)


def read_history(path: str) -> History:
    """The history in a file.

    Raises:
        UsageError: there is no such file, or a line of it does not parse.
    """
    try:
        return History.parse(Path(path).read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the history {path} can't be read: {error}") from error


def _make(folder: Path) -> str:
    """The folder, and in it the place for checkpoints, which is returned."""
    for each in (folder, folder / CHECKPOINTS):
        make(each)
    return str(folder / CHECKPOINTS)


def _take(folder: Path, place: str) -> tuple[int, str]:
    """Hold the folder until this process ends. The lock's handle, and the identity of the run in the folder."""
    lock = hold(folder)
    release_in_children(lock)
    with reaching(place):
        identity = adopt(place, folder)
    mark_inside(place, this_run(identity, folder, inside=True))
    return lock, identity


def _open_lines(folder: Path) -> io.FileIO:
    file = append(folder / METRICS)
    file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
    cut_torn(file, file.read())
    return file
