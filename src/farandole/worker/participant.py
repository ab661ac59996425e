"""A worker's place in the run: the member's state machine under a lock.

The training thread, the view's exchange thread and the connection's own thread meet in one condition variable. The
training thread waits in it for "my round ended, or the view changed, or I am to go"; nothing of a step waits for the
coordinator. Three kinds, each final: `Connected` has a coordinator, `Alone` is a world of one, `FakeParticipant` is for
tests. What all of them have to keep is in `tests/worker/test_participant.py`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from farandole.collective.arena import Memory, Ordinary
from farandole.collective.transfer import touched
from farandole.collective.transport import Links
from farandole.errors import CheckpointsGone
from farandole.membership import messages as m
from farandole.membership.instructions import Activity, Instructions
from farandole.membership.member import Action, Member
from farandole.membership.patience import Waiting
from farandole.membership.view import View, Word
from farandole.plan.shards import History
from farandole.worker.meter import Meter
from farandole.worker.shard_timer import ShardTimer
from farandole.worker.tracer import Tracer


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
    def _word(self, *, view: int, round_: int, compute_us: int, shards: int) -> Word | None:
        """`Member.word`, for as long as this worker may give one."""

    @abstractmethod
    def _end_round(self, words: Sequence[Word]) -> bool:
        """`Member.end_round`, for as long as this worker may end one."""

    @abstractmethod
    def _perform(self, actions: Iterable[Action]) -> None:
        """Do what the member asks for. Under `condition`."""

    # --- the state machine, from the training side -----------------------------------------------------------

    def word(self, *, view: int, round_: int, compute_us: int, shards: int) -> Word | None:
        with self.condition:
            return self._word(view=view, round_=round_, compute_us=compute_us, shards=shards)

    def end_round(self, words: Sequence[Word]) -> bool:
        with self.condition:
            ended = self._end_round(words)
            self._perform(self.member.report())
            return ended

    def lost(self, view: int, peer: str, reason: str, *, waited_s: int = 0) -> None:
        with self.condition:
            self._perform(self.member.lost(view, peer, reason, waited_s=waited_s))

    def changed(self) -> None:
        with self.condition:
            self.condition.notify_all()

    def activity(self) -> Activity:
        """For a heartbeat. Under `condition`."""
        shard_us, shards, of = self.shard_timer.take()
        return Activity(
            epoch=self.epoch,
            done=self.done,
            waits=self.waits,
            whole=self.whole,
            shard_us=shard_us,
            shards=shards,
            of=of,
            time_us=self.meter.said(),
        )
