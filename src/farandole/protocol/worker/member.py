"""The worker as a pure state machine: its side of rules R1 and R2 and of the recovery (docs/protocol.md, Rules).

Two callers share it under one lock: the control connection feeds `receive`, the training side calls the round's
functions. What makes the races between them harmless:

- once `Stop` has been answered, `word`, `end_round`, `begin_round`, `adopt` and `become_synced` refuse until `Resume`
  (or `Demoted`), so what was reported stays true;
- `Resume` advances `round` at once when the current round is committed. The training side compares its own round with
  `round` and so learns, however late it looks, whether its round was committed or is to be redone under `view`.

A round does not end if its commit messages carry different digests of the replica (`apart`, `report`; docs/protocol.md,
Replicas that differ), or if two have different results for a shard (`checks`, `unlike`; docs/protocol.md,
Recomputation).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from farandole.errors import ProtocolError
from farandole.plan.shards import Check, audit, due, of_checker, of_holder
from farandole.protocol import messages as m
from farandole.protocol.difference import outliers
from farandole.protocol.messages import NO_DIGESTS, Computed, RunTerms, fitting
from farandole.protocol.messages import NO_DIGESTS as NOT_COMPUTED
from farandole.protocol.values import NOTHING, Call
from farandole.protocol.view import CommitMessage, Lineage, View, agreed_switch, of_workers, unlike

# --- drift ------------------------------------------------------------------------------------------------------------
#
# Replicas that drift apart, where `--bits any` allows it: every `EVERY` steps, members that differ from the
# longest-standing one load its state again. Invariant: all members of a view know alike which ones are due, and when.
# Argument: docs/protocol.md, Drift 1-3.

EVERY = 512  # steps, in which the digests of steps have looked at everything


class Drift:
    """What one member remembers of it."""

    def __init__(self) -> None:
        self._view = 0
        self._odd: set[str] = set()  # in that view
        self._times = 0
        self._reports: list[m.Message] = []

    def on_step(self, view: View, step: int, digests: Mapping[str, int]) -> None:
        """A step has ended in `view`, with these digests in its words."""
        apart = outliers(digests)
        if not apart:
            return
        if view.number != self._view:
            self._view, self._odd = view.number, set()
        self._odd |= {worker for worker in digests if digests[worker] != digests.get(view.members[0])}
        self._times += 1
        if self._times & (self._times - 1) == 0:
            self._reports.append(m.Drifts(step=step, workers=apart, times=self._times))

    def report(self) -> list[m.Message]:
        """For the coordinator: the first time, and each time that their number has doubled."""
        said, self._reports = self._reports, []
        return said

    def renewal(self, view: View, step: int) -> View | None:
        """Who gives the state to whom as `step` begins in `view`, as if these were joiners; None: nobody is due."""
        if view.number != self._view or step % EVERY or not self._odd:
            return None
        odd, self._odd = self._odd, set()
        return msgspec.structs.replace(view, joining=tuple(worker for worker in view.members if worker in odd))


# --- member -----------------------------------------------------------------------------------------------------------


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
class CompareDigests:
    """Answer Digests. Nobody trains any more."""


Action = m.Message | Connect | Exit | Save | CompareDigests


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

    def on_message(self, message: m.Message) -> list[Action]:
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
            case m.JoinRefused():
                self.phase = "out"
                return [Exit(f"refused: {message.reason}", 1)]
            case m.End():
                return [Save(message.save, message.between)]
            case m.Compare():
                return [CompareDigests()]
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

    def commit_message(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None:
        """This worker holds every reduced bucket of `round_` under `view`: its control word, or None if that is past.

        The thread of an abandoned view may come here late, with garbage in its buckets: hence the question.
        """
        if self.phase != "member" or self.view is None or not self.synced:
            return None
        if (view, round_) != (self.view.number, self.round):
            return None
        self.holds = True
        return CommitMessage(
            view=self.view.number, round=self.round, prepared=self._named(), compute_us=compute_us, shards=shards,
            call=self.call.number, digest=self.digest, held=self.held.number, checked=self.checked.number,
        )  # fmt: skip

    def end_round(self, words: Sequence[CommitMessage]) -> bool:
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
            self.drift.on_step(self.view, self.step, digests)
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
            return [m.ShardsDiffer(step=self.step)]
        return [*self.drift.report()] if self.drift else []

    def finished(self, fingerprint: str, after: m.StepTime) -> m.Finished:
        """The script has run to its end, `after` its last step, with this `fingerprint` of the state."""
        view = self.view.number if self.view else 0
        return m.Finished(fingerprint=fingerprint, view=view, round=self.round, step=self.step, after=after)

    def on_peer_lost(self, view: int, peer: str, reason: str, *, waited_s: int = 0) -> list[Action]:
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


# --- checks -----------------------------------------------------------------------------------------------------------
#
# What a worker found for shards that two compute, round by round, and what its commit message says about it.
#
# Results stay for as long as the round is current, whatever happens to the view. Which worker checks which is set again
# each time the round starts (`plan.checks`), and what is missing then is computed.

Found = dict[int, tuple[tuple[str, ...], tuple[int, ...]]]  # names and digests of a shard


class Checking:
    """Of one worker. Its `Member` has the checks of the round in hand, and what the word will say."""

    def __init__(self, member: Member, terms: RunTerms) -> None:
        self._member = member
        self._terms = terms
        self._mine: Found = {}
        self._others: Found = {}

    def begin(self) -> None:
        """A round: nothing of it has been computed."""
        self._mine, self._others = {}, {}

    def arrange(self, lineage: Lineage, shards: int, step: int) -> None:
        """The round starts, perhaps anew, as a step's of so many `shards`; 0: it is none."""
        member, terms = self._member, self._terms
        member.checks = ()
        if shards and terms.bits != "any":
            held, workers = lineage.assign(shards), lineage.sets[-1]
            fraction = 0.0 if member.view is None or member.view.undecided else terms.audit
            audited = audit(held, workers, fraction, terms.seed, step)
            member.checks = due(held, member.unproven, lineage.again, audited)
        self._settle()

    def concerns(self, shard: int) -> bool:
        """Whether somebody checks `shard`, which is this worker's."""
        return shard in of_holder(self._member.checks, self._member.worker)

    def owed(self) -> tuple[int, ...]:
        """The shards of another's that this worker has yet to compute, before it gives its word."""
        mine = of_checker(self._member.checks, self._member.worker)
        return tuple(shard for shard in mine.shards if shard not in self._others) if mine else ()

    def on_digests(self, shard: int, names: Sequence[str], digests: Sequence[int]) -> None:
        """In one of its own. To be told before the last of it is handed in, since the word may follow at once."""
        self._mine[shard] = (tuple(names), tuple(digests))
        self._settle()

    def on_check(self, shard: int, names: Sequence[str], digests: Sequence[int]) -> None:
        """In another's."""
        self._others[shard] = (tuple(names), tuple(digests))
        self._settle()

    def _settle(self) -> None:
        member, mine = self._member, of_checker(self._member.checks, self._member.worker)
        member.held = _computed(member.worker, of_holder(member.checks, member.worker), self._mine)
        member.checked = _computed(mine.holder, mine.shards, self._others) if mine else NO_DIGESTS


def _computed(holder: str, shards: Sequence[int], found: Found) -> Computed:
    """Nothing until all of it is there."""
    if not shards or any(shard not in found for shard in shards):
        return NO_DIGESTS
    pairs = [(f"shard {shard}: {name}", digest) for shard in shards for name, digest in zip(*found[shard], strict=True)]
    names, digests = tuple(name for name, _ in pairs), tuple(digest for _, digest in pairs)
    most = fitting(names)
    if most < len(digests):
        rest = hashlib.sha256(repr(digests[most - 1 :]).encode()).digest()
        names, digests = names[:most], (*digests[: most - 1], int.from_bytes(rest[:8], "little") >> 1 or 1)
    return Computed(holder=holder, shards=tuple(shards), names=names, digests=digests)


# --- call rounds ------------------------------------------------------------------------------------------------------
#
# What each of this worker's rounds is for, and which come after a call round: docs/protocol.md, Same calls 2.


class CallRounds:
    """Knows the sizes of the newest training step's messages, as all members of its view do."""

    def __init__(self) -> None:
        self._sizes = ""

    def enter(self) -> None:
        """This worker comes in anew: the others know the sizes of its first step."""
        self._sizes = ""

    def due(self, sizes: str, step: int, *, trains: bool, doing: str) -> tuple[Call | None, Call]:
        """The call round that has to come first, if one has to, and the round itself.

        `sizes`: of the round's messages. `doing`: what was called, where that is no training step, in words that are
        equal on all workers.
        """
        if not trains:
            call = Call.of(doing or f"something after step {step}", sizes)
            return call, call
        known, self._sizes = self._sizes or sizes, sizes
        other = Call.of(f"step {step}, of which other parameters are trained", sizes)
        return (other if sizes != known else None), Call.of(f"step {step}", sizes)
