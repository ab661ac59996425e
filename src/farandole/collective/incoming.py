"""What a worker receives from one peer of its host.

Who waits reads: of all threads that wait for this peer one reads, and notes what comes for the others. So between a
sender's call and the thread that waits for it there is one hop through the kernel, which also makes what was written
before visible to the other's core.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import defaultdict, deque
from contextlib import suppress

import torch

from farandole.collective.arena import Mapped, Unusable, mapped
from farandole.collective.packets import (
    CLOSED,
    DTYPES,
    HEAD,
    INLINE,
    INLINE_BYTES,
    LENT,
    LONG,
    MOST_BYTES,
    SEGMENT,
    raw,
)
from farandole.collective.transport import PeerLost, Room

_NONSENSE = "it sent what no worker sends"


class Receiving:
    """See `Pending`. `borrows`: what is lent need not be copied."""

    def __init__(self, by: Incoming, room: Room, *, borrows: bool) -> None:
        self._by = by
        self.room = room
        self.borrows = borrows
        self.done = False
        self._there: torch.Tensor | None = None

    def take(self, what: torch.Tensor) -> None:
        """It is here; in memory that stays as it is until it is asked for."""
        self._there = what
        self.done = True

    def wait(self) -> torch.Tensor:
        self._by.read_until(self)
        there = self._there
        assert there is not None
        self._there = None
        if there.numel() != self.room.numel or there.dtype != self.room.dtype:
            raise PeerLost(
                self._by.peer,
                f"it sent {there.numel()} of {there.dtype} where {self.room.numel} of {self.room.dtype} are due",
            )
        return there if self.borrows else self.room.memory.view(-1).copy_(there)


class Incoming:
    """From `peer`, over `connection`."""

    def __init__(self, peer: str, connection: socket.socket) -> None:
        self.peer = peer
        self._connection = connection
        self._lost = ""  # why nothing comes any more
        self._news = threading.Condition()
        self._reading = False
        self._expected: dict[int, deque[Receiving]] = defaultdict(deque)
        self._arrived: dict[int, deque[torch.Tensor]] = defaultdict(deque)
        self._segments: dict[int, Mapped] = {}  # theirs; of whoever reads

    def receive(self, room: Room, tag: int, *, borrows: bool = False) -> Receiving:
        receiving = Receiving(self, room, borrows=borrows)
        with self._news:
            arrived = self._arrived.get(tag)
            if arrived:
                receiving.take(arrived.popleft())
                if not arrived:
                    del self._arrived[tag]
            elif self._lost:
                raise PeerLost(self.peer, self._lost)
            else:
                self._expected[tag].append(receiving)
        return receiving

    def read_until(self, receiving: Receiving) -> None:
        """Blocks until it is here; meanwhile reads, or waits while another thread does."""
        while True:
            with self._news:
                self._news.wait_for(lambda: receiving.done or self._lost or not self._reading)
                if receiving.done:
                    return
                if self._lost:
                    raise PeerLost(self.peer, self._lost)
                self._reading = True
            lost = ""
            try:
                lost = self._read()
            except (Unusable, OSError, RuntimeError) as error:  # RuntimeError: no memory for so long a message
                lost = str(error)
            finally:
                with self._news:
                    self._reading = False
                    self._lost = self._lost or lost
                    self._news.notify_all()

    def _read(self) -> str:
        """One message, or one segment. Returns why there is none, and never will be."""
        packet, files = self._receive_packet()
        try:
            return self._heed(packet, files) if packet else CLOSED
        finally:
            for file in files:
                os.close(file)

    def _heed(self, packet: bytes, files: list[int]) -> str:
        """`files`: that came with it; what is taken over is no longer in it."""
        if len(packet) < HEAD.size:
            raise Unusable(_NONSENSE)
        kind, dtype, tag, number, offset, size = HEAD.unpack_from(packet)
        if kind == SEGMENT:
            if not files:
                raise Unusable("it handed over no memory")
            self._segments[number] = mapped(files.pop())
            return ""
        what = self._content(packet, kind, dtype, number, offset, size)
        if what is None:
            return CLOSED
        with self._news:
            expected = self._expected.get(tag)
            if expected:
                expected.popleft().take(what)
                if not expected:
                    del self._expected[tag]
            else:
                self._arrived[tag].append(what)
        return ""

    def _content(
        self, packet: bytes, kind: int, dtype: int, number: int, offset: int, size: int
    ) -> torch.Tensor | None:
        """What a message carries, flat. None: it never came whole."""
        if dtype >= len(DTYPES) or size % DTYPES[dtype].itemsize:
            raise Unusable(_NONSENSE)
        if kind == LENT and number in self._segments:
            return self._segments[number].tensor(offset, size, DTYPES[dtype])
        if not (kind == LONG and size <= MOST_BYTES) and not (kind == INLINE and len(packet) == HEAD.size + size):
            raise Unusable(_NONSENSE)
        what = torch.empty(size // DTYPES[dtype].itemsize, dtype=DTYPES[dtype])
        data = raw(what)
        if kind == LONG:
            return what if self._read_long(data) else None
        data[:] = packet[HEAD.size :]
        return what

    def _receive_packet(self) -> tuple[bytes, list[int]]:
        while True:
            with suppress(ConnectionResetError):  # said once, before what is still to be read
                packet, files, _, _ = socket.recv_fds(
                    self._connection, HEAD.size + INLINE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
                return packet, files

    def _read_long(self, data: memoryview) -> bool:
        start = 0
        while start < len(data):
            with suppress(ConnectionResetError):
                read = self._connection.recv_into(data[start:])
                if not read:
                    return False
                start += read
        return True
