"""A host's shards are one range in a round that begins in a view, whatever order its workers joined in."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.protocol import messages as m
from farandole.protocol.view import View
from tests.support.scene import SIGNATURE, Scene, trained

HOSTS = st.sampled_from(("north", "south", "east"))


def ranges(view: View, workers: tuple[str, ...], shards: int) -> list[str]:
    """The hosts in the order of the shards, one for each range."""
    host = dict(zip(view.members, view.hosts, strict=True))
    held = view.lineage(workers).assign(shards)
    assert sorted(shard for mine in held.values() for shard in mine) == list(range(shards))
    at = {shard: host[worker] for worker, mine in held.items() for shard in mine}
    return [each for each, _ in groupby(at[shard] for shard in sorted(at))]


@given(st.lists(HOSTS, min_size=1, max_size=12), st.data())
def test_each_hosts_shards_are_one_range(hosts: list[str], data: st.DataObject) -> None:
    members = tuple(f"w{number}" for number in range(len(hosts)))
    shares = data.draw(st.just(()) | st.tuples(*[st.integers(1, 1000) for _ in hosts]))
    view = View(number=1, members=members, group=1, hosts=tuple(hosts), shares=shares)
    workers = tuple(w for w in members if data.draw(st.booleans())) or members
    found = ranges(view, workers, data.draw(st.integers(0, 40)))
    assert len(found) == len(set(found))
    dealt = view.lineage(workers).sets[0]
    assert sorted(dealt) == sorted(workers)
    assert dealt[0] == workers[0], "whose shards come first stays"
    for one, other in pairwise(dealt):
        at = members.index
        assert hosts[at(one)] != hosts[at(other)] or at(one) < at(other), "in one host in the order of standing"
    of = dict(zip(members, shares, strict=True)) if shares else {}
    assert view.lineage(workers).shares in ((), tuple(of.get(worker) for worker in dealt)), "each keeps its own"


@given(st.lists(HOSTS, min_size=2, max_size=2), st.lists(st.tuples(st.booleans(), HOSTS), max_size=8))
def test_whoever_joins_and_dies(first: list[str], then: list[tuple[bool, str]]) -> None:
    scene = Scene(wanted=2, minimum=1)
    names = iter(f"w{number}" for number in range(20))

    def ask_in(host: str) -> None:
        worker = next(names)
        scene.greet(worker, pool="pool", session=worker, attempt=1, host=host)
        scene.say(worker, m.Ready(signature=SIGNATURE))
        while scene.coordinator.proposed:
            scene.switch(scene.coordinator.proposed, 0)

    for host in first:
        ask_in(host)
    for joins, host in then:
        view = scene.coordinator.view
        assert view
        if joins or view.size < 2:
            ask_in(host)
        else:
            scene.lose(view.members[0])
            for worker in view.members[1:]:
                scene.report(worker, 0)
        view = scene.coordinator.view
        assert view
        assert view.hosts == tuple(scene.coordinator.workers[worker].host for worker in view.members)
        for workers in (view.members, view.synced):
            found = ranges(view, workers, 3 * view.size)
            assert len(found) == len(set(found))


def test_ranks_stay_the_order_of_standing() -> None:
    view = View(number=2, members=("a", "b", "c"), group=1, hosts=("x", "y", "x"), shares=(4, 2, 1))
    assert [view.rank(worker) for worker in "abc"] == [0, 1, 2]
    assert view.lineage(view.members).sets == (("a", "c", "b"),)
    assert view.lineage(view.members).shares == (4, 1, 2)
    assert view.lineage(view.members).assign(7) == {"a": (0, 1, 2, 3), "c": (4,), "b": (5, 6)}


def test_a_new_deal_keeps_the_hosts() -> None:
    scene = trained("a", "b", "c", views_per_group=2)
    view = scene.coordinator.view
    assert view
    scene.say("c", m.LeaveRequest(reason="SIGTERM"))
    proposed = scene.last("a", m.Propose).view
    assert (proposed.members, proposed.hosts) == (("a", "b"), ("h-a", "h-b"))
    scene.switch(proposed, 4, "a", "b", "c")
    anew = scene.last("a", m.Propose).view
    assert (anew.group, anew.hosts) == (anew.number, ("h-a", "h-b")), "the same members over new connections"


def test_one_host_for_each_or_none() -> None:
    with pytest.raises(ValueError, match=r"\b1\b.*\b2\b"):
        View(number=1, members=("a", "b"), group=1, hosts=("x",))
