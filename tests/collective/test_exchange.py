"""The exchange over real Gloo connections: several workers as threads of one process.

The rendezvous is in memory and the agreement a fake that knows no coordinator. What must come out is computed by hand
from plain tensors: the tree sum over shards, the same bits on every rank.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch

from farandole.collective import buckets as buckets_module
from farandole.collective import exchange as exchanges
from farandole.collective.buckets import FIRST_BUCKET_BYTES
from farandole.collective.codec import CODECS, NONE, Codec
from farandole.collective.fake import FakeNetwork
from farandole.collective.schedule import COMMIT, MakeCommitMessage
from farandole.protocol.view import Lineage, View
from tests.support.exchanging import (
    LANES,
    SHAPES,
    Worker,
    assert_same,
    decoded,
    expected,
    gradient,
    on_all,
    until,
    workers,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several loopback addresses, /proc/self/fd")


WHERE = {
    "network": ("", ""), "one host": ("aaaa", ""), "two hosts": ("abba", ""), "two zones": ("abca", "eewe"),
}  # fmt: skip
TABLE = [
    (1, 5, "a world of one goes through the same tree"),
    (2, 1, "more ranks than shards: one has nothing to send"),
    (2, 8, "each holds an aligned subtree: one partial sum each"),
    (3, 7, "three do not divide seven"),
    (3, 2, "more ranks than shards, among three"),
    (4, 13, "four ranks, several partial sums each"),
]


@pytest.mark.parametrize(
    "stage", [pytest.param(None, id="direct"), pytest.param(True, id="staged", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("hosts", "zones"), WHERE.values(), ids=WHERE)
@pytest.mark.parametrize(("count", "shards", "remark"), TABLE)
def test_every_rank_has_the_bits_of_the_reference_in_every_round(
    count: int, shards: int, remark: str, stage: bool | None, hosts: str, zones: str
) -> None:
    with workers(count, stage=stage, hosts=hosts[:count], zones=zones[:count]) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        for step in range(5):  # rounds count modulo 4 in the tags
            reduced = on_all(everyone, lambda w, step=step: w.step(step, shards, lineage))
            for buckets in reduced:
                assert_same(buckets, expected(everyone[0].layout, step, shards))  # type: ignore[arg-type]
        assert not any(worker.agreement.lost_peers for worker in everyone), remark


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16+zstd", "int4"])
@pytest.mark.parametrize("hosts", ["abc", "aab", "abbcca"])
def test_slices_that_are_sent_in_pieces_have_the_same_bits(
    hosts: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of a piece is as large as the piece, so there are several for a slice."""
    monkeypatch.setattr(buckets_module, "PIECE_BYTES", 16 << 10)
    shapes = [(400, 500), (33, 7), (600, 500), (900, 300)]
    with workers(len(hosts), network=FakeNetwork(), hosts=hosts, shapes=shapes, codec=CODECS[codec]) as everyone:
        members = tuple(worker.name for worker in everyone)
        layout = everyone[0].layout
        for step in range(3):
            for buckets in on_all(everyone, lambda w, step=step: w.step(step, 11, (members,))):
                assert_same(decoded(layout, buckets), decoded(layout, expected(layout, step, 11)))
        round_ = everyone[0].exchange._round
        assert round_ is not None
        parts = Counter((m.peer, m.kind, m.bucket, m.node) for m in round_.order.arrivals if m.kind != COMMIT)
        assert max(parts.values()) > 1


@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if codec != NONE], ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    ("hosts", "zones"),
    [
        pytest.param(*places, id=where, marks=[pytest.mark.long] * (where != "two zones"))
        for where, places in WHERE.items()
    ],
)
def test_with_a_codec_too_and_with_half_the_bytes_of_what_is_rounded(codec: Codec, hosts: str, zones: str) -> None:
    where = {"hosts": hosts[:3], "zones": zones[:3]}
    with workers(3, codec=codec, **where) as everyone, workers(3, **where) as without:
        sent = {"": 0, codec.name: 0}
        for name, group in (("", without), (codec.name, everyone)):
            lineage = (tuple(worker.name for worker in group),)
            for step in range(2):
                for buckets in on_all(group, lambda w, step=step, lineage=lineage: w.step(step, 7, lineage)):
                    layout = group[0].layout
                    wanted = decoded(layout, expected(layout, step, 7))
                    assert_same(decoded(layout, buckets), wanted)  # type: ignore[arg-type]
            sent[name] = sum(sum(worker.links.bytes.values()) for worker in group if worker.links)
        assert {bucket.dtype for bucket in everyone[0].layout.buckets} == {codec.wire(torch.float32), torch.float64}
        assert 0 < sent[codec.name] <= (0.51 if codec.dtype else 1.0) * sent[""]


@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if codec != NONE], ids=lambda codec: codec.name)
@pytest.mark.parametrize("shards", [1, 5, 8])
def test_with_a_codec_a_single_worker_has_the_sums_of_the_whole_tree(codec: Codec, shards: int) -> None:
    """Of eight shards the last one completes sums on three levels at once."""
    worker = Worker("w0", None, codec=codec)
    worker.enter(View(number=1, members=("w0",), group=1))
    for step in range(2):
        buckets = decoded(worker.layout, worker.step(step, shards, (("w0",),)))
        assert_same(buckets, decoded(worker.layout, expected(worker.layout, step, shards)))


def test_a_plain_sum_over_ranks_would_give_other_bits() -> None:
    """The evidence above is worth something only if the order shows in these values."""
    layout = Worker("w0", None).layout
    wanted = expected(layout, 0, 7)[0]
    flat = torch.zeros_like(wanted)
    for shard in range(7):
        for index, place in layout.views(layout.buckets[0], flat).items():
            value = gradient(layout, 0, shard, index)
            if value is not None:
                place.add_(value)
    assert not flat.equal(wanted)


@pytest.mark.parametrize("flushed", [False, True])
def test_sums_are_made_as_the_training_thread_takes_denormal_numbers(*, flushed: bool) -> None:
    """A setting of each thread, and sums are made on threads of the view's. Those within an operator keep theirs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def step(worker: Worker, number: int, flushed: bool) -> list[torch.Tensor]:
        torch.set_flush_denormal(flushed)
        try:
            worker.done = set()
            worker.partials.begin(2)
            worker.begin(number, 2, lineage)
            for shard in worker.todo:
                worker.partials.complete = worker.exchange.submit
                worker.partials.open(shard)
                for index in reversed(range(len(denormal))):
                    worker.partials.add_gradient(index, denormal[index])
                worker.partials.close(torch.zeros(LANES, dtype=torch.float64))
            worker.agreement.until(lambda: worker.exchange.ended)
            return [flat.clone() for flat in worker.exchange.reduced(worker.layout)]
        finally:
            torch.set_flush_denormal(False)

    with workers(2) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        denormal = [torch.full(parameter.shape, 2.0**-140) for parameter in everyone[0].layout.parameters]
        on_all(everyone, lambda worker: step(worker, 0, not flushed))  # in which the view's thread begins
        for buckets in on_all(everyone, lambda worker: step(worker, 1, flushed)):
            assert float(buckets[0].double().max()) == (0.0 if flushed else 2.0**-139)  # type: ignore[index]
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("hosts", "zones"), WHERE.values(), ids=WHERE)
def test_late_and_early_ranks_wait_for_each_other(hosts: str, zones: str) -> None:
    with workers(3, hosts=hosts[:3], zones=zones[:3]) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)

        def slow(worker: Worker) -> list[torch.Tensor]:
            earlier = everyone[: everyone.index(worker)]
            until(lambda: all(other.exchange.waiting_for for other in earlier))
            return worker.step(0, 6, lineage)

        for buckets in on_all(everyone, slow):
            assert_same(buckets, expected(everyone[0].layout, 0, 6))  # type: ignore[arg-type]


@pytest.mark.parametrize(("hosts", "zones"), WHERE.values(), ids=WHERE)
def test_less_than_a_slice_for_each_rank(hosts: str, zones: str) -> None:
    """Two parameters fill two aligned units, so of four ranks two own nothing of that bucket."""
    with workers(4, shapes=[(3,), (2,)], hosts=hosts, zones=zones) as everyone:
        assert everyone[0].layout.buckets[0].numel == 32
        lineage = (tuple(worker.name for worker in everyone),)
        shapes_expected = expected(everyone[0].layout, 0, 6)
        for buckets in on_all(everyone, lambda w: w.step(0, 6, lineage)):
            assert_same(buckets, shapes_expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_bytes_on_the_wire_are_a_ring_all_reduces_where_each_rank_holds_one_partial_sum(count: int) -> None:
    """2 (n - 1) / n of the buckets a rank, and a word to each peer. Power-of-two ranges are single nodes."""
    shards = {2: 8, 3: 3, 4: 8}[count]
    with workers(count) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        on_all(everyone, lambda w: w.step(0, shards, lineage))
        total = sum(bucket.numel * bucket.dtype.itemsize for bucket in everyone[0].layout.buckets)
        words = exchanges.COMMIT_FIELDS * 8 * (count - 1)
        sent = [sum(worker.links.bytes.values()) for worker in everyone if worker.links]
        assert sum(sent) == 2 * (count - 1) * total + count * words
        for rank, one in enumerate(sent):
            cuts = [(bucket, bucket.slice(rank, count)) for bucket in everyone[0].layout.buckets]
            mine = sum((stop - start) * bucket.dtype.itemsize for bucket, (start, stop) in cuts)
            assert one - words == total - mine + (count - 1) * mine
        buckets = len(everyone[0].layout.buckets)
        assert [w.links.sends for w in everyone if w.links] == [(count - 1) * (2 * buckets + 1)] * count


def test_words_carry_what_each_member_said() -> None:
    with workers(3) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        on_all(everyone, lambda w: w.step(0, 8, lineage))
        for worker in everyone:
            assert Counter(word.shards for word in worker.agreement.commits) == Counter([2, 3, 3])
            assert all(word.compute_us > 0 for word in worker.agreement.commits)


def at_its_word(worker: Worker) -> bool:
    """There is nothing left to do before its word, or it has said that."""
    round_ = worker.exchange._round
    assert round_ is not None
    return (
        round_.ended or worker.agreement.asked > 0 or isinstance(round_.order.serve[round_.served], MakeCommitMessage)
    )


def test_a_joiner_that_may_not_word_yet_holds_the_round_and_nothing_else() -> None:
    """It has no shards in its first round, takes part in the sums, and the round ends when it holds the state."""
    with workers(3) as everyone:
        joiner = everyone[2]
        lineage = (("w0", "w1"),)

        def first_round(worker: Worker) -> list[torch.Tensor]:
            if worker is not joiner:
                return worker.step(0, 6, lineage)
            worker.exchange.withhold()
            worker.partials.begin(6)
            worker.exchange.begin(0, worker.partials, 6, Lineage(sets=lineage))
            for bucket in range(len(worker.layout.buckets)):
                worker.exchange.submit(bucket)
            others = [other for other in everyone if other is not joiner]
            until(lambda: at_its_word(joiner) and all(other.stands or other.exchange.ended for other in others))
            assert not any(w.exchange.ended for w in everyone)
            assert not joiner.agreement.asked
            worker.exchange.release()
            worker.agreement.until(lambda: worker.exchange.ended)
            return [flat.clone() for flat in worker.exchange.reduced(worker.layout)]

        for buckets in on_all(everyone, first_round):
            assert_same(buckets, expected(joiner.layout, 0, 6))  # type: ignore[arg-type]


def test_the_layout_of_these_tests_has_two_buckets_and_lanes() -> None:
    assert SHAPES[2][0] * SHAPES[2][1] * 4 > FIRST_BUCKET_BYTES
    assert len(Worker("w0", None).layout.buckets) == 3
    assert exchanges.COMMIT_FIELDS == 9
