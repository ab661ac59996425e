"""What a message's tag has room for: buckets grow with the model, and too many partial sums are an error in words."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from farandole.collective import buckets
from farandole.collective.buckets import FIRST_BUCKET_BYTES, Layout
from farandole.collective.schedule import (
    MOST_BUCKETS,
    MOST_PIECES,
    MOST_SUMS,
    PARTIAL,
    REDUCED,
    SendMessages,
    Take,
    order,
)
from farandole.errors import UsageError
from farandole.protocol.view import Lineage, View
from farandole.simulate.pieces import SimulatedBucket


def parameters(count: int, numel: int, *, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Of no memory: only sizes count."""
    return [nn.Parameter(torch.empty(numel, dtype=dtype, device="meta")) for _ in range(count)]


def test_a_large_model_has_larger_buckets_rather_than_more() -> None:
    """Six dozen tensors of 8 MB, in two dtypes: 73 buckets of the usual size, of which 12 may be."""
    large = [*parameters(60, 2 << 20), *parameters(12, 4 << 20, dtype=torch.bfloat16)]
    assert len(Layout(large, lanes=3).buckets) == 73
    layout = Layout(large, lanes=3, most=12)
    assert len(layout.buckets) <= 12
    assert sorted(index for bucket in layout.buckets for index in bucket.params) == list(range(72))
    assert layout.sizes == Layout(large, lanes=3, most=12).sizes, "by the model alone"


@pytest.mark.parametrize("most", [5, 6, 9, 20])
@pytest.mark.parametrize("numel", [1, FIRST_BUCKET_BYTES // 4, 3_000_001])
def test_the_buckets_fit_whatever_the_tensors(most: int, numel: int) -> None:
    several = [
        *parameters(33, numel),
        *parameters(17, 2 * numel + 1, dtype=torch.float64),
        *parameters(5, 40 * numel, dtype=torch.float16),
    ]
    assert len(Layout(several, lanes=1, most=max(most, 6)).buckets) <= max(most, 6)


def test_twenty_gibibytes_of_gradients_have_buckets_that_a_tag_can_name() -> None:
    assert len(Layout(parameters(20 << 3, 32 << 20), lanes=9).buckets) <= MOST_BUCKETS
    assert len(Layout(parameters(20 << 7, 2 << 20), lanes=9).buckets) <= MOST_BUCKETS


def test_usual_models_have_buckets_of_the_usual_size() -> None:
    """So bytes on the wire, and when they go out, are what they were."""
    assert len(Layout(parameters(200, 2 << 20), lanes=1).buckets) == 201
    assert buckets.BUCKET_BYTES == 8 << 20


def losses(workers: int, lost: int) -> Lineage:
    """So many of the workers are lost, one by one, in one step."""
    order = random.Random(0)
    sets = [tuple(f"w{number}" for number in range(workers))]
    for _ in range(lost):
        gone = order.choice(sets[-1])
        sets.append(tuple(worker for worker in sets[-1] if worker != gone))
    return Lineage(sets=tuple(sets))


@pytest.mark.failure(
    "The training loop",
    "dozens of workers are lost in one step of thousands of micro-batches",
    seen="an error names the number of partial sums, the limit of 512 and the remedy: a larger `micro`",
    outcome="the run ends as after an error of the script, with the state of that step",
)
def test_too_many_partial_sums_are_an_error_with_the_limit_and_a_remedy() -> None:
    """What the last of 64 workers hold of 16,384 shards is in pieces, when all others have been lost in one step."""

    def made(shards: int, lineage: Lineage) -> None:
        order(View(number=1, members=lineage.sets[-1], group=1), lineage.sets[-1][0], (), shards, lineage)

    made(1 << 14, losses(64, 0))
    made(1 << 14, losses(8, 7))
    with pytest.raises(UsageError) as caught:
        made(1 << 14, losses(64, 60))
    assert all(value in str(caught.value) for value in ("60", "16,384", str(MOST_SUMS), "micro="))


@pytest.mark.parametrize(("lost", "in_pieces"), [(0, True), (28, True), (32, False), (44, False)])
def test_slices_are_cut_only_where_tags_have_room_for_the_pieces(lost: int, in_pieces: bool) -> None:
    """The sums are more with each loss; a piece without room would be an AssertionError."""
    lineage, bucket = losses(64, lost), SimulatedBucket(1 << 12, MOST_PIECES)
    members = lineage.sets[-1]
    view = View(number=1, members=members, group=1, hosts=members)
    made = order(view, members[0], (bucket,), 1 << 14, lineage)
    cut = bucket.slice(0, len(members))
    arrivals = [(message.start, message.stop) for message in made.begin if message.kind == PARTIAL]
    assert made.in_pieces == in_pieces
    assert set(arrivals) == set(bucket.pieces(*cut) if in_pieces else [cut])
    sends = [n for n, act in enumerate(made.serve) if isinstance(act, SendMessages) and act.messages[0].kind == REDUCED]
    waits = [n for n, act in enumerate(made.serve) if isinstance(act, Take) and act.messages[0].kind == PARTIAL]
    assert (sends[0] < waits[-1]) == in_pieces, "a piece is sent on before the next one arrives"
