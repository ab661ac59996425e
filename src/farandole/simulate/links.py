"""The links of a simulated worker, which keep what `collective/transport` promises and no more.

A message goes to the receive of the same tag, what is sent is read when it is taken, and waits on a broken pair fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farandole.collective.schedule import WORD, ExchangeMessage
from farandole.protocol.view import CommitMessage
from farandole.simulate.replica import GARBAGE

NO_WORD = CommitMessage(view=-1, round=-1, prepared=-1, compute_us=-1, shards=-1)
Memory = dict[Any, Any]
GIVEN_BACK = "given back"
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

    @property
    def given_back(self) -> bool:
        """What it lends may be anything. What is being sent is kept."""
        return GIVEN_BACK in self.memory


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

    def use(self, *, later: bool) -> bool:
        """What is lent is read now, or later than it can be seen whether its owner has given it back: then False."""
        found = self.memory[self.key]
        if isinstance(found, Parcel) and not later:
            self.memory[self.key] = GARBAGE if found.given_back else found.read()
        return not (isinstance(found, Parcel) and later and found.given_back)


class LostError(Exception):
    """The connection to a peer is broken."""

    def __init__(self, peer: str) -> None:
        self.peer = peer


def size(message: ExchangeMessage) -> int:
    """In elements; a word's is like no other."""
    return -1 if message.kind == WORD else message.stop - message.start
