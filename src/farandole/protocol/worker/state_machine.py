"""The worker as a pure state machine: its side of rules R1 and R2 and of the recovery (docs/protocol.md, Rules).

Several threads call it under one lock: the control connection's `on_message`; the view's `commit_message` and
`end_round`; whatever loses a peer `on_peer_lost`; the one that opens connections `connected`; the training side the
rest. What makes the races between them harmless:

- once `Stop` has been answered, `commit_message`, `end_round`, `begin_round`, `enter_view` and `become_synced` refuse
  until `Resume` (or `ViewWithdrawn`), so what was reported stays true;
- `Resume` advances `round` at once when the current round is committed. The training side compares its own round with
  `round` and so learns, however late it looks, whether its round was committed or is to be redone under `view`.

A round does not end if its commit messages carry different digests of the replica (`differing`, `report`;
docs/protocol.md, Replicas that differ), or if two have different results for a shard (`checks`, `unlike`;
docs/protocol.md, Recomputation).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from farandole.errors import ProtocolError
from farandole.plan.shards import Check, audit, compared, of_checker, of_owner, select_checks
from farandole.protocol import messages as m
from farandole.protocol.difference import outliers
from farandole.protocol.messages import NO_DIGESTS, Computed, RunTerms, fitting
from farandole.protocol.messages import NO_DIGESTS as NOT_COMPUTED
from farandole.protocol.values import NOTHING, Call, doing_step
from farandole.protocol.view import CommitMessage, Lineage, View, agreed_switch, by_worker, unlike

# --- drift ------------------------------------------------------------------------------------------------------------
#
# Replicas that drift apart, where `--bits any` allows it: every `EVERY` steps, members that differ from the
# longest-standing one load its state again. Invariant: all members of a view know alike which ones are due, and when.
# The state is that of the step's beginning; it arrives before its receiver computes anything of the step. If the view
# is stopped meanwhile, the receiver has loaded nothing or all, and goes on with either: it counts as synced all the
# time. Digests are remembered within one view only. A member has ended each round of its view by their commit messages:
# one that is told that a round is committed gets another view with it.
# Argument: docs/protocol.md, Drift 1-3.

EVERY = 512  # steps, in which the digests of steps have looked at everything


class Drift:
    """What one member remembers of drifted replicas in the view in force. See docs/protocol.md, Drift 1-3."""

    def __init__(self) -> None:
        self._view = 0
        self._odd: set[str] = set()  # members whose digest differed from the first member's in that view
        self._times = 0  # steps in which replicas differed, over the whole life of this member
        self._reports: list[m.Message] = []

    def on_step(self, view: View, step: int, digests: Mapping[str, int]) -> None:
        """Record the digests in the commit messages of a step that ended in `view`, by worker."""
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
        """Return and clear the `Drifts` reports: one for the first such step, then one each time the count doubles."""
        reports, self._reports = self._reports, []
        return reports

    def renewal(self, view: View, step: int) -> View | None:
        """Return `view` with the drifted members as `joining`, if they take the state over when `step` begins.

        Returns None if no transfer is due at this step.
        """
        if view.number != self._view or step % EVERY or not self._odd:
            return None
        odd, self._odd = self._odd, set()
        return msgspec.structs.replace(view, joining=tuple(worker for worker in view.members if worker in odd))


# --- state machine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connect:
    """Open this view's missing connections and make its buffers, in the background; then call `connected`.

    `key` is the secret of the view's group. Members authenticate each other with it.
    """

    view: View
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Exit:
    """Leave the run for `reason` and exit with `code`.

    With `save`, the worker saves the state that it holds first. The process ends after `within_s` seconds in any case.
    """

    reason: str
    code: int
    save: bool = False
    within_s: float | None = None


@dataclass(frozen=True)
class Save:
    """With `save`, write the state of the last complete step and answer `Saved`. Without, only wait for `Goodbye`.

    `allow_between` also permits a state between two steps, which no run can continue from.
    """

    save: bool
    allow_between: bool


@dataclass(frozen=True)
class CompareDigests:
    """Answer with `Digests`. Training has stopped."""


Action = m.Message | Connect | Exit | Save | CompareDigests


class WorkerStateMachine:
    """The state machine of one worker; the module's head says why its callers cannot race.

    From its answer to `Stop` until `Resume` or `ViewWithdrawn` it refuses `commit_message`, `end_round`, `begin_round`,
    `enter_view` and `become_synced`, so its report stays true. `Resume` advances `round` at once if the current round
    is committed.

    Attributes:
        phase: "candidate" (waits for a view), "member" of one, "stopped" (has answered `Stop`, awaits `Resume` or
            `ViewWithdrawn`, which make it a member or a candidate), "left" its last view gracefully (it answers `Stop`
            too; `Resume` makes it a member if only leaving workers remain), or "out" of the run (`Goodbye`,
            `JoinRefused`).
        view: the view that it is in, None before the first.
        pending: the proposed view, None if there is none.
        prepared: the number of the newest proposed view whose connections this worker has opened, 0 for none.
        agreed: the view that it switches to where the next training step begins (R2), None if there is none.
        round: the number of the round in progress, or of the next one between two rounds.
        step: the training step of that round.
        has_result: this worker holds every reduced bucket of `round`.
        synced: this worker holds the run's state.
        lineage: how the shards of `round` are assigned, None if that is not decided yet.
    """

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.phase = "candidate"
        self.view: View | None = None
        self.pending: View | None = None
        self.prepared = 0
        self.agreed: View | None = None
        self.round = 0
        self.step = 0
        self.has_result = False
        self.synced = False
        self.lineage: Lineage | None = None
        self.first = False  # the round in progress is the view's first
        self.digest = 0  # of the replica at the start of the current step; goes into its commit message
        self.differing: tuple[str, ...] = ()  # workers whose replica differs from the others'
        self.drift: Drift | None = None  # None unless replicas may differ (`--bits any`)
        self.checks: tuple[Check, ...] = ()  # of the round in progress
        self.own_results = self.check_results = NOT_COMPUTED  # for its commit message
        self.unlike: tuple[Check, ...] = ()  # checks whose two workers computed different results
        self.computes_step = False  # the round in progress is a training step's
        self._admission_pending = (
            False  # no training round has ended in this view, so its admission checks are still to be made
        )
        self.newest = m.Newest()  # the checkpoint that the members who begin the proposed view must find
        self._called = (-1, NOTHING)  # the newest round that has begun here, and its call

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The workers that must pass the admission check in the round in progress, if it is a training step's."""
        return self.view.unchecked if self.view and self._admission_pending else ()

    @property
    def call(self) -> Call:
        """The script's call in `round`, or `NOTHING` if that round has not begun here."""
        round_, call = self._called
        return call if round_ == self.round else NOTHING

    # --- from the coordinator --------------------------------------------------------------------------------

    def on_message(self, message: m.Message) -> list[Action]:
        """Handle a message of the coordinator. Returns the actions for the worker, messages to send among them.

        Raises:
            ProtocolError: `Resume` continues after a round that this worker does not hold.
        """
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
            case m.ViewWithdrawn():
                self.phase, self.view, self.pending, self.prepared, self.synced = "candidate", None, None, 0, False
                self.agreed, self.lineage, self.has_result = None, None, False
                return []
            case m.Goodbye():
                self.phase = "out"
                return [Exit(message.reason, message.code, message.save)]
            case m.JoinRefused():
                self.phase = "out"
                return [Exit(f"refused: {message.reason}", 1)]
            case m.End():
                return [Save(message.save, message.allow_between)]
            case m.Compare():
                return [CompareDigests()]
            case _:
                return []

    def _propose(self, view: View, key: bytes) -> list[Action]:
        self.pending, self.prepared = view, 0
        return [Connect(view, key)] if self.worker in view.members else self.connected(view)

    def connected(self, view: View) -> list[Action]:
        """The connections of `view` are open. Returns the answer to the coordinator, nothing if `view` is outdated."""
        if self.pending is None or self.pending.number != view.number:
            return []
        self.prepared = view.number
        return [m.Prepared(view=view.number)]

    def _stop(self, number: int) -> list[Action]:
        if self.phase in ("member", "candidate"):
            self.phase = "stopped"
        return [
            m.Stopped(
                stop=number,
                view=self.view,
                round=self.round,
                step=self.step,
                has_result=self.has_result,
                synced=self.synced and self.view is not None,
                lineage=self.lineage or self._base(),
                call=self.call,
                prepared=self._named(),
                own_results=self.own_results,
                check_results=self.check_results,
                unchecked=self.worker in self.unchecked,
                compared=compared(self.checks),
                cannot_end=bool(self.differing or self.unlike),
            )
        ]

    def _named(self) -> int:
        """The number of the view that this worker's commit messages name."""
        return self.agreed.number if self.agreed else self.prepared

    def _resume(self, message: m.Resume) -> list[Action]:
        self.pending, self.agreed, self.prepared = None, None, 0
        self.view, self.phase, self.first, self.differing, self.unlike = message.view, "member", False, (), ()
        if self.round == message.round - 1:
            if not self.has_result:
                raise ProtocolError(
                    f"the coordinator resumes at round {message.round}, but this worker holds no result of round "
                    f"{self.round}; restart the run from its newest checkpoint"
                )
            self._next(message.lineage)
        elif message.commit:
            self._next(None)
        else:
            self.has_result, self.lineage = False, message.lineage
        self._admission_pending = True  # no round has ended in this view, even if one of the previous view ends here
        return []

    # --- from the training side --------------------------------------------------------------------------------

    def enter_view(self, round_: int, step: int, *, view: int) -> list[m.Message] | None:
        """Switch to the proposed `view`, from no view: a joiner reads `round_` and `step` in the header of the state.

        Returns the messages to send, or None if the view is not proposed any more.
        """
        if self.phase != "candidate" or self.pending is None or self.prepared != self.pending.number:
            return None
        if view != self.pending.number:
            return None
        self.view, self.pending, self.prepared = self.pending, None, 0
        self.phase, self.round, self.step, self.first = "member", round_, step, True
        self.synced, self._called = self.worker not in self.view.joining, (-1, NOTHING)
        self._admission_pending = True
        self.lineage = self._base()
        return [m.Switched(view=self.view.number, round=round_, step=step)]

    def become_synced(self) -> list[m.Message] | None:
        """Record that this joiner has loaded the state. Returns the messages to send.

        Returns None if the view was stopped before: then the state does not count.
        """
        if self.phase != "member" or self.view is None:
            return None
        self.synced = True
        return [m.Synced(view=self.view.number)]

    def begin_round(self, step: int, *, may_switch: bool, call: Call = NOTHING) -> list[m.Message] | None:
        """Begin a round of `step`; first switch to an agreed view if `may_switch` (R2). Returns the messages to send.

        Returns None while stopped: wait, then call again.
        """
        if self.phase == "stopped":
            return None
        assert self.view is not None
        self.step = step
        actions: list[m.Message] = []
        if self.agreed and may_switch:
            self.view, self.agreed, self.first, self.lineage = self.agreed, None, True, None
            self._admission_pending = True
            actions.append(m.Switched(view=self.view.number, round=self.round, step=step))
            if self.worker not in self.view.members:
                self.phase = "left"
                return actions
        if self.lineage is None:
            self.lineage = self._base()
        self._called = (self.round, call)
        return actions

    def commit_message(self, *, view: int, round_: int, compute_us: int, shards: int) -> CommitMessage | None:
        """Return this worker's commit message: it holds every reduced bucket of `round_` under `view`.

        Returns None if the view or the round is over. The thread of an abandoned view may call this late, with
        garbage in its buckets, so both are compared here. `compute_us`: microseconds that its `shards` took.
        """
        if self.phase != "member" or self.view is None or not self.synced:
            return None
        if (view, round_) != (self.view.number, self.round):
            return None
        self.has_result = True
        return CommitMessage(
            view=self.view.number, round=self.round, prepared=self._named(), compute_us=compute_us, shards=shards,
            call=self.call.number, digest=self.digest, own_results=self.own_results.number,
            check_results=self.check_results.number,
        )  # fmt: skip

    def end_round(self, commits: Sequence[CommitMessage]) -> bool:
        """End the round: all its commit messages are here (R1).

        `commits`: this worker's own message, then those of its peers in the order of their ranks. Returns False if the
        view was stopped before, if the scripts called different things, if the replicas differ, or if two workers
        computed different results of one shard.
        """
        if self.phase != "member" or self.view is None:
            return False
        for commit in commits:
            if (commit.view, commit.round) != (self.view.number, self.round):
                return False
        if any(
            commit.call != self.call.number for commit in commits
        ):  # the scripts diverged (`protocol/coordinator/view_changes.py`): never ends
            return False
        worker_messages = by_worker(self.view, self.worker, commits)
        digests = {w: commit.digest for w, commit in worker_messages.items() if commit.digest}
        self.differing = () if self.drift else outliers(digests)
        self.unlike = unlike(self.checks, worker_messages)
        if self.differing or self.unlike:
            return False
        if self.drift:
            self.drift.on_step(self.view, self.step, digests)
        number = agreed_switch(commits)
        if self.pending and number == self.pending.number:
            self.agreed, self.pending, self.prepared = self.pending, None, 0
        self._next(None)
        return True

    def _next(self, lineage: Lineage | None) -> None:
        """Move on to the next round, whose shards are assigned by `lineage`; None: not decided yet."""
        self.round += 1
        self.has_result, self.first, self.lineage = False, False, lineage
        self._admission_pending = self._admission_pending and not self.computes_step
        self.checks, self.own_results, self.check_results = (), NOT_COMPUTED, NOT_COMPUTED

    def report(self) -> list[Action]:
        """Return the reports to the coordinator after `end_round`, whichever value that returned."""
        if self.differing:
            return [m.Differs(step=self.step, workers=self.differing)]
        if self.unlike:
            return [m.ShardsDiffer(step=self.step)]
        return [*self.drift.report()] if self.drift else []

    def script_end_report(self, fingerprint: str, after: m.StepTime) -> m.Finished:
        """Return the report that the script has ended. `fingerprint`: of the state; `after`: since its last step."""
        view = self.view.number if self.view else 0
        return m.Finished(fingerprint=fingerprint, view=view, round=self.round, step=self.step, after=after)

    def on_peer_lost(self, view: int, peer: str, reason: str, *, waited_s: int = 0) -> list[Action]:
        """Report that the connection to `peer` broke, or that this worker has waited `waited_s` seconds for it.

        A joiner may report this about the view that it waits for. Returns nothing if `view` is over.
        """
        mine = self.view if self.phase == "member" else self.pending if self.phase == "candidate" else None
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
# each time the round starts (`Checking.arrange`, `plan/shards.py`), and what is missing then is computed.

ShardDigests = dict[int, tuple[tuple[str, ...], tuple[int, ...]]]  # by shard: names, and a digest for each


class Checking:
    """The checked shards of one worker. Sets the member's `checks`, `own_results` and `check_results` for its round."""

    def __init__(self, machine: WorkerStateMachine, terms: RunTerms) -> None:
        self._state_machine = machine
        self._terms = terms
        self._mine: ShardDigests = {}  # own shards that another worker checks
        self._others: ShardDigests = {}  # shards of another worker that this one checks

    def begin(self) -> None:
        """Begin a round, of which nothing is computed yet."""
        self._mine, self._others = {}, {}

    def arrange(self, lineage: Lineage, shards: int, step: int) -> None:
        """Start or restart the round of `step`, and decide who checks which of its `shards`; 0: no training step."""
        machine, terms = self._state_machine, self._terms
        machine.checks = ()
        if shards and terms.bits != "any":
            held, workers = lineage.assign(shards), lineage.sets[-1]
            fraction = 0.0 if machine.view is None or machine.view.undecided else terms.audit
            audited = audit(held, workers, fraction, terms.seed, step)
            machine.checks = select_checks(held, machine.unchecked, lineage.rechecks, audited)
        self._update_member()

    def concerns(self, shard: int) -> bool:
        """Return True if another worker checks `shard`, which is this worker's own."""
        return shard in of_owner(self._state_machine.checks, self._state_machine.worker)

    def checks_left(self) -> tuple[int, ...]:
        """Return the shards of another worker that this one must still compute before it sends its commit message."""
        mine = of_checker(self._state_machine.checks, self._state_machine.worker)
        return tuple(shard for shard in mine.shards if shard not in self._others) if mine else ()

    def on_digests(self, shard: int, names: Sequence[str], digests: Sequence[int]) -> None:
        """Record the digests of one of this worker's own shards.

        Call it before the last gradient of the shard is submitted: the commit message may follow at once.
        """
        self._mine[shard] = (tuple(names), tuple(digests))
        self._update_member()

    def on_check(self, shard: int, names: Sequence[str], digests: Sequence[int]) -> None:
        """Record the digests of a shard of another worker, computed here as a check."""
        self._others[shard] = (tuple(names), tuple(digests))
        self._update_member()

    def _update_member(self) -> None:
        machine, mine = self._state_machine, of_checker(self._state_machine.checks, self._state_machine.worker)
        machine.own_results = _computed(machine.worker, of_owner(machine.checks, machine.worker), self._mine)
        machine.check_results = _computed(mine.owner, mine.shards, self._others) if mine else NO_DIGESTS


def _computed(owner: str, shards: Sequence[int], digests_of: ShardDigests) -> Computed:
    """Return what was computed of `shards`; `NO_DIGESTS` until the digests of all of them are known."""
    if not shards or any(shard not in digests_of for shard in shards):
        return NO_DIGESTS
    pairs = [
        (f"shard {shard}: {name}", digest) for shard in shards for name, digest in zip(*digests_of[shard], strict=True)
    ]
    names, digests = tuple(name for name, _ in pairs), tuple(digest for _, digest in pairs)
    most = fitting(names)
    if most < len(digests):
        rest = hashlib.sha256(repr(digests[most - 1 :]).encode()).digest()
        names, digests = names[:most], (*digests[: most - 1], int.from_bytes(rest[:8], "little") >> 1 or 1)
    return Computed(owner=owner, shards=tuple(shards), names=names, digests=digests)


# --- call rounds ------------------------------------------------------------------------------------------------------
#
# What each of this worker's rounds is for, and which come after a call round: docs/protocol.md, Same calls 2.


class CallRounds:
    """Decides when a call round is due. Remembers the message sizes of the newest step, as all members do."""

    def __init__(self) -> None:
        self._sizes = ""

    def enter(self) -> None:
        """This worker joins a view: forget the sizes. The others know those of its first step."""
        self._sizes = ""

    def due(self, sizes: str, step: int, *, is_step: bool, doing: str) -> tuple[Call | None, Call]:
        """Return (the call round that must come first or None, the call of the round itself).

        `sizes` describes the sizes of the round's messages. `doing` describes a call that is no training step, with the
        same text on all workers.
        """
        if not is_step:
            call = Call.of(doing or f"something after step {step}", sizes)
            return call, call
        previous, self._sizes = self._sizes or sizes, sizes
        other = Call.of(f"step {step}, of which other parameters are trained", sizes)
        return (other if sizes != previous else None), Call.of(doing_step(step), sizes)
