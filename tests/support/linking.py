"""Links of several workers of one process: over Gloo, over shared memory, in memory; and their ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from farandole.collective.arena import Memory
from farandole.collective.fake import Fake, FakeNetwork
from farandole.collective.gloo import GlooLinks, Rendezvous
from farandole.collective.link_meter import LinkMeter, Metered
from farandole.collective.schedule import REDUCED
from farandole.collective.shm import ByHost, LinksByHost
from farandole.collective.transport import Borrowing, Links, Pending, ReceiveBuffer
from farandole.protocol.view import View

DEADLINE_S = 30.0


class Counting:
    """Links that count what is sent through them: bytes by receiving peer."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.bytes: Counter[str] = Counter()
        self.sends = 0

    def keep_alive(self, memory: object) -> None:
        self.links.keep_alive(memory)

    def close(self) -> None:
        self.links.close()

    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        self._count(tensor, peer)
        return self.links.send(tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        return self.links.receive(tensor, peer, tag)

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        self._count(tensor, peer)
        return self.links.lend(tensor, peer, tag)

    def borrow(self, room: ReceiveBuffer, peer: str, tag: int) -> Borrowing:
        return self.links.borrow(room, peer, tag)

    def shares(self, peer: str) -> bool:
        return self.links.shares(peer)

    def _count(self, tensor: torch.Tensor, peer: str) -> None:
        self.bytes[peer] += tensor.numel() * tensor.element_size()
        self.sends += 1


class Gated(Counting):
    """What is lent of a large sum is waited for until the gate opens."""

    def __init__(self, links: Links, gate: threading.Event) -> None:
        super().__init__(links)
        self._gate = gate

    def borrow(self, room: ReceiveBuffer, peer: str, tag: int) -> Borrowing:
        borrowing = super().borrow(room, peer, tag)
        return Behind(borrowing, self._gate) if tag >> 17 & 3 == REDUCED else borrowing


class SlowElsewhere(Counting):
    """Links whose `lend` takes long in every thread but the one that made them.

    `lends`: set when it begins there. `lent`: peers and tags.
    """

    def __init__(self, links: Links) -> None:
        super().__init__(links)
        self.lends = threading.Event()
        self.lent: list[tuple[str, int]] = []
        self._thread = threading.get_ident()

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        if threading.get_ident() != self._thread:
            self.lends.set()
            time.sleep(0.1)
        self.lent.append((peer, tag))
        return super().lend(tensor, peer, tag)


class Behind:
    def __init__(self, borrowing: Borrowing, gate: threading.Event) -> None:
        self._borrowing, self._gate = borrowing, gate

    def wait(self) -> torch.Tensor:
        self._gate.wait()
        return self._borrowing.wait()


def connect(names: Sequence[str], doomed: Sequence[int] = ()) -> list[GlooLinks]:
    """Links of all, each on an address of its own. `doomed`: the ranks that `kill` will be used on, in this order.

    Of two Gloo peers the one with the lower address listens, and only that end of a connection shows whose it is.
    """
    addresses = {rank: f"127.0.0.{2 + place}" for place, rank in enumerate(doomed)}
    stores = rendezvous(names)
    with ThreadPoolExecutor(len(names)) as pool:
        made = [
            pool.submit(GlooLinks, 1, name, tuple(names), stores[name], addresses.get(rank, "127.0.0.9"))
            for rank, name in enumerate(names)
        ]
        return [future.result(DEADLINE_S) for future in made]


def rendezvous(names: Sequence[str]) -> dict[str, Rendezvous]:
    """Of each, which reach the others."""
    stores: dict[str, Rendezvous] = {}

    def publish(name: str) -> Callable[[str, bytes, str], None]:
        return lambda key, value, to: [stores[w].put(key, value) for w in names if w != name and to in ("", w)] and None

    for name in names:
        stores[name] = Rendezvous(publish(name))
    return stores


def by_host(
    view: View, memory: Sequence[Memory], interfaces: Sequence[str], compressed: torch.dtype | None = None
) -> list[Links]:
    """Links of all members, over shared memory within each host."""
    stores = rendezvous(view.members)
    with ThreadPoolExecutor(view.size) as pool:
        made = [
            pool.submit(
                ByHost(
                    stores[member], b"key", interfaces[rank], memory=memory[rank], compressed=compressed
                ).connect, view, member,
            )
            for rank, member in enumerate(view.members)
        ]  # fmt: skip
        return [future.result(DEADLINE_S) for future in made]


def measured(links: Links) -> Metered:
    """As compression needs them; what is sent is counted for nobody."""
    return LinkMeter().metered(links, {}, lambda _: ())


def in_memory(network: FakeNetwork, view: View) -> list[Links]:
    with ThreadPoolExecutor(view.size) as pool:
        return list(pool.map(lambda member: Fake(network).connect(view, member), view.members))


def kill(address: str) -> None:
    """What the kernel does to a killed process's connections, done to those at `address` of this process."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                    if connection.family == socket.AF_INET and connection.getsockname()[0] == address:
                        connection.getpeername()  # raises for the listening one, whose end would abort the process
                        connection.shutdown(socket.SHUT_RDWR)


def cut(links: Links) -> None:
    """What the kernel does to a killed process's ends of its pairs."""
    for pair in links.pairs.values() if isinstance(links, LinksByHost) else ():
        pair.connection.shutdown(socket.SHUT_RDWR)
