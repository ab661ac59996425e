"""The lease: how long a worker goes on without a coordinator, and when the coordinator may count on that."""

from __future__ import annotations

from farandole.protocol import messages as m
from farandole.protocol.worker.session import Lease
from tests.support.scene import trained

ORPHAN_S = 60.0


def welcomed() -> Lease:
    lease = Lease()
    lease.on_welcome(0.0, ORPHAN_S)
    return lease


def test_it_counts_from_when_the_answered_message_was_sent() -> None:
    lease = welcomed()
    lease.beat(20.0)
    assert (lease.over(60.0), lease.over(60.1)) == (False, True), "sent is not answered"
    lease = welcomed()
    number = lease.beat(10.0)
    lease.on_answer(number, ORPHAN_S)
    assert (lease.over(70.0), lease.over(70.1)) == (False, True)


def test_without_a_coordinator_ever_there_is_no_end() -> None:
    assert not Lease().over(1e9)


def test_an_answer_that_comes_twice_or_late_counts_once() -> None:
    lease = welcomed()
    first, second = lease.beat(10.0), lease.beat(20.0)
    lease.on_answer(second, ORPHAN_S)
    lease.on_answer(first, ORPHAN_S)
    lease.on_answer(second, 10 * ORPHAN_S)
    lease.on_answer(99, ORPHAN_S)
    assert (lease.over(80.0), lease.over(80.1)) == (False, True)


def test_answers_to_an_earlier_connections_heartbeats_do_not_count() -> None:
    lease = welcomed()
    number = lease.beat(10.0)
    lease.on_welcome(5.0, ORPHAN_S)
    lease.on_answer(number, ORPHAN_S)
    assert lease.over(65.1)


def test_what_has_ended_stays_ended() -> None:
    lease = welcomed()
    lease.on_welcome(60.3, ORPHAN_S)  # it came back just before it noticed
    assert lease.over(60.4)


# --- the coordinator's side ----------------------------------------------------------------------------------------


def test_a_worker_beyond_its_lease_holds_nobody_up() -> None:
    scene = trained("a", "b", "c", orphan_s=ORPHAN_S)
    scene.close("a", "b", "c")
    scene.wait(30.0)
    scene.back("b", "c")
    scene.wait(30.0, "b", "c")
    assert scene.events == ["out of reach"], "a may train on; b and c, who hear nothing, too"
    scene.wait(0.5, "b", "c")
    scene.report("b", 7)
    assert scene.events == ["out of reach"], "c is within reach: it is asked"
    scene.report("c", 7)
    assert scene.members("b", "c") == ("b", "c")


def test_one_that_returns_after_all_counts_again() -> None:
    scene = trained("a", "b", orphan_s=ORPHAN_S)
    scene.close("a")
    scene.wait(ORPHAN_S + 0.5, "b")  # b hears nothing: its heartbeats come
    scene.back("a")
    for worker in ("a", "b"):
        scene.report(worker, 7)
    assert scene.members("a", "b") == ("a", "b")
    scene.forget()
    scene.close("a", "b")
    scene.wait(10.0)
    assert scene.events == ["out of reach"], "both may train on"


def test_the_run_begins_again_when_the_lease_of_one_that_was_put_out_is_over() -> None:
    scene = trained("a", orphan_s=ORPHAN_S)
    scene.say("a", m.HeartbeatAnswer(beat=1))  # not a worker's message
    assert scene.closed == ["a"]
    scene.ready("b")
    scene.wait(ORPHAN_S + 1.0, "b")
    assert scene.last("b", m.Propose).view.members == ("b",)


def test_a_lease_that_was_found_to_be_over_stays_so() -> None:
    """Else a word that was refused would be missing for ever: its worker stays, and nobody asks for it again."""
    lease = Lease()
    lease.on_welcome(0.0, 6.0)
    beat = lease.beat(5.0)
    assert lease.over(6.5)
    lease.on_answer(beat, 6.0)
    lease.on_welcome(5.5, 6.0)
    assert lease.over(6.6)
