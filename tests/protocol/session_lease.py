"""What a session must do with time: heartbeats and their lines, the lease, and peers that stall.

The checks of `test_session.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from farandole.protocol import messages as m
from farandole.protocol.kept_lines import KEPT_LINES
from farandole.protocol.values import MAX_LINES
from farandole.protocol.view import CommitMessage, View
from farandole.protocol.worker.session import EXIT_ORPHANED
from farandole.protocol.worker.state_machine import Exit
from tests.support.mentioned import mentions
from tests.support.metric_lines import logged, stepped
from tests.support.played_session import ORPHAN_S, STALL_S, Worker, welcome

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
    assert (first.view, first.round, first.epoch, first.shards_computed, first.at_step_start) == (1, 0, 3, 7, True)
    assert it.asked == 2


def lines_are_sent_until_the_coordinator_has_them() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.member_of("a", "b")
    for step in range(MAX_LINES + 60):
        it.session.add_line(stepped(step, seconds=1.0))
    it.session.beat(1.0)
    assert [len(beat.lines) for beat in it.said() if isinstance(beat, m.Heartbeat)] == [MAX_LINES, 60]
    assert beaten(it) == [], "they are on their way"
    it.session.on_message(attempt, m.HeartbeatAnswer(beat=1, lines=(4, 0)), 1.0)
    it.welcomed(2.0, lines=(4, 0))
    assert stepped_first(it) == 5, "the others may be lost"
    for lines, first in (((80, 0), 5), ((90, 0), 81)):
        it.session.on_message(it.session.attempt, m.HeartbeatAnswer(beat=2, lines=lines), 3.0)
        it.welcomed(4.0, lines=(-1, 0))
        assert stepped_first(it) == first, "what it had written when it last said so, nobody needs any more"


def stepped_first(it: Worker) -> int:
    """The step of the first line that is sent with the next heartbeat."""
    it.session.beat(1.0)
    return stepped_lines(it)[0][0]


def a_heartbeat_of_many_lines_has_others_after_it_that_ask_for_no_answer() -> None:
    it = Worker()
    it.welcomed()
    it.member_of("a", "b")
    for index in range(2 * MAX_LINES + 1):
        it.session.add_line(logged(0, index + 1, n=index))
    it.session.beat(1.0)
    said = [beat for beat in it.said() if isinstance(beat, m.Heartbeat)]
    assert [(beat.number, len(beat.lines)) for beat in said] == [(1, MAX_LINES), (0, MAX_LINES), (0, 1)]


def of_more_lines_than_are_kept_the_others_are_counted() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.member_of("a", "b")
    some = logged(0, 1, n=1)
    for _ in range(KEPT_LINES - 1):
        it.session.add_line(some)
    it.session.beat(1.0)
    assert sum(len(lines) for lines in stepped_lines(it)) == 10 * MAX_LINES, "under way, and kept"
    for index in range(KEPT_LINES - 1, KEPT_LINES + 5):
        it.session.add_line(logged(0, index, n=index))
    it.session.tell(m.Finished(), 2.0)
    lines = [line for said in it.said() if isinstance(said, m.Heartbeat) for line in said.lines]
    assert (lines[-1].step, lines[-1].index, lines[-1].missing) == (0, KEPT_LINES + 4, 5)
    it.session.add_line(stepped(1))
    it.session.add_line(stepped(2))
    it.session.on_message(attempt, m.HeartbeatAnswer(beat=1, lines=(0, KEPT_LINES + 4)), 3.0)
    it.session.on_message(attempt, m.HeartbeatAnswer(beat=2, lines=(0, KEPT_LINES + 4)), 4.0)
    it.session.add_line(stepped(3))
    it.session.beat(5.0)
    [beat] = [said for said in it.said() if isinstance(said, m.Heartbeat)]
    assert [(line.step, line.missing) for line in beat.lines] == [(2, 2), (3, 0)], "in their place"


def a_median_step_is_that_of_steps_whatever_is_logged_between_them() -> None:
    it = Worker()
    it.welcomed()
    it.member_of("a", "b")
    for step in range(60):
        it.session.add_line(stepped(step, seconds=20.0, evaluation_s=16.0))
        for index in range(100):
            it.session.add_line(logged(step, index + 1, n=1))
    it.waiting = (1, "b", 1.0)
    assert it.session.watch(STALL_S + 2.0) == [], "ten steps of 4 s, without evaluations"
    assert [type(action) for action in it.session.watch(42.0)] == [m.Suspect]


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
    last = (m.NotFinite(step=1, loss="nan"), m.ScriptFailed(traceback="no"), m.Finished())
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


def stepped_lines(it: Worker) -> list[list[int]]:
    """Of each heartbeat that is said, and -1 for another message."""
    return [[line.step for line in said.lines] if isinstance(said, m.Heartbeat) else [-1] for said in it.said()]


def a_rank_0_that_leaves_or_ends_has_sent_all_lines_before() -> None:
    for members in (("b",), ("b", "a"), ()):
        it = Worker()
        it.welcomed()
        it.member_of("a", "b")
        for step in range(MAX_LINES + 3):
            it.session.add_line(stepped(step, seconds=1.0))
        switch(it, *members)
        first, second, switched = stepped_lines(it)
        assert (first + second, switched) == ([*range(MAX_LINES + 3)], [-1]), members
        it.session.add_line(stepped(MAX_LINES + 3, seconds=1.0))
        assert beaten(it) == [], "it is the next one's, or the saver's"


def who_is_not_rank_0_sends_none_when_it_switches_but_all_when_it_has_saved() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.member_of("b", "a")
    it.session.add_line(stepped(0, seconds=1.0))
    switch(it)
    assert stepped_lines(it) == [[-1]]
    it.session.on_message(attempt, m.End(save=True, reason="stop"), 2.0)
    it.session.tell(m.Saved(path="p"), 3.0)
    assert stepped_lines(it) == [[0], [-1]]


def switch(it: Worker, *members: str) -> None:
    """To a view of these, after the round in hand; the empty one ends the run."""
    view = View(number=2, members=members, group=2)
    it.session.on_message(it.session.attempt, m.Propose(view=view), 0.5)
    it.session.state_machine.connected(view)
    word = it.session.commit_message(0.6, view=1, round_=0, compute_us=0, shards=1)
    assert word
    assert it.session.end_round(0.6, [word, word])
    for message in it.session.state_machine.begin_round(1, may_switch=True) or ():
        it.session.tell(message, 0.7)


# --- the lease, and peers --------------------------------------------------------------------------------------------


def words(it: Worker, now: float) -> CommitMessage | None:
    return it.session.commit_message(now, view=1, round_=0, compute_us=0, shards=1)


def a_lease_counts_from_when_the_question_left() -> None:
    for asked, given in ((20.0 + ORPHAN_S, True), (20.1 + ORPHAN_S, False)):
        it = Worker()
        attempt = it.session.on_connected(10.0).attempt
        it.session.on_message(attempt, welcome(), 15.0)
        it.member_of("a")
        assert not it.session.lease_over(10.0 + ORPHAN_S)
        it.session.beat(20.0)
        it.session.beat(30.0)
        it.session.on_message(attempt, m.HeartbeatAnswer(beat=1), 50.0)
        word = words(it, 50.0)
        assert word is not None
        assert (words(it, asked) is not None) is given
        assert it.session.end_round(asked, [word]) is given
    it = Worker()
    it.session.on_message(it.session.on_connected(10.0).attempt, welcome(), 15.0)
    assert it.session.lease_over(10.1 + ORPHAN_S)


def what_has_ended_stays_ended() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.session.beat(5.0)
    assert words(it, ORPHAN_S + 0.5) is None
    it.session.on_message(attempt, m.HeartbeatAnswer(beat=1), ORPHAN_S + 0.6)
    assert it.session.lease_over(ORPHAN_S + 0.7), "the word was not given, and nobody asks for it again"
    it = Worker()
    attempt = it.welcomed()
    it.session.beat(ORPHAN_S + 1.0)
    it.session.on_message(attempt, m.HeartbeatAnswer(beat=1), ORPHAN_S + 1.1)
    assert it.session.lease_over(ORPHAN_S + 1.2), "the run may have begun again"
    it.welcomed(ORPHAN_S + 2.0)
    assert it.session.lease_over(ORPHAN_S + 2.1)


def a_worker_goes_when_its_lease_is_over_and_not_before() -> None:
    it = Worker()
    it.welcomed()
    it.member_of("a", "b")
    it.session.on_closed(it.session.attempt)
    assert it.session.watch(ORPHAN_S) == []
    (exit_,) = it.session.watch(ORPHAN_S + 0.1)
    assert isinstance(exit_, Exit)
    assert exit_ == Exit(exit_.reason, EXIT_ORPHANED, save=True)
    assert mentions(exit_.reason, f"{ORPHAN_S:g} s")
    assert it.session.instructions.exit == exit_
    assert it.session.instructions.save_before_exit
    assert it.session.watch(ORPHAN_S + 1.0) == [], "once"


def who_was_sent_away_is_no_orphan() -> None:
    it = Worker()
    attempt = it.welcomed()
    it.session.on_message(attempt, m.Goodbye(reason="over"), 0.0)
    assert it.session.watch(ORPHAN_S + 1.0) == []
    assert not it.session.instructions.save_before_exit


def without_a_coordinator_ever_there_is_no_end() -> None:
    assert Worker().session.watch(1e6) == []


def who_stalls_is_reported_and_who_holds_up_is_named() -> None:
    it = Worker()
    it.welcomed()
    it.member_of("a", "b")
    it.session.beat(50.0)
    it.session.on_message(it.session.attempt, m.HeartbeatAnswer(beat=1), 50.1)
    it.waiting = (1, "b", 60.0)
    assert it.session.watch(60.0 + STALL_S) == []
    (suspect,) = it.session.watch(60.1 + STALL_S)
    assert suspect == m.Suspect(view=1, peer="b", reason="stalled", waited_s=30)
    it.said()
    it.session.beat(60.1 + STALL_S)
    (beat,) = it.said()
    assert isinstance(beat, m.Heartbeat)
    assert beat.blocked_on == "b"
    for step in range(3):
        it.session.add_line(stepped(step, seconds=4.0))
    assert it.session.watch(60.1 + 4.0 * 10 - 1.0) == [], "its steps take long"
    (suspect,) = it.session.watch(60.1 + 4.0 * 10)
    assert isinstance(suspect, m.Suspect)


CHECKS: tuple[Callable[[], None], ...] = (
    a_heartbeat_says_where_the_worker_is,
    lines_are_sent_until_the_coordinator_has_them,
    only_the_first_in_rank_sends_lines,
    a_heartbeat_of_many_lines_has_others_after_it_that_ask_for_no_answer,
    of_more_lines_than_are_kept_the_others_are_counted,
    a_median_step_is_that_of_steps_whatever_is_logged_between_them,
    the_lines_go_before_what_may_be_the_last,
    a_rank_0_that_leaves_or_ends_has_sent_all_lines_before,
    who_is_not_rank_0_sends_none_when_it_switches_but_all_when_it_has_saved,
    a_lease_counts_from_when_the_question_left,
    what_has_ended_stays_ended,
    a_worker_goes_when_its_lease_is_over_and_not_before,
    who_was_sent_away_is_no_orphan,
    without_a_coordinator_ever_there_is_no_end,
    who_stalls_is_reported_and_who_holds_up_is_named,
)
