"""The worker's side of the control plane: the member's state machine under a lock.

The training thread, the view's exchange thread and the connection's own thread meet in one condition variable. The
training thread waits in it for "my round ended, or the view changed, or I am to go"; nothing of a step waits for the
coordinator. `sent` and `received` count messages by kind, which is how the tests show it. The connection is in
`connection.py`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from farandole.collective.transport import Links
from farandole.errors import CheckpointsGone
from farandole.membership import messages as m
from farandole.membership.member import Action, Exit, Member, Save
from farandole.membership.values import NOTHING
from farandole.membership.view import View, Word
from farandole.plan.history import History
from farandole.worker.shard_timer import ShardTimer


class Participant:
    """A worker's place in the run. This class alone is a world of one; `Connected` adds the coordinator."""

    def __init__(self, worker: str, minimum: int = 1) -> None:
        self.worker = worker
        self.minimum = minimum
        self.member = Member(worker)
        self.condition = threading.Condition(threading.RLock())
        self.exit: Exit | None = None
        self.orphaned = False  # nobody else may hold what this worker does: it is to be saved before `exit`
        self.save: Save | None = None  # the coordinator asks for the last checkpoint
        self.saves = True  # this worker writes the checkpoints while the run trains
        self.save_at_once = False  # ... and the first one without waiting, since another could not
        self.newest = m.Newest()  # what a world of one has to find
        self.groups: dict[int, Links] = {}
        self.prepare: Callable[[View], None] = _nothing  # the training side makes a view's buffers, in the background
        self.digest: Callable[[], int] = lambda: 0  # of the replica, when a step begins
        self.digests: Callable[[], m.Message] = lambda: m.Digests(step=0, names=(), digests=())
        self.waiting_for: Callable[[], tuple[int, str, float] | None] = lambda: None
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.epoch = 0
        self.call = NOTHING  # what the script has called, of which the next round is
        self.saved: Callable[[bool], m.Saved] = lambda between: m.Saved(error="nothing to save", between=between)
        self.whole = False  # the replicated state is that of a whole step; see `hung`
        self.begun = -1  # the round that the training thread has begun last
        self.waits = True  # it has nothing to compute and waits for others
        self.done = 0  # shards
        self.shard_timer = ShardTimer()
        self.history: History | None = None  # of the workers that a world of one stands for

    def workers_at(self, step: int, members: int) -> int:
        """How many workers count as having begun `step`, for the batch, when `members` really have."""
        return self.history.workers(step) if self.history else members

    def ask_in(self, signature: m.Signature, unreached: str = "") -> None:
        """Built and opened: ready for a view. A world of one has its view at once.

        `unreached`: why this worker can't write the run's checkpoints, "" if it can.
        """
        del signature, unreached
        with self.condition:
            view = View(number=1, members=(self.worker,), group=1)
            self.member.receive(m.Propose(view=view, newest=self.newest))
            self.member.connected(view)

    def short(self, view: View, error: CheckpointsGone) -> None:
        """The first view can't begin with what this worker finds. In a world of one nobody else could: raises it."""
        del view
        raise error

    def tell(self, message: m.Message) -> None:
        """Send a message to the coordinator."""
        del message

    def add_line(self, line: m.Line) -> None:
        """A line of metrics."""
        del line

    def finish(self, fingerprint: str) -> None:
        """The script has run to its end."""
        del fingerprint

    def close(self) -> None:
        """Let go of the connection."""

    # --- the state machine, from the training side -----------------------------------------------------------

    def adopt(self, round_: int, step: int, *, view: int) -> bool:
        return self._do(lambda: self.member.adopt(round_, step, view=view))

    def become_synced(self) -> bool:
        return self._do(self.member.become_synced)

    def begin_round(self, step: int, *, may_switch: bool) -> bool:
        return self._do(lambda: self.member.begin_round(step, may_switch=may_switch, call=self.call))

    def word(self, *, view: int, round_: int, compute_us: int, shards: int) -> Word | None:
        with self.condition:
            return self.member.word(view=view, round_=round_, compute_us=compute_us, shards=shards)

    def end_round(self, words: Sequence[Word]) -> bool:
        with self.condition:
            ended = self.member.end_round(words)
            if not ended:
                self._perform(self.member.report())
            return ended

    def lost(self, view: int, peer: str, reason: str, *, waited_s: int = 0) -> None:
        with self.condition:
            self._perform(self.member.lost(view, peer, reason, waited_s=waited_s))

    def changed(self) -> None:
        with self.condition:
            self.condition.notify_all()

    def _do(self, ask: Callable[[], list[Action] | None]) -> bool:
        with self.condition:
            actions = ask()
            if actions is None:
                return False
            self._perform(actions)
            return True

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, m.Message):
                self.tell(action)


def _nothing(argument: Any) -> None:
    del argument
