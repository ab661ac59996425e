"""Between hosts those that serve the same column exchange their hosts' sums: to the same bits, in fewer bytes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.collective.buckets import Bucket
from farandole.collective.fake import FakeNetwork
from farandole.collective.schedule import Levels
from farandole.protocol.view import COMMIT_FIELDS, Lineage, View
from tests.support.exchanging import Worker, assert_same, expected, on_all, until, workers

HOSTS = ["aabb", "abab", "aaab", "abbb", "aabbc", "abcabca", "abcddda", "aaaabbb"]
BUCKET = Bucket(index=0, dtype=torch.float32, device=torch.device("cpu"), params=(0,), offsets=(0,), numel=1 << 19)


def view_of(hosts: str) -> View:
    return View(number=1, members=tuple(f"w{rank}" for rank in range(len(hosts))), group=1, hosts=tuple(hosts))


def run(hosts: str, shards: int, *, rounds: int = 2) -> list[Worker]:
    """Raises if anyone ends a round with other bits than the tree's."""
    with workers(len(hosts), network=FakeNetwork(), hosts=hosts) as everyone:
        lineage = view_of(hosts).lineage(everyone[0].exchange.view.members).sets
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


def test_a_worker_exchanges_with_its_host_and_with_one_worker_of_each_other_host() -> None:
    for worker, host in zip(run("aabbcc", 6, rounds=1), "aabbcc", strict=True):
        assert worker.links
        beyond = Counter("aabbcc"[int(peer[1:])] for peer in worker.links.bytes)
        assert beyond == Counter(dict.fromkeys("abc", 1)), f"{worker.name} of {host}"


@given(hosts=st.text("abcde", min_size=1, max_size=12), numel=st.integers(1, 4096))
def test_every_element_is_summed_up_once_and_held_once_on_each_host(hosts: str, numel: int) -> None:
    bucket = Bucket(
        index=0, dtype=torch.float32, device=torch.device("cpu"), params=(0,), offsets=(0,), numel=numel * 16
    )
    levels = Levels.of(view_of(hosts))
    cuts = [levels.slice(bucket, column, host) for column in range(levels.columns) for host in range(len(levels.hosts))]
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
    assert cuts[-1][1] == bucket.numel
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


def test_a_loss_within_a_step_is_made_up_for_across_hosts() -> None:
    """Two hosts of two; one worker dies after its first bucket, and the round is done again by three on two hosts."""
    network, hosts = FakeNetwork(), "aabb"
    with workers(4, network=network, hosts=hosts) as everyone:
        first = everyone[0].exchange.view
        on_all(everyone, lambda worker: worker.step(0, 9, (first.members,)))
        lost, survivors = everyone[3], everyone[:3]

        def begin(worker: Worker) -> None:
            worker.done = set()
            worker.partials.begin(9)
            worker.begin(1, 9, (first.members,))
            worker.compute(1, only=1 if worker is lost else None)

        on_all(everyone, begin)
        network.lose(lost.name)
        until(lambda: any(worker.agreement.lost_peers for worker in survivors))
        second = View(number=2, members=("w0", "w1", "w2"), group=1, hosts=tuple("aab"))
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
