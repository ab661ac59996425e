"""A peer of the exchange is lost: the survivors do the round again on the connections that stand, over real Gloo."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import pytest
import torch

from farandole.collective.codec import CODECS
from farandole.collective.fake import FakeNetwork
from farandole.collective.quantization import Place, Quantization
from farandole.collective.transport import PeerLost
from farandole.errors import FarandoleError
from farandole.protocol.view import View
from tests.support.exchanging import DEADLINE_S, Worker, assert_same, decoded, expected, on_all, until, workers
from tests.support.linking import SlowElsewhere, connect, kill

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
@pytest.mark.parametrize("hosts", ["", pytest.param("aaa", marks=pytest.mark.long), "aba"])
@pytest.mark.parametrize("handed_in", [0, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 2)), 3])
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long), 2])
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


def test_a_view_that_is_given_up_while_a_bucket_is_sent_sends_it_once() -> None:
    """A bucket of quantized numbers is sent by the thread that quantizes, beside the one that gives the view up."""
    with workers(2, codec=CODECS["int8"], network=FakeNetwork()) as (worker, _):
        assert worker.links is not None
        worker.links = links = SlowElsewhere(worker.links)
        worker.enter(View(number=1, members=("w0", "w1"), group=1))
        worker.partials.begin(2)
        worker.begin(0, 2, (("w0", "w1"),))
        worker.compute(0)
        assert links.lends.wait(DEADLINE_S)
        follow(worker, View(number=2, members=("w0",), group=1), 0)
        worker.partials.wait_until_quantized()
        assert links.lent
        assert len(links.lent) == len(set(links.lent))


def test_a_view_without_anything_left_to_compute_sends_what_is_still_being_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantize = Quantization.quantize

    def slow(self: Quantization, numbers: torch.Tensor, out: torch.Tensor, place: Place) -> torch.Tensor:
        time.sleep(0.05)
        return quantize(self, numbers, out, place)

    monkeypatch.setattr(Quantization, "quantize", slow)
    alone = View(number=2, members=("w0",), group=1)
    with workers(2, codec=CODECS["int8"], network=FakeNetwork()) as (worker, _):
        worker.partials.begin(1)
        worker.begin(0, 1, (("w0",),))
        worker.compute(0)
        worker.enter(alone)
        worker.begin(0, 1, (("w0",),))
        assert not worker.todo
        worker.exchange.on_all_submitted()
        layout = worker.layout
        assert_same(decoded(layout, worker.exchange.reduced(layout)), decoded(layout, expected(layout, 0, 1)))


def test_an_error_of_the_thread_that_quantizes_reaches_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for its peers for ever, and they for it."""

    def fail(*_: object) -> torch.Tensor:
        raise MemoryError("of a test")

    monkeypatch.setattr(Quantization, "quantize", fail)
    with workers(2, codec=CODECS["int8"], network=FakeNetwork()) as (worker, _):
        worker.partials.begin(2)
        worker.begin(0, 2, (("w0", "w1"),))
        worker.compute(0)
        with pytest.raises(MemoryError, match="of a test"):
            worker.exchange.on_all_submitted()
