"""What the battery of tests for transports needs of each: links of all members of a group, and their faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from farandole.collective.fake import Network
from farandole.collective.transport import Links
from farandole.membership.view import View
from tests.support.exchanging import connect, in_memory, kill

NAMES = ("a", "b", "c")


class Group(Protocol):
    """Three workers that are connected. Of them `c` may be lost."""

    links: Sequence[Links]

    def lose_c(self) -> None:
        """Its process ends."""
        ...


class OfGloo:
    def __init__(self) -> None:
        self.links: Sequence[Links] = connect(NAMES, doomed=[2])

    def lose_c(self) -> None:
        kill("127.0.0.2")


class InMemory:
    def __init__(self) -> None:
        self._network = Network()
        self.links: Sequence[Links] = in_memory(self._network, View(number=1, members=NAMES, group=1))

    def lose_c(self) -> None:
        self._network.lose("c")


TRANSPORTS: tuple[Callable[[], Group], ...] = (OfGloo, InMemory)
