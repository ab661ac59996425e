"""What a session must do with the deadline of a notice: its worker goes before, and nobody waits for its word then.

The checks of `test_session.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from farandole.protocol import messages as m
from farandole.protocol.messages import EXIT_PREEMPTED
from farandole.protocol.view import CommitMessage
from farandole.protocol.worker.session import EXIT_ORPHANED, LONGEST_S, PART, SHORTEST_S
from farandole.protocol.worker.state_machine import Exit
from tests.support.mentioned import mentions
from tests.support.played_session import ORPHAN_S, Worker


def told_by_itself(it: Worker, within_s: float, now: float) -> None:
    it.session.tell(m.LeaveRequest(reason="it is interrupted", within_s=within_s), now)


def told_by_the_coordinator(it: Worker, within_s: float, now: float) -> None:
    it.session.on_message(it.session.attempt, m.PreemptionDeadline(within_s=within_s), now)


def who_is_still_there_saves_and_goes_a_quarter_of_its_notice_before_the_deadline() -> None:
    for told in (told_by_itself, told_by_the_coordinator):
        it = trained()
        told(it, 20.0, 10.0)
        assert it.session.watch(25.0) == []
        (exit_,) = it.session.watch(25.1)
        assert isinstance(exit_, Exit)
        assert exit_ == Exit(exit_.reason, EXIT_PREEMPTED, save=True, within_s=2.5)
        assert mentions(exit_.reason, "5 s")
        assert it.session.instructions.exit == exit_
        assert it.session.instructions.save_before_exit
        assert it.session.watch(26.0) == [], "once"


def from_then_on_it_gives_no_word_and_ends_no_round() -> None:
    it = trained()
    told_by_itself(it, 20.0, 10.0)
    word = words(it, 25.0)
    assert word is not None
    assert words(it, 25.1) is None
    assert not it.session.end_round(25.1, [word])
    assert it.session.end_round(25.0, [word])


def the_earliest_deadline_counts_and_a_later_one_takes_nothing_back() -> None:
    for first, second in ((20.0, 100.0), (100.0, 20.0)):
        it = trained()
        told_by_itself(it, first, 10.0)
        told_by_the_coordinator(it, second, 10.0)
        assert not it.session.lease_over(25.0)
        assert it.session.lease_over(25.1)


def of_a_long_notice_no_more_is_kept_than_saving_takes() -> None:
    it = trained(orphan_is_far=True)
    seconds = 10 * LONGEST_S / PART
    told_by_itself(it, seconds, 0.0)
    assert not it.session.lease_over(seconds - LONGEST_S)
    assert it.session.lease_over(seconds - LONGEST_S + 0.1)


def a_notice_that_is_too_short_is_left_to_the_machine() -> None:
    """It may be that a clock is wrong; and to end it at once would be no less of a crash."""
    it = trained()
    told_by_itself(it, 0.0, 10.0)
    told_by_the_coordinator(it, SHORTEST_S - 0.1, 10.0)
    assert it.session.watch(10.0 + SHORTEST_S) == []
    told_by_itself(it, SHORTEST_S, 20.0)
    assert it.session.watch(20.0 + SHORTEST_S) != []


def a_notice_without_a_deadline_ends_nobody() -> None:
    it = trained()
    it.session.tell(m.LeaveRequest(reason="SIGTERM"), 10.0)
    assert it.session.watch(ORPHAN_S) == []


def what_it_says_when_it_connects_again_moves_no_deadline() -> None:
    it = trained()
    told_by_itself(it, 20.0, 10.0)
    it.welcomed(22.0)
    assert m.LeaveRequest(reason="it is interrupted", within_s=20.0) in it.said()
    assert it.session.lease_over(25.1)


def the_lease_ends_no_later_for_a_deadline() -> None:
    it = trained()
    told_by_itself(it, 10 * ORPHAN_S, 0.0)
    (exit_,) = it.session.watch(ORPHAN_S + 0.1)
    assert isinstance(exit_, Exit)
    assert (exit_.code, exit_.within_s) == (EXIT_ORPHANED, None)


def trained(*, orphan_is_far: bool = False) -> Worker:
    it = Worker()
    it.welcomed()
    it.member_of("a", "b")
    if orphan_is_far:
        it.session._lease.end = math.inf
    return it


def words(it: Worker, now: float) -> CommitMessage | None:
    it.session.state_machine.synced = True
    return it.session.commit_message(now, view=1, round_=0, compute_us=1, shards=1)


CHECKS: tuple[Callable[[], None], ...] = (
    who_is_still_there_saves_and_goes_a_quarter_of_its_notice_before_the_deadline,
    from_then_on_it_gives_no_word_and_ends_no_round,
    the_earliest_deadline_counts_and_a_later_one_takes_nothing_back,
    of_a_long_notice_no_more_is_kept_than_saving_takes,
    a_notice_that_is_too_short_is_left_to_the_machine,
    a_notice_without_a_deadline_ends_nobody,
    what_it_says_when_it_connects_again_moves_no_deadline,
    the_lease_ends_no_later_for_a_deadline,
)
