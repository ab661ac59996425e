"""One worker's end of the connection to another one of its host: a Unix socket, and memory that the other can map.

A message is one packet of the socket. What lies in the sender's arena is *lent*: the packet says where it lies, and
before the first of a segment goes the segment itself, as an open file. Anything else goes through the socket, after its
head if it is long. Each direction of the socket keeps the order; the head names the tag that a receive waits for.

The end of the peer's process ends the socket, which is how its loss shows. What it had sent until then is read first,
and what it had lent stays readable. See `transport` for what all of this keeps.
"""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress

import torch

from farandole.collective.arena import Arena
from farandole.collective.incoming import Incoming, Receiving
from farandole.collective.outgoing import Outgoing, Sending
from farandole.collective.transport import PeerLost, Room


class Connection(socket.socket):
    """Closed when nobody holds it any more, and in each forked process: else its parent's end would not be seen."""

    def __init__(self, made: socket.socket) -> None:
        """Takes over what `made` has."""
        super().__init__(fileno=made.detach())
        _open.add(self)

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _in_child() -> None:
    for connection in tuple(_open):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class Pair:
    """See the module's head. `connection` is connected, and taken over; `arena` is where what is lent lies."""

    def __init__(self, peer: str, connection: socket.socket, arena: Arena) -> None:
        self.connection = connection = Connection(connection)
        self._outgoing = Outgoing(peer, connection, arena)
        self._incoming = Incoming(peer, connection)

    def send(self, tensor: torch.Tensor, tag: int) -> Sending:
        """A copy of it."""
        return self._outgoing.send(tensor, tag)

    def lend(self, tensor: torch.Tensor, tag: int) -> Sending:
        """Where it lies, if that is in the arena."""
        return self._outgoing.lend(tensor, tag)

    def receive(self, room: Room, tag: int, *, borrows: bool = False) -> Receiving:
        if self._outgoing.closed:
            raise PeerLost(self._incoming.peer, "the links are closed")
        return self._incoming.receive(room, tag, borrows=borrows)

    def close(self) -> None:
        """Nothing is sent after what has been sent until now, nothing received that is not under way. Idempotent."""
        self._outgoing.close()
