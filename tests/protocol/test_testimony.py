"""What all should see at once and one alone says; and who may speak of whose workers, under which name."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from farandole.errors import Refused
from farandole.pool.fake import FakePool
from farandole.pool.reconciler import serve_pool
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import EXIT_BANNED, EXIT_EVICTED, OwnPool
from farandole.protocol.messages import UPDATES
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained
from tests.support.stage import Stage, play

DIFFERS = m.Differs(step=7, workers=("b",))
NAN = m.NotFinite(step=7, loss="nan")


@pytest.mark.parametrize("wrong", [DIFFERS, NAN], ids=["replicas", "loss"])
def test_one_of_three_alone_ends_no_run(wrong: m.Message) -> None:
    scene = trained("a", "b", "c", stop_on_nan=True)
    scene.say("c", wrong)
    assert scene.coordinator.ending is None
    assert "Stop" not in scene.kinds("a")
    scene.say("a", wrong)
    assert scene.coordinator.ending is not None
    assert scene.last("b", m.Stop)


@pytest.mark.parametrize("wrong", [DIFFERS, NAN], ids=["replicas", "loss"])
def test_one_of_three_ends_no_run_either_where_the_coordinator_is_back_and_knows_of_no_view_in_force(
    wrong: m.Message,
) -> None:
    before = Scene(wanted=3, minimum=3, stop_on_nan=True)
    before.ready("a", "b", "c")
    scene = before.restarted()
    scene.back("c")
    scene.say("c", wrong)
    assert scene.coordinator.ending is None
    scene.back("a")
    scene.say("a", wrong)
    assert scene.coordinator.ending is not None


@pytest.mark.parametrize("wrong", [m.Differs(step=7, workers=("c",)), NAN], ids=["replicas", "loss"])
def test_when_fewer_than_three_are_left_one_word_counts(wrong: m.Message) -> None:
    """Whoever else has seen it may have died before it could say so."""
    scene = trained("a", "b", "c", stop_on_nan=True)
    scene.say("b", wrong)
    scene.lose("a")
    scene.report("b", 7, has_result=True)
    scene.report("c", 7, has_result=True)
    assert scene.coordinator.ending is not None


def test_what_one_has_seen_to_differ_is_not_committed_before_the_others_have_looked() -> None:
    scene = trained("a", "b", "c", "d")
    scene.say("c", DIFFERS)
    scene.lose("d")
    for worker in "abc":
        scene.report(worker, 7, has_result=True)
    assert not scene.last("a", m.Resume).commit


def test_where_the_run_ends_anyway_what_one_has_seen_to_differ_is_compared_first() -> None:
    scene = trained("a", "b", "c")
    scene.say("c", DIFFERS)
    scene.say("a", m.ScriptFailed(traceback="ValueError"))
    for worker in "abc":
        scene.report(worker, 7, has_result=True)
        assert "End" not in scene.kinds(worker)
    for worker, digest in (("a", 1), ("b", 2), ("c", 1)):
        scene.say(worker, m.Digests(step=7, names=("w",), digests=(digest,)))
    assert scene.last("a", m.End).allow_between


def test_a_difference_that_the_others_have_gone_beyond_was_none() -> None:
    scene = trained("a", "b", "c", "d")
    scene.say("d", DIFFERS)
    for worker in "abc":
        scene.say(worker, m.Heartbeat(view=1, round=9, step=9))
    scene.say("c", DIFFERS)
    assert scene.coordinator.ending is None


@pytest.mark.parametrize("difference", [DIFFERS, m.ShardsDiffer(step=7)], ids=["replicas", "results"])
def test_one_report_of_a_later_step_disproves_nothing(difference: m.Message) -> None:
    scene = trained("a", "b", "c", "d")
    scene.say("d", m.Heartbeat(view=1, round=2**40, step=2**40))
    scene.say("a", difference)
    assert scene.coordinator.stopping is None
    scene.say("c", difference)
    assert scene.coordinator.stopping is not None


def test_a_leaving_worker_whose_view_two_others_have_left_is_one_of_three() -> None:
    """All of them have seen the same rounds."""
    scene = trained("a", "b", wanted=4)
    scene.ready("c")
    first = scene.last("c", m.Propose).view
    scene.say("a", m.LeaveRequest(reason="SIGTERM"))
    scene.ready("d")
    scene.switch(first, 7)
    view = scene.last("d", m.Propose).view
    assert view.members == ("b", "c", "d")
    scene.say("a", DIFFERS)
    scene.switch(view, 8, "b", "c", synced=False)
    assert scene.coordinator.previous, "the leaver still has a part"
    assert scene.coordinator.ending is scene.coordinator.stopping is None
    scene.switch(view, 8, "d")
    assert scene.coordinator.ending is scene.coordinator.stopping is None


def test_who_is_beyond_a_round_that_several_could_not_end_goes() -> None:
    """It was the furthest, so the others committed what they had seen to differ, or it saved."""
    scene = trained("a", "b", "c", "d")
    scene.say("a", DIFFERS)
    scene.say("c", DIFFERS)
    for worker in "acd":
        scene.report(worker, 7, has_result=True, cannot_end=True)
    scene.report("b", 8)
    assert scene.last("b", m.Goodbye).code == EXIT_BANNED
    assert scene.coordinator.ending


@pytest.mark.parametrize(("behind", "ahead"), ["ab", "ba"])
def test_of_two_words_about_a_round_that_one_could_not_end_the_longest_standing_counts(behind: str, ahead: str) -> None:
    """c is lost, and nobody else can tell. The round is not committed by a worker that has seen it differ."""
    scene = trained("a", "b", "c")
    scene.lose("c")
    scene.report(behind, 7, has_result=True, cannot_end=True)
    scene.report(ahead, 8)
    assert scene.last("b", m.Goodbye).code == EXIT_EVICTED
    assert scene.members("a") == ("a",)
    assert scene.last("a", m.Resume).round == (7 if behind == "a" else 8)


def third_holder_not_known() -> Scene:
    """`a` reports that `b`, a joiner, differs; `c` holds the state too, and the coordinator has not heard so."""
    scene = trained("a", wanted=3, minimum=1)
    scene.close("a")
    scene.back("a")
    scene.ready("b", "c")
    scene.report("a", 7)
    view = scene.last("a", m.Propose).view
    assert view.joining == ("b", "c")
    scene.switch(view, 7, synced=False)
    scene.say("b", m.Synced(view=view.number))
    scene.say("a", DIFFERS)
    return scene


def test_if_the_run_is_to_end_what_one_of_three_has_reported_is_compared_first() -> None:
    scene = third_holder_not_known()
    scene.say("a", m.ScriptFailed(traceback="ValueError"))
    for worker in "abc":
        scene.report(worker, 7)
    assert "End" not in [*scene.kinds("a"), *scene.kinds("b"), *scene.kinds("c")]
    for worker, digest in (("a", 1), ("b", 2), ("c", 1)):
        assert scene.last(worker, m.Compare)
        scene.say(worker, m.Digests(step=7, names=("w",), digests=(digest,)))
    assert scene.coordinator.ending
    assert scene.coordinator.ending.differing == ("b",)
    assert scene.coordinator.ending.saver in ("a", "c")


def test_a_joiner_is_not_refused_by_one_of_three_though_the_third_was_not_known_to_hold_the_state() -> None:
    scene = third_holder_not_known()
    for worker in "abc":
        scene.report(worker, 7)
    assert scene.members("a", "b", "c") == ("a", "b", "c")
    assert not scene.last("a", m.Resume).commit
    scene.say("a", DIFFERS)
    assert scene.coordinator.stopping is None
    scene.say("c", DIFFERS)
    for worker in "abc":
        scene.report(worker, 7, has_result=True)
    assert UPDATES in scene.last("b", m.JoinRefused).reason
    assert scene.members("a", "c") == ("a", "c")


def test_of_two_one_that_says_so_falsely_is_named_for_it() -> None:
    scene = trained("a", "b")
    scene.say("a", m.Differs(step=7, workers=("b",)))
    for worker in "ab":
        scene.report(worker, 7)
    for worker in "ab":
        scene.say(worker, m.Digests(step=7, names=("w",), digests=(1,)))
    assert scene.coordinator.ending
    assert mentions(scene.coordinator.ending.reason, "a", "b's")


def test_of_two_nobody_says_of_the_longest_standing_that_its_replica_is_the_odd_one() -> None:
    scene = trained("a", "b")
    scene.say("b", m.Differs(step=7, workers=("a",)))
    assert scene.coordinator.ending is scene.coordinator.stopping is None
    scene.say("a", m.Differs(step=7, workers=("b",)))
    assert scene.coordinator.ending
    assert scene.coordinator.ending.differing == ("b",)


@pytest.mark.parametrize("round_", [0, 6, 2**53])
def test_a_view_takes_effect_in_the_round_that_two_say(round_: int) -> None:
    """One wrong number ended the run: the others seemed to call what nobody calls there."""
    scene = trained("a", "b", "c", "d")
    scene.say("d", m.LeaveRequest(reason="SIGTERM"))
    view = scene.last("a", m.Propose).view
    scene.say("c", m.Switched(view=view.number, round=round_, step=0))
    call = m.Call.of("step 7")
    for worker in "ab":
        scene.say(worker, m.Heartbeat(view=1, round=7, step=7, call=call))
    for worker in "ab":
        scene.say(worker, m.Switched(view=view.number, round=8, step=8))
    for worker in list(scene.coordinator.stopping.unanswered if scene.coordinator.stopping else ()):
        scene.report(worker, 8)
    assert "calls differ" not in scene.events
    assert scene.last("c", m.Goodbye).code == EXIT_BANNED
    assert scene.members("a", "b") == ("a", "b")


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_two_the_longest_standing_says_in_which_round_a_view_takes_effect(order: str) -> None:
    """A joiner that was first with a wrong number took out the only worker that held the state."""
    scene = trained("a")
    scene.ready("b")
    view = scene.last("a", m.Propose).view
    said = {"a": m.Switched(view=view.number, round=8, step=8), "b": m.Switched(view=view.number, round=2, step=0)}
    for worker in order:
        scene.say(worker, said[worker])
    for worker in list(scene.coordinator.stopping.unanswered if scene.coordinator.stopping else ()):
        scene.report(worker, 8)
    assert scene.last("b", m.Goodbye).code == EXIT_BANNED
    assert scene.members("a") == ("a",)


def test_of_two_one_that_says_falsely_that_it_has_switched_ends_no_run() -> None:
    scene = trained("a", "b")
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    view = scene.last("a", m.Propose).view
    scene.say("b", m.Switched(view=view.number, round=6, step=6))
    scene.say("a", m.Heartbeat(view=1, round=7, step=7, call=m.Call.of("step 7")))
    assert "calls differ" not in scene.events
    scene.say("a", m.Switched(view=view.number, round=8, step=8))
    for worker in list(scene.coordinator.stopping.unanswered if scene.coordinator.stopping else ()):
        scene.report(worker, 8)
    assert scene.members("a") == ("a",)


@pytest.mark.parametrize("wrong", ["c", "d"])
def test_a_leaving_worker_is_not_let_go_while_its_answer_is_waited_for(wrong: str) -> None:
    """The last to say in which round it switched says another one: it is expelled, and who leaves is asked."""
    scene = trained("a", "b", "c", "d")
    scene.say("d", m.LeaveRequest(reason="SIGTERM"))
    view = scene.last("a", m.Propose).view
    for worker in [worker for worker in "abcd" if worker != wrong]:
        scene.say(worker, m.Switched(view=view.number, round=8, step=8))
    scene.say(wrong, m.Switched(view=view.number, round=2**40, step=0))
    assert scene.coordinator.stopping
    assert scene.coordinator.stopping.unanswered <= scene.coordinator.workers.keys()
    for worker in list(scene.coordinator.stopping.unanswered):
        scene.report(worker, 8)
    assert not scene.coordinator.stopping
    assert scene.members("a", "b") == (("a", "b", "c") if wrong == "d" else ("a", "b"))


@pytest.mark.parametrize("further", ["a", "ab"])
def test_a_switch_that_two_have_gone_beyond_was_none(further: str) -> None:
    scene = trained("a", "b", "c", "d")
    scene.say("d", m.LeaveRequest(reason="SIGTERM"))
    view = scene.last("a", m.Propose).view
    scene.say("c", m.Switched(view=view.number, round=6, step=6))
    for worker in further:
        scene.say(worker, m.Heartbeat(view=1, round=7, step=7, call=m.Call.of("step 7")))
    assert "calls differ" not in scene.events
    assert ("expelled" in scene.events) == (len(further) > 1), "of one nobody could tell which of the two is wrong"


@pytest.mark.parametrize("call", ["step 9", "evaluate"])
def test_one_alone_that_is_beyond_a_switch_that_counts_ends_no_run(call: str) -> None:
    scene = trained("a", "b", "c", "d")
    scene.say("d", m.LeaveRequest(reason="SIGTERM"))
    view = scene.last("a", m.Propose).view
    for worker in "ab":
        scene.say(worker, m.Switched(view=view.number, round=8, step=8))
    scene.say("a", m.Heartbeat(view=view.number, round=9, step=9, call=m.Call.of("step 9")))
    scene.say("c", m.Heartbeat(view=1, round=9, step=9, call=m.Call.of(call)))
    assert "calls differ" not in scene.events
    assert scene.coordinator.stopping
    for worker in list(scene.coordinator.stopping.unanswered):
        if worker in "ab":
            scene.report(worker, 9, view=view)
        else:
            scene.report(worker, 8)
    assert scene.last("c", m.Goodbye).code == EXIT_BANNED
    assert scene.members("a", "b") == ("a", "b")


def test_a_step_that_one_alone_has_reached_is_no_progress() -> None:
    scene = trained("a", "b", "c")
    for worker, step in (("a", 5), ("b", 5), ("c", 2**53)):
        scene.say(worker, m.Heartbeat(view=1, round=5, step=step))
    assert scene.coordinator.reached == 6


def test_only_who_began_says_what_the_run_went_on_from() -> None:
    """A member silenced all metrics, and let no run begin again, by one number."""
    scene = trained("a", "b", "c")
    scene.say("c", m.Restored(step=2**53, path="nowhere"))
    scene.say("c", m.Checkpointed(step=2**53, path="nowhere"))
    assert scene.coordinator.last_line == (-1, 0)
    assert scene.coordinator.newest == m.Newest()


# --- whose worker is whose -----------------------------------------------------------------------------------------

OWN = OwnPool(pool="local", host="here", pid=77)


def run() -> Scene:
    return Scene(wanted=2, startup_failures=3, pool=OWN)


@pytest.mark.parametrize("hello", [{}, {"attempt": 2}, {"pool": "evil", "attempt": 2}], ids=str)
def test_an_external_worker_squats_no_name_that_the_runs_pool_will_give(hello: dict[str, object]) -> None:
    scene = run()
    assert scene.greet("w3", **{"session": "s", "attempt": 1, "pool": "", **hello}) == "guest-1"
    assert scene.greet("w3", session="t", attempt=1, pool="local") == "w3"
    assert scene.greet("node2", session="u", attempt=1, pool="") == "node2"


def test_external_workers_of_one_name_never_share_it() -> None:
    scene = run()
    assert scene.greet("guest-2", session="s", attempt=2, pool="") == "guest-2"
    assert [scene.greet("", session=session, attempt=1, pool="") for session in "tu"] == ["guest-1", "guest-3"]


@pytest.mark.parametrize("pool", ["", "evil", "guest"])
def test_nobody_but_its_pool_says_that_a_worker_has_exited(pool: str) -> None:
    scene = run()
    scene.greet("w1", session="s", attempt=1, pool="local")
    scene.greet("", session="t", attempt=1, pool="")
    for worker in ("w1", "guest-1", "1"):
        scene.exit(worker, pool=pool)
    assert not {"w1", "guest-1"} & set(scene.coordinator.dead)


def test_another_pools_failures_end_no_replacements() -> None:
    scene = run()
    scene.greet("w1", session="s", attempt=1, pool="local")
    for number in range(10):
        scene.exit(f"w{number}", pool="evil")
    assert scene.coordinator.startup_failures == {}
    assert scene.coordinator.over is None


def test_the_name_of_the_runs_own_pool_is_taken_while_it_is_away(tmp_path: Path) -> None:
    """As after a coordinator's restart, when anybody may be the first."""

    async def scenario(scene: Stage) -> None:
        for name in ("local", ""):
            with pytest.raises(Refused, match=f"'{name}'" if name else None):
                await serve_pool(FakePool(name), scene.ticket)
        assert not scene.server._pools.names

    play(tmp_path, scenario, wanted=2, pool=OwnPool(pool="local", host="here", pid=os.getpid() + 1))


def test_the_run_s_own_pool_is_heard(tmp_path: Path) -> None:

    async def scenario(scene: Stage) -> None:
        own = FakePool("local")
        keeping = asyncio.create_task(serve_pool(own, scene.ticket))
        await scene.until(lambda: own.started == ["w1", "w2"])
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    play(tmp_path, scenario, wanted=2, pool=OwnPool(pool="local", host=socket.gethostname(), pid=os.getpid()))
