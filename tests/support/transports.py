"""What the battery of tests for transports needs of each: links of all members of a group, and their faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from farandole.collective.arena import Arena, Memory, Ordinary
from farandole.collective.compression import Compressed
from farandole.collective.fake import FakeNetwork
from farandole.collective.transport import Links
from farandole.protocol.view import View
from tests.support.linking import by_host, connect, cut, in_memory, kill, measured

NAMES = ("a", "b", "c")


class Group(Protocol):
    """Three workers that are connected. Of them `c` may be lost."""

    links: Sequence[Links]
    memory: Sequence[Memory]  # of each, what it lends from

    def lose_c(self) -> None:
        """Its process ends."""
        ...


class OfGloo:
    def __init__(self) -> None:
        self.links: Sequence[Links] = connect(NAMES, doomed=[2])
        self.memory: Sequence[Memory] = [Ordinary()] * 3

    def lose_c(self) -> None:
        kill("127.0.0.2")


class Compressing(OfGloo):
    def __init__(self) -> None:
        super().__init__()
        self.links: Sequence[Links] = [Compressed(measured(links), torch.float32) for links in self.links]


class OfOneHost:
    """Over memory that they share."""

    def __init__(self) -> None:
        view = View(number=1, members=NAMES, group=1)
        self.memory: Sequence[Memory] = [Arena() for _ in NAMES]
        self.links: Sequence[Links] = by_host(view, self.memory, ["127.0.0.9"] * 3)
        assert all(
            links.shares(peer) for links, name in zip(self.links, NAMES, strict=True) for peer in NAMES if peer != name
        )

    def lose_c(self) -> None:
        cut(self.links[2])


class OfTwoHosts:
    """`b` and `c` share memory."""

    def __init__(self) -> None:
        view = View(number=1, members=NAMES, group=1, hosts=("one", "two", "two"))
        self.memory: Sequence[Memory] = [Arena() for _ in NAMES]
        self.links: Sequence[Links] = by_host(view, self.memory, ["127.0.0.9", "127.0.0.9", "127.0.0.2"])
        assert [links.shares("c") for links in self.links[:2]] == [False, True]

    def lose_c(self) -> None:
        cut(self.links[2])
        kill("127.0.0.2")


class InMemory:
    def __init__(self) -> None:
        self._network = FakeNetwork()
        self.memory: Sequence[Memory] = [Ordinary()] * 3
        self.links: Sequence[Links] = in_memory(self._network, View(number=1, members=NAMES, group=1))

    def lose_c(self) -> None:
        self._network.lose("c")


TRANSPORTS: tuple[Callable[[], Group], ...] = (OfGloo, Compressing, OfOneHost, OfTwoHosts, InMemory)
