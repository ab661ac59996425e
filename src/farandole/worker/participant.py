"""A worker's place in the run: the member's state machine under a lock.

The training thread, the view's exchange thread and the connection's own thread meet in one condition variable. The
training thread waits in it for "my round ended, or the view changed, or I am to go"; nothing of a step waits for the
coordinator. Three kinds, each final: `Connected` has a coordinator, `Alone` is a world of one, `FakeParticipant` is for
tests. What all of them have to keep is in `tests/worker/test_participant.py`.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, final

import msgspec
import torch

from farandole import __version__
from farandole.checkpoint.owner import adopt, mark_inside, this_run
from farandole.checkpoint.reach import listed
from farandole.checkpoint.store import first_line, reaching
from farandole.collective.arena import Memory, Ordinary
from farandole.collective.state_transfer import touched
from farandole.collective.transport import Links
from farandole.control.run_folder import CHECKPOINTS, METRICS, hold
from farandole.errors import CheckpointsGone, UsageError
from farandole.plan.shards import History
from farandole.platform.files import add, append, cut_torn, make, release_in_children
from farandole.platform.output import say
from farandole.platform.process import age_s
from farandole.protocol import events, reported_events
from farandole.protocol import messages as m
from farandole.protocol.coordinator.accounting import PERIOD_S, worker_time
from farandole.protocol.messages import (
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
from farandole.protocol.metrics import Line as MetricsLine
from farandole.protocol.metrics import as_written, metrics_line
from farandole.protocol.view import CommitMessage, View
from farandole.protocol.worker.driver import Activity, Instructions
from farandole.protocol.worker.member import Action, Exit, Member
from farandole.protocol.worker.session import Waiting
from farandole.worker.timing import Meter, ShardTimer, Tracer

# --- participant ------------------------------------------------------------------------------------------------------


class Training(Protocol):
    """The training side, as a participant asks it from its other threads."""

    def prepare(self, view: View) -> None:
        """Make the buffers of a proposed view, before this worker says that it is ready for it."""
        ...

    def waiting_for(self) -> Waiting | None:
        """The peer that it waits for, None for nobody."""
        ...

    def saved(self, between: bool) -> m.Saved:
        """Write the last checkpoint, and say how that went. With `between` even a state between two steps."""
        ...

    def digests(self) -> m.Digests:
        """Of everything in the replica. Nobody trains any more."""
        ...


class NoTraining:
    """Before there is a training side."""

    def prepare(self, view: View) -> None:
        del view

    def waiting_for(self) -> Waiting | None:
        return None

    def saved(self, between: bool) -> m.Saved:
        return m.Saved(error="nothing to save", between=between)

    def digests(self) -> m.Digests:
        return m.Digests(step=0, names=(), digests=())


class Participant(ABC):
    """What the training side sees of the run; see the module's head.

    Attributes:
        told: what the coordinator wants of the training side; read and taken up under `condition`.
        groups: the connections to peers, by the group's number.
        epoch, done (shards), shard_timer, meter (of its time): for heartbeats.
        tracer: tells of the next steps, when that is asked.
        begun: the round that the training thread has begun last.
        waits: it has nothing to compute and waits for others.
        whole: the replicated state is that of a whole step; see `hung`.
        proven: it is known to be; see `Driver`.
        joins: others train already, as it was welcomed.
        memory: where what is exchanged lies.
        room: memory made ahead for the state that others may hand over; who receives it takes this.
    """

    def __init__(
        self, member: Member, told: Instructions, history: History | None = None, already_s: float = 0.0
    ) -> None:
        """`history`: of the workers that a world of one stands for; `already_s`: how long this one has been there."""
        self.member = member
        self.told = told
        self.condition = threading.Condition(threading.RLock())
        self.groups: dict[int, Links] = {}
        self.memory: Memory = Ordinary()
        self.room: torch.Tensor | None = None
        self.epoch = 0
        self.whole = self.proven = self.joins = False
        self.begun = -1
        self.waits = True
        self.done = 0
        self.shard_timer = ShardTimer()
        self.meter = Meter(already_s)
        self.tracer = Tracer(self.meter, lambda spans: self.tell(spans))
        self._history = history

    @property
    def worker(self) -> str:
        """Its name in the run."""
        return self.member.worker

    def workers_at(self, step: int, members: int) -> int:
        """How many workers count as having begun `step`, for the batch, when `members` really have."""
        return self._history.workers(step) if self._history else members

    def make_room(self, size: int) -> None:
        """The state of others takes `size` bytes or less. Before asking in: later they would wait for page faults."""
        self.room = touched(size)

    # --- what the kinds differ in ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def terms(self) -> m.RunTerms:
        """What the run was started with."""

    @abstractmethod
    def attend(self, training: Training) -> None:
        """From now on it is `training` that does what is asked of this worker."""

    @abstractmethod
    def ask_in(self, signature: m.Signature, unreached: str = "") -> None:
        """Built and opened: ready for a view. A world of one has its view at once.

        `unreached`: why this worker can't write the run's checkpoints, "" if it can.
        """

    @abstractmethod
    def short(self, view: View, error: CheckpointsGone) -> None:
        """The first view can't begin with what this worker finds. In a world of one nobody else could: raises it."""

    @abstractmethod
    def tell(self, message: m.Message) -> None:
        """Send a message to the coordinator. Never waits: threads with locks of their own and signals call it."""

    @abstractmethod
    def add_line(self, line: m.Line) -> None:
        """A line of metrics."""

    @abstractmethod
    def finish(self, fingerprint: str, after: m.StepTime) -> None:
        """The script has run to its end, `after` its last step."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connection."""

    @abstractmethod
    def _word(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None:
        """`Member.word`, for as long as this worker may give one."""

    @abstractmethod
    def _end_round(self, words: Sequence[CommitMessage]) -> bool:
        """`Member.end_round`, for as long as this worker may end one."""

    @abstractmethod
    def _perform(self, actions: Iterable[Action]) -> None:
        """Do what the member asks for. Under `condition`."""

    # --- the state machine, from the training side -----------------------------------------------------------

    def word(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None:
        with self.condition:
            return self._word(view=view, round_=round_, compute_us=compute_us, shards=shards)

    def end_round(self, words: Sequence[CommitMessage]) -> bool:
        with self.condition:
            ended = self._end_round(words)
            self._perform(self.member.report())
            return ended

    def lost(self, view: int, peer: str, reason: str, *, waited_s: int = 0) -> None:
        with self.condition:
            self._perform(self.member.on_peer_lost(view, peer, reason, waited_s=waited_s))

    def changed(self) -> None:
        with self.condition:
            self.condition.notify_all()

    def activity(self) -> Activity:
        """For a heartbeat. Under `condition`."""
        shard_us, shards, of = self.shard_timer.take()
        return Activity(
            epoch=self.epoch,
            shards_computed=self.done,
            idle=self.waits,
            state_complete=self.whole,
            shard_us=shard_us,
            shards=shards,
            shards_total=of,
            time_us=self.meter.said(),
        )


# --- alone ------------------------------------------------------------------------------------------------------------
#
# A world of one without a coordinator: the same code over a participant that agrees with itself.
#
# With a folder it saves when the process ends, however it ends, as a run does: what the script left after its loop is
# the final state; a step left in the middle is the state of its beginning; anything between two steps is called so.
# The folder is this process's alone meanwhile, as it is `farandole run`'s for a run (`control/run_folder.py`).

_log = logging.getLogger(__name__)
TAIL_BYTES = 1024 * 1024  # of metrics.jsonl, in which its last line is
QUIET = (
    events.CheckpointEvent, events.FinishedEvent, events.LoaderReplacedEvent, events.OverEvent, events.RunStartedEvent,
    events.SavedEvent, events.TimeSpentEvent,
)  # fmt: skip


@final
class SingleProcess(Participant):
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
            self._record(events.RunStartedEvent(version=__version__))
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
            self.member.on_message(Propose(view=view, newest=self._newest))
            self._perform(self.member.connected(view))

    def short(self, view: View, error: CheckpointsGone) -> None:
        del view
        raise error

    def tell(self, message: Message) -> None:
        match message:
            case Checkpointed() | Restored() | LoaderEnded() | Unrecorded():
                for event in reported_events.events_of(self.worker, message):
                    self._record(event)
                if isinstance(message, Restored) and message.done:
                    reason = f"nothing is left to train: {message.path} is at the end of what the script asks for"
                    self.told.leave(Exit(reason, 0))
            case SettingChanged():
                fields = {name: getattr(message, name) for name in message.__struct_fields__}
                self._record(events.SettingChangedEvent(worker=self.worker, **fields))
            case UnknownOperator():
                self._record(events.UnknownOperatorEvent(worker=self.worker, operator=message.operator))
            case NotFinite():
                self._record(events.NotFiniteEvent(worker=self.worker, step=message.step, loss=message.loss))
            case Saved(error=""):
                whole = not message.between
                self._record(
                    events.SavedEvent(
                        worker=self.worker,
                        path=message.path,
                        whole=whole,
                        finite=message.finite,
                        seconds=message.seconds,
                    )
                )
            case Saved():
                self._record(events.NotSavedEvent(worker=self.worker, reason=message.error))
            case _:
                pass

    def finish(self, fingerprint: str, after: StepTime) -> None:
        self._finished = True
        self._record(events.FinishedEvent(fingerprint=fingerprint, equal=True, **after.written()))

    def add_line(self, line: Line) -> None:
        if self._file:
            self._write(metrics_line(line))
            if time.monotonic() - self._told_at >= PERIOD_S:
                self._tell_time(line.step)

    def close(self) -> None:
        """There is no connection."""

    def _word(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None:
        return self.member.commit_message(view=view, round_=round_, compute_us=compute_us, shards=shards)

    def _end_round(self, words: Sequence[CommitMessage]) -> bool:
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
                    self._record(events.LinesLostEvent(worker=self.worker, lines=lost, reason=self._why))

    def _tell_time(self, step: int, *ended: str) -> None:
        self._told_at = time.monotonic()
        spent = worker_time(self.meter.said(), host=socket.gethostname(), pool="", step=step)
        self._record(events.TimeSpentEvent(workers={self.worker: spent}, ended=ended))

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
                self._record(events.OverEvent(code=0 if saved else 1, reason=reason))
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
