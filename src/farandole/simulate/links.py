"""The links of a simulated worker, which guarantee what `collective/transport.py` promises and no more.

A message matches the receive of the same tag. The sender's memory is read when the message is received. Waits on a
broken pair fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farandole.collective.schedule import COMMIT, ExchangeMessage
from farandole.protocol.view import CommitMessage
from farandole.simulate.replica import GARBAGE

NO_COMMIT = CommitMessage(view=-1, round=-1, prepared=-1, compute_us=-1, shards=-1)
Memory = dict[Any, Any]
GIVEN_BACK = "given back"
Way = tuple[int, str, int]  # group, peer, tag


@dataclass(eq=False)
class Parcel:
    """A message: the content of its sender's memory when it was sent. The memory must not change before it is read."""

    memory: Memory
    key: Any
    size: int
    snapshot: Any

    def read(self) -> Any:
        return self.snapshot if self.memory.get(self.key) == self.snapshot else GARBAGE

    @property
    def given_back(self) -> bool:
        """True if the sender has freed the memory, so that lent content is undefined. Memory of a send is kept."""
        return GIVEN_BACK in self.memory


@dataclass(eq=False)
class Landing:
    """A receive into `memory[key]`. A `lent` message stays in its sender's memory until it is used."""

    memory: Memory
    key: Any
    size: int
    lent: bool = False
    is_done: bool = False

    def take(self, parcel: Parcel) -> None:
        self.memory[self.key] = parcel if self.lent else parcel.read()
        self.is_done = True

    def use(self, *, later: bool) -> bool:
        """Uses the message. Lent memory is read now, or `later`; False if it is read later and freed already."""
        content = self.memory[self.key]
        if isinstance(content, Parcel) and not later:
            self.memory[self.key] = GARBAGE if content.given_back else content.read()
        return not (isinstance(content, Parcel) and later and content.given_back)


class LostError(Exception):
    """The connection to a peer is broken."""

    def __init__(self, peer: str) -> None:
        self.peer = peer


def size(message: ExchangeMessage) -> int:
    """Returns the size in elements; that of a commit message differs from all others."""
    return -1 if message.kind == COMMIT else message.stop - message.start
