"""The zones of a view: as the workers' first Hello reports them, one for each host, empty if there is only one."""

from __future__ import annotations

import msgspec
import pytest

from farandole.control.status import describe
from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.view import View
from tests.support.mentioned import mentions
from tests.support.scene import SIGNATURE, Scene


def ask_in(scene: Scene, worker: str, zone: str, *, host: str = "") -> None:
    scene.greet(worker, pool="pool", session=worker, attempt=1, zone=zone, host=host or f"h-{worker}")
    scene.say(worker, m.Ready(signature=SIGNATURE))


def started(**zones: str) -> tuple[Scene, View]:
    """A run whose workers are in these zones, each on a host of its own."""
    scene = Scene(wanted=len(zones), minimum=len(zones))
    for worker, zone in zones.items():
        ask_in(scene, worker, zone)
    view = scene.last(next(iter(zones)), m.Propose).view
    scene.switch(view, 0)
    return scene, view


def test_the_first_view_has_the_zones_of_its_members() -> None:
    _, view = started(a="east", b="west", c="east")
    assert (view.members, view.zones) == (("a", "b", "c"), ("east", "west", "east"))
    assert view.zones_of(("c", "b")) == ("east", "west")
    assert view.zones_of(("c", "x")) == ()


@pytest.mark.parametrize("zone", ["", "east"])
def test_one_zone_or_none_leaves_the_view_as_it_is(zone: str) -> None:
    _, view = started(a=zone, b=zone)
    assert view.zones == ()
    assert view.zones_of(view.members) == ()


def test_hosts_without_a_zone_are_in_one_of_their_own() -> None:
    _, view = started(a="east", b="", c="")
    assert view.zones == ("east", "", "")


def test_views_keep_the_zones_as_workers_join_leave_and_are_lost() -> None:
    scene, _ = started(a="east", b="east")
    ask_in(scene, "c", "west")
    joined = scene.last("a", m.Propose).view
    assert joined.zones == ("east", "east", "west")
    scene.switch(joined, 1)
    scene.say("b", m.LeaveRequest(reason="SIGTERM"))
    left = scene.last("a", m.Propose).view
    assert (left.members, left.zones) == (("a", "c"), ("east", "west"))
    scene.switch(left, 2, "a", "b", "c")
    scene.lose("c")
    scene.report("a", 2)
    resumed = scene.last("a", m.Resume).view
    assert (resumed.members, resumed.zones) == (("a",), ())


def test_a_view_after_a_loss_has_the_zones_of_the_others() -> None:
    scene, view = started(a="east", b="west", c="west")
    scene.lose("c")
    for worker in view.members[:2]:
        scene.report(worker, 0)
    assert scene.last("a", m.Resume).view.zones == ("east", "west")


def test_a_coordinator_that_is_back_knows_the_zones() -> None:
    scene, _ = started(a="east", b="west")
    again = scene.restarted()
    assert {worker.id: worker.zone for worker in again.coordinator.workers.values()} == {"a": "east", "b": "west"}
    assert again.coordinator.view
    assert again.coordinator.view.zones == ("east", "west")


@pytest.mark.parametrize("zone", ["west", ""])
def test_a_second_zone_of_a_host_is_refused_by_name(zone: str) -> None:
    scene, _ = started(a="east", b="west")
    ask_in(scene, "c", zone, host="h-a")
    assert mentions(scene.last("c", m.JoinRefused).reason, zone, "h-a", "a", "east", "FARANDOLE_ZONE")
    refused = [event for event in scene.recorded if isinstance(event, events.RefusedEvent)]
    assert [(event.worker, event.host) for event in refused] == [("c", "h-a")]
    assert "c" not in scene.coordinator.workers
    ask_in(scene, "d", "east", host="h-a")
    assert scene.last("a", m.Propose).view.zones == ("east", "west", "east")


def test_the_status_has_the_zone_of_each_worker() -> None:
    scene, _ = started(a="east", b="")
    status = describe(scene.coordinator, pid=1, address="http://h:1", steps=(), now=scene.now, time=0.0)
    assert [(worker.id, worker.zone) for worker in status.workers] == [("a", "east"), ("b", "")]
    assert [worker["zone"] for worker in msgspec.json.decode(msgspec.json.encode(status))["workers"]] == ["east", ""]


@pytest.mark.parametrize(
    ("hosts", "zones"),
    [(("x", "y"), ("east",)), ((), ("east", "west")), (("x", "y"), ("east", "west", "west"))],
)
def test_one_zone_for_each_or_none(hosts: tuple[str, ...], zones: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=rf"\b{len(zones)}\b.*\b{len(hosts)}\b.*\b2\b"):
        View(number=1, members=("a", "b"), group=1, hosts=hosts, zones=zones)


def test_a_host_is_in_one_zone() -> None:
    with pytest.raises(ValueError, match=r"'x'.*'east'.*'west'"):
        View(number=1, members=("a", "b", "c"), group=1, hosts=("x", "y", "x"), zones=("east", "west", "west"))
