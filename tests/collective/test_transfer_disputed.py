"""A joiner takes no veteran's word for a part of the state if there is another one; over real connections."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from farandole.collective.arena import Ordinary
from farandole.collective.state_transfer import PIECE_BYTES, Arrival, Snapshot, send_state
from farandole.errors import StateDisputed
from farandole.plan.shards import Position
from farandole.protocol.view import View
from tests.support.exchanging import DEADLINE_S
from tests.support.linking import connect


def state(rate: float = 0.1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    large = torch.randn(PIECE_BYTES // 2, generator=generator)  # a stripe of one of two has two pieces
    return {"requires_grad": [True], "rate": rate, "large": large, "small": torch.ones(3)}


def handed_over(veterans: int, change: Callable[[int, dict[str, Any]], None] = lambda *_: None) -> Any:
    """What a joiner gets from so many veterans, of whom `change` has got at what they hold."""
    names = [f"w{rank}" for rank in range(veterans + 1)]
    view = View(number=1, members=tuple(names), joining=(names[-1],), group=1)
    groups = connect(names)
    arrival = Arrival(view, view.synced, groups[-1], 1)

    def send(rank: int) -> None:
        mine = state()
        change(rank, mine)
        send_state(
            view,
            view.synced,
            names[rank],
            groups[rank],
            4,
            Position(epoch=1, offset=2, step=9),
            Snapshot(mine),
            Ordinary(),
        )

    with ThreadPoolExecutor(veterans) as pool:
        sending = [pool.submit(send, rank) for rank in range(veterans)]
        assert arrival.header() == (4, Position(epoch=1, offset=2, step=9), [True])
        try:
            return arrival.state()
        finally:
            for future in sending:
                future.result(DEADLINE_S)


@pytest.mark.parametrize("veterans", [1, 2, 3])
def test_what_all_hold_is_taken(veterans: int) -> None:
    got, held = handed_over(veterans), state()
    assert torch.equal(got["large"], held["large"])
    assert got["rate"] == held["rate"]


@pytest.mark.failure(
    "External workers, pools and machines",
    "a worker sends a joiner a wrong part of the state, and two or more workers hold the state",
    seen="the joiner fails before its admission, with the part, its sender and the worker whose copy differs",
    outcome="the joiner ends and is replaced; the run continues",
)
@pytest.mark.parametrize(
    ("element", "part", "sender", "witness"), [(5, 1, "w0", "w1"), (-5, 2, "w1", "w0")], ids=["first", "second"]
)
def test_a_stripe_that_is_rubbish_names_its_sender_and_the_witness(
    element: int, part: int, sender: str, witness: str
) -> None:
    def rubbish(rank: int, held: dict[str, Any]) -> None:
        if f"w{rank}" == sender:
            held["large"][element] += 1.0

    with pytest.raises(StateDisputed, match=rf"\b{part}\b") as caught:
        handed_over(2, rubbish)
    assert (caught.value.sender, caught.value.witness) == (sender, witness)
    assert all(worker in str(caught.value) for worker in (sender, witness))


def test_plain_values_are_disputed_too() -> None:
    def other_rate(rank: int, held: dict[str, Any]) -> None:
        held["rate"] = 0.2 if rank == 0 else held["rate"]

    with pytest.raises(StateDisputed) as caught:
        handed_over(2, other_rate)
    assert caught.value.sender == "w0"
