"""The links of a simulated worker, which keep what `collective/transport` promises and no more.

A message goes to the receive of the same tag, what is sent is read when it is taken, and waits on a broken pair fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farandole.collective.order import Message
from farandole.collective.tags import WORD
from farandole.simulate.replica import GARBAGE

Memory = dict[Any, Any]
Way = tuple[int, str, int]  # group, peer, tag


@dataclass(eq=False)
class Parcel:
    """A message: what its sender's memory held when it was sent; it must still do so when it is taken."""

    memory: Memory
    key: Any
    size: int
    sent: Any

    def read(self) -> Any:
        return self.sent if self.memory.get(self.key) == self.sent else GARBAGE


@dataclass(eq=False)
class Landing:
    """A receive: where it lands, and whether it has. What is `lent` lies in its sender's memory until it is used."""

    memory: Memory
    key: Any
    size: int
    lent: bool = False
    done: bool = False

    def take(self, parcel: Parcel) -> None:
        self.memory[self.key] = parcel if self.lent else parcel.read()
        self.done = True

    def use(self) -> None:
        """What is lent is read now."""
        found = self.memory[self.key]
        self.memory[self.key] = found.read() if isinstance(found, Parcel) else found


class LostError(Exception):
    """The connection to a peer is broken."""

    def __init__(self, peer: str) -> None:
        self.peer = peer


def size(message: Message) -> int:
    """In elements; a word's is like no other."""
    return -1 if message.kind == WORD else message.stop - message.start
