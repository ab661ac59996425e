"""Workers of two pools that both count from w1: neither is taken for the other, by anybody."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from farandole.errors import Refused
from farandole.membership import messages as m
from farandole.membership.names import roster_of
from farandole.pool.base import keep
from farandole.pool.fake import FakePool
from tests.support.scene import SIGNATURE, Scene
from tests.support.stage import Stage, play

KILLED = "killed by signal 9"


def ask_in(scene: Scene, pool: str, worker: str) -> str:
    given = scene.greet(worker, pool=pool, session=f"{pool} {worker}", attempt=1)
    scene.say(given, m.Ready(signature=SIGNATURE))
    while scene.coordinator.proposed:
        scene.switch(scene.coordinator.proposed, 0)
    return given


def two_pools() -> Scene:
    scene = Scene(wanted=2, startup_failures=100)
    assert [ask_in(scene, *who) for who in (("here", "w1"), ("there", "w1"), ("there", "w2"), ("here", "w2"))] == [
        "w1", "there-w1", "there-w2", "w2",
    ]  # fmt: skip
    scene.forget()
    return scene


def exits(scene: Scene, pool: str, worker: str) -> None:
    scene.coordinator.exited(worker, pool, "h", KILLED, scene.now)
    scene.look()


def test_all_of_them_are_in() -> None:
    scene = two_pools()
    assert scene.coordinator.view
    assert scene.coordinator.view.members == ("w1", "there-w1", "there-w2", "w2")


def test_an_exit_is_that_of_the_pools_own_worker() -> None:
    scene = two_pools()
    exits(scene, "there", "w1")
    assert list(scene.coordinator.gone) == ["there-w1"]
    scene.close("there-w1")
    assert scene.fields["lost"]["worker"] == "there-w1"
    assert set(scene.coordinator.workers) == {"w1", "there-w2", "w2"}


def test_a_process_that_never_said_hello_takes_nobody_with_it() -> None:
    scene = two_pools()
    exits(scene, "third", "w1")
    assert scene.fields["exited"]["worker"] == "third-w1"
    assert len(scene.coordinator.workers) == 4
    exits(scene, "third", "w1")  # told again
    assert scene.events.count("exited") == 1
    assert scene.coordinator.startup_failures == 0, "another pool's failures don't end the run's own replacements"


def test_an_exit_of_somebody_who_is_in_no_pool_is_not_believed() -> None:
    scene = Scene(wanted=1)
    scene.greet("w1", session="s", attempt=1)
    exits(scene, "here", "w1")
    assert scene.events == ["starting"]
    assert not scene.coordinator.gone


def test_each_pool_is_told_of_its_own_in_its_own_names() -> None:
    scene = two_pools()
    scene.coordinator.release("there-w1", scene.now)
    roster = scene.coordinator.roster()
    assert roster.leaving == ("there-w1",)
    assert roster_of(scene.coordinator, roster, "there").leaving == ("w1",)
    assert "w1" not in roster_of(scene.coordinator, roster, "here").leaving
    scene.coordinator._evict("w1", "a test")
    scene.look()
    for worker in ("there-w1", "there-w2", "w2"):
        scene.report(worker, 0)
    roster = scene.coordinator.roster()
    assert roster.evicted == ("w1",)
    assert roster_of(scene.coordinator, roster, "there").evicted == ()


def test_names_survive_the_coordinator() -> None:
    scene = two_pools()
    scene = scene.restarted()
    given = scene.greet("there-w1", pool="there", session="there w1", attempt=2, synced=True)
    assert given == "there-w1"
    exits(scene, "there", "w2")
    assert "there-w2" in scene.coordinator.gone
    assert "w2" not in scene.coordinator.gone


def test_a_second_pool_of_the_same_name_is_refused(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        keeping = asyncio.create_task(keep(FakePool("here"), scene.ticket))
        await scene.until(lambda: scene.server._pools)
        [hello] = scene.server._pools.values()
        hello.pid += 1  # as if the first were another process
        with pytest.raises(Refused, match="another pool of this run is called 'here'"):
            await keep(FakePool("here"), scene.ticket)
        other = FakePool("there")
        second = asyncio.create_task(keep(other, scene.ticket))
        await scene.until(lambda: other.started == ["w1", "w2"])
        await scene.until(lambda: scene.events("refused"))
        for task in (keeping, second):
            task.cancel()
        await asyncio.gather(keeping, second, return_exceptions=True)

    play(tmp_path, scenario, wanted=2)
