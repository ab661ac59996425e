"""New connections for the same members, before the numbers of a group's views wrap in the tags of its messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.watch import Watch
from farandole.protocol import messages as m
from farandole.protocol.coordinator.view_changes import REGROUP_S
from farandole.protocol.events import FinishedEvent, LostEvent, ViewEvent
from tests.support.by_hand import by_hand
from tests.support.fake_worker import until
from tests.support.scene import Scene, trained, view_of

JOB = Path(__file__).parents[1] / "jobs" / "faults.py"


def worn(workers: str, **settings: object) -> Scene:
    """A run whose next view, the fourth of its group, is to have new connections."""
    scene = trained(*workers, "x", "y", views_per_group=3, **settings)
    for leaving_worker, stay in (("y", (*workers, "x")), ("x", tuple(workers))):
        scene.say(leaving_worker, m.LeaveRequest(reason="SIGTERM"))
        scene.switch(scene.last(workers[0], m.Propose).view, 4, *stay, leaving_worker)
        scene.exit(leaving_worker)
    return scene


def test_members_are_connected_anew_while_they_train() -> None:
    scene = worn("ab")
    view = scene.last("a", m.Propose).view
    assert view == view_of(4, "a", "b", unchecked=("a", "b")), "no step is known to have ended"
    assert scene.coordinator.cause == "new connections"
    scene.switch(view, 5)
    assert scene.coordinator.view == view
    assert "shares" not in scene.events
    scene.wait(REGROUP_S + 1, "a", "b")
    assert scene.last("a", m.Propose).view == view, "once in so many views"


def test_a_joiner_brings_new_connections_anyway() -> None:
    scene = trained("a", "b", views_per_group=2)
    scene.lose("b")
    scene.report("a", 3)
    scene.ready("c")
    assert scene.last("a", m.Propose).view.members == ("a", "c")


def test_connections_that_do_not_come_about_are_tried_again_later() -> None:
    scene = worn("ab", prepare_timeout_s=5.0)
    scene.say("a", m.Prepared(view=4))
    scene.wait(6.0, "a", "b")
    for worker in "ab":
        scene.report(worker, 6)
    view = scene.last("a", m.Resume).view
    assert (view.members, view.group) == (("a", "b"), 1), "over those that stand"
    assert "lost" not in scene.events
    scene.forget()
    scene.wait(REGROUP_S / 2, "a", "b")
    assert scene.kinds("a").count("Propose") == 0
    scene.ready("c")
    assert scene.last("c", m.Propose).view.members == ("a", "b", "c"), "meanwhile others may come in"


def test_new_connections_wait_for_what_else_is_due() -> None:
    scene = trained("a", views_per_group=1)
    assert scene.coordinator.proposed is None, "one worker alone has no connections"
    scene.ready("b")
    joined = scene.last("a", m.Propose).view
    scene.switch(joined, 3)
    assert scene.last("a", m.Propose).view.group > joined.group


@pytest.mark.processes
def test_a_run_goes_on_over_new_connections(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.5")
    job = [str(JOB), str(tmp_path), "--pace", str(pace)]
    with by_hand(tmp_path / "run", 2, job, wanted=2, minimum=2, views_per_group=1) as run:
        watch = Watch(run.folder)

        def views() -> list[ViewEvent]:
            watch.look()
            return watch.events(ViewEvent)

        until(lambda: len(views()) > 1)
        pace.unlink()
        until(lambda: run.coordinator.poll() is not None)
        assert run.coordinator.returncode == 0
        watch.look()
        first, second = watch.events(ViewEvent)[:2]
        assert (first.cause, second.cause) == ("first view", "new connections")
        assert first.members == second.members
        assert [event.equal for event in watch.events(FinishedEvent)] == [True]
        assert not watch.events(LostEvent)
