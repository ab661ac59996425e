"""A worker's session with its coordinator: what they send each other, over one connection after another.

A pure machine. Its owner opens and closes connections, carries what `take` gives, passes in what arrives, and calls
`watch` and `beat` every `terms.heartbeat_s`. Times are the owner's, in seconds. Invariants: only the newest connection
counts; messages that still hold (`STANDING`) are repeated on a new one; after the lease this worker gives no commit
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
from farandole.protocol.messages import EXIT_PREEMPTED, Ends, RunTerms
from farandole.protocol.view import CommitMessage
from farandole.protocol.worker.driver import Activity, Instructions
from farandole.protocol.worker.member import Action, Exit, Member, Save

# --- patience ---------------------------------------------------------------------------------------------------------
#
# How long a worker waits for a peer before it reports so. Times are in seconds. Two reports: (a) stalled, after
# max(stall_s, 10 median steps): the coordinator evicts the peer; (b) held up, in heartbeats: two members that both wait
# for each other for max(heartbeat_timeout_s, 10 median steps) can't reach each other. Before the first step has ended,
# the limit of (b) is the stall limit.
# Argument: docs/protocol.md, Session, "Waiting for a peer".

STEPS = 10
Waiting = tuple[int, str, float]  # in which view, for which peer, since when


def peer_over_soft_limit(
    waiting: Waiting | None, step_s: float | None, *, stall_s: float, heartbeat_timeout_s: float, now: float
) -> str:
    """The peer that is waited for, if it has been for too long; "" for nobody. `step_s`: the median step's time."""
    limit = stall_s if step_s is None else max(heartbeat_timeout_s, STEPS * step_s)
    return waiting[1] if waiting is not None and now - waiting[2] > limit else ""


def stalled(waiting: Waiting, step_s: float | None, *, stall_s: float, now: float) -> bool:
    """Whether the peer that is waited for is to be reported."""
    return now - waiting[2] > max(stall_s, STEPS * (step_s or 0.0))


# --- lease ------------------------------------------------------------------------------------------------------------
#
# A worker's lease: how long it may go on without a coordinator. Times are the caller's, in seconds.
#
# It ends `orphan_s` after the newest heartbeat, or Hello, was *sent* that the coordinator has answered. The coordinator
# received that later than it was sent, so when it has heard nothing for `orphan_s`, the lease is over.
# Argument: docs/protocol.md, Reconnection and the lease 2.


class Lease:
    """Without end until the first `welcomed`."""

    def __init__(self) -> None:
        self.end = math.inf
        self._ended = False  # and somebody has gone by it
        self._beats: dict[int, float] = {}  # when sent, by number; not answered yet
        self._number = 0

    def beat(self, now: float) -> int:
        """A heartbeat goes out: its number."""
        self._number += 1
        self._beats[self._number] = now
        return self._number

    def on_answer(self, number: int, orphan_s: float) -> None:
        """Heartbeat `number` was answered."""
        sent = self._beats.get(number)
        if sent is not None and sent <= self.end:  # what has ended stays ended: the run may have begun again
            self.end = max(self.end, sent + orphan_s)
            self._beats = {n: at for n, at in self._beats.items() if n > number}

    def on_welcome(self, hello_at: float, orphan_s: float) -> None:
        """The Hello sent at `hello_at` was answered; of the connection before nothing will be any more."""
        if self.end == math.inf:
            self.end = hello_at + orphan_s
        elif hello_at <= self.end:
            self.end = max(self.end, hello_at + orphan_s)
        self._beats.clear()

    def over(self, now: float) -> bool:
        """Once that was found it stays so, whatever is answered: a word refused for it is not asked for again."""
        self._ended = self._ended or now > self.end
        return self._ended


# --- session ----------------------------------------------------------------------------------------------------------

# Said again on every new connection.
STANDING = (m.Ready, m.LeaveRequest, m.ScriptFailed, m.DataUnavailable, m.Differs, m.Finished, m.NotFinite)
LAST = (
    m.NotFinite,
    m.ScriptFailed,
    m.DataUnavailable,
    m.Stopped,
    m.Finished,
    m.Switched,
    m.Saved,
)  # all lines go before it
MORE_BEATS = 9  # that follow one, where it can't carry all lines: a script may log thousands in a second
FIRST_S = 20.0  # to reach the coordinator for the first time: it may be on its way back, also from being frozen
PATIENCE = 0.6  # of the heartbeat timeout
BACKOFF_S = (0.1, 1.0)  # between two tries, doubling, with jitter
EXIT_ORPHANED = 4  # the exit code of who has been without a coordinator for too long
DEFAULT_TERMS = RunTerms(
    heartbeat_s=1.0, heartbeat_timeout_s=FIRST_S, stall_s=MAX_SECONDS, orphan_s=MAX_SECONDS
)  # before Welcome


class Session:
    """See the module's head. `hello` says who this is; the worker starts `now`.

    `activity()` is what the training side has done since it was last asked, which is once a heartbeat; `waiting_for()`
    is the peer that it waits for.
    """

    def __init__(
        self, hello: m.Hello, member: Member, activity: Callable[[], Activity],
        waiting_for: Callable[[], Waiting | None], now: float,
    ) -> None:  # fmt: skip
        self.member = member
        self.instructions = Instructions()
        self.terms = DEFAULT_TERMS
        self._run = ""
        self.attempt = 0  # the number of the newest connection
        self._hello = hello
        self._activity = activity
        self._waiting_for = waiting_for
        self._first_until = now + FIRST_S
        self._phase = "closed"  # or "greeting": Hello is said, or "open": it has been answered
        self._hello_at = self._heard_at = now
        self._wait_s = BACKOFF_S[0]
        self._standing: list[m.Message] = []
        self._outgoing: deque[m.Message] = deque()
        self._lease = Lease()
        self._ends = Ends()
        self._lines = KeptLines()
        self._was_rank_0 = False  # it was rank 0 when it last could be, and all its lines are not sent yet

    # --- connections -----------------------------------------------------------------------------------------

    def on_connected(self, now: float) -> m.Hello:
        """A new connection stands: the Hello to be sent. Every other one is over."""
        self.attempt += 1
        self._phase, self._hello_at = "greeting", now
        self._outgoing.clear()
        worker, synced = self.member.worker, self.member.synced
        return msgspec.structs.replace(self._hello, worker=worker, attempt=self.attempt, synced=synced)

    def on_closed(self, attempt: int) -> None:
        """Connection `attempt` has ended."""
        if attempt == self.attempt:
            self._phase = "closed"

    @property
    def met(self) -> bool:
        """Whether the run has let this worker speak at all."""
        return bool(self._run)

    @property
    def patience_s(self) -> float:
        """How long a connection may be silent."""
        return (PATIENCE if self._phase == "open" else 1.0) * self.terms.heartbeat_timeout_s

    def silent(self, now: float) -> bool:
        """Whether the connection carries nothing any more: then it is to be closed."""
        return self._phase != "closed" and now - max(self._hello_at, self._heard_at) > self.patience_s

    def retry_s(self, chance: float) -> float:
        """How long to wait before the next try. `chance`: a random number between 0 and 1."""
        wait, self._wait_s = self._wait_s, min(2 * self._wait_s, BACKOFF_S[1])
        return wait * (0.5 + 0.5 * chance)

    def unreachable(self, now: float) -> bool:
        """Whether no coordinator has ever answered, for too long: then there is none."""
        return not self.met and now > self._first_until

    # --- what is heard ---------------------------------------------------------------------------------------

    def on_message(self, attempt: int, message: m.Message, now: float) -> list[Action]:
        """What is to be done about a message of connection `attempt`; messages in it are to be told.

        Raises:
            Refused: the coordinator does not let this worker in, or is another run's.
            ProtocolError: it asks for what can't be.
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
                raise Refused(f"answered {type(message).__name__}")
            case m.LinesHeard():
                self._lease.on_answer(message.beat, self.terms.orphan_s)
                self._lines.forget(message.lines)
            case m.Saver():
                self.instructions.saves = message.worker == self.member.worker
                self.instructions.save_at_once = self.instructions.saves and message.at_once
            case m.PreemptionDeadline():
                self._ends.within(message.within_s, now)
            case m.Published() | m.Stacks() | m.Trace():
                return [message]
            case _:
                return self._follow(message)
        return []

    def _welcomed(self, welcome: m.Welcome) -> None:
        if self.met and welcome.worker != self.member.worker:
            raise Refused(f"this worker was {self.member.worker}, and the run calls it {welcome.worker} now")
        if self.met and welcome.run != self._run:
            raise Refused(f"this worker is one of run {self._run}, and the coordinator that of run {welcome.run}")
        self._run, self.terms = welcome.run, welcome.terms
        self.member.worker = welcome.worker
        self._phase, self._wait_s = "open", BACKOFF_S[0]
        self._lease.on_welcome(self._hello_at, welcome.terms.orphan_s)
        self._lines.send_after(welcome.lines)
        self._outgoing.extend(self._standing)

    def _follow(self, message: m.Message) -> list[Action]:
        self.instructions.saves = self.instructions.saves and not isinstance(message, m.Demoted)
        actions = self.member.on_message(message)
        if not self.member.apart:  # it goes on, and compares anew
            self._standing = [said for said in self._standing if not isinstance(said, m.Differs)]
        for action in actions:
            match action:
                case Exit():
                    self.instructions.leave(action)
                case Save():
                    self.instructions.save = action
                case _:
                    pass
        return actions

    # --- what is said ----------------------------------------------------------------------------------------

    def tell(self, message: m.Message, now: float) -> None:
        """It goes to the coordinator, with whom there is a connection; what stands, on every later one as well."""
        message = _sendable(message)
        if isinstance(message, m.NotFinite):  # the newest one stands
            self._standing = [said for said in self._standing if not isinstance(said, m.NotFinite)]
        if isinstance(message, m.LeaveRequest) and message.within_s is not None:
            self._ends.within(message.within_s, now)
        stands = isinstance(message, STANDING) or (isinstance(message, m.Restored) and message.done)
        if stands and message not in self._standing:
            self._standing.append(message)
        if self._phase == "open":
            if isinstance(message, LAST):
                while self._leads() and (lines := self._lines.take()):
                    self._outgoing.append(self._heartbeat(0, now, lines))
                self._was_rank_0 = self._is_rank_0()
            self._outgoing.append(message)

    def take(self) -> list[m.Message]:
        """What is to be sent now, in this order."""
        messages = list(self._outgoing)
        self._outgoing.clear()
        return messages

    def add_line(self, line: m.Line) -> None:
        self._lines.add(line)

    def beat(self, now: float) -> None:
        """A heartbeat is due."""
        if self._phase == "open":
            for number in (self._lease.beat(now), *[0] * MORE_BEATS):
                lines = self._lines.take() if self._leads() else ()
                if number or lines:
                    self._outgoing.append(self._heartbeat(number, now, lines))

    def _is_rank_0(self) -> bool:
        view = self.member.view
        return view is not None and view.members[:1] == (self.member.worker,)

    def _leads(self) -> bool:
        """Returns True if the lines of metrics are this worker's to send."""
        self._was_rank_0 = self._was_rank_0 or self._is_rank_0()
        return self._was_rank_0 or self.instructions.save is not None

    def _heartbeat(self, number: int, now: float, lines: tuple[m.Line, ...]) -> m.Message:
        member, activity, terms = self.member, self._activity(), self.terms
        view = member.view
        beat = m.Heartbeat(
            number=number, view=view.number if view else 0, round=member.round, step=member.step, call=member.call,
            lines=lines, epoch=activity.epoch, done=activity.shards_computed, waits=activity.idle,
            whole=activity.state_complete, shard_us=activity.shard_us, shards=activity.shards, of=activity.shards_total,
            time_us=activity.time_us,
            waits_for=peer_over_soft_limit(
                self._waiting_for(), self._lines.median_step_s(), stall_s=terms.stall_s,
                heartbeat_timeout_s=terms.heartbeat_timeout_s, now=now,
            ),
        )  # fmt: skip
        return _sendable(beat)

    # --- the lease -------------------------------------------------------------------------------------------

    def lease_over(self, now: float) -> bool:
        """Whether the lease is over."""
        return self._ends.over(now) or self._lease.over(now)

    def commit_message(
        self, now: float, *, view: int, round_: int, compute_us: int, shards: int
    ) -> CommitMessage | None:
        """See `Member.word`."""
        if self.lease_over(now):
            return None
        return self.member.commit_message(view=view, round_=round_, compute_us=compute_us, shards=shards)

    def end_round(self, now: float, words: Sequence[CommitMessage]) -> bool:
        """See `Member.end_round`."""
        self._was_rank_0 = self._was_rank_0 or self._is_rank_0()
        return not self.lease_over(now) and self.member.end_round(words)

    def watch(self, now: float) -> list[Action]:
        """Whatever becomes of connections: who stalls is reported, and without a coordinator the lease runs out."""
        actions: list[Action] = []
        waiting = self._waiting_for()
        if waiting and stalled(waiting, self._lines.median_step_s(), stall_s=self.terms.stall_s, now=now):
            view, peer, since = waiting
            actions += self.member.on_peer_lost(view, peer, "stalled", waited_s=max(1, round(now - since)))
        if self.lease_over(now) and self.instructions.exit is None:
            exit_ = self._exit(now)
            self.instructions.leave(exit_)
            actions.append(exit_)
        return actions

    def _exit(self, now: float) -> Exit:
        if self._ends.over(now):
            left_s = self._ends.left_s
            return Exit(f"this machine goes in {left_s:.0f} s", EXIT_PREEMPTED, save=True, within_s=left_s / 2)
        return Exit(f"no coordinator for {self.terms.orphan_s:g} s: this worker stops", EXIT_ORPHANED, save=True)


def _sendable(message: m.Message) -> m.Message:
    try:
        return m.sendable(message)
    except UsageError as error:
        return m.ScriptFailed(traceback=str(error))
