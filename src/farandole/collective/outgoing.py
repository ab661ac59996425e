"""What a worker sends to one peer of its host.

Nobody who sends waits for a peer that does not read: what the socket does not take at once is sent by a thread.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from contextlib import suppress

import torch

from farandole.collective.arena import Arena
from farandole.collective.packets import (
    CHUNK_BYTES,
    CLOSED,
    HEAD,
    INLINE,
    INLINE_BYTES,
    LENT,
    LENT_BYTES,
    LONG,
    SEGMENT,
    head,
    raw,
)
from farandole.collective.transport import PeerLost


class Sending:
    """See `Pending`. Done when the socket has taken it all.

    start: the first packet. body: what follows in packets of its own. lent: what the packet only tells of. file: goes
    with the packet.
    """

    def __init__(
        self,
        to: Outgoing,
        start: bytes,
        *,
        body: torch.Tensor | None = None,
        lent: torch.Tensor | None = None,
        file: int = -1,
    ) -> None:
        self._to = to
        self.start = start
        self.body = body
        self._lent = lent  # it may be read for as long as this is held
        self.file = file
        self.done = False

    def wait(self) -> None:
        self._to.sent(self)


class Outgoing:
    """To `peer`, over `connection`. `arena`: where what is lent lies."""

    def __init__(self, peer: str, connection: socket.socket, arena: Arena) -> None:
        self._peer = peer
        self._connection = connection
        self._arena = arena
        self._room = threading.Condition()
        self._waiting: deque[Sending] = deque()  # what the socket has not taken
        self._handed_over: set[int] = set()  # segments of ours
        self.closed = self._broken = False

    def send(self, tensor: torch.Tensor, tag: int) -> Sending:
        """A copy of it."""
        flat = tensor.view(-1)
        if flat.nbytes <= INLINE_BYTES:
            return self._go(Sending(self, head(INLINE, flat, tag) + raw(flat)))
        return self._go(Sending(self, head(LONG, flat, tag), body=flat))

    def lend(self, tensor: torch.Tensor, tag: int) -> Sending:
        """Where it lies, if that is in the arena."""
        found = self._arena.find(tensor) if tensor.nbytes >= LENT_BYTES else None
        if found is None:
            return self.send(tensor, tag)
        segment, offset = found
        with self._room:  # nobody is told of a place in a segment before it has gone
            if segment.number not in self._handed_over:
                self._handed_over.add(segment.number)
                handed = HEAD.pack(SEGMENT, 0, 0, segment.number, 0, segment.size)
                self._go(Sending(self, handed, file=segment.file))
            return self._go(Sending(self, head(LENT, tensor, tag, segment.number, offset), lent=tensor))

    def sent(self, sending: Sending) -> None:
        """Blocks until it is."""
        with self._room:
            self._room.wait_for(lambda: sending.done or self._broken)
        if not sending.done:
            raise PeerLost(self._peer, CLOSED)

    def close(self) -> None:
        """Nothing is sent after what has been sent until now. Idempotent."""
        with self._room:
            self.closed = True
            if not self._waiting:
                self._end()

    def _go(self, sending: Sending) -> Sending:
        with self._room:
            if self.closed or self._broken:
                raise PeerLost(self._peer, "the links are closed" if self.closed else CLOSED)
            if not self._waiting and sending.body is None and self._packet(sending, socket.MSG_DONTWAIT):
                return sending
            if self._broken:
                raise PeerLost(self._peer, CLOSED)
            self._waiting.append(sending)
            if len(self._waiting) == 1:
                threading.Thread(target=self._push, name=f"to-{self._peer}", daemon=True).start()
        return sending

    def _push(self) -> None:
        """A thread, for as long as there is something that the socket has not taken."""
        while True:
            with self._room:
                sending = self._waiting[0]
            if self._packet(sending, 0) and sending.body is not None:
                self._long(sending.body)
            with self._room:
                sending.done = not self._broken
                self._waiting.popleft()
                if self._broken:
                    self._waiting.clear()
                self._room.notify_all()
                if not self._waiting:
                    if self.closed:
                        self._end()
                    return

    def _packet(self, sending: Sending, flags: int) -> bool:
        """False: not now, or never."""
        files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", sending.file))] if sending.file >= 0 else []
        try:
            self._connection.sendmsg([sending.start], files, flags | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            self._break()
            return False
        sending.done = sending.body is None
        return True

    def _long(self, body: torch.Tensor) -> None:
        data = raw(body)
        try:
            for start in range(0, len(data), CHUNK_BYTES):
                self._connection.send(data[start : start + CHUNK_BYTES], socket.MSG_NOSIGNAL)
        except OSError:
            self._break()

    def _break(self) -> None:
        with self._room:
            self._broken = True
            self._room.notify_all()

    def _end(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
