"""What every transport keeps: one battery, over Gloo, shared memory, both, in memory. See `collective/transport`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from farandole.collective.fake import FakeNetwork
from farandole.collective.transport import Links, PeerLost, Pending, ReceiveBuffer
from farandole.errors import FarandoleError
from farandole.protocol.view import View
from tests.support.exchanging import DEADLINE_S
from tests.support.linking import in_memory
from tests.support.transports import TRANSPORTS, Group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several loopback addresses, /proc/self/fd")

HIGHEST = (1 << 31) - 1


@pytest.fixture(scope="module", params=TRANSPORTS, ids=lambda made: made.__name__)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Whose members stay as they are."""
    made = request.param()
    yield made
    for links in made.links:
        links.close()


@pytest.fixture(params=TRANSPORTS, ids=lambda made: made.__name__)
def doomed(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Whose members may be lost."""
    made = request.param()
    yield made
    for links in made.links:
        links.close()


def outcome(pending: Pending) -> tuple[threading.Thread, list[str]]:
    """A thread that waits, and what came of it: who was lost, or "done"."""
    what: list[str] = []

    def wait() -> None:
        try:
            pending.wait()
        except PeerLost as lost:
            what.append(lost.peer)
        else:
            what.append("done")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, what


def over(waiting: tuple[threading.Thread, list[str]]) -> str:
    waiting[0].join(DEADLINE_S)
    return waiting[1][0] if waiting[1] else "still waits"


@pytest.mark.parametrize("first", ["send", "receive"])
@pytest.mark.parametrize("numel", [0, 1, 7, 1 << 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_message_arrives_whichever_end_is_first(group: Group, first: str, numel: int, dtype: torch.dtype) -> None:
    a, b, _ = group.links
    sent, room = torch.arange(numel).to(dtype), torch.full((numel,), 77).to(dtype)
    start: dict[str, Callable[[], Pending]] = {
        "send": lambda: a.send(sent, "b", 5),
        "receive": lambda: b.receive(room, "a", 5),
    }
    pending = {one: start[one]() for one in sorted(start, key=lambda one: one != first)}
    for one in ("receive", "send"):
        pending[one].wait()
    assert room.equal(sent)


@pytest.mark.parametrize("numel", [0, 1, 100_000])
def test_fewer_bytes_than_the_receive_expects_arrive_where_no_memory_is_shared(group: Group, numel: int) -> None:
    a, b, _ = group.links
    if a.shares("b"):
        pytest.skip("for links that share no memory")
    for first in (True, False):
        sent, room = torch.ones(numel, dtype=torch.uint8), torch.full((100_001,), 77, dtype=torch.uint8)
        sending = a.send(sent, "b", 6) if first else None
        received = b.receive(room, "a", 6)
        (sending or a.send(sent, "b", 6)).wait()
        received.wait()
        assert room[:numel].equal(sent)
        assert room[numel:].eq(77).all()


@pytest.mark.parametrize("numel", [0, 7, 1 << 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_lent_is_here_or_where_it_lies(group: Group, numel: int, dtype: torch.dtype) -> None:
    for lender, borrower, names in zip(group.links, group.links[1:], (("a", "b"), ("b", "c")), strict=False):
        lent = group.memory[0 if names[0] == "a" else 1].empty(numel, dtype).copy_(torch.arange(numel) % 251)
        room = ReceiveBuffer.of(torch.full((numel,), 77, dtype=dtype))
        under_way = borrower.borrow(room, names[0], 5)
        lending = lender.lend(lent, names[1], 5)
        there = under_way.wait()
        lending.wait()
        assert there.dtype == dtype
        assert there.equal(lent)
        assert borrower.shares(names[0]) or room.holds(there)
        if numel == 1 << 21 and borrower.shares(names[0]):  # not a copy
            lent[0] = 99
            assert there[0] == 99


def test_tags_tell_messages_apart_in_any_order(group: Group) -> None:
    a, b, _ = group.links
    tags = [0, 1, HIGHEST, 512, 3 << 19, 1 << 30]
    rooms = {tag: torch.zeros(3) for tag in tags}
    receives = [b.receive(rooms[tag], "a", tag) for tag in tags]
    sends = [a.send(torch.full((3,), float(tag)), "b", tag) for tag in reversed(tags)]
    for pending in (*receives, *sends):
        pending.wait()
    assert all(bool((rooms[tag] == float(tag)).all()) for tag in tags)


def test_messages_of_one_tag_go_in_the_order_in_which_they_were_started(group: Group) -> None:
    a, b, _ = group.links
    sends = [a.send(torch.full((2,), k), "b", 9) for k in range(4)]
    rooms = [torch.zeros(2, dtype=torch.int64) for _ in range(4)]
    receives = [b.receive(room, "a", 9) for room in rooms]
    for pending in (*sends, *receives):
        pending.wait()
    assert [int(room[0]) for room in rooms] == [0, 1, 2, 3]


def test_the_same_tag_of_another_pair_or_in_the_other_direction_is_another_message(group: Group) -> None:
    values = {(x, y): torch.tensor([10 * x + y]) for x in range(3) for y in range(3) if x != y}
    rooms = {pair: torch.zeros(1, dtype=torch.int64) for pair in values}
    names = "abc"
    pending: list[Pending] = []
    for (x, y), value in values.items():
        pending.append(group.links[y].receive(rooms[x, y], names[x], 4))
        pending.append(group.links[x].send(value, names[y], 4))
    for one in pending:
        one.wait()
    assert rooms == values


def test_what_waits_for_a_lost_peer_fails_and_the_others_go_on(doomed: Group) -> None:
    a, b, _ = doomed.links
    receiving = outcome(a.receive(torch.zeros(4), "c", 1))
    sending = outcome(a.send(torch.zeros(1 << 20), "c", 2))
    doomed.lose_c()
    assert (over(receiving), over(sending)) == ("c", "c")
    with pytest.raises(PeerLost, match=r"^c: ") as caught:
        a.receive(torch.zeros(4), "c", 3).wait()
    assert caught.value.peer == "c"
    assert isinstance(caught.value, FarandoleError)
    with pytest.raises(PeerLost, match=r"^c: "):
        a.send(torch.zeros(4), "c", 3).wait()
    room = torch.zeros(4)
    sent, received = a.send(torch.ones(4), "b", 3), b.receive(room, "a", 3)
    sent.wait()
    received.wait()
    assert room.equal(torch.ones(4))


def test_what_had_arrived_before_the_loss_counts(doomed: Group) -> None:
    a, _, c = doomed.links
    room = torch.zeros(4)
    received = a.receive(room, "c", 1)
    c.send(torch.ones(4), "a", 1).wait()
    doomed.lose_c()
    received.wait()
    assert room.equal(torch.ones(4))


def test_nothing_wakes_a_wait_on_a_peer_that_does_not_move_but_its_end(doomed: Group) -> None:
    """Not traffic with others, nor other messages of that peer, nor that the waiting side has closed its links."""
    a, b, c = doomed.links
    waiting = outcome(a.receive(torch.zeros(4), "c", 1))
    for sender, receiver, name, peer in ((a, b, "b", "a"), (c, a, "a", "c")):
        sent, received = sender.send(torch.ones(2), name, 2), receiver.receive(torch.zeros(2), peer, 2)
        sent.wait()
        received.wait()
    a.close()
    waiting[0].join(0.2)
    assert waiting[1] == []
    doomed.lose_c()
    assert over(waiting) == "c"


def test_who_has_closed_starts_nothing_any_more_and_is_lost_for_the_others(doomed: Group) -> None:
    a, b, c = doomed.links
    waiting = outcome(b.receive(torch.zeros(4), "a", 1))
    a.keep_alive(torch.zeros(3))
    a.close()
    a.close()
    for start in (a.send, a.receive):
        with pytest.raises(PeerLost, match=r"^b: "):
            start(torch.zeros(4), "b", 1)
    assert over(waiting) == "a"
    sent, received = b.send(torch.ones(2), "c", 1), c.receive(torch.zeros(2), "b", 1)
    sent.wait()
    received.wait()


def two(members: tuple[str, ...]) -> tuple[FakeNetwork, list[Links]]:
    network = FakeNetwork()
    return network, in_memory(network, View(number=1, members=members, group=1))


def test_a_frozen_peer_goes_on_where_it_was() -> None:
    network, (a, b) = two(("a", "b"))
    network.freeze("b")
    room = torch.zeros(2)
    waiting = outcome(a.receive(room, "b", 1))
    sent = outcome(b.send(torch.ones(2), "a", 1))
    waiting[0].join(0.1)
    assert waiting[1] == []
    network.thaw("b")
    assert (over(waiting), over(sent)) == ("done", "done")
    assert room.equal(torch.ones(2))


def test_in_memory_a_message_of_another_size_is_an_error_in_words() -> None:
    """Gloo ends the process, which no test wants."""
    _, (a, b) = two(("a", "b"))
    a.send(torch.zeros(2), "b", 1)
    with pytest.raises(AssertionError, match=r"\ba\b.*\b8 bytes\b.*\bb\b.*\b12\b"):
        b.receive(torch.zeros(3), "a", 1)
