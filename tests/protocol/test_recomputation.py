"""Who is right where two have found different things of one shard, as truth tables; and what becomes of the other."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator import disputes
from farandole.protocol.coordinator.state import EXIT_BANNED
from farandole.protocol.messages import NO_DIGESTS, UPDATES, Computed
from farandole.protocol.view import Lineage, View
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained

ABC = ("a", "b", "c")


def found(holder: str, value: int, *shards: int) -> Computed:
    names = tuple(f"shard {shard}: {what}" for shard in shards for what in ("the micro-batch", "the loss"))
    return Computed(owner=holder, shards=shards, names=names, digests=(5, value) * len(shards))


def said(
    own_results: Computed = NO_DIGESTS, check_results: Computed = NO_DIGESTS, *, new: bool = False, round_: int = 7,
    compared: tuple[str, ...] = (), step: int = 7,
) -> m.Stopped:  # fmt: skip
    return m.Stopped(
        stop=1, view=View(number=1, members=ABC, group=1), round=round_, step=step, has_result=True,
        synced=True, lineage=Lineage(sets=(ABC,)), own_results=own_results, check_results=check_results, unchecked=new,
        compared=compared,
    )  # fmt: skip


def test_nothing_differs() -> None:
    reports = {"a": said(found("a", 1, 0)), "b": said(check_results=found("a", 1, 0)), "c": said()}
    assert disputes.judge(reports) == disputes.Verdict()


def test_another_member_checks_where_the_checker_is_gone_and_each_member_checks_once() -> None:
    """The checker may have found a difference before it went (seed 41091221 of the schedules)."""
    known = {"compared": ("a", "b", "c", "gone")}
    reports = {"a": said(found("a", 1, 0), **known), "b": said(found("b", 1, 1), **known), "c": said(**known)}
    assert disputes.judge(reports).rechecks == (("b", (0,)), ("a", (1,)))
    assert disputes.judge({"a": reports["a"], "b": said(new=True, **known)}).rechecks == ()
    reports |= {"b": said(check_results=found("a", 2, 0), **known), "c": said(found("c", 1, 2), **known)}
    assert disputes.judge(reports).rechecks == (("b", (0,)), ("c", (0,)), ("a", (2,)))
    reports = {"a": said(found("a", 1, 0), **known), "b": said(found("b", 1, 1), **known), "c": said(**known)}
    assert disputes.judge(reports, {"b": 7}).rechecks == (("c", (0,)),)
    reports |= {"a": said(**known), "c": said(found("c", 1, 2), **known)}
    assert disputes.judge(reports).rechecks == (("a", (1,)), ("b", (2,)))


def test_a_round_in_which_a_joiners_replica_differed_is_done_again_also_where_it_is_gone() -> None:
    reports = {"a": said(), "b": said()}
    assert disputes.judge(reports, {"c": 7}) == disputes.Verdict(rechecks=())
    assert disputes.judge({**reports, "c": said()}, {"c": 7}).rechecks == ()


@pytest.mark.parametrize("new", ["", "a", "b"])
def test_results_of_different_steps_are_not_compared_and_the_round_is_done_again(new: str) -> None:
    reports = {
        "a": said(found("a", 1, 0), step=6, new=new == "a"),
        "b": said(check_results=found("a", 9, 0), new=new == "b"),
        "c": said(),
    }
    assert disputes.judge(reports) == disputes.Verdict(rechecks=())


def test_a_third_is_asked_what_two_members_do_not_agree_on() -> None:
    reports = {"a": said(found("a", 1, 0, 2)), "b": said(check_results=found("a", 9, 0, 2)), "c": said()}
    assert disputes.judge(reports).rechecks == (("b", (0, 2)), ("c", (0, 2)))


@pytest.mark.parametrize(("values", "odd"), [((1, 9, 9), "a"), ((1, 9, 1), "b"), ((1, 1, 9), "c")])
def test_what_two_of_three_have_found_is_right(values: tuple[int, int, int], odd: str) -> None:
    first, second, third = values
    reports = {
        "a": said(found("a", first, 3)),
        "b": said(check_results=found("a", second, 3)),
        "c": said(check_results=found("a", third, 3)),
    }
    verdict = disputes.judge(reports)
    assert list(verdict.wrong) == [odd]
    assert mentions(verdict.wrong[odd], *(worker for worker in ABC if worker != odd), "shard 3")
    assert verdict.rechecks == ()


def test_of_three_that_differ_nobody_can_tell() -> None:
    reports = {worker: said(check_results=found("a", value, 3)) for worker, value in (("b", 2), ("c", 3))}
    verdict = disputes.judge({"a": said(found("a", 1, 3)), **reports})
    assert list(verdict.undecided) == [ABC]
    assert mentions(verdict.undecided[ABC], "shard 3")
    assert not verdict.wrong


def test_two_alone_are_both_named() -> None:
    verdict = disputes.judge({"a": said(found("a", 1, 3)), "b": said(check_results=found("a", 2, 3))})
    assert list(verdict.undecided) == [("a", "b")]
    assert mentions(verdict.undecided["a", "b"], "shard 3")
    assert verdict.rechecks == ()


def test_a_joiner_goes_if_it_does_not_find_what_the_holder_has() -> None:
    reports = {"a": said(found("a", 1, 0)), "b": said(), "c": said(check_results=found("a", 2, 0), new=True)}
    verdict = disputes.judge(reports)
    assert list(verdict.refused) == ["c"]
    assert mentions(verdict.refused["c"], "a", "shard 0")
    assert verdict.rechecks == ()


def test_two_joiners_that_agree_do_not_outvote_who_was_in_the_run() -> None:
    new = {worker: said(check_results=found("a", 2, 0), new=True) for worker in "bc"}
    assert list(disputes.judge({"a": said(found("a", 1, 0)), **new}).refused) == ["b", "c"]


@pytest.mark.parametrize(("values", "odd"), [((1, 9, 9), ["a"]), ((1, 9, 1), ["b"]), ((1, 2, 3), ["b", "c"])])
def test_in_a_first_view_what_most_have_found_counts(values: tuple[int, int, int], odd: list[str]) -> None:
    first, *others = values
    checkers = {w: said(check_results=found("a", v, 0), new=True) for w, v in zip("bc", others, strict=True)}
    assert list(disputes.judge({"a": said(found("a", first, 0), new=True), **checkers}).refused) == odd


def test_a_new_one_is_no_third() -> None:
    reports = {"a": said(found("a", 1, 3)), "b": said(check_results=found("a", 2, 3)), "c": said(new=True)}
    assert disputes.judge(reports).undecided


def test_only_the_round_in_hand_counts() -> None:
    reports = {"a": said(found("a", 1, 3)), "b": said(check_results=found("a", 2, 3)), "c": said(round_=8)}
    assert disputes.judge(reports) == disputes.Verdict()


@pytest.mark.parametrize("gone", ["a", "b"], ids=["the holder", "the checker"])
def test_a_round_is_not_committed_without_one_that_was_to_be_compared(gone: str) -> None:
    known = {"compared": ("a", "b")}
    reports = {"a": said(found("a", 1, 3), **known), "b": said(check_results=found("a", 1, 3), **known)}
    reports["c"] = said(**known)
    del reports[gone]
    assert disputes.judge(reports).rechecks == ((("c", (3,)),) if gone == "b" else ())


def test_nor_without_one_that_was_to_prove_itself_beside_others() -> None:
    known = {"compared": ABC}
    reports = {"a": said(found("a", 1, 0), **known), "b": said(check_results=found("a", 1, 0), new=True, **known)}
    assert disputes.judge(reports).rechecks == ()


def test_nor_without_both_that_were_to_be_compared_where_one_that_is_neither_is_left() -> None:
    """`c` has nothing to compare, and the wrong result of `b` may be in the sum that `c` holds."""
    assert disputes.judge({"c": said(compared=("a", "b"))}).rechecks == ()
    assert disputes.judge({"c": said(compared=("a", "c"))}).rechecks == ()
    assert disputes.judge({"c": said()}).rechecks is None


def test_who_has_not_been_compared_is_still_to_prove_itself() -> None:
    reports = {"a": said(found("a", 1, 0)), "b": said(check_results=found("a", 1, 0), new=True), "c": said(new=True)}
    assert disputes.unchecked(reports, commit=True) == ("c",)
    assert disputes.unchecked(reports, commit=False) == ("b", "c")


# --- what becomes of them ----------------------------------------------------------------------------------------


def stopped(scene: Scene, **reports: m.Stopped) -> None:
    for worker, report in reports.items():
        stop, view = scene.last(worker, m.Stop).stop, scene.coordinator.view
        assert view is not None
        lineage = scene.dealt(view, 7)
        changed = {"stop": stop, "view": view, "lineage": lineage}
        scene.say(worker, m.Stopped(**{f: getattr(report, f) for f in m.Stopped.__struct_fields__} | changed))


def unlike(scene: Scene) -> None:
    for worker in ("a", "b"):
        scene.say(worker, m.ShardsDiffer(step=7))


def test_the_third_decides_and_who_computes_wrong_leaves_and_its_host_is_not_asked_again() -> None:
    scene = trained(*ABC)
    unlike(scene)
    stopped(scene, a=said(found("a", 1, 0)), b=said(check_results=found("a", 2, 0)), c=said())
    resume = scene.last("a", m.Resume)
    assert (resume.view.members, resume.commit) == (ABC, False), "a round that all hold, and that is done again"
    assert resume.lineage.rechecks == (("b", (0,)), ("c", (0,)))
    scene.forget()
    unlike(scene)
    stopped(
        scene, a=said(found("a", 1, 0)), b=said(check_results=found("a", 2, 0)), c=said(check_results=found("a", 1, 0))
    )
    assert scene.members("a", "c") == ("a", "c")
    assert scene.fields["computes wrong"]["worker"] == "b"
    assert scene.last("b", m.Goodbye).code == EXIT_BANNED
    assert scene.coordinator.roster().wrong_hosts == ("h-b",)
    assert scene.restarted().coordinator.roster().wrong_hosts == ("h-b",), "the next coordinator knows"


@pytest.mark.parametrize("stops", [True, False])
def test_where_nobody_can_tell_the_run_does_as_it_was_told(stops: bool) -> None:
    scene = trained("a", "b", stop_undecided=stops)
    scene.say("a", m.ShardsDiffer(step=7))
    stopped(scene, a=said(found("a", 1, 0)), b=said(check_results=found("a", 2, 0)))
    assert scene.fields["undecided"]["workers"] == ["a", "b"]
    if stops:
        assert scene.coordinator.ending is not None
        assert scene.last("a", m.End).save
    else:
        view = scene.last("a", m.Resume).view
        assert (view.members, view.undecided) == (("a", "b"), True)
        scene.ready("c")
        scene.wait(1.0, "a", "b", "c")
        assert not scene.last("a", m.Propose).view.undecided, "with a third they check each other again"


def test_one_of_three_that_says_so_alone_stops_nobody() -> None:
    scene = trained(*ABC)
    scene.say("c", m.ShardsDiffer(step=7))
    assert "Stop" not in scene.kinds("a")


def test_a_joiner_that_is_refused_is_told_why() -> None:
    scene = trained("a", "b")
    scene.ready("c")
    scene.say("c", m.Prepared(view=2))
    view = scene.last("c", m.Propose).view
    scene.switch(view, 7)
    unlike(scene)
    stopped(scene, a=said(found("a", 1, 0)), b=said(), c=said(check_results=found("a", 2, 0), new=True))
    assert scene.members("a", "b") == ("a", "b")
    assert mentions(scene.last("c", m.JoinRefused).reason, "a", "shard 0")
    assert scene.fields["refused"]["worker"] == "c"
    assert scene.coordinator.roster().wrong_hosts == ()


def test_who_may_have_had_no_step_to_prove_itself_in_has_it_in_the_next_view() -> None:
    scene = Scene(wanted=2, minimum=2)
    scene.ready("a", "b")
    scene.say("a", m.Prepared(view=1))
    scene.switch(scene.last("a", m.Propose).view, 0)
    scene.ready("c")
    assert scene.last("c", m.Propose).view.unchecked == ("a", "b", "c")
    scene = trained("a", "b")
    scene.say("a", m.Heartbeat(view=1, step=9, round=9))
    scene.ready("c")
    assert scene.last("c", m.Propose).view.unchecked == ("c",), "a step has ended"


def joined(entered: int, *, failure: str = "") -> Scene:
    """`c` came in at that step; now `c` differs, as `a` and `b` say; the script fails on `failure`, and all stop."""
    scene = trained("a", "b")
    scene.ready("c")
    view = scene.last("c", m.Propose).view
    for worker in view.members:
        scene.say(worker, m.Prepared(view=view.number))
    scene.switch(view, entered)
    scene.forget()
    for worker in "ab":
        scene.say(worker, m.Differs(step=600, workers=("c",)))
    if failure:
        scene.say(failure, m.ScriptFailed(traceback="ValueError"))
    for worker in "abc":
        scene.report(worker, 600, has_result=True)
    return scene


def test_a_joiner_whose_updates_differ_goes_and_what_it_computed_is_done_again() -> None:
    scene = joined(595)
    assert scene.coordinator.ending is None
    assert scene.members("a", "b") == ("a", "b")
    assert not scene.last("a", m.Resume).commit
    assert UPDATES in scene.last("c", m.JoinRefused).reason


def test_if_the_script_fails_at_the_same_stop_the_state_of_the_others_is_saved() -> None:
    """Their replicas are equal: the run would have gone on with them (seed 42020366 of the schedules)."""
    scene = joined(595, failure="c")
    assert UPDATES in scene.last("c", m.JoinRefused).reason
    assert scene.coordinator.ending is not None
    assert not scene.coordinator.ending.replicas_differ
    end = scene.last(scene.coordinator.ending.saver, m.End)
    assert (scene.coordinator.ending.saver, end.save, end.allow_between) == ("a", True, False)


def test_one_that_has_been_looked_at_all_over_ends_the_run() -> None:
    scene = joined(600 - disputes.DIGEST_CYCLE_STEPS - 1)
    assert scene.coordinator.ending is not None
    assert scene.fields["replicas differ"]["workers"] == ["c"]
