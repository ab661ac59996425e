"""Workers of several hosts and zones exchange the sums of their hosts and zones: to the same bits, in fewer bytes."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.collective.buckets import Bucket
from farandole.collective.fake import FakeNetwork
from farandole.collective.schedule import Levels
from farandole.protocol.view import COMMIT_FIELDS, Lineage, View
from tests.support.exchanging import Worker, assert_same, expected, on_all, until, workers

ZONED = [  # the hosts of the workers, and the zones of these hosts
    ("abcd", "eeww"), ("abcde", "eeeww"), ("abcde", "ewwww"), ("aabbcc", "eeeeww"), ("abacbd", "ewewww"),
    ("abcdef", "eewwxx"), ("aaabcd", "eeeeww"), ("aabbccdd", "eeeewwww"), ("abcd", "ewew"),
]  # fmt: skip
HOSTS = ["aabb", "abab", "aaab", "abbb", "aabbc", "abcabca", "abcddda", "aaaabbb"]
BUCKET = Bucket(index=0, dtype=torch.float32, device=torch.device("cpu"), params=(0,), offsets=(0,), numel=1 << 19)


def view_of(hosts: str, zones: str = "") -> View:
    members = tuple(f"w{rank}" for rank in range(len(hosts)))
    return View(number=1, members=members, group=1, hosts=tuple(hosts), zones=tuple(zones))


def run(hosts: str, shards: int, *, rounds: int = 2, zones: str = "") -> list[Worker]:
    """Raises if anyone ends a round with other bits than the tree's."""
    with workers(len(hosts), network=FakeNetwork(), hosts=hosts, zones=zones) as everyone:
        lineage = view_of(hosts, zones).lineage(everyone[0].exchange.view.members).sets
        for step in range(rounds):
            wanted = expected(everyone[0].layout, step, shards)
            for buckets in on_all(everyone, lambda worker, step=step: worker.step(step, shards, lineage)):
                assert_same(buckets, wanted)  # type: ignore[arg-type]
        return everyone


@pytest.mark.parametrize("shards", [1, 7, 16])
@pytest.mark.parametrize("hosts", HOSTS)
def test_the_bits_are_those_of_the_tree_whatever_the_hosts_are(hosts: str, shards: int) -> None:
    for worker in run(hosts, shards):
        assert Counter(word.shards for word in worker.agreement.commits).total() == len(hosts), "a word of everyone"


@pytest.mark.parametrize("shards", [1, 7, 16])
@pytest.mark.parametrize(("hosts", "zones"), ZONED)
def test_nor_do_the_zones_change_the_bits(hosts: str, zones: str, shards: int) -> None:
    for worker in run(hosts, shards, zones=zones):
        assert Counter(word.shards for word in worker.agreement.commits).total() == len(hosts)


@pytest.mark.parametrize("hosts", ["ab", "aabb", "aaaabbbb", "aabbcc"])
def test_what_goes_from_host_to_host_is_the_size_of_the_sums_however_many_workers_a_host_has(hosts: str) -> None:
    """Where each host holds one partial sum: what a ring all-reduce between the hosts would send, and words."""
    others = len(set(hosts)) - 1
    everyone = run(hosts, 4 * len(set(hosts)), rounds=1)
    total = sum(bucket.numel * bucket.dtype.itemsize for bucket in everyone[0].layout.buckets)
    across = 0
    for worker, host in zip(everyone, hosts, strict=True):
        assert worker.links
        across += sum(size for peer, size in worker.links.bytes.items() if hosts[int(peer[1:])] != host)
    assert across == 2 * others * total + others * len(hosts) * COMMIT_FIELDS * 8


@pytest.mark.parametrize(
    ("hosts", "zones", "shards"),
    [("abcd", "eeww", 4), ("abcd", "ewew", 8), ("aabbccdd", "eeeewwww", 16), ("abcdef", "eewwxx", 12)],
)
def test_one_copy_of_the_sums_goes_from_one_zone_to_another(hosts: str, zones: str, shards: int) -> None:
    """Where each zone holds one partial sum: what a ring all-reduce between the zones would send, and words."""
    everyone, others = run(hosts, shards, rounds=1, zones=zones), len(set(zones)) - 1
    total = sum(bucket.numel * bucket.dtype.itemsize for bucket in everyone[0].layout.buckets)
    across, words = 0, 0
    for worker, zone in zip(everyone, zones, strict=True):
        assert worker.links
        across += sum(size for peer, size in worker.links.bytes.items() if zones[int(peer[1:])] != zone)
        words += len({host for host, there in zip(hosts, zones, strict=True) if there != zone})
    assert across == 2 * others * total + words * COMMIT_FIELDS * 8


def test_a_worker_exchanges_with_its_host_and_with_one_worker_of_each_other_host() -> None:
    for worker, host in zip(run("aabbcc", 6, rounds=1), "aabbcc", strict=True):
        assert worker.links
        beyond = Counter("aabbcc"[int(peer[1:])] for peer in worker.links.bytes)
        assert beyond == Counter(dict.fromkeys("abc", 1)), f"{worker.name} of {host}"


def test_sums_in_memory_of_their_own_have_the_size_of_the_layout_of_their_round() -> None:
    """A host and a zone with several sums: first of a small layout, then of a larger one, then of the first again."""
    shapes: dict[str, list[tuple[int, ...]]] = {"small": [(600, 50)], "large": [(1500, 150)]}
    with workers(6, network=FakeNetwork(), hosts="aabbcc", zones="eeeeww", shapes=shapes["small"]) as everyone:
        members = everyone[0].exchange.view.members
        for number, size in enumerate(("small", "large", "small")):
            for worker in everyone:
                worker.reshape(shapes[size])
            for buckets in on_all(everyone, lambda worker, number=number: worker.step(number, 11, (members,))):
                assert_same(buckets, expected(everyone[0].layout, number, 11))  # type: ignore[arg-type]


@given(
    hosts=st.text("abcde", min_size=1, max_size=12), zone_of=st.text("ewx", min_size=5, max_size=5),
    numel=st.integers(1, 4096),
)  # fmt: skip
def test_every_element_is_summed_up_once_and_held_once_on_each_host(hosts: str, zone_of: str, numel: int) -> None:
    bucket = Bucket(
        index=0, dtype=torch.float32, device=torch.device("cpu"), params=(0,), offsets=(0,), numel=numel * 16
    )
    levels = Levels.of(view_of(hosts, "".join(zone_of["abcde".index(host)] for host in hosts)))
    parts = range(levels.columns), range(levels.strips), range(len(levels.zones))
    cuts = [levels.slice(bucket, *part) for part in product(*parts)]
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
    assert cuts[-1][1] == bucket.numel
    workers_ = [worker for on_host in levels.hosts for worker in on_host]
    assert sorted(cut for worker in workers_ for cut in levels.slices(bucket, worker)) == sorted(cuts)
    for zone, column in product(levels.zones, range(levels.columns)):
        on_zone = [levels.strips_of(bucket, column, levels.hosts[host][0]) for host in zone]
        assert on_zone[0][0] == levels.slice(bucket, column, 0, 0)[0]
        assert [start for start, _ in on_zone[1:]] == [stop for _, stop in on_zone[:-1]]
        assert on_zone[-1][1] == levels.slice(bucket, column, levels.strips - 1, len(levels.zones) - 1)[1]
    for number, on_host in enumerate(levels.hosts):
        stretches = [levels.stretch(bucket, worker) for worker in on_host]
        assert [start for start, _ in stretches] == [0, *(stop for _, stop in stretches[:-1])]
        assert stretches[-1][1] == bucket.numel
        assert [levels.delegate(number, column) for column in range(levels.columns)] == [
            worker for worker in on_host for _ in levels.served(worker)
        ]


def test_what_has_landed_and_is_sent_on_stays_until_the_other_host_has_it() -> None:
    """The host's sum is w1's alone, which lands at w0; the third bucket's lands there before w2 takes the first's."""
    with workers(3, network=FakeNetwork(), hosts="aab", shapes=[(4000,), (1500, 1500), (600, 500)]) as everyone:
        assert len(everyone[0].layout.buckets) == 4
        for worker in everyone:
            if worker.name == "w2":
                until(lambda: (everyone[0].exchange.waiting_for or ("",))[0] == "w2")
            worker.partials.begin(2)
            worker.exchange.begin(0, worker.partials, 2, Lineage(sets=(("w1", "w2"),)))
            worker.todo = [] if worker.name == "w0" else [int(worker.name == "w2")]
            for bucket in range(0 if worker.todo else 4):
                worker.exchange.submit(bucket)
            worker.compute(0)
        wanted = expected(everyone[0].layout, 0, 2)
        for worker in everyone:
            worker.agreement.until(lambda worker=worker: worker.exchange.ended)
            assert_same(worker.exchange.reduced(worker.layout), wanted)


@pytest.mark.parametrize(
    ("hosts", "zones", "dies"),
    [("aabb", "", 3), ("abcd", "eeww", 1), ("abcde", "eewww", 4), ("aabcd", "eeeww", 0), ("abc", "eww", 0)],
)
def test_a_loss_within_a_step_is_made_up_for_across_hosts_and_zones(hosts: str, zones: str, dies: int) -> None:
    """One worker dies after its first bucket, and the round is done again by the others on their hosts."""
    network = FakeNetwork()
    with workers(len(hosts), network=network, hosts=hosts, zones=zones) as everyone:
        first = everyone[0].exchange.view
        on_all(everyone, lambda worker: worker.step(0, 9, (first.members,)))
        lost, survivors = everyone[dies], everyone[:dies] + everyone[dies + 1 :]

        def begin(worker: Worker) -> None:
            worker.done = set()
            worker.partials.begin(9)
            worker.begin(1, 9, (first.members,))
            worker.compute(1, only=1 if worker is lost else None)

        on_all(everyone, begin)
        network.lose(lost.name)
        until(lambda: any(worker.agreement.lost_peers for worker in survivors))
        stay = tuple(worker.name for worker in survivors)
        second = View(number=2, members=stay, group=1, hosts=first.hosts_of(stay), zones=first.zones_of(stay))
        for worker in survivors:
            worker.agreement.stopped = True

        def again(worker: Worker) -> list[torch.Tensor]:
            old = worker.exchange
            worker.enter(second)
            worker.agreement.round = 1
            old.close()
            old.release_peers()
            worker.begin(1, 9, (first.members, second.members))
            worker.compute(1)
            worker.agreement.until(lambda: worker.exchange.ended)
            return [flat.clone() for flat in worker.exchange.reduced(worker.layout)]

        for buckets in on_all(survivors, again):
            assert_same(buckets, expected(survivors[0].layout, 1, 9))  # type: ignore[arg-type]
        lost.exchange.close()
