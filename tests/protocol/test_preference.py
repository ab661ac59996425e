"""How many workers are wanted of each of several pools."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import OwnPool
from farandole.protocol.settings import PoolTerms, targets
from tests.support.scene import Scene

RESERVED, SPOT = ("", None), ("spot-", None)


@pytest.mark.parametrize(
    ("total", "sizes", "fixed", "can", "there", "expected", "remark"),
    [
        (4, [RESERVED, SPOT], {}, {}, {}, {"": 4, "spot-": 0}, "the first is asked for all, while it says nothing"),
        (4, [("", 1), SPOT], {}, {}, {}, {"": 1, "spot-": 3}, "never more than its size"),
        (4, [RESERVED, SPOT], {}, {"": 3}, {"": 3}, {"": 4, "spot-": 1}, "it is still asked for what it can't have"),
        (4, [RESERVED, SPOT], {}, {"": 0}, {"": 2}, {"": 4, "spot-": 2}, "what is there of it counts"),
        (4, [RESERVED, SPOT], {}, {"": 9}, {"": 0}, {"": 4, "spot-": 0}, "what it can have soon counts"),
        (4, [("", 1), ("spot-", 2)], {}, {}, {}, {"": 1, "spot-": 2}, "together they have no more"),
        (4, [RESERVED, SPOT], {"": 1}, {}, {}, {"": 1, "spot-": 4}, "a number that is fixed takes no part"),
        (None, [RESERVED, SPOT], {}, {"": 3, "spot-": 5}, {}, {"": 3, "spot-": 5}, "all that there are"),
        (None, [("", 2), SPOT], {}, {"": 3}, {"spot-": 1}, {"": 2, "spot-": 1}, "who is there before it has said so"),
        (None, [("", 2)], {}, {}, {}, {"": 2}, "no limit is known but its size"),
        (None, [RESERVED], {}, {"": 1}, {"": 3}, {"": 3}, "nobody goes for a host out of reach"),
    ],
)  # fmt: skip
def test_targets(total, sizes, fixed, can, there, expected, remark) -> None:  # type: ignore[no-untyped-def]
    assert targets(total, sizes, fixed, can, there) == expected, remark


def of_two(**settings: object) -> Scene:
    """A rack that is preferred, and spot instances; three workers of each would do for themselves."""
    pools = (PoolTerms(name="rack"), PoolTerms(name="spot", kind="ec2"))
    return Scene(pools=pools, pool=OwnPool(pool="rack", host="here", pid=1), wanted=3, **settings)


def told(scene: Scene, pool: str, message: m.FromPool) -> None:
    scene.coordinator.on_pool_message(pool, "here", message, scene.now)
    scene.look()


def wanted(scene: Scene) -> tuple[int, int]:
    return scene.coordinator.roster("rack").wanted, scene.coordinator.roster("spot").wanted


def mixed() -> Scene:
    """The rack has one host, of one slot; two workers of the other pool fill up."""
    scene = of_two()
    assert wanted(scene) == (3, 0)
    told(scene, "rack", m.Capacity(workers=1))
    assert wanted(scene) == (3, 2), "it is still asked, should it get more"
    scene.ready("w1", pool="rack")
    scene.ready("spot-w1", "spot-w2", pool="spot")
    return scene


def test_what_the_preferred_pool_can_have_again_the_newest_of_the_other_make_room_for() -> None:
    scene = mixed()
    told(scene, "rack", m.Capacity(workers=2))
    assert wanted(scene) == (3, 1)
    assert scene.events.count("notice") == 1
    assert scene.fields["notice"]["worker"] == "spot-w2"


def test_less_than_it_has_makes_nobody_leave() -> None:
    scene = mixed()
    told(scene, "rack", m.Capacity(workers=0))
    assert wanted(scene) == (3, 2)
    scene.lose("w1")
    assert wanted(scene) == (3, 3), "its place is to be filled"
    assert "notice" not in scene.events


def test_a_pool_whose_hosts_are_on_their_way_claims_what_it_is_asked_for() -> None:
    """What it has already may begin."""
    scene = of_two()
    told(scene, "rack", m.Capacity(workers=1, gathers=True))
    assert wanted(scene) == (3, 0)
    told(scene, "rack", m.Capacity(workers=1))
    assert wanted(scene) == (3, 2)


def test_no_limit_that_is_known_is_all_that_it_is_asked_for() -> None:
    scene = mixed()
    told(scene, "rack", m.Capacity(workers=None))
    assert wanted(scene) == (3, 0)


def test_the_next_coordinator_knows_what_they_have_said() -> None:
    scene = mixed()
    again = scene.restarted()
    assert wanted(again) == (3, 2)


def test_scale_sets_them_all_or_fixes_one() -> None:
    scene = mixed()
    scene.coordinator.scale(5, scene.now)
    assert wanted(scene) == (5, 4)
    scene.coordinator.scale(1, scene.now, "spot")
    assert wanted(scene)[1] == 1
    assert scene.coordinator.wanted == scene.coordinator.roster("rack").wanted + 1
    scene.coordinator.scale(3, scene.now)
    assert wanted(scene) == (3, 2), "and no number is fixed any more"


def test_who_is_released_is_not_asked_for_again() -> None:
    scene = mixed()
    scene.coordinator.release("w1", scene.now)
    assert wanted(scene) == (0, 2)


def test_without_a_number_all_that_there_are() -> None:
    scene = of_two(minimum=1)
    scene.settings["wanted"] = None
    scene = Scene(**scene.settings)
    assert wanted(scene) == (0, 0)
    told(scene, "rack", m.Capacity(workers=1, gathers=True))
    assert wanted(scene) == (1, 0), "who is there begins"
    told(scene, "rack", m.Capacity(workers=4))
    told(scene, "spot", m.Capacity(workers=2))
    assert wanted(scene) == (4, 2)
    assert scene.coordinator.wanted == 6


def fails(scene: Scene, *workers: str, pool: str = "spot") -> None:
    for worker in workers:
        scene.hello(worker, pool=pool)
        scene.lose(worker)


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "workers die before they have joined (a broken installation, no memory for one more)",
)
def test_a_pool_whose_workers_die_before_they_join_starts_no_more() -> None:
    scene = mixed()
    fails(scene, *(f"spot-w{number}" for number in range(3, 7)))
    assert wanted(scene) == (3, 2)
    scene.lose("spot-w2")
    assert wanted(scene) == (2, 1), "it keeps whom it has, and the other pool is asked for the rest"
    assert scene.events.count("no replacements") == 1
    assert "pool spot" in scene.fields["no replacements"]["reason"]
    assert scene.coordinator.ending is None
    scene.coordinator.scale(2, scene.now, "spot")
    fails(scene, *(f"spot-w{number}" for number in range(7, 11)))
    assert wanted(scene) == (2, 2), "`farandole scale` begins to count anew"


def test_one_pool_s_workers_that_join_say_nothing_of_another_s() -> None:
    scene = of_two()
    told(scene, "rack", m.Capacity(workers=1))
    fails(scene, *(f"spot-w{number}" for number in range(1, 5)))
    scene.ready("w1", pool="rack")
    scene.switch(scene.last("w1", m.Propose).view, 0)
    assert scene.coordinator.startup_failures == {"spot-": 4}
    fails(scene, "spot-w5")
    assert wanted(scene) == (3, 0)
    assert scene.coordinator.ending is None


def test_a_worker_of_the_pool_that_joins_ends_its_row() -> None:
    scene = of_two()
    told(scene, "rack", m.Capacity(workers=1))
    scene.ready("w1", pool="rack")
    scene.switch(scene.last("w1", m.Propose).view, 0)
    fails(scene, "spot-w1")
    scene.ready("spot-w2", pool="spot")
    scene.switch(scene.last("w1", m.Propose).view, 5)
    assert scene.coordinator.startup_failures == {}


def test_without_any_pool_that_could_begin_it_the_run_ends() -> None:
    scene = Scene(pool=OwnPool(pool="rack", host="here", pid=1), wanted=1)
    scene.coordinator.roster("spot")
    told(scene, "spot", m.Capacity(workers=9))
    scene.coordinator.scale(2, scene.now, "spot")
    scene.coordinator.scale(0, scene.now, "rack")
    fails(scene, *(f"spot-w{number}" for number in range(1, 6)))
    assert scene.coordinator.over
    assert scene.coordinator.over.code == 1
    assert "pool spot" in scene.coordinator.over.reason
