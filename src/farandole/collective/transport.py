"""How tensors get from worker to worker: what a transport gives to an exchange, and what happens when a peer fails.

`connect` makes the links of a view's group: to every other member, and to nobody else. A view that only shrinks goes on
over the links of an earlier one. A transport is made for one group and used once; what it needs beside the view (where
to say how it is reached, the group's key) it was made with. So one that picks another transport for each peer, by the
view's hosts, has the same face as those that it picks from.

What every transport keeps, and `tests/collective/test_transport.py` shows of each:

- **Order.** A message goes to the receive of the same tag, of its peer's, whichever of the two is there first. Those
  of one tag go in the order in which they were started. Nothing is said of the order of different tags.
- **Memory.** A tensor that is being sent is read at any time until its receiver has it; one that is being received into
  is written at any time until `wait` returns. Who starts either does not change, or read, the tensor meanwhile. A
  `Pending` keeps its tensor alive; `keep` does so beyond that, until the links are closed. A send may not be done
  before its receiver waits for it.
- **Sizes.** A message and its receive are of the same size, which may be 0. Where they are not, the process may end.
- **Lending.** What is lent may be read by its borrower where it lies, or land in the borrower's room: `wait` tells. So
  the lender does not change it, and the borrower does not write there, until both know by other means that it is over:
  in a round by the words (`sums` says which), of a state by what a joiner says (`transfer`). Where no memory is shared
  to lend is to send, and to borrow to receive.
- **A lost peer.** When the connection to a peer is broken, `send`, `receive` and the waits on what they returned raise
  `PeerLost`; what had arrived before counts. The links to others are unharmed.
- **A frozen peer** is not lost: a wait on it goes on until it goes on, or ends. Nothing else wakes it, no limit either,
  so the one who waits is a thread of the view, and the control plane decides who hangs.
- **Closing** ends the links for their owner, at once: nothing is started any more. For the peers he is lost when what
  he had under way is done, or he is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from farandole.errors import FarandoleError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from farandole.protocol.view import View


class Room:
    """Where a message may land: `numel` elements of `dtype`, in memory that is made when it is needed first."""

    __slots__ = ("_make", "_memory", "dtype", "numel")

    def __init__(self, numel: int, dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> None:
        """`make`: gives the memory, contiguous."""
        self.numel = numel
        self.dtype = dtype
        self._make = make
        self._memory: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Room:
        return cls(tensor.numel(), tensor.dtype, lambda: tensor)

    @property
    def memory(self) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._make()
        return self._memory

    def holds(self, what: torch.Tensor) -> bool:
        """Whether `what` has landed here."""
        return what is self._memory


class PeerLost(FarandoleError):
    """The connection to a peer is broken."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class Unproved(FarandoleError):
    """Who is connected as a peer has not proved that it is that one."""

    def __init__(self, peer: str, address: str) -> None:
        super().__init__(f"{address} has not proved that it is {peer}")
        self.peer = peer
        self.address = address


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> object:
        """Blocks until it is done. To be called once.

        Raises:
            PeerLost: it never will be.
        """
        ...


class Borrowing(Protocol):
    """What a peer lends, under way."""

    def wait(self) -> torch.Tensor:
        """Blocks until it is here. To be called once. Returns where it lies: in the room, or in the lender's memory.

        Raises:
            PeerLost: it never will be.
        """
        ...


class Links(Protocol):
    """One worker's ends of the connections to its peers, who are named by worker id."""

    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        """Start sending a contiguous tensor of host memory.

        Raises:
            PeerLost: the connection is broken.
        """
        ...

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        """Start receiving into a contiguous tensor of host memory.

        Raises:
            PeerLost: the connection is broken.
        """
        ...

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        """Start sending a flat tensor of host memory, which may be read where it lies.

        Raises:
            PeerLost: the connection is broken.
        """
        ...

    def borrow(self, room: Room, peer: str, tag: int) -> Borrowing:
        """Start receiving what is lent.

        Raises:
            PeerLost: the connection is broken.
        """
        ...

    def shares(self, peer: str) -> bool:
        """Whether what `peer` lends is read where it lies."""
        ...

    def keep(self, memory: object) -> None:
        """Do not let go of `memory` before the links are closed: a frozen peer may still read it, or write into it."""
        ...

    def close(self) -> None:
        """The view's workers have left these links. May take a while. Idempotent."""
        ...


class Unshared(ABC):
    """What lending is over links whose ends share no memory: sending."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending: ...

    @abstractmethod
    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> Borrowing: ...

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        return self.send(tensor, peer, tag)

    def borrow(self, room: Room, peer: str, tag: int) -> Borrowing:
        return self.receive(room.memory, peer, tag)

    def shares(self, peer: str) -> bool:
        del peer
        return False


class Transport(Protocol):
    """Makes the links of one group."""

    def connect(self, view: View, me: str) -> Links:
        """Blocks until all of `view.members` have come, each from its own process.

        Raises:
            RuntimeError, KeyError, PeerLost: the view was given up, or not all came in time.
            Unproved: somebody else has come in a peer's place.
            OSError, ValueError: this worker can't be reached by others, or a peer's address can't be read.
        """
        ...
