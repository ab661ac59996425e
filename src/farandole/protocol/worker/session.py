"""A worker's session with its coordinator: what they send each other, over one connection after another.

A pure machine. Its owner opens and closes connections, carries what `take` gives, passes in what arrives, and calls
`watch` and `beat` every `terms.heartbeat_s`. Times are the owner's, in seconds. Invariants: only the newest connection
counts; the messages of `REPEATED` are sent again on a new one; after the lease this worker gives no commit
message and ends no round.
Argument: docs/protocol.md, Session 1-7.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from farandole.errors import Refused, UsageError
from farandole.platform.bounds import MAX_SECONDS
from farandole.protocol import messages as m
from farandole.protocol.kept_lines import KeptLines
from farandole.protocol.messages import EXIT_PREEMPTED, RunTerms
from farandole.protocol.view import CommitMessage
from farandole.protocol.worker.driver import Activity, Instructions
from farandole.protocol.worker.state_machine import Action, Exit, Save, WorkerStateMachine

# --- patience ---------------------------------------------------------------------------------------------------------
#
# How long a worker waits for a peer before it reports so. Times are in seconds. Two reports: (a) stalled, after
# max(stall_s, 10 median steps): an accusation of the peer; (b) blocked, in heartbeats: two members that both wait for
# each other for max(heartbeat_timeout_s, 10 median steps) can't reach each other, although the coordinator reaches
# both. Before the first step has ended, the limit of (b) is the stall limit. A waiting member has sent everything that
# comes earlier in the exchange, so at least one message between the two is under way, and no computation and no third
# member delays it. A slow link may: but a wait is for one message, and a step takes at least as long as its longest
# message.
# Argument: docs/protocol.md, Session, "Waiting for a peer".

STEPS = 10
PeerWait = tuple[int, str, float]  # the view, the peer that is waited for, and since when


def peer_over_soft_limit(
    waiting: PeerWait | None, step_s: float | None, *, stall_s: float, heartbeat_timeout_s: float, now: float
) -> str:
    """Return the peer that this worker has waited for beyond the soft limit; "" if there is none.

    `step_s` is the median time of a step, None before the first step has ended.
    """
    limit = stall_s if step_s is None else max(heartbeat_timeout_s, STEPS * step_s)
    return waiting[1] if waiting is not None and now - waiting[2] > limit else ""


def stalled(waiting: PeerWait, step_s: float | None, *, stall_s: float, now: float) -> bool:
    """Return True if the peer that is waited for must be reported as stalled."""
    return now - waiting[2] > max(stall_s, STEPS * (step_s or 0.0))


# --- lease ------------------------------------------------------------------------------------------------------------
#
# A worker's lease: how long it may go on without a coordinator. Times are the caller's, in seconds.
#
# It ends `orphan_s` after the newest heartbeat, or Hello, was *sent* that the coordinator has answered. The coordinator
# received that later than it was sent, so when it has heard nothing for `orphan_s`, the lease is over.
# Argument: docs/protocol.md, Reconnection and the lease 2.


class Lease:
    """The lease of one worker. It has no end until the first `on_welcome`."""

    def __init__(self) -> None:
        self.end = math.inf
        self._ended = False  # `over` has returned True once
        self._beats: dict[int, float] = {}  # unanswered heartbeats: when each was sent, by number
        self._number = 0

    def beat(self, now: float) -> int:
        """Record that a heartbeat is sent. Returns its number."""
        self._number += 1
        self._beats[self._number] = now
        return self._number

    def on_answer(self, number: int, orphan_s: float) -> None:
        """Extend the lease: heartbeat `number` was answered."""
        sent = self._beats.get(number)
        if sent is not None and sent <= self.end:  # an ended lease stays ended: the run may have restarted
            self.end = max(self.end, sent + orphan_s)
            self._beats = {n: at for n, at in self._beats.items() if n > number}

    def on_welcome(self, hello_at: float, orphan_s: float) -> None:
        """Extend the lease: the Hello of `hello_at` was answered. No heartbeat of an earlier connection will be."""
        if self.end == math.inf:
            self.end = hello_at + orphan_s
        elif hello_at <= self.end:
            self.end = max(self.end, hello_at + orphan_s)
        self._beats.clear()

    def over(self, now: float) -> bool:
        """Return True if the lease has ended. It stays ended: a refused commit message is not requested again."""
        self._ended = self._ended or now > self.end
        return self._ended


# How much of a preemption notice is reserved for saving: a fraction, and seconds at most.
PART, LONGEST_S = 0.25, 30.0
# A shorter notice does not end the lease: the worker leaves gracefully if it still can. To exit at once would be a
# certain crash, and a wrong clock can make two minutes look like none.
SHORTEST_S = 4.0


class PreemptionClock:
    """The end of a worker's lease because of a preemption deadline. Times are the caller's, in seconds.

    The notice comes from the worker itself (`LeaveRequest`), or from its pool by way of the coordinator
    (`PreemptionDeadline`), again on each new connection. None is cancelled, not even one that has passed while the
    machine still runs: nothing is known about such a machine. The deadline decides where no view leaves the worker out
    in time: in an evaluation, or if all members leave and a joiner must come first. Members whose leases end in
    different rounds, at most one apart, each save their own state. The process ends at half of the time that is left
    for saving, in any case (`worker/hung.py`).
    Argument: docs/protocol.md, Preemption deadline 2 and 5.
    """

    def __init__(self) -> None:
        self.at = math.inf
        self.left_s = 0.0  # from then to the deadline, in seconds

    def within(self, seconds: float, now: float) -> None:
        """Record a notice: the machine goes in `seconds`. The earliest deadline counts."""
        left_s = min(PART * seconds, LONGEST_S)
        if seconds >= SHORTEST_S and now + seconds - left_s < self.at:
            self.at, self.left_s = now + seconds - left_s, left_s

    def over(self, now: float) -> bool:
        """Return True if the lease has ended."""
        return now > self.at


# --- session ----------------------------------------------------------------------------------------------------------

# Sent again on every new connection: they still hold. Other messages are not, since neither side can tell which of them
# a broken connection has lost: the coordinator stops the view of a returning worker, and asks.
REPEATED = (m.Ready, m.LeaveRequest, m.ScriptFailed, m.DataUnavailable, m.Differs, m.Finished, m.NotFinite)
# Before one of these, heartbeats carry all lines of metrics: it may be the worker's last message, or end its time as
# rank 0. A switch is reported when the last step before it has its line. The writer of the last checkpoint sends its
# lines, whoever was rank 0.
LAST = (
    m.NotFinite,
    m.ScriptFailed,
    m.DataUnavailable,
    m.Stopped,
    m.Finished,
    m.Switched,
    m.Saved,
)
MORE_BEATS = 9  # heartbeats that may follow one that can't carry all lines: a script may log thousands a second
FIRST_S = 20.0  # limit for the first contact: the coordinator may be restarting, or thawing
SILENT_FRACTION = 0.6  # how long a connection may be silent, as a fraction of the heartbeat timeout
BACKOFF_S = (0.1, 1.0)  # between two attempts: first and longest; doubles, with jitter
EXIT_ORPHANED = 4  # exit code of a worker that was without a coordinator for too long
DEFAULT_TERMS = RunTerms(
    heartbeat_s=1.0, heartbeat_timeout_s=FIRST_S, stall_s=MAX_SECONDS, orphan_s=MAX_SECONDS
)  # before Welcome


class Session:
    """The session of one worker, as the module's head describes. `hello` identifies the worker, which starts `now`.

    `activity()` returns what the training side has done since the last call, and is called once a heartbeat.
    `waiting_for()` returns the peer that it waits for.
    """

    def __init__(
        self, hello: m.Hello, machine: WorkerStateMachine, activity: Callable[[], Activity],
        waiting_for: Callable[[], PeerWait | None], now: float,
    ) -> None:  # fmt: skip
        self.state_machine = machine
        self.instructions = Instructions()
        self.terms = DEFAULT_TERMS
        self._run = ""
        # The number of the newest connection. What arrives on an older one was sent to a peer that has moved since.
        self.attempt = 0
        self._hello = hello
        self._activity = activity
        self._waiting_for = waiting_for
        self._first_until = now + FIRST_S
        self._phase = "closed"  # or "greeting": Hello is sent, or "open": it was answered
        self._hello_at = self._heard_at = now
        self._wait_s = BACKOFF_S[0]
        self._repeated: list[m.Message] = []
        self._outgoing: deque[m.Message] = deque()
        self._lease = Lease()
        self._preemption = PreemptionClock()
        self._lines = KeptLines()
        self._was_rank_0 = False  # it was rank 0 when last seen in a view, and not all of its lines are sent yet

    # --- connections -----------------------------------------------------------------------------------------

    def on_connected(self, now: float) -> m.Hello:
        """Register a new connection, which replaces every other one. Returns the Hello to send."""
        self.attempt += 1
        self._phase, self._hello_at = "greeting", now
        self._outgoing.clear()
        worker, synced = self.state_machine.worker, self.state_machine.synced
        return msgspec.structs.replace(self._hello, worker=worker, attempt=self.attempt, synced=synced)

    def on_closed(self, attempt: int) -> None:
        """Record that connection `attempt` has ended."""
        if attempt == self.attempt:
            self._phase = "closed"

    @property
    def met(self) -> bool:
        """True if the run has welcomed this worker before."""
        return bool(self._run)

    @property
    def patience_s(self) -> float:
        """How long a connection may be silent, in seconds."""
        return (SILENT_FRACTION if self._phase == "open" else 1.0) * self.terms.heartbeat_timeout_s

    def silent(self, now: float) -> bool:
        """Return True if the connection was silent for too long: the owner must close it."""
        return self._phase != "closed" and now - max(self._hello_at, self._heard_at) > self.patience_s

    def retry_s(self, chance: float) -> float:
        """Return the seconds to wait before the next attempt. `chance`: random between 0 and 1, for the jitter."""
        wait, self._wait_s = self._wait_s, min(2 * self._wait_s, BACKOFF_S[1])
        return wait * (0.5 + 0.5 * chance)

    def unreachable(self, now: float) -> bool:
        """Return True if no coordinator has answered within `FIRST_S`: then there is none."""
        return not self.met and now > self._first_until

    # --- receiving -------------------------------------------------------------------------------------------

    def on_message(self, attempt: int, message: m.Message, now: float) -> list[Action]:
        """Handle a message of connection `attempt`. Returns the actions; messages among them must be passed to `tell`.

        Raises:
            Refused: the coordinator does not admit this worker, or belongs to another run.
            ProtocolError: the coordinator requests what is impossible.
        """
        if attempt != self.attempt or self._phase == "closed":
            return []
        self._heard_at = now
        match message:
            case m.Welcome() if self._phase == "greeting":
                self._welcomed(message)
            case m.Goodbye() if self._phase == "greeting" and self.met:
                return self._follow(message)
            case m.JoinRefused() | m.Goodbye() if self._phase == "greeting":
                raise Refused(message.reason)
            case _ if self._phase == "greeting":
                raise Refused(f"the coordinator answered Hello with {type(message).__name__}, not with Welcome")
            case m.HeartbeatAnswer():
                self._lease.on_answer(message.beat, self.terms.orphan_s)
                self._lines.forget(message.lines)
            case m.Saver():
                self.instructions.saves = message.worker == self.state_machine.worker
                self.instructions.save_at_once = self.instructions.saves and message.at_once
            case m.PreemptionDeadline():
                self._preemption.within(message.within_s, now)
            case m.Published() | m.Stacks() | m.Trace():
                return [message]
            case _:
                return self._follow(message)
        return []

    def _welcomed(self, welcome: m.Welcome) -> None:
        if self.met and welcome.worker != self.state_machine.worker:
            raise Refused(
                f"this worker has the id {self.state_machine.worker}, but the coordinator calls it {welcome.worker}"
            )
        if self.met and welcome.run != self._run:
            raise Refused(f"this worker belongs to run {self._run}, but the coordinator belongs to run {welcome.run}")
        self._run, self.terms = welcome.run, welcome.terms
        self.state_machine.worker = welcome.worker
        self._phase, self._wait_s = "open", BACKOFF_S[0]
        self._lease.on_welcome(self._hello_at, welcome.terms.orphan_s)
        self._lines.send_after(welcome.lines)
        self._outgoing.extend(self._repeated)

    def _follow(self, message: m.Message) -> list[Action]:
        self.instructions.saves = self.instructions.saves and not isinstance(message, m.ViewWithdrawn)
        actions = self.state_machine.on_message(message)
        if not self.state_machine.differing:  # the worker continues, and compares again
            self._repeated = [message for message in self._repeated if not isinstance(message, m.Differs)]
        for action in actions:
            match action:
                case Exit():
                    self.instructions.leave(action)
                case Save():
                    self.instructions.save = action
                case _:
                    pass
        return actions

    # --- sending ---------------------------------------------------------------------------------------------

    def tell(self, message: m.Message, now: float) -> None:
        """Send `message` if a connection is open. A message of `REPEATED` is sent on every later connection as well."""
        message = _sendable(message)
        if isinstance(message, m.NotFinite):  # only the newest one is kept
            self._repeated = [each for each in self._repeated if not isinstance(each, m.NotFinite)]
        if isinstance(message, m.LeaveRequest) and message.within_s is not None:
            self._preemption.within(message.within_s, now)
        repeats = isinstance(message, REPEATED) or (isinstance(message, m.Restored) and message.done)
        if repeats and message not in self._repeated:
            self._repeated.append(message)
        if self._phase == "open":
            if isinstance(message, LAST):
                while self._leads() and (lines := self._lines.take()):
                    self._outgoing.append(self._heartbeat(0, now, lines))
                if self._lines.to_compare and not self._leads():
                    self._outgoing.append(self._heartbeat(0, now, ()))
                self._was_rank_0 = self._is_rank_0()
            self._outgoing.append(message)

    def take(self) -> list[m.Message]:
        """Return and clear the messages to send now, in this order."""
        messages = list(self._outgoing)
        self._outgoing.clear()
        return messages

    def add_line(self, line: m.Line) -> None:
        """Keep a line of metrics until the coordinator has it."""
        self._lines.add(line)

    def beat(self, now: float) -> None:
        """Queue the heartbeat that is due `now`, with lines of metrics if this worker sends them."""
        if self._phase == "open":
            for number in (self._lease.beat(now), *[0] * MORE_BEATS):
                lines = self._lines.take() if self._leads() else ()
                if number or lines:
                    self._outgoing.append(self._heartbeat(number, now, lines))

    def _is_rank_0(self) -> bool:
        view = self.state_machine.view
        return view is not None and view.members[:1] == (self.state_machine.worker,)

    def _leads(self) -> bool:
        """Return True if this worker sends the lines of metrics."""
        self._was_rank_0 = self._was_rank_0 or self._is_rank_0()
        return self._was_rank_0 or self.instructions.save is not None

    def _heartbeat(self, number: int, now: float, lines: tuple[m.Line, ...]) -> m.Message:
        machine, activity, terms = self.state_machine, self._activity(), self.terms
        view = machine.view
        beat = m.Heartbeat(
            number=number, view=view.number if view else 0, round=machine.round, step=machine.step, call=machine.call,
            lines=lines, logged=() if self._leads() else self._lines.take_to_compare(),
            epoch=activity.epoch, shards_computed=activity.shards_computed,
            waits_for_peers=activity.waits_for_peers, at_step_start=activity.at_step_start,
            shard_us=activity.shard_us, shards=activity.shards, shards_total=activity.shards_total,
            time_us=activity.time_us, links=activity.links if len(lines) <= m.MAX_LINES // 2 else None,
            blocked_on=peer_over_soft_limit(
                self._waiting_for(), self._lines.median_step_s(), stall_s=terms.stall_s,
                heartbeat_timeout_s=terms.heartbeat_timeout_s, now=now,
            ),
        )  # fmt: skip
        return _sendable(beat)

    # --- the lease -------------------------------------------------------------------------------------------

    def lease_over(self, now: float) -> bool:
        """Return True if the lease is over, or ended early because the machine goes."""
        return self._preemption.over(now) or self._lease.over(now)

    def commit_message(
        self, now: float, *, view: int, round_: int, compute_us: int, shards: int
    ) -> CommitMessage | None:
        """Return `WorkerStateMachine.commit_message`, or None once the lease is over."""
        if self.lease_over(now):
            return None
        return self.state_machine.commit_message(view=view, round_=round_, compute_us=compute_us, shards=shards)

    def end_round(self, now: float, commits: Sequence[CommitMessage]) -> bool:
        """Return `WorkerStateMachine.end_round`, or False once the lease is over."""
        self._was_rank_0 = self._was_rank_0 or self._is_rank_0()
        return not self.lease_over(now) and self.state_machine.end_round(commits)

    def watch(self, now: float) -> list[Action]:
        """Report a stalled peer, and end this worker when its lease is over. Works with and without a connection."""
        actions: list[Action] = []
        waiting = self._waiting_for()
        if waiting and stalled(waiting, self._lines.median_step_s(), stall_s=self.terms.stall_s, now=now):
            view, peer, since = waiting
            actions += self.state_machine.on_peer_lost(view, peer, "stalled", waited_s=max(1, round(now - since)))
        if self.lease_over(now) and self.instructions.exit is None:
            exit_ = self._exit(now)
            self.instructions.leave(exit_)
            actions.append(exit_)
        return actions

    def _exit(self, now: float) -> Exit:
        if self._preemption.over(now):
            left_s = self._preemption.left_s
            return Exit(f"this machine is preempted in {left_s:.0f} s", EXIT_PREEMPTED, save=True, within_s=left_s / 2)
        return Exit(f"no coordinator for {self.terms.orphan_s:g} s: this worker exits", EXIT_ORPHANED, save=True)


def _sendable(message: m.Message) -> m.Message:
    """Return `message`, or the failure of the script if the coordinator would close the connection over its size.

    The worker, and any replacement, would send the same again. So the run ends with the reason, and its state is saved.
    """
    try:
        return m.sendable(message)
    except UsageError as error:
        return m.ScriptFailed(traceback=str(error))
