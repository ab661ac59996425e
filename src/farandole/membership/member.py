"""The worker as a pure state machine: its side of rules R1 and R2 and of the recovery.

Two callers share it under one lock: the control connection feeds `receive`, the training side calls the round's
functions. What makes the races between them harmless:

- once `Stop` has been answered, `word`, `end_round`, `begin_round`, `adopt` and `become_synced` refuse until `Resume`
  (or `Demoted`), so what was reported stays true;
- `Resume` moves `round` on at once when the round in hand is committed. The training side compares its own round with
  `round` and so learns, however late it looks, whether its round was committed or is to be redone under `view`.

A round whose words carry different digests of the replica does not end: `apart` says who is unlike the others, `report`
tells the coordinator. What follows is argued in `replicas`. Nor does one end in which two have found different things
of a shard (`checks`, `unlike`): what follows is argued in `verdicts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from farandole.errors import ProtocolError
from farandole.membership import messages as m
from farandole.membership.comparison import NOTHING as NOT_COMPUTED
from farandole.membership.difference import outliers
from farandole.membership.drift import Drift
from farandole.membership.values import NOTHING, Call
from farandole.membership.view import Lineage, View, Word, agreed_switch, of_workers, unlike
from farandole.plan.shards import Check


@dataclass(frozen=True)
class Connect:
    """Make this view's connections, if they do not stand, and its buffers, in the background; then call `connected`.

    `key`: the group's, by which the members prove themselves to each other.
    """

    view: View
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Exit:
    """This worker is done; with `save`, once it has saved what it holds; `within_s`: its process ends then anyway."""

    reason: str
    code: int
    save: bool = False
    within_s: float | None = None


@dataclass(frozen=True)
class Save:
    """Write the state of the last whole step and answer Saved, or just wait for Goodbye."""

    save: bool
    between: bool


@dataclass(frozen=True)
class Compare:
    """Answer Digests. Nobody trains any more."""


Action = m.Message | Connect | Exit | Save | Compare


class Member:
    """See the module's head. `phase`: waiting (for a view), member, stopped, left, out."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.phase = "waiting"
        self.view: View | None = None
        self.pending: View | None = None
        self.prepared = 0
        self.agreed: View | None = None
        self.round = 0
        self.step = 0
        self.holds = False
        self.synced = False
        self.lineage: Lineage | None = None
        self.first = False  # the round in hand is the view's first
        self.digest = 0  # of the replica at the beginning of the step in hand, for its word
        self.apart: tuple[str, ...] = ()
        self.drift: Drift | None = None  # where replicas may drift apart
        self.checks: tuple[Check, ...] = ()  # of the round in hand
        self.held = self.checked = NOT_COMPUTED  # for its word
        self.unlike: tuple[Check, ...] = ()
        self.trains = False  # the round in hand is a training step's
        self._proving = False  # no such round has ended in this view
        self.newest = m.Newest()  # what who begins the proposed view has to find
        self._called = (-1, NOTHING)  # the newest round that has begun here, and what for

    @property
    def unproven(self) -> tuple[str, ...]:
        """Who is to prove itself in the round in hand, if it is a step's."""
        return self.view.unproven if self.view and self._proving else ()

    @property
    def call(self) -> Call:
        """What the script has called in `round`; nothing if that one has not begun here."""
        round_, call = self._called
        return call if round_ == self.round else NOTHING

    # --- from the coordinator --------------------------------------------------------------------------------

    def receive(self, message: m.Message) -> list[Action]:
        if self.phase == "out":
            return []
        match message:
            case m.Propose():
                self.newest = message.newest
                return self._propose(message.view, message.key)
            case m.Stop():
                return self._stop(message.stop)
            case m.Resume():
                return self._resume(message)
            case m.Demoted():
                self.phase, self.view, self.pending, self.prepared, self.synced = "waiting", None, None, 0, False
                self.agreed, self.lineage, self.holds = None, None, False
                return []
            case m.Goodbye():
                self.phase = "out"
                return [Exit(message.reason, message.code, message.save)]
            case m.Refused():
                self.phase = "out"
                return [Exit(f"refused: {message.reason}", 1)]
            case m.End():
                return [Save(message.save, message.between)]
            case m.Compare():
                return [Compare()]
            case _:
                return []

    def _propose(self, view: View, key: bytes) -> list[Action]:
        self.pending, self.prepared = view, 0
        return [Connect(view, key)] if self.worker in view.members else self.connected(view)

    def connected(self, view: View) -> list[Action]:
        """The connections of `view` stand."""
        if self.pending is None or self.pending.number != view.number:
            return []
        self.prepared = view.number
        return [m.Prepared(view=view.number)]

    def _stop(self, number: int) -> list[Action]:
        if self.phase in ("member", "waiting"):
            self.phase = "stopped"
        return [
            m.Stopped(
                stop=number,
                view=self.view,
                round=self.round,
                step=self.step,
                holds=self.holds,
                synced=self.synced and self.view is not None,
                lineage=self.lineage or self._base(),
                call=self.call,
                prepared=self._named(),
                held=self.held,
                checked=self.checked,
                unproven=self.worker in self.unproven,
            )
        ]

    def _named(self) -> int:
        """The view that this worker's words name."""
        return self.agreed.number if self.agreed else self.prepared

    def _resume(self, message: m.Resume) -> list[Action]:
        self.pending, self.agreed, self.prepared = None, None, 0
        self.view, self.phase, self.first, self.apart, self.unlike = message.view, "member", False, (), ()
        if self.round == message.round - 1:
            if not self.holds:
                raise ProtocolError(f"told to go on from round {message.round} but round {self.round} is not held")
            self._next(message.lineage)
        elif message.commit:
            self._next(None)
        else:
            self.holds, self.lineage = False, message.lineage
        self._proving = True  # in this view no round has ended, also where one of the last has here
        return []

    # --- from the training side --------------------------------------------------------------------------------

    def adopt(self, round_: int, step: int, *, view: int) -> list[m.Message] | None:
        """A joiner learns from the state's header that the proposed `view` is in force; None: not any more."""
        if self.phase != "waiting" or self.pending is None or self.prepared != self.pending.number:
            return None
        if view != self.pending.number:
            return None
        self.view, self.pending, self.prepared = self.pending, None, 0
        self.phase, self.round, self.step, self.first = "member", round_, step, True
        self.synced, self._called = self.worker not in self.view.joining, (-1, NOTHING)
        self._proving = True
        self.lineage = self._base()
        return [m.Switched(view=self.view.number, round=round_, step=step)]

    def become_synced(self) -> list[m.Message] | None:
        """A joiner holds the state now; None: its view was stopped before, the state counts for nothing."""
        if self.phase != "member" or self.view is None:
            return None
        self.synced = True
        return [m.Synced(view=self.view.number)]

    def begin_round(self, step: int, *, may_switch: bool, call: Call = NOTHING) -> list[m.Message] | None:
        """Before a round: apply an agreed switch (R2). None while stopped: wait, then ask again."""
        if self.phase == "stopped":
            return None
        assert self.view is not None
        self.step = step
        actions: list[m.Message] = []
        if self.agreed and may_switch:
            self.view, self.agreed, self.first, self.lineage = self.agreed, None, True, None
            self._proving = True
            actions.append(m.Switched(view=self.view.number, round=self.round, step=step))
            if self.worker not in self.view.members:
                self.phase = "left"
                return actions
        if self.lineage is None:
            self.lineage = self._base()
        self._called = (self.round, call)
        return actions

    def word(self, *, view: int, round_: int, compute_us: int, shards: int) -> Word | None:
        """This worker holds every reduced bucket of `round_` under `view`: its control word, or None if that is past.

        The thread of an abandoned view may come here late, with garbage in its buckets: hence the question.
        """
        if self.phase != "member" or self.view is None or not self.synced:
            return None
        if (view, round_) != (self.view.number, self.round):
            return None
        self.holds = True
        return Word(
            view=self.view.number, round=self.round, prepared=self._named(), compute_us=compute_us, shards=shards,
            call=self.call.number, digest=self.digest, held=self.held.number, checked=self.checked.number,
        )  # fmt: skip

    def end_round(self, words: Sequence[Word]) -> bool:
        """All words of the round are here (R1): it has ended. False if the view was stopped before, or if the replicas
        differ, or what two have found of a shard. `words`: this worker's own, then its peers' in the order of their
        ranks.
        """
        if self.phase != "member" or self.view is None:
            return False
        for word in words:
            if (word.view, word.round) != (self.view.number, self.round):
                return False
        if any(word.call != self.call.number for word in words):  # see `calls`: this round never ends
            return False
        by_worker = of_workers(self.view, self.worker, words)
        digests = {w: word.digest for w, word in by_worker.items() if word.digest}
        self.apart = () if self.drift else outliers(digests)
        self.unlike = unlike(self.checks, by_worker)
        if self.apart or self.unlike:
            return False
        if self.drift:
            self.drift.heard(self.view, self.step, digests)
        number = agreed_switch(words)
        if self.pending and number == self.pending.number:
            self.agreed, self.pending, self.prepared = self.pending, None, 0
        self._next(None)
        return True

    def _next(self, lineage: Lineage | None) -> None:
        """The round in hand has ended; the next one is dealt by `lineage`."""
        self.round += 1
        self.holds, self.first, self.lineage = False, False, lineage
        self._proving = self._proving and not self.trains
        self.checks, self.held, self.checked = (), NOT_COMPUTED, NOT_COMPUTED

    def report(self) -> list[Action]:
        """After `end_round`, whatever that said."""
        if self.apart:
            return [m.Differs(step=self.step, workers=self.apart)]
        if self.unlike:
            return [m.Unlike(step=self.step)]
        return [*self.drift.report()] if self.drift else []

    def finished(self, fingerprint: str, after: m.StepTime) -> m.Finished:
        """The script has run to its end, `after` its last step, with this `fingerprint` of the state."""
        view = self.view.number if self.view else 0
        return m.Finished(fingerprint=fingerprint, view=view, round=self.round, step=self.step, after=after)

    def lost(self, view: int, peer: str, reason: str, *, waited_s: int = 0) -> list[Action]:
        """A peer's connection broke, or it kept us waiting too long, `waited_s` so far. Joiners may say so of the view
        they wait for.
        """
        mine = self.view if self.phase == "member" else self.pending if self.phase == "waiting" else None
        if mine is not None and mine.number == view:
            return [m.Suspect(view=view, peer=peer, reason=reason, waited_s=waited_s)]
        return []

    def _base(self) -> Lineage:
        if self.view is None:
            return Lineage(sets=())
        return self.view.lineage(self.view.synced if self.first else self.view.members)
