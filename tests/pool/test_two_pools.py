"""Workers of two pools that both count from w1: neither is taken for the other, by anybody."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from farandole.errors import Refused, UsageError
from farandole.pool.fake import FakePool
from farandole.pool.reconciler import serve_pool
from farandole.protocol import messages as m
from farandole.protocol.coordinator import view_changes
from farandole.protocol.coordinator.state import Removal
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
    for pool, worker in (("here", "w1"), ("there", "there-w1"), ("there", "there-w2"), ("here", "w2")):
        assert ask_in(scene, pool, worker) == worker
    scene.forget()
    return scene


def exits(scene: Scene, pool: str, worker: str) -> None:
    scene.coordinator.on_pool_message(pool, "h", m.WorkerProcessExited(worker=worker, reason=KILLED), scene.now)
    scene.look()


def test_all_of_them_are_in() -> None:
    scene = two_pools()
    assert scene.coordinator.view
    assert scene.coordinator.view.members == ("w1", "there-w1", "there-w2", "w2")


@pytest.mark.failure(
    "External workers, pools and machines",
    "two pools start workers, and both count from w1",
    seen="the workers of the second pool are called POOL-w1",
    outcome="an exit reported by a pool applies to its own worker only",
)
def test_an_exit_is_that_of_the_pools_own_worker() -> None:
    scene = two_pools()
    exits(scene, "there", "there-w1")
    assert list(scene.coordinator.dead) == ["there-w1"]
    scene.close("there-w1")
    assert scene.fields["lost"]["worker"] == "there-w1"
    assert set(scene.coordinator.workers) == {"w1", "there-w2", "w2"}


def test_a_process_that_never_said_hello_takes_nobody_with_it() -> None:
    scene = two_pools()
    exits(scene, "third", "third-w1")
    assert scene.fields["exited"]["worker"] == "third-w1"
    assert len(scene.coordinator.workers) == 4
    exits(scene, "third", "third-w1")  # told again
    assert scene.events.count("exited") == 1
    assert scene.coordinator.startup_failures == {"third-": 1}, (
        "another pool's failures don't end the run's own replacements"
    )


def test_an_exit_of_somebody_who_is_in_no_pool_is_not_believed() -> None:
    scene = Scene(wanted=1)
    scene.greet("w1", session="s", attempt=1)
    exits(scene, "here", "w1")
    assert scene.events == ["starting"]
    assert not scene.coordinator.dead


def rosters(scene: Scene) -> tuple[m.Roster, m.Roster]:
    return scene.coordinator.roster("here"), scene.coordinator.roster("there")


def test_each_pool_is_told_of_its_own() -> None:
    scene = two_pools()
    here, there = rosters(scene)
    assert (here.mark, there.mark) == ("", "there-"), "by which it names those that it starts"
    scene.coordinator.release("there-w1", scene.now)
    here, there = rosters(scene)
    assert (here.leaving, there.leaving) == ((), ("there-w1",))
    view_changes.remove(scene.coordinator, "w1", Removal.EVICTED, "a test")
    scene.look()
    for worker in ("there-w1", "there-w2", "w2"):
        scene.report(worker, 0)
    here, there = rosters(scene)
    assert (here.evicted, there.evicted) == (("w1",), ())


def test_what_is_wanted_is_wanted_of_one_pool() -> None:
    scene = Scene(wanted=2, minimum=2, maximum=5)
    coordinator = scene.coordinator
    for who in (("here", "w1"), ("there", "there-w1")):
        ask_in(scene, *who)
    assert [each.wanted for each in rosters(scene)] == [2, 0], "a second pool gives what it is asked for"
    coordinator.scale(3, scene.now, "there")
    assert [each.wanted for each in rosters(scene)] == [2, 3]
    with pytest.raises(UsageError, match=r"scale 4\b.*\b2\b.*--max 5\b"):
        coordinator.scale(4, scene.now, "there")
    coordinator.scale(0, scene.now)
    assert [each.wanted for each in rosters(scene)] == [0, 3]
    assert re.search(r"\b0\b", coordinator.workers["w1"].leaving)
    assert not coordinator.workers["there-w1"].leaving
    with pytest.raises(UsageError, match=r"scale 1\b.*--min 2\b"):
        coordinator.scale(1, scene.now, "there")
    with pytest.raises(UsageError, match=r"--pool elsewhere\b.*\bhere, there\b"):
        coordinator.scale(1, scene.now, "elsewhere")
    coordinator.release("there-w1", scene.now)
    assert [each.wanted for each in rosters(scene)] == [0, 2]
    assert [each.wanted for each in rosters(scene.look().restarted())] == [0, 2]


def test_whose_an_id_is() -> None:
    scene = Scene()
    cases = [
        ("here", "w1", "w1", "the first pool's"),
        ("there", "there-w1", "there-w1", "another's"),
        ("there", "w2", "guest-1", "it is not called as its pool calls its own"),
        ("here", "there-w2", "guest-2", "nor is this one"),
        ("there-too", "there-too-w1", "there-too-w1", "a name that begins with another's"),
        ("there", "there-too-w2", "guest-3", "and is not its own therefore"),
        ("here", "guest-9", "guest-4", "the run gives those"),
    ]
    for number, (pool, brings, called, remark) in enumerate(cases):
        assert scene.greet(brings, pool=pool, session=str(number), attempt=1) == called, remark


def test_names_survive_the_coordinator() -> None:
    scene = two_pools()
    scene = scene.restarted()
    given = scene.greet("there-w1", pool="there", session="there there-w1", attempt=2, synced=True)
    assert given == "there-w1"
    exits(scene, "there", "there-w2")
    assert "there-w2" in scene.coordinator.dead
    assert "w2" not in scene.coordinator.dead


@pytest.mark.failure(
    "External workers, pools and machines",
    "two pools have the same name",
    seen="an error at once, for the second",
    outcome="the second pool ends; the run continues",
)
def test_a_second_pool_of_the_same_name_is_refused(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        keeping = asyncio.create_task(serve_pool(FakePool("here"), scene.ticket))
        await scene.until(lambda: scene.server._pools.names == ["here"])
        [hello] = scene.server._pools._connected.values()
        hello.pid += 1  # as if the first were another process
        with pytest.raises(Refused, match="'here'"):
            await serve_pool(FakePool("here"), scene.ticket)
        other = FakePool("there")
        second = asyncio.create_task(serve_pool(other, scene.ticket))
        await scene.until(lambda: scene.server._pools.names == ["here", "there"])
        scene.server.coordinator.scale(2, scene.server.now(), "there")
        await scene.until(lambda: other.started == ["there-w1", "there-w2"])
        await scene.until(lambda: scene.events("refused"))
        for task in (keeping, second):
            task.cancel()
        await asyncio.gather(keeping, second, return_exceptions=True)

    play(tmp_path, scenario, wanted=2)
