"""A worker's context: what its threads share, with the worker's state machine under a lock.

The training thread, the view's exchange thread and the connection's thread share one condition variable. The training
thread waits on it for "my round ended, or the view changed, or I must exit". No step waits for the coordinator. There
are three final classes: `Connected` has a coordinator, `SingleProcess` runs without one (`world_size=1`), and
`FakeContext` is for tests. `tests/worker/test_context.py` tests what all of them must guarantee.

    Run                     training thread, the main thread of the process: may compute for a long time
    |- Loop, Step           training thread: the order of a step; one Step a step
    |- Rounds               training thread: resumes the driver's generators
    |  |- Driver            training thread, with the lock; what it yields is done without the lock
    |  '- Exchange          one a view; sums and commit messages on the view's thread, which waits for peers, and can't
    |                       be woken while one is frozen
    '- Connected            a WorkerContext, has the lock (`WorkerContext.condition`)
       |- Session           control thread, with the lock; it never waits
       '- WorkerStateMachine  all threads, with the lock

Short-lived threads open connections (`Groups.arrange`), send the state, receive it, and save. With an integer codec on
the CPU another thread quantizes and submits the buckets (`Partials`).
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
from farandole.collective.link_meter import LinkMeter
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
from farandole.protocol.worker.session import PeerWait
from farandole.protocol.worker.state_machine import Action, Exit, WorkerStateMachine
from farandole.worker.timing import Meter, ShardTimer, Tracer

# --- context ----------------------------------------------------------------------------------------------------------


class Training(Protocol):
    """The training side's interface to the other threads of its worker."""

    def prepare(self, view: View) -> None:
        """Allocates the buffers of a proposed view, before this worker reports that it is ready for the view."""
        ...

    def waiting_for(self) -> PeerWait | None:
        """Returns the current wait for a peer; None if it waits for none."""
        ...

    def saved(self, between: bool) -> m.Saved:
        """Writes the last checkpoint, and returns the result. With `between`, even of a state between two steps."""
        ...

    def digests(self) -> m.Digests:
        """Returns the digests of everything in the replica. No worker trains any more when this is called."""
        ...


class NoTraining:
    """The `Training` of a worker before `set_training`."""

    def prepare(self, view: View) -> None:
        del view

    def waiting_for(self) -> PeerWait | None:
        return None

    def saved(self, between: bool) -> m.Saved:
        return m.Saved(error="nothing to save", between=between)

    def digests(self) -> m.Digests:
        return m.Digests(step=0, names=(), digests=())


class WorkerContext(ABC):
    """The interface of a run to the training side; see the docstring of the module.

    Attributes:
        instructions: the coordinator's requests to the training side; read and handled under `condition`.
        groups: the connections to peers, by the group's number.
        epoch, done (number of shards), shard_timer, meter, link_meter: the data of heartbeats.
        tracer: records the next steps for a trace.
        begun: the round that the training thread has begun last.
        waits_for_peers: True if it has nothing to compute and waits for peers.
        at_step_start: True if the replicated state is that of the start of a step: no update has begun; see `hung.py`.
        fully_loaded: True if every part of the replicated state is known to be loaded; see `Driver`.
        joins: True if other workers were training when this one was admitted.
        is_external: True if a user started this worker with `farandole join`, and no pool did.
        memory: the allocator of tensors that are exchanged.
        room: memory that is allocated ahead for the state from other workers; the receiver takes it.
        stream_mark: a place in the stream of samples, that a member has sent before its state; b"" if there is none.
    """

    def __init__(
        self,
        machine: WorkerStateMachine,
        instructions: Instructions,
        history: History | None = None,
        already_s: float = 0.0,
    ) -> None:
        """`history`: the workers that a single process stands for; `already_s`: the age of this process, in seconds."""
        self.state_machine = machine
        self.instructions = instructions
        self.condition = threading.Condition(threading.RLock())
        self.groups: dict[int, Links] = {}
        self.memory: Memory = Ordinary()
        self.room: torch.Tensor | None = None
        self.stream_mark = b""
        self.epoch = 0
        self.at_step_start = self.fully_loaded = self.joins = self.is_external = False
        self.begun = -1
        self.waits_for_peers = True
        self.done = 0
        self.shard_timer = ShardTimer()
        self.meter = Meter(already_s)
        self.link_meter = LinkMeter()
        self.tracer = Tracer(self.meter, lambda spans: self.tell(spans))
        self._history = history

    @property
    def worker(self) -> str:
        """The worker's name in the run."""
        return self.state_machine.worker

    def workers_at(self, step: int, members: int) -> int:
        """Returns the number of workers that the batch of `step` is for, if `members` workers have begun it.

        Only here a replay or a rehearsal, a single process that stands for a history, differs from a run.
        """
        return self._history.workers(step) if self._history else members

    def make_room(self, size: int) -> None:
        """Allocates memory for a state of up to `size` bytes. Call it before `ask_in`; later, peers would wait."""
        self.room = touched(size)

    # --- the parts that subclasses implement -----------------------------------------------------------------

    @property
    @abstractmethod
    def terms(self) -> m.RunTerms:
        """The terms that the run was started with."""

    @abstractmethod
    def set_training(self, training: Training) -> None:
        """Sets the training side that handles the coordinator's requests from now on."""

    @abstractmethod
    def ask_in(self, signature: m.Signature, unreached: str = "") -> None:
        """Reports that the model is built and the data is open, so that this worker is ready for a view.

        A single process has its view at once. `unreached`: the reason why this worker can't write the run's
        checkpoints, "" if it can.
        """

    @abstractmethod
    def short(self, view: View, error: CheckpointsGone) -> None:
        """Reports that the first view can't begin with the checkpoints that this worker finds.

        A single process raises the error, because no other worker could begin.
        """

    @abstractmethod
    def tell(self, message: m.Message) -> None:
        """Sends a message to the coordinator. Never blocks: threads that hold locks and signal handlers call it."""

    @abstractmethod
    def add_line(self, line: m.Line) -> None:
        """Records a line of metrics."""

    @abstractmethod
    def report_script_end(self, fingerprint: str, after: m.StepTime) -> None:
        """Reports that the script has ended, with the time of its last step."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connection."""

    @abstractmethod
    def _commit_message(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None:
        """`WorkerStateMachine.commit_message`, as long as this worker may send one; otherwise None."""

    @abstractmethod
    def _end_round(self, commits: Sequence[CommitMessage]) -> bool:
        """`WorkerStateMachine.end_round`, as long as this worker may end a round; otherwise False."""

    @abstractmethod
    def _perform(self, actions: Iterable[Action]) -> None:
        """Performs the member's actions. The caller holds `condition`."""

    # --- the state machine, from the training side -----------------------------------------------------------

    def commit_message(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None:
        with self.condition:
            return self._commit_message(view=view, round_=round_, compute_us=compute_us, shards=shards)

    def end_round(self, commits: Sequence[CommitMessage]) -> bool:
        with self.condition:
            ended = self._end_round(commits)
            self._perform(self.state_machine.report())
            return ended

    def lost(self, view: int, peer: str, reason: str, *, waited_s: int = 0) -> None:
        with self.condition:
            self._perform(self.state_machine.on_peer_lost(view, peer, reason, waited_s=waited_s))

    def changed(self) -> None:
        with self.condition:
            self.condition.notify_all()

    def activity(self) -> Activity:
        """Returns the data of a heartbeat. The caller holds `condition`."""
        shard_us, shards, of = self.shard_timer.take()
        return Activity(
            epoch=self.epoch,
            shards_computed=self.done,
            waits_for_peers=self.waits_for_peers,
            at_step_start=self.at_step_start,
            shard_us=shard_us,
            shards=shards,
            shards_total=of,
            time_us=self.meter.said(),
            links=self.link_meter.said(self.tracer.waits.total_ns),
        )


# --- alone ------------------------------------------------------------------------------------------------------------
#
# A single process (`world_size=1`) without a coordinator: the same code over a `WorkerContext` without peers.
#
# With a folder it saves when the process ends, in any way, as a run does: the state after the script's loop is the
# final state; in the middle of a step the state of the step's beginning is saved; a state between two steps is saved
# with that label. The folder belongs to this process alone meanwhile, as it belongs to `farandole run` in a run
# (`control/run_folder.py`).

_log = logging.getLogger(__name__)
TAIL_BYTES = 1024 * 1024  # the end of metrics.jsonl that contains its last line
QUIET = (
    events.CheckpointEvent, events.FinishedEvent, events.LoaderReplacedEvent, events.OverEvent, events.RunStartedEvent,
    events.SavedEvent, events.TimeSpentEvent,
)  # fmt: skip


@final
class SingleProcess(WorkerContext):
    """The context of a single process (`world_size=1`) without a coordinator.

    Its metrics go to FARANDOLE_FOLDER, or nowhere. `identity` is that of the run in the folder, "" without a folder.

    `save` is called when the process ends. It returns False if it could not save, and then the exit code is 1.
    `history` is a file: each step's batch is the one that so many workers would have; the results are the same bits.

    Raises:
        RunFolderInUse: another process trains in the folder, or coordinates a run there.
        NoFileLocks: the folder's file system does not support locks.
        UsageError: the folder belongs to another run.
    """

    def __init__(self, folder: str, save: Callable[[], bool], history: str = "") -> None:
        instructions = Instructions(saves=True)
        parsed = read_history(history) if history else None
        super().__init__(WorkerStateMachine("alone"), instructions, history=parsed, already_s=age_s())
        self._recorded_at = self._shown_at = time.monotonic()  # the last record of its time; its last progress line
        self._lock, self.identity = _take(Path(folder), _make(Path(folder))) if folder else (-1, "")
        self._newest = listed(Path(folder) / METRICS) if folder else Newest()
        self._file = _open_lines(Path(folder)) if folder else None
        self._writing = threading.RLock()  # the thread that writes checkpoints writes events too
        self._lost, self._why = 0, ""  # lines that could not be written, and that no event reports yet
        self._save = save
        self._finished = False
        if folder:
            self._record(events.RunStartedEvent(version=__version__))
            atexit.register(self._end, os.getpid())

    @property
    def terms(self) -> RunTerms:
        return RunTerms()

    def set_training(self, training: Training) -> None:
        """Does nothing: there is no coordinator that could send requests."""
        del training

    def make_room(self, size: int) -> None:
        """Does nothing: there are no peers."""

    def ask_in(self, signature: Signature, unreached: str = "") -> None:
        del signature, unreached
        with self.condition:
            view = View(number=1, members=(self.worker,), group=1)
            self.state_machine.on_message(Propose(view=view, newest=self._newest))
            self._perform(self.state_machine.connected(view))

    def short(self, view: View, error: CheckpointsGone) -> None:
        del view
        raise error

    def tell(self, message: Message) -> None:
        match message:
            case Checkpointed() | Restored() | LoaderEnded() | Unrecorded():
                for event in reported_events.events_of(self.worker, message):
                    self._record(event)
                if isinstance(message, Restored) and message.done:
                    reason = f"nothing is left to train: {message.path} is already at the last step of the script"
                    self.instructions.leave(Exit(reason, 0))
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

    def report_script_end(self, fingerprint: str, after: StepTime) -> None:
        self._finished = True
        self._record(events.FinishedEvent(fingerprint=fingerprint, equal=True, **after.written()))

    def add_line(self, line: Line) -> None:
        if self._history and time.monotonic() - self._shown_at >= PERIOD_S:
            self._shown_at = time.monotonic()
            say(f"farandole: step {line.step:,} has ended")
        if self._file:
            self._write(metrics_line(line))
            if time.monotonic() - self._recorded_at >= PERIOD_S:
                self._record_time(line.step)

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def _commit_message(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None:
        return self.state_machine.commit_message(view=view, round_=round_, compute_us=compute_us, shards=shards)

    def _end_round(self, commits: Sequence[CommitMessage]) -> bool:
        return self.state_machine.end_round(commits)

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
        """Writes a line. If the disk is full, the line is lost and counted, and the training continues."""
        assert self._file is not None
        with self._writing:
            try:
                add(self._file, as_written(line))
            except OSError as error:
                if not self._lost:
                    _log.error("metrics.jsonl can't be written: %s; the training continues", error)
                self._lost += 1
                self._why = str(error)
            else:
                if lost := self._lost:
                    self._lost = 0
                    self._record(events.LinesLostEvent(worker=self.worker, lines=lost, reason=self._why))

    def _record_time(self, step: int, *ended: str) -> None:
        self._recorded_at = time.monotonic()
        spent = worker_time(self.meter.said(), host=socket.gethostname(), pool="", step=step)
        spent = msgspec.structs.replace(spent, sent={})  # it has no peers
        self._record(events.TimeSpentEvent(workers={self.worker: spent}, ended=ended))

    def _end(self, process: int) -> None:
        """Runs at the exit of the process; does nothing in its forked children."""
        if os.getpid() != process or self._close():
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)

    def end(self) -> bool:
        """Ends the run before its process ends, and gives the folder back. Returns False if it could not save."""
        if self._lock < 0:
            return True
        atexit.unregister(self._end)
        saved = self._close()
        if self._file is not None:
            self._file.close()
        os.close(self._lock)
        self._lock, self._file = -1, None
        return saved

    def _close(self) -> bool:
        """Saves, and writes the run's last lines. Returns False if it could not save."""
        saved = False
        try:
            saved = self._save()
            self._record_time(self.state_machine.step, self.worker)
            if self._finished:
                reason = "the script has run to its end" + ("" if saved else ", but its state could not be saved")
                self._record(events.OverEvent(code=0 if saved else 1, reason=reason))
            if self._lost:
                say(f"farandole: {self._lost} lines of metrics.jsonl were not written: {self._why}")
        except BaseException as error:  # noqa: BLE001  Python would print it, and end with exit code 0
            saved = False
            say(f"farandole: error: this process failed at its exit: {first_line(error)}")
        return saved


def read_history(path: str) -> History:
    """Returns the history in a file.

    Raises:
        UsageError: the file can't be read, or a line of it is invalid.
    """
    try:
        return History.parse(Path(path).read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the history {path} can't be read: {error}") from error


def _make(folder: Path) -> str:
    """Creates the folder and its subfolder for checkpoints, and returns the latter."""
    for each in (folder, folder / CHECKPOINTS):
        make(each)
    return str(folder / CHECKPOINTS)


def _take(folder: Path, place: str) -> tuple[int, str]:
    """Locks the folder until this process ends. Returns the lock's handle, and the identity of the folder's run."""
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
