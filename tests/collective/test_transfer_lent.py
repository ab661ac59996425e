"""The state is lent to joiners piece by piece: over every transport, in bounded memory, unchanged under a reader."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from farandole.collective import state_transfer
from farandole.collective.arena import Arena, Memory, Ordinary
from farandole.collective.state_transfer import IN_FLIGHT, PIECE_BYTES, Arrival, Snapshot, send_state, touched
from farandole.collective.transport import Borrowing, Links, PeerLost, Pending, ReceiveBuffer
from farandole.plan.shards import Position
from farandole.protocol.view import View
from tests.support.exchanging import DEADLINE_S
from tests.support.linking import Counting, by_host
from tests.support.transports import NAMES, TRANSPORTS, Group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several loopback addresses, /proc/self/fd")
PIECES = 3 * IN_FLIGHT


def state(pieces: int = PIECES) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    large = torch.randint(-(1 << 62), 1 << 62, (pieces * PIECE_BYTES // 8 - 50,), generator=generator)
    return {"requires_grad": [True, False], "large": large, "small": [torch.arange(5), torch.zeros(0), 0.1]}


class Measured:
    """Memory that counts what is taken from it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.bytes = 0

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.bytes += numel * dtype.itemsize
        return self._memory.empty(numel, dtype)


def veteran(view: View, worker: str, links: Links, memory: Memory, held: dict[str, Any]) -> None:
    position = Position(epoch=1, offset=2, step=9)
    send_state(view, view.synced, worker, links, 4, position, Snapshot(held), memory)


def joiner(view: View, links: Links, ahead: torch.Tensor | None = None, mark: bytes = b"") -> dict[str, Any]:
    arrival = Arrival(view, view.synced, links, 2, ahead)
    assert arrival.header() == (4, Position(epoch=1, offset=2, step=9), [True, False])
    assert arrival.mark == mark
    return arrival.state()


def test_the_mark_of_the_first_veteran_comes_with_the_header() -> None:
    """Veterans have different ones, and no dispute about them; those of the others are not sent."""
    group = TRANSPORTS[0]()
    view = View(number=1, members=NAMES, joining=("c",), group=1)
    with ThreadPoolExecutor(3) as pool:
        sending = [
            pool.submit(veteran, view, worker, group.links[rank], group.memory[rank], {**state(1), "stream": mark})
            for rank, (worker, mark) in enumerate(zip(NAMES, (b"first", b"second one"), strict=False))
        ]
        got = pool.submit(joiner, view, group.links[2], None, b"first").result(DEADLINE_S)
        for future in sending:
            future.result(DEADLINE_S)
    assert "stream" not in got
    assert torch.equal(got["large"], state(1)["large"])
    for links in group.links:
        links.close()


@pytest.mark.parametrize("joining", [("c",), ("b", "c")], ids="-".join)
@pytest.mark.parametrize("made", TRANSPORTS, ids=lambda made: made.__name__)
def test_over_every_transport_in_bounded_memory(made: Callable[[], Group], joining: tuple[str, ...]) -> None:
    group, held = made(), state()
    view = View(number=1, members=NAMES, joining=joining, group=1)
    memory = [Measured(each) for each in group.memory]
    with ThreadPoolExecutor(3) as pool:
        sending = [
            pool.submit(veteran, view, worker, group.links[rank], memory[rank], held)
            for rank, worker in enumerate(NAMES)
            if worker not in joining
        ]
        arriving = [pool.submit(joiner, view, group.links[NAMES.index(worker)]) for worker in joining]
        for arrived in arriving:
            got = arrived.result(DEADLINE_S)
            assert torch.equal(got["large"], held["large"])
            assert got["small"][0].tolist() == held["small"][0].tolist()
        for future in sending:
            future.result(DEADLINE_S)
    assert max(each.bytes for each in memory) <= IN_FLIGHT * PIECE_BYTES
    for links in group.links:
        links.close()


class Slow(Counting):
    """A joiner that looks at its first piece only when the veteran has come as far as it can."""

    def __init__(self, links: Links, may: threading.Event) -> None:
        super().__init__(links)
        self._may = may
        self.read: list[torch.Tensor] = []
        self.has = threading.Event()

    def borrow(self, buffer: ReceiveBuffer, peer: str, tag: int) -> Borrowing:
        return Held(self, super().borrow(buffer, peer, tag))

    def hold(self, there: torch.Tensor) -> torch.Tensor:
        self.read.append(there)
        self.has.set()
        assert self._may.wait(DEADLINE_S)
        return there


class Held:
    def __init__(self, by: Slow, borrowing: Borrowing) -> None:
        self._by, self._borrowing = by, borrowing

    def wait(self) -> torch.Tensor:
        return self._by.hold(self._borrowing.wait())


class Watched(Counting):
    """A veteran's links, which tell when it waits for a joiner, or has lent everything."""

    def __init__(self, links: Links, total: int) -> None:
        super().__init__(links)
        self._total = total
        self.lent = 0
        self.stands = threading.Event()

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        self.lent += 1
        if self.lent == self._total:
            self.stands.set()
        return super().lend(tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        return Announced(self.stands, super().receive(tensor, peer, tag))


class Announced:
    def __init__(self, event: threading.Event, pending: Pending) -> None:
        self._event, self._pending = event, pending

    def wait(self) -> object:
        self._event.set()
        return self._pending.wait()


def shared(names: Sequence[str]) -> tuple[list[Arena], list[Links]]:
    memory = [Arena() for _ in names]
    return memory, by_host(View(number=1, members=tuple(names), group=1), memory, ["127.0.0.9"] * len(names))


def test_a_piece_stays_as_it_is_until_a_slow_joiner_has_taken_it() -> None:
    """It looks once the veteran can't go on: one that goes on has written over what was lent first."""
    memory, links = shared("ab")
    view, held = View(number=1, members=("a", "b"), joining=("b",), group=1), state()
    watched = Watched(links[0], PIECES)
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(veteran, view, "a", watched, memory[0], held)
        got = pool.submit(joiner, view, Slow(links[1], watched.stands)).result(DEADLINE_S)
        sending.result(DEADLINE_S)
    assert torch.equal(got["large"], held["large"])


def test_when_a_joiner_is_lost_what_another_reads_stays_as_it_is() -> None:
    memory, links = shared("abc")
    view, held, over = View(number=1, members=NAMES, joining=("c", "b"), group=1), state(), threading.Event()
    slow = Slow(links[1], over)
    reading = threading.Thread(target=_until_lost, args=(view, slow), daemon=True)
    reading.start()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(veteran, view, "a", links[0], memory[0], held)
        assert slow.has.wait(DEADLINE_S)
        before = slow.read[0].clone()
        for pair in links[2].pairs.values():  # type: ignore[attr-defined]  c's process ends
            pair.connection.shutdown(2)
        with pytest.raises(PeerLost, match=r"^c: "):
            sending.result(DEADLINE_S)
    del sending
    for _ in range(4 * IN_FLIGHT):
        memory[0].empty(PIECE_BYTES, torch.uint8).fill_(7)
    kept = [memory[0].empty(PIECE_BYTES, torch.uint8).fill_(7) for _ in range(4 * IN_FLIGHT)]
    assert torch.equal(slow.read[0], before)
    assert kept
    over.set()
    links[0].close()
    reading.join(DEADLINE_S)
    assert not reading.is_alive(), "the view's end wakes it"


def _until_lost(view: View, links: Links) -> None:
    with pytest.raises(PeerLost, match=r"^a: "):
        joiner(view, links)


# --- memory that was made ahead --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "used"), [(2 * PIECE_BYTES, True), (PIECE_BYTES, False)], ids=["enough", "too small"])
def test_memory_that_was_made_ahead_is_used_where_it_is_enough(size: int, used: bool) -> None:
    memory, links = shared("ab")
    view, held, ahead = View(number=1, members=("a", "b"), joining=("b",), group=1), state(2), touched(size)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(veteran, view, "a", links[0], memory[0], held)
        got = joiner(view, links[1], ahead)
        sending.result(DEADLINE_S)
    assert torch.equal(got["large"], held["large"])
    assert (0 <= got["large"].data_ptr() - ahead.data_ptr() < size) is used


# --- checksums -------------------------------------------------------------------------------------------------------

checksum: Callable[[torch.Tensor, int], int] = getattr(state_transfer, "_checksum")  # noqa: B009
ROWS = torch.randn(5 * 1023 + 77, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def swapped(words: torch.Tensor, a: int, b: int) -> None:
    words[a], words[b] = words[b].item(), words[a].item()


WRONG: dict[str, Callable[[torch.Tensor], object]] = {
    "the first word's lowest bit": lambda words: words.view(torch.uint8)[0].bitwise_xor_(1),
    "the last word's sign": lambda words: words[-1].neg_(),
    "every sign": lambda words: words.neg_(),
    "two neighbours are swapped": lambda words: swapped(words, 8, 9),
    "two words of different rows are swapped": lambda words: swapped(words, 8, 8 + 1023),
    "rows are swapped": lambda words: words[: 2 * 1023].copy_(words[: 2 * 1023].view(2, -1).flip(0).reshape(-1)),
    "all moved by one": lambda words: words.copy_(words.roll(1)),
    "doubled": lambda words: words.mul_(2),
    "of half the precision": lambda words: words.copy_(words.float().double()),
    "one is not there": lambda words: words[3000:].copy_(torch.cat([words[3001:], words[:1]])),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_checksum_tells_what_goes_wrong(wrong: str) -> None:
    words = ROWS.clone()
    WRONG[wrong](words)
    assert checksum(words.view(torch.uint8), 0) != checksum(ROWS.view(torch.uint8), 0)


def test_a_checksum_is_of_what_came_before_too_and_of_the_bytes_alone() -> None:
    piece = ROWS.view(torch.uint8)
    assert checksum(piece, 1) != checksum(piece, 0)
    assert checksum(torch.cat([piece, piece])[len(piece) :], 0) == checksum(piece, 0)
    assert checksum(piece[:64], 0) != checksum(piece[:128], 0)


def test_ordinary_memory_will_do() -> None:
    _, links = shared("ab")
    view, held = View(number=1, members=("a", "b"), joining=("b",), group=1), state(2)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(veteran, view, "a", links[0], Ordinary(), held)
        assert torch.equal(joiner(view, links[1])["large"], held["large"])
        sending.result(DEADLINE_S)
