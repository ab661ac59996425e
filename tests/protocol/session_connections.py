"""What a session must do while connections come and go: what is said again, who is let in, and what is heard.

The checks of `test_session.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from farandole.errors import ProtocolError, Refused
from farandole.protocol import messages as m
from farandole.protocol.view import Lineage, View
from farandole.protocol.worker.session import BACKOFF_S, EXIT_ORPHANED, FIRST_S, SILENT_FRACTION
from farandole.protocol.worker.state_machine import Exit, Save
from tests.support.played_session import LEAVING, READY, TIMEOUT_S, Worker, welcome

# --- connections -----------------------------------------------------------------------------------------------------


def attempts_grow_and_the_name_stays() -> None:
    it = Worker()
    first = it.session.on_connected(0.0)
    it.session.on_message(first.attempt, welcome(), 0.0)
    second = it.session.on_connected(1.0)
    assert (first.worker, second.worker) == ("", "a")
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.session == second.session == "s"


def a_hello_tells_who_holds_the_state() -> None:
    it = Worker()
    it.welcomed()
    it.member_of("a")
    assert it.session.on_connected(1.0).synced


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
    it.session.on_closed(attempt)
    it.session.tell(m.Prepared(view=2), 0.0)
    it.session.tell(READY, 0.0)
    attempt = it.session.on_connected(1.0).attempt
    it.session.tell(m.Prepared(view=3), 1.0)
    assert it.said() == [], "nothing before Welcome"
    it.session.on_message(attempt, welcome(), 1.0)
    assert it.said() == [READY]


def the_newest_loss_stands() -> None:
    it = Worker()
    it.welcomed()
    for step in (3, 9):
        it.session.tell(m.NotFinite(step=step, loss="nan"), 0.0)
    it.welcomed(1.0)
    assert it.said() == [m.NotFinite(step=9, loss="nan")]


def a_difference_stands_until_the_worker_goes_on() -> None:
    it = Worker()
    it.welcomed()
    it.member_of("a", "b")
    it.session.state_machine.differing = ("b",)
    it.session.tell(m.Differs(step=3, workers=("b",)), 0.0)
    it.session.on_message(it.session.attempt, m.Stop(stop=1), 0.0)
    attempt = it.welcomed(1.0)
    assert m.Differs(step=3, workers=("b",)) in it.said()
    view = View(number=2, members=("a",), group=2)
    resume = m.Resume(view=view, round=it.session.state_machine.round, commit=False, lineage=Lineage(sets=(("a",),)))
    it.session.on_message(attempt, resume, 1.0)
    it.welcomed(2.0)
    assert not [said for said in it.said() if isinstance(said, m.Differs)]


def what_comes_late_on_an_old_connection_is_left_out() -> None:
    it = Worker()
    old = it.welcomed()
    it.member_of("a", "b")
    it.welcomed(1.0)
    assert it.session.on_message(old, m.Stop(stop=1), 1.0) == []
    assert it.session.state_machine.phase == "member"
    it.session.on_closed(old)
    it.session.tell(LEAVING, 1.0)
    assert LEAVING in it.said(), "the newest one stands"


def nothing_is_heard_on_a_closed_connection() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.member_of("a", "b")
    it.session.on_closed(attempt)
    it.session.on_message(attempt, m.Stop(stop=1), 1.0)
    assert it.session.state_machine.phase == "member"


def tries_are_further_and_further_apart_up_to_a_bound() -> None:
    it = Worker()
    longest = [it.session.retry_s(1.0) for _ in range(8)]
    assert longest == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0])
    assert it.session.retry_s(0.0) == BACKOFF_S[1] / 2
    it.welcomed()
    assert it.session.retry_s(1.0) == BACKOFF_S[0], "it has been heard"


def who_hears_nothing_gives_the_connection_up() -> None:
    it = Worker()
    attempt = it.session.on_connected(0.0).attempt
    assert (it.session.silent(FIRST_S), it.session.silent(FIRST_S + 0.1)) == (False, True)
    it.session.on_message(attempt, welcome(), 1.0)
    limit = SILENT_FRACTION * TIMEOUT_S
    assert limit < TIMEOUT_S, "before the coordinator does"
    assert (it.session.silent(1.0 + limit), it.session.silent(1.1 + limit)) == (False, True)
    it.session.on_message(attempt, m.HeartbeatAnswer(beat=1), 3.0)
    assert (it.session.silent(3.0 + limit), it.session.silent(3.1 + limit)) == (False, True)
    it.session.on_connected(10.0)
    assert (it.session.silent(10.0 + TIMEOUT_S), it.session.silent(10.1 + TIMEOUT_S)) == (False, True)
    it.session.on_closed(it.session.attempt)
    assert not it.session.silent(100.0)


def nobody_is_waited_for_who_never_answered() -> None:
    it = Worker()
    assert (it.session.unreachable(FIRST_S), it.session.unreachable(FIRST_S + 0.1)) == (False, True)
    it.welcomed(FIRST_S)
    assert not it.session.unreachable(1000.0), "it has been there: the lease decides"


# --- who is let in ---------------------------------------------------------------------------------------------------


def another_name_or_another_run_is_refused() -> None:
    for other, why in (({"worker": "b"}, r"\ba\b.*\bb\b"), ({"run": "s"}, r"\br\b.*\bs\b")):
        it = Worker()
        it.welcomed()
        with pytest.raises(Refused, match=why):
            it.welcomed(1.0, **other)


def whatever_else_is_answered_first_is_no_welcome() -> None:
    for answer, why in (
        (m.JoinRefused(reason="full"), "full"),
        (m.Goodbye(reason="evicted"), "evicted"),
        (m.Stop(stop=1), "Stop"),
    ):
        it = Worker()
        attempt = it.session.on_connected(0.0).attempt
        with pytest.raises(Refused, match=why):
            it.session.on_message(attempt, answer, 0.0)
        assert it.said() == []


def who_comes_back_may_be_sent_away() -> None:
    it = Worker()
    it.welcomed()
    attempt = it.session.on_connected(1.0).attempt
    (exit_,) = it.session.on_message(attempt, m.Goodbye(reason="over", code=3, save=True), 1.0)
    assert it.session.instructions.exit == exit_ == Exit("over", 3, save=True)
    assert it.session.instructions.save_before_exit


# --- what is heard ---------------------------------------------------------------------------------------------------


def instructions_are_kept_for_the_training_side() -> None:
    it = Worker()
    attempt = it.welcomed()
    told = it.session.instructions
    assert (told.exit, told.save, told.saves, told.save_at_once) == (None, None, False, False)
    it.session.on_message(attempt, m.Saver(worker="a", at_once=True), 0.0)
    assert (told.saves, told.save_at_once) == (True, True)
    it.session.on_message(attempt, m.Saver(worker="b", at_once=True), 0.0)
    assert (told.saves, told.save_at_once) == (False, False)
    it.session.on_message(attempt, m.Saver(worker="a"), 0.0)
    it.session.on_message(attempt, m.ViewWithdrawn(), 0.0)
    assert not told.saves, "it holds no state"
    assert (
        it.session.on_message(attempt, m.End(reason="stopped", save=True, allow_between=True), 0.0)
        == [told.save]
        == [Save(True, True)]
    )
    it.session.on_message(attempt, m.Goodbye(reason="over"), 0.0)
    told.leave(Exit("its lease is over, too", EXIT_ORPHANED, save=True))
    assert (told.exit, told.save_before_exit) == (Exit("over", 0), False), "the first reason counts"


def what_is_for_others_is_handed_on() -> None:
    it = Worker()
    attempt = it.welcomed()
    for message in (m.Stacks(reason="hangs"), m.Published(group=1, key="k", value=b"v")):
        assert it.session.on_message(attempt, message, 0.0) == [message]


def what_cannot_be_is_an_error() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.member_of("a", "b")
    view = View(number=2, members=("a",), group=1)
    with pytest.raises(ProtocolError):
        it.session.on_message(attempt, m.Resume(view=view, round=1, commit=False, lineage=Lineage(sets=())), 0.0)


CHECKS: tuple[Callable[[], None], ...] = (
    attempts_grow_and_the_name_stays,
    a_hello_tells_who_holds_the_state,
    what_stands_is_said_again_and_nothing_else,
    what_is_told_without_a_connection_is_lost_unless_it_stands,
    the_newest_loss_stands,
    a_difference_stands_until_the_worker_goes_on,
    what_comes_late_on_an_old_connection_is_left_out,
    nothing_is_heard_on_a_closed_connection,
    tries_are_further_and_further_apart_up_to_a_bound,
    who_hears_nothing_gives_the_connection_up,
    nobody_is_waited_for_who_never_answered,
    another_name_or_another_run_is_refused,
    whatever_else_is_answered_first_is_no_welcome,
    who_comes_back_may_be_sent_away,
    instructions_are_kept_for_the_training_side,
    what_is_for_others_is_handed_on,
    what_cannot_be_is_an_error,
)
