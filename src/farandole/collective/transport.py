"""The interface of a transport: how an exchange sends tensors to other workers, and what happens when a peer fails.

`connect` makes the links of a view's group: to every other member, and to nobody else. A view that only shrinks keeps
using the links of an earlier view. A transport object is made for one group and is used once. Its constructor gets
what it needs beside the view: the rendezvous and the group's key. So a transport that picks another transport for each
peer, by the view's hosts, has the same interface as the transports that it picks from.

Every transport guarantees the following, and `tests/collective/test_transport.py` tests it for each:

- **Order.** A message matches the receive with the same tag and peer, whichever of the two starts first. Messages of
  one tag match in the order in which they were started. There is no order between different tags.
- **Memory.** A tensor that is being sent may be read at any time until its receiver has it. A tensor that is being
  received into may be written at any time until `wait` returns. The caller must neither change nor read the tensor
  meanwhile. A `Pending` keeps its tensor alive; `keep` keeps memory alive longer, until the links are closed. A send
  may not complete before its receiver waits for it.
- **Sizes.** A message and its receive have the same size, which may be 0. Where no memory is shared, a message of bytes
  (uint8) may be shorter than its receive, and the rest of the receive's memory is left as it is. If the sizes differ
  in another way, the process may end.
- **Sharing.** `lend` may let the receiver read the sender's memory directly, without a copy. Otherwise the message is
  copied into the receiver's `ReceiveBuffer`. `borrow(...).wait()` returns the tensor that holds the data in either
  case. So the sender must not change the memory, and the receiver must not write to it, until both know by other means
  that it is no longer used: in a round by the commit messages (`shm_sums` has the rules), in a state transfer by the
  acknowledgements of the joiner (`state_transfer`). Where no memory is shared, `lend` sends and `borrow` receives.
- **A lost peer.** When the connection to a peer is broken, `send`, `receive` and the waits on what they returned raise
  `PeerLost`. Messages that had arrived before are still delivered. The links to other peers keep working.
- **A frozen peer** is not lost: a wait on it blocks until the peer resumes or ends. Nothing else wakes the wait, and
  it has no time limit. So a thread of the view does the waiting, and the control plane decides which peer hangs.
- **Closing** ends the links for their owner at once: it can't start new operations. The peers see the owner as lost
  when its pending operations are done, or when its process has ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from farandole.errors import FarandoleError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from farandole.protocol.view import View


class ReceiveBuffer:
    """A receive buffer of `numel` elements of `dtype`. Its memory is allocated at the first use."""

    __slots__ = ("_make", "_memory", "dtype", "numel")

    def __init__(self, numel: int, dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> None:
        """`make` allocates the memory, as a contiguous tensor."""
        self.numel = numel
        self.dtype = dtype
        self._make = make
        self._memory: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ReceiveBuffer:
        return cls(tensor.numel(), tensor.dtype, lambda: tensor)

    @property
    def memory(self) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._make()
        return self._memory

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns True if `tensor` is this buffer's memory, so that the message was copied here."""
        return tensor is self._memory


class PeerLost(FarandoleError):
    """The connection to a peer is broken."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class Unproved(FarandoleError):
    """The process that is connected as a peer has not authenticated as that peer."""

    def __init__(self, peer: str, address: str) -> None:
        super().__init__(f"{address} has not proved that it is {peer}")
        self.peer = peer
        self.address = address


class Pending(Protocol):
    """A pending send or receive."""

    def wait(self) -> object:
        """Blocks until the operation is done. Call it once.

        Raises:
            PeerLost: the operation can never complete.
        """
        ...


class Borrowing(Protocol):
    """A pending receive of shared memory."""

    def wait(self) -> torch.Tensor:
        """Blocks until the message is here. Call it once.

        Returns:
            The tensor that holds the message: the memory of the `ReceiveBuffer`, or the sender's memory.

        Raises:
            PeerLost: the message can never arrive.
        """
        ...


class Links(Protocol):
    """One worker's ends of the connections to its peers. Peers are named by worker id."""

    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        """Starts to send a contiguous tensor in host memory.

        Raises:
            PeerLost: the connection is broken.
        """
        ...

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        """Starts to receive into a contiguous tensor in host memory.

        Raises:
            PeerLost: the connection is broken.
        """
        ...

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        """Starts to share a flat tensor in host memory; the peer may read it in place.

        Raises:
            PeerLost: the connection is broken.
        """
        ...

    def borrow(self, buffer: ReceiveBuffer, peer: str, tag: int) -> Borrowing:
        """Starts to receive a tensor that the peer shares with `lend`.

        Raises:
            PeerLost: the connection is broken.
        """
        ...

    def shares(self, peer: str) -> bool:
        """Returns True if this worker reads in place what `peer` shares with `lend`."""
        ...

    def keep_alive(self, memory: object) -> None:
        """Keeps `memory` alive until the links are closed, because a frozen peer may still read it or write to it."""
        ...

    def close(self) -> None:
        """Closes the links; the workers of the view no longer use them. May take a while. Idempotent."""
        ...


class Unshared(ABC):
    """Base class of links whose ends share no memory: `lend` sends, `borrow` receives."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending: ...

    @abstractmethod
    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> Borrowing: ...

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        return self.send(tensor, peer, tag)

    def borrow(self, buffer: ReceiveBuffer, peer: str, tag: int) -> Borrowing:
        return self.receive(buffer.memory, peer, tag)

    def shares(self, peer: str) -> bool:
        del peer
        return False


class Transport(Protocol):
    """The factory of the links of one group."""

    def connect(self, view: View, me: str) -> Links:
        """Connects `me` to the other members. Blocks until all of `view.members` call it, each in its own process.

        Raises:
            RuntimeError, KeyError, PeerLost: the view was given up, or not all members connected in time.
            Unproved: another process connected in a peer's place.
            OSError, ValueError: others can't reach this worker, or a peer's address can't be parsed.
        """
        ...
