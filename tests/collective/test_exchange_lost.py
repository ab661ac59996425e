"""A peer of the exchange is lost: the survivors do the round again on the connections that stand, over real Gloo."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch

from farandole.collective.transport import PeerLost
from farandole.errors import FarandoleError
from farandole.protocol.view import View
from tests.support.exchanging import Worker, assert_same, expected, on_all, until, workers
from tests.support.linking import connect, kill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several loopback addresses, /proc/self/fd")


FIRST = View(number=1, members=("w0", "w1", "w2"), group=1)


def until_somebody_reports(survivors: Sequence[Worker]) -> list[tuple[int, str]]:
    """One report is enough for the coordinator. Others may wait for what the reporter will not send any more."""
    until(lambda: any(worker.agreement.lost_peers for worker in survivors))
    return [lost for worker in survivors for lost in worker.agreement.lost_peers]


def follow(worker: Worker, view: View, round_: int) -> None:
    """What Rounds does on Resume: the old exchange releases its peers, the next view's takes the same partial sums."""
    old = worker.exchange
    worker.enter(view, stage=worker.stage)
    worker.agreement.round = round_
    old.close()
    old.release_peers()


def redo(worker: Worker, view: View, step: int, shards: int, lineage: tuple[tuple[str, ...], ...]) -> object:
    follow(worker, view, step)
    worker.begin(step, shards, lineage)
    worker.compute(step)
    worker.agreement.until(lambda: worker.exchange.ended)
    return [flat.clone() for flat in worker.exchange.reduced(worker.layout)]


@pytest.mark.parametrize("stage", [None, True], ids=["direct", "staged"])
@pytest.mark.parametrize("hosts", ["", "aaa", "aba"])
@pytest.mark.parametrize("handed_in", [0, 1, 2, 3])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_redo_the_round_on_the_same_connections(
    victim: int, handed_in: int, hosts: str, stage: bool | None
) -> None:
    """The victim dies in step 2 after `handed_in` of its buckets; the others inherit its shards and go on."""
    shards = 7
    with workers(3, stage=stage, doomed=[victim], hosts=hosts) as everyone:
        for step in range(2):
            on_all(everyone, lambda w, step=step: w.step(step, shards, (FIRST.members,)))
        dead = everyone[victim]
        survivors = [worker for worker in everyone if worker is not dead]

        def third(worker: Worker) -> None:
            worker.done = set()
            worker.partials.begin(shards)
            worker.begin(2, shards, (FIRST.members,))
            worker.compute(2, only=handed_in if worker is dead else None)

        dead.agreement.stopped = True  # whatever it has handed in, it does not get to say its word
        on_all(everyone, third)
        dead.die()
        reports = until_somebody_reports(survivors)
        assert set(reports) == {(1, dead.name)}
        assert not any(worker.exchange.ended for worker in survivors)

        view = View(number=2, members=tuple(w.name for w in survivors), group=1)
        lineage = (FIRST.members, view.members)
        for buckets in on_all(survivors, lambda w: redo(w, view, 2, shards, lineage)):
            assert_same(buckets, expected(survivors[0].layout, 2, shards))  # type: ignore[arg-type]
        for step in (3, 4):
            for worker in survivors:
                worker.agreement.round = step
            for buckets in on_all(survivors, lambda w, step=step: w.step(step, shards, (view.members,))):
                assert_same(buckets, expected(survivors[0].layout, step, shards))  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", ["", "aaa", "abb"])
def test_two_losses_in_one_round_down_to_one(hosts: str) -> None:
    shards = 6
    with workers(3, doomed=[2, 1], hosts=hosts) as everyone:
        a, b, c = everyone

        def begin(worker: Worker) -> None:
            worker.partials.begin(shards)
            worker.begin(0, shards, (FIRST.members,))
            worker.compute(0, only=0 if worker is c else None)

        on_all(everyone, begin)
        c.die()
        assert set(until_somebody_reports([a, b])) == {(1, "w2")}

        second = View(number=2, members=("w0", "w1"), group=1)
        lineage: tuple[tuple[str, ...], ...] = (FIRST.members, second.members)

        def again(worker: Worker) -> None:
            follow(worker, second, 0)
            worker.begin(0, shards, lineage)
            worker.compute(0, only=0 if worker is b else None)

        on_all([a, b], again)
        b.die()
        assert until_somebody_reports([a]) == [(2, "w1")]

        third = View(number=3, members=("w0",), group=1)
        follow(a, third, 0)
        a.begin(0, shards, (*lineage, third.members))
        a.compute(0)
        a.exchange.on_all_submitted()
        assert a.exchange.ended
        assert_same(a.exchange.reduced(a.layout), expected(a.layout, 0, shards))


@pytest.mark.parametrize("hosts", ["", "aa"])
def test_a_stopped_view_ends_no_round_although_every_byte_is_there(hosts: str) -> None:
    """Stop has been answered: `word` refuses, and the buckets wait for what the coordinator decides."""
    with workers(2, hosts=hosts) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        everyone[1].agreement.stopped = True

        def attempt(worker: Worker) -> None:
            worker.partials.begin(4)
            worker.begin(0, 4, lineage)
            worker.compute(0)

        on_all(everyone, attempt)
        until(lambda: everyone[1].agreement.asked and (everyone[0].stands or everyone[0].exchange.ended))
        assert not any(worker.exchange.ended for worker in everyone)
        view = View(number=2, members=lineage[0], group=1)
        for buckets in on_all(everyone, lambda w: redo(w, view, 0, 4, (lineage[0], lineage[0]))):
            assert_same(buckets, expected(everyone[0].layout, 0, 4))  # type: ignore[arg-type]


def test_a_lost_peer_is_an_error_of_ours_that_names_it() -> None:
    left, right = connect(["left", "right"], doomed=[1])
    wait = left.receive(torch.zeros(4), "right", 7)
    kill("127.0.0.2")
    with pytest.raises(PeerLost, match=r"^right: ") as caught:
        wait.wait()
    assert caught.value.peer == "right"
    assert isinstance(caught.value, FarandoleError)
    with pytest.raises(PeerLost):
        left.send(torch.zeros(4), "right", 7).wait()
    del right
