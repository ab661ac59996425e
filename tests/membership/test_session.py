"""The worker's side of a session: what is said again, for how long it is waited, and what ends it.

Each check is a test; and bugs planted in the shipped files show that some check would find them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from farandole.errors import ProtocolError, Refused
from farandole.membership import instructions, kept_lines, lease, patience, session
from farandole.membership import messages as m
from farandole.membership.instructions import Activity
from farandole.membership.member import Exit, Member, Save
from farandole.membership.patience import Waiting
from farandole.membership.session import BACKOFF_S, FIRST_S, ORPHANED, PATIENCE, Session
from farandole.membership.terms import RunTerms
from farandole.membership.values import MAX_LINES
from farandole.membership.view import Lineage, View, Word
from tests.support.metric_lines import stepped
from tests.support.planted import planted

READY, LEAVING = m.Ready(signature=m.Signature(facts=(("torch", "2"),))), m.Leaving(reason="SIGTERM")
ORPHAN_S, TIMEOUT_S, STALL_S = 60.0, 5.0, 30.0


class Worker:
    """One side of a session, played by hand."""

    def __init__(self, name: str = "") -> None:
        self.waiting: Waiting | None = None
        self.asked = 0
        hello = m.Hello(kind="worker", worker=name, session="s")
        self.session = Session(hello, Member(name), self._activity, lambda: self.waiting, 0.0)

    def _activity(self) -> Activity:
        self.asked += 1
        return Activity(epoch=3, done=7, whole=True)

    def welcomed(self, now: float = 0.0, *, worker: str = "a", run: str = "r", lines: tuple[int, int] = (-1, 0)) -> int:
        """The number of a connection that is answered as soon as it stands."""
        attempt = self.session.connected(now).attempt
        self.session.hear(attempt, welcome(worker=worker, run=run, lines=lines), now)
        return attempt

    def member_of(self, *members: str) -> None:
        """In the first view, with the state, and in a round."""
        s, view = self.session, View(number=1, members=members, group=1)
        s.hear(s.attempt, m.Propose(view=view), 0.0)
        s.member.connected(view)
        s.member.adopt(0, 0, view=1)
        s.member.begin_round(0, may_switch=True)

    def said(self) -> list[m.Message]:
        return self.session.take()


def welcome(*, worker: str = "a", run: str = "r", lines: tuple[int, int] = (-1, 0)) -> m.Welcome:
    terms = RunTerms(heartbeat_s=0.5, heartbeat_timeout_s=TIMEOUT_S, stall_s=STALL_S, orphan_s=ORPHAN_S)
    return m.Welcome(run=run, worker=worker, folder="", terms=terms, lines=lines)


# --- connections -----------------------------------------------------------------------------------------------------


def attempts_grow_and_the_name_stays() -> None:
    it = Worker()
    first = it.session.connected(0.0)
    it.session.hear(first.attempt, welcome(), 0.0)
    second = it.session.connected(1.0)
    assert (first.worker, second.worker) == ("", "a")
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.session == second.session == "s"


def a_hello_tells_who_holds_the_state() -> None:
    it = Worker()
    it.welcomed()
    it.member_of("a")
    assert it.session.connected(1.0).synced


def what_stands_is_said_again_and_nothing_else() -> None:
    it = Worker()
    it.welcomed()
    for message in (READY, m.Prepared(view=1), LEAVING, m.Restored(step=4, path="p", done=True), m.Synced(view=1)):
        it.session.tell(message, 0.0)
    it.said()
    for now in (1.0, 2.0):
        it.welcomed(now)
        assert it.said() == [READY, LEAVING, m.Restored(step=4, path="p", done=True)]


def what_is_told_without_a_connection_is_lost_unless_it_stands() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.session.tell(m.Prepared(view=1), 0.0)
    it.session.closed(attempt)
    it.session.tell(m.Prepared(view=2), 0.0)
    it.session.tell(READY, 0.0)
    attempt = it.session.connected(1.0).attempt
    it.session.tell(m.Prepared(view=3), 1.0)
    assert it.said() == [], "nothing before Welcome"
    it.session.hear(attempt, welcome(), 1.0)
    assert it.said() == [READY]


def the_newest_loss_stands() -> None:
    it = Worker()
    it.welcomed()
    for step in (3, 9):
        it.session.tell(m.NotFinite(step=step, loss="nan"), 0.0)
    it.welcomed(1.0)
    assert it.said() == [m.NotFinite(step=9, loss="nan")]


def what_comes_late_on_an_old_connection_is_left_out() -> None:
    it = Worker()
    old = it.welcomed()
    it.member_of("a", "b")
    it.welcomed(1.0)
    assert it.session.hear(old, m.Stop(stop=1), 1.0) == []
    assert it.session.member.phase == "member"
    it.session.closed(old)
    it.session.tell(LEAVING, 1.0)
    assert LEAVING in it.said(), "the newest one stands"


def nothing_is_heard_on_a_closed_connection() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.member_of("a", "b")
    it.session.closed(attempt)
    it.session.hear(attempt, m.Stop(stop=1), 1.0)
    assert it.session.member.phase == "member"


def tries_are_further_and_further_apart_up_to_a_bound() -> None:
    it = Worker()
    longest = [it.session.retry_s(1.0) for _ in range(8)]
    assert longest == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0])
    assert it.session.retry_s(0.0) == BACKOFF_S[1] / 2
    it.welcomed()
    assert it.session.retry_s(1.0) == BACKOFF_S[0], "it has been heard"


def who_hears_nothing_gives_the_connection_up() -> None:
    it = Worker()
    attempt = it.session.connected(0.0).attempt
    assert (it.session.silent(FIRST_S), it.session.silent(FIRST_S + 0.1)) == (False, True)
    it.session.hear(attempt, welcome(), 1.0)
    limit = PATIENCE * TIMEOUT_S
    assert limit < TIMEOUT_S, "before the coordinator does"
    assert (it.session.silent(1.0 + limit), it.session.silent(1.1 + limit)) == (False, True)
    it.session.hear(attempt, m.Heard(beat=1), 3.0)
    assert (it.session.silent(3.0 + limit), it.session.silent(3.1 + limit)) == (False, True)
    it.session.connected(10.0)
    assert (it.session.silent(10.0 + TIMEOUT_S), it.session.silent(10.1 + TIMEOUT_S)) == (False, True)
    it.session.closed(it.session.attempt)
    assert not it.session.silent(100.0)


def nobody_is_waited_for_who_never_answered() -> None:
    it = Worker()
    assert (it.session.unreachable(FIRST_S), it.session.unreachable(FIRST_S + 0.1)) == (False, True)
    it.welcomed(FIRST_S)
    assert not it.session.unreachable(1000.0), "it has been there: the lease decides"


# --- who is let in ---------------------------------------------------------------------------------------------------


def another_name_or_another_run_is_refused() -> None:
    for other, why in (({"worker": "b"}, "was a"), ({"run": "s"}, "one of run r")):
        it = Worker()
        it.welcomed()
        with pytest.raises(Refused, match=why):
            it.welcomed(1.0, **other)


def whatever_else_is_answered_first_is_no_welcome() -> None:
    for answer, why in (
        (m.Refused(reason="full"), "full"),
        (m.Goodbye(reason="evicted"), "evicted"),
        (m.Stop(stop=1), "answered Stop"),
    ):
        it = Worker()
        attempt = it.session.connected(0.0).attempt
        with pytest.raises(Refused, match=why):
            it.session.hear(attempt, answer, 0.0)
        assert it.said() == []


def who_comes_back_may_be_sent_away() -> None:
    it = Worker()
    it.welcomed()
    attempt = it.session.connected(1.0).attempt
    (exit_,) = it.session.hear(attempt, m.Goodbye(reason="over", code=3, save=True), 1.0)
    assert it.session.told.exit == exit_ == Exit("over", 3, save=True)
    assert it.session.told.orphaned


# --- what is heard ---------------------------------------------------------------------------------------------------


def instructions_are_kept_for_the_training_side() -> None:
    it = Worker()
    attempt = it.welcomed()
    told = it.session.told
    assert (told.exit, told.save, told.saves, told.save_at_once) == (None, None, False, False)
    it.session.hear(attempt, m.Saver(worker="a", at_once=True), 0.0)
    assert (told.saves, told.save_at_once) == (True, True)
    it.session.hear(attempt, m.Saver(worker="b", at_once=True), 0.0)
    assert (told.saves, told.save_at_once) == (False, False)
    it.session.hear(attempt, m.Saver(worker="a"), 0.0)
    it.session.hear(attempt, m.Demoted(), 0.0)
    assert not told.saves, "it holds no state"
    assert (
        it.session.hear(attempt, m.End(reason="stopped", save=True, between=True), 0.0)
        == [told.save]
        == [Save(True, True)]
    )
    it.session.hear(attempt, m.Goodbye(reason="over"), 0.0)
    told.leave(Exit("its lease is over, too", ORPHANED, save=True))
    assert (told.exit, told.orphaned) == (Exit("over", 0), False), "the first reason counts"


def what_is_for_others_is_handed_on() -> None:
    it = Worker()
    attempt = it.welcomed()
    for message in (m.Stacks(reason="hangs"), m.Published(group=1, key="k", value=b"v")):
        assert it.session.hear(attempt, message, 0.0) == [message]


def what_cannot_be_is_an_error() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.member_of("a", "b")
    view = View(number=2, members=("a",), group=1)
    with pytest.raises(ProtocolError):
        it.session.hear(attempt, m.Resume(view=view, round=1, commit=False, lineage=Lineage(sets=())), 0.0)


# --- heartbeats and lines --------------------------------------------------------------------------------------------


def a_heartbeat_says_where_the_worker_is() -> None:
    it = Worker()
    it.session.beat(0.0)
    assert it.said() == [], "not before Welcome"
    it.welcomed()
    it.member_of("b", "a")
    it.session.beat(1.0)
    it.session.beat(2.0)
    first, second = it.said()
    assert isinstance(first, m.Heartbeat)
    assert isinstance(second, m.Heartbeat)
    assert (first.number, second.number) == (1, 2)
    assert (first.view, first.round, first.epoch, first.done, first.whole) == (1, 0, 3, 7, True)
    assert it.asked == 2


def lines_are_sent_until_the_coordinator_has_them() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.member_of("a", "b")
    for step in range(MAX_LINES + 60):
        it.session.add_line(stepped(step, seconds=1.0))
    assert len(beaten(it)) == MAX_LINES
    assert beaten(it) == list(range(MAX_LINES, MAX_LINES + 60))
    assert beaten(it) == [], "they are on their way"
    it.session.hear(attempt, m.Heard(beat=1, lines=(4, 0)), 1.0)
    it.welcomed(2.0, lines=(4, 0))
    assert beaten(it)[0] == 5, "the others may be lost"
    it.session.hear(it.session.attempt, m.Heard(beat=2, lines=(80, 0)), 3.0)
    it.welcomed(4.0, lines=(-1, 0))
    assert beaten(it)[0] == 81, "nobody needs them any more"


def only_the_first_in_rank_sends_lines() -> None:
    it = Worker()
    it.welcomed()
    it.session.add_line(stepped(0, seconds=1.0))
    assert beaten(it) == [], "in no view"
    it.member_of("b", "a")
    assert beaten(it) == []


def beaten(it: Worker) -> list[int]:
    """The steps of the lines in the next heartbeat."""
    it.session.beat(1.0)
    (beat,) = it.said()
    assert isinstance(beat, m.Heartbeat)
    return [line.step for line in beat.lines]


def the_lines_go_before_what_may_be_the_last() -> None:
    last = (m.NotFinite(step=1, loss="nan"), m.Failed(traceback="no"), m.Finished())
    for message in (*last, m.Synced(view=1)):
        it = Worker()
        it.welcomed()
        it.member_of("a", "b")
        it.session.add_line(stepped(0, seconds=1.0))
        it.session.tell(message, 1.0)
        said = it.said()
        if message in last:
            before, said = said[0], said[1:]
            assert isinstance(before, m.Heartbeat)
            assert (before.number, len(before.lines)) == (0, 1), "no answer is asked for"
        assert said == [message]


# --- the lease, and peers --------------------------------------------------------------------------------------------


def words(it: Worker, now: float) -> Word | None:
    return it.session.word(now, view=1, round_=0, compute_us=0, shards=1)


def a_lease_counts_from_when_the_question_left() -> None:
    it = Worker()
    attempt = it.session.connected(10.0).attempt
    it.session.hear(attempt, welcome(), 15.0)
    it.member_of("a")
    assert (it.session.lapsed(10.0 + ORPHAN_S), it.session.lapsed(10.1 + ORPHAN_S)) == (False, True)
    it.session.beat(20.0)
    it.session.beat(30.0)
    it.session.hear(attempt, m.Heard(beat=1), 50.0)
    word = words(it, 20.0 + ORPHAN_S)
    assert word is not None
    assert words(it, 20.1 + ORPHAN_S) is None
    assert not it.session.end_round(20.1 + ORPHAN_S, [word])
    assert it.session.end_round(20.0 + ORPHAN_S, [word])


def what_has_ended_stays_ended() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.session.beat(ORPHAN_S + 1.0)
    it.session.hear(attempt, m.Heard(beat=1), ORPHAN_S + 1.1)
    assert it.session.lapsed(ORPHAN_S + 1.2), "the run may have begun again"
    it.welcomed(ORPHAN_S + 2.0)
    assert it.session.lapsed(ORPHAN_S + 2.1)


def a_worker_goes_when_its_lease_is_over_and_not_before() -> None:
    it = Worker()
    it.welcomed()
    it.member_of("a", "b")
    it.session.closed(it.session.attempt)
    assert it.session.watch(ORPHAN_S) == []
    (exit_,) = it.session.watch(ORPHAN_S + 0.1)
    assert exit_ == Exit("no coordinator for 60 s: this worker stops", ORPHANED, save=True)
    assert it.session.told.exit == exit_
    assert it.session.told.orphaned
    assert it.session.watch(ORPHAN_S + 1.0) == [], "once"


def who_was_sent_away_is_no_orphan() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.session.hear(attempt, m.Goodbye(reason="over"), 0.0)
    assert it.session.watch(ORPHAN_S + 1.0) == []
    assert not it.session.told.orphaned


def without_a_coordinator_ever_there_is_no_end() -> None:
    assert Worker().session.watch(1e6) == []


def who_stalls_is_reported_and_who_holds_up_is_named() -> None:
    it = Worker()
    it.welcomed()
    it.member_of("a", "b")
    it.session.beat(50.0)
    it.session.hear(it.session.attempt, m.Heard(beat=1), 50.1)
    it.waiting = (1, "b", 60.0)
    assert it.session.watch(60.0 + STALL_S) == []
    (suspect,) = it.session.watch(60.1 + STALL_S)
    assert suspect == m.Suspect(view=1, peer="b", reason="stalled", waited_s=30)
    it.said()
    it.session.beat(60.1 + STALL_S)
    (beat,) = it.said()
    assert isinstance(beat, m.Heartbeat)
    assert beat.waits_for == "b"
    for step in range(3):
        it.session.add_line(stepped(step, seconds=4.0))
    assert it.session.watch(60.1 + 4.0 * 10 - 1.0) == [], "its steps take long"
    (suspect,) = it.session.watch(60.1 + 4.0 * 10)
    assert isinstance(suspect, m.Suspect)


CHECKS: tuple[Callable[[], None], ...] = (
    attempts_grow_and_the_name_stays, a_hello_tells_who_holds_the_state, what_stands_is_said_again_and_nothing_else,
    what_is_told_without_a_connection_is_lost_unless_it_stands, the_newest_loss_stands,
    what_comes_late_on_an_old_connection_is_left_out, nothing_is_heard_on_a_closed_connection,
    tries_are_further_and_further_apart_up_to_a_bound, who_hears_nothing_gives_the_connection_up,
    nobody_is_waited_for_who_never_answered, another_name_or_another_run_is_refused,
    whatever_else_is_answered_first_is_no_welcome, who_comes_back_may_be_sent_away,
    instructions_are_kept_for_the_training_side, what_is_for_others_is_handed_on, what_cannot_be_is_an_error,
    a_heartbeat_says_where_the_worker_is, lines_are_sent_until_the_coordinator_has_them,
    only_the_first_in_rank_sends_lines, the_lines_go_before_what_may_be_the_last,
    a_lease_counts_from_when_the_question_left, what_has_ended_stays_ended,
    a_worker_goes_when_its_lease_is_over_and_not_before,
    who_was_sent_away_is_no_orphan, without_a_coordinator_ever_there_is_no_end,
    who_stalls_is_reported_and_who_holds_up_is_named,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_session(check: Callable[[], None]) -> None:
    check()


BUGS: tuple[tuple[ModuleType, str, str], ...] = (
    (session, "self._lease.welcomed(self._hello_at, welcome", "self._lease.welcomed(self._heard_at, welcome"),
    (session, "self._lease.beat(now), now", "self._lease.beat(now + 30.0), now"),
    (session, "self._outgoing.extend(self._standing)", "self._outgoing.extend(self._standing[-1:])"),
    (session, "if attempt != self.attempt or self._phase", "if self._phase"),
    (session, 'or self._phase == "closed":\n            return []', ":\n            return []"),
    (session, "min(2 * self._wait_s, BACKOFF_S[1])", "2 * self._wait_s"),
    (session, 'self._phase, self._wait_s = "open", BACKOFF_S[0]', 'self._phase = "open"'),
    (session, "lines=self._lines.take() if leads else ()", "lines=()"),
    (session, "lines=self._lines.take() if leads else ()", "lines=self._lines.take()"),
    (session, "self._lines.send_after(welcome.lines)", "pass"),
    (session, "self._lines.forget(message.lines)", "pass"),
    (session, "self.attempt += 1", "self.attempt = max(self.attempt, 1)"),
    (session, "if self.lapsed(now) and self.told.exit is None:", "if self.told.exit is None:"),
    (session, "if self.lapsed(now) and self.told.exit is None:", "if self.lapsed(now):"),
    (session, "if self.met and welcome.run != self._run:", "if False:"),
    (session, "if self.met and welcome.worker != self.member.worker:", "if False:"),
    (session, "            if isinstance(message, LAST):\n", "            if False:\n"),
    (session, "self._heartbeat(0, now)", "self._heartbeat(self._lease.beat(now), now)"),
    (session, "        self._outgoing.clear()\n        worker,", "        worker,"),
    (session, 'if self._phase == "open":\n            if', 'if self._phase != "closed":\n            if'),
    (session, "max(self._hello_at, self._heard_at) > self.patience_s", "self._hello_at > self.patience_s"),
    (session, '(PATIENCE if self._phase == "open" else 1.0)', "1.0"),
    (session, "return not self.met and now > self._first_until", "return now > self._first_until"),
    (session, "if attempt == self.attempt:\n            self._phase", "if True:\n            self._phase"),
    (session, "not isinstance(said, m.NotFinite)]", "said != message]"),
    (session, "self.told.saves and not isinstance(message, m.Demoted)", "self.told.saves"),
    (session, "self.told.saves and message.at_once", "message.at_once"),
    (session, "        if self.lapsed(now):\n            return None\n", ""),
    (session, "not self.lapsed(now) and self.member.end_round", "self.member.end_round"),
    (session, "synced=synced)", "synced=False)"),
    (session, '            case m.Goodbye() if self._phase == "greeting" and self.met:', "            case None:"),
    (kept_lines, "while len(self._lines) > RECENT_STEPS and", "while"),
    (kept_lines, "            self._sent = (lines[-1].step, lines[-1].index)", "            self._lines.clear()"),
    (lease, "if sent is not None and sent <= self.end:", "if sent is not None:"),
    (lease, "self.end = max(self.end, sent + orphan_s)", "self.end += orphan_s"),
    (patience, "max(stall_s, STEPS * (step_s or 0.0))", "stall_s"),
    (instructions, "(exit_.save and self.exit is None)", "exit_.save"),
    (instructions, "self.exit = self.exit or exit_", "self.exit = exit_"),
)


@pytest.mark.parametrize(("module", "place", "by"), BUGS)
def test_a_planted_bug_is_found(module: ModuleType, place: str, by: str) -> None:
    with planted(module, place, by):
        assert any(fails(check) for check in CHECKS)


def fails(check: Callable[[], None]) -> bool:
    try:
        check()
    except (Exception, pytest.fail.Exception):  # noqa: BLE001  a planted bug may raise whatever it likes
        return True
    return False
