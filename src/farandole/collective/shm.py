"""Shared-memory connections between the workers of one host: a Unix socket for each pair, and memory that the peer
maps.

A message is one packet of the socket. A tensor in the sender's arena is *lent* (shared): the packet has its location,
and the segment itself is sent as an open file before its first use. Any other tensor is copied through the socket; a
long one follows its head. Each direction of the socket keeps the order. The head has the tag of the receive.

When the peer's process ends, the socket ends: so a lost peer is detected. Messages that it had sent before are read
first, and memory that it had lent stays readable. `transport` lists the guarantees.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from farandole.collective.arena import PAGE, Arena, Mapped, Memory, Unusable, mapped
from farandole.collective.compression import Compressed, Payoff
from farandole.collective.gloo import NONCE_BYTES, PROOF_BYTES, Gloo, Rendezvous, proof
from farandole.collective.link_meter import LinkMeter
from farandole.collective.transport import Borrowing, Links, PeerLost, Pending, ReceiveBuffer
from farandole.platform.output import warn_once
from farandole.protocol.view import View

# --- packets ----------------------------------------------------------------------------------------------------------
#
# The packets on the connection of a pair: the format of their heads.

INLINE_BYTES = 16 << 10  # largest message that goes in one packet with its head
LENT_BYTES = 256  # smallest message that is lent
CHUNK_BYTES = 64 << 10  # size of the packets that follow the head of a longer message
MOST_BYTES = 1 << 40  # largest message; a larger size is invalid
CLOSED = "connection closed by peer"
HEAD = struct.Struct("<BBIIQQ")  # kind, dtype, tag, segment, offset, bytes
INLINE, LONG, LENT, SEGMENT = range(4)
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def head(kind: int, tensor: torch.Tensor, tag: int, segment: int = 0, offset: int = 0) -> bytes:
    """Returns the head of a message; for a `LENT` one with its segment and offset."""
    return HEAD.pack(kind, DTYPES.index(tensor.dtype), tag, segment, offset, tensor.nbytes)


def raw(flat: torch.Tensor) -> memoryview:
    """Returns the bytes of a flat tensor, without a copy."""
    return flat.view(torch.uint8).numpy().data


# --- incoming ---------------------------------------------------------------------------------------------------------
#
# The receiving side of a pair.
#
# A waiting thread reads: of all threads that wait for this peer one reads, and stores the messages for the others. So
# there is one hop through the kernel between the sender's call and the waiting thread. That hop also makes the sender's
# earlier writes to shared memory visible to the other core.

_NONSENSE = "it sent an invalid packet"


class Receiving:
    """A pending receive. `borrows` is True if lent memory need not be copied."""

    def __init__(self, by: Incoming, buffer: ReceiveBuffer, *, borrows: bool) -> None:
        self._by = by
        self.buffer = buffer
        self.borrows = borrows
        self.done = False
        self._content: torch.Tensor | None = None

    def take(self, content: torch.Tensor) -> None:
        """Completes the receive with `content`, in memory that does not change before `wait`."""
        self._content = content
        self.done = True

    def wait(self) -> torch.Tensor:
        self._by.read_until(self)
        content = self._content
        assert content is not None
        self._content = None
        if content.numel() != self.buffer.numel or content.dtype != self.buffer.dtype:
            raise PeerLost(
                self._by.peer,
                f"it sent {content.numel()} elements of {content.dtype}, and "
                f"{self.buffer.numel} of {self.buffer.dtype} are expected",
            )
        return content if self.borrows else self.buffer.memory.view(-1).copy_(content)


class Incoming:
    """The messages from `peer`, over `connection`."""

    def __init__(self, peer: str, connection: socket.socket) -> None:
        self.peer = peer
        self._connection = connection
        self._lost = ""  # why no more messages arrive
        self._news = threading.Condition()
        self._reading = False
        self._expected: dict[int, deque[Receiving]] = defaultdict(deque)
        self._arrived: dict[int, deque[torch.Tensor]] = defaultdict(deque)
        self._segments: dict[int, Mapped] = {}  # the peer's; used by the reading thread only

    def receive(self, buffer: ReceiveBuffer, tag: int, *, borrows: bool = False) -> Receiving:
        receiving = Receiving(self, buffer, borrows=borrows)
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
        """Blocks until `receiving` is done; meanwhile reads, or waits while another thread reads."""
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
            except (Unusable, OSError, RuntimeError) as error:  # RuntimeError: not enough memory for the message
                lost = str(error)
            finally:
                with self._news:
                    self._reading = False
                    self._lost = self._lost or lost
                    self._news.notify_all()

    def _read(self) -> str:
        """Reads one message or one segment. Returns "", or the reason why no more can arrive."""
        packet, files = self._receive_packet()
        try:
            return self._heed(packet, files) if packet else CLOSED
        finally:
            for file in files:
                os.close(file)

    def _heed(self, packet: bytes, files: list[int]) -> str:
        """Handles a packet. `files` came with it; a file that this takes over is removed from the list."""
        if len(packet) < HEAD.size:
            raise Unusable(_NONSENSE)
        kind, dtype, tag, number, offset, size = HEAD.unpack_from(packet)
        if kind == SEGMENT:
            if not files:
                raise Unusable("it sent a segment without its file")
            self._segments[number] = mapped(files.pop())
            return ""
        content = self._content(packet, kind, dtype, number, offset, size)
        if content is None:
            return CLOSED
        with self._news:
            expected = self._expected.get(tag)
            if expected:
                expected.popleft().take(content)
                if not expected:
                    del self._expected[tag]
            else:
                self._arrived[tag].append(content)
        return ""

    def _content(
        self, packet: bytes, kind: int, dtype: int, number: int, offset: int, size: int
    ) -> torch.Tensor | None:
        """Returns the content of a message as a flat tensor; None if it is incomplete because the peer is lost."""
        if dtype >= len(DTYPES) or size % DTYPES[dtype].itemsize:
            raise Unusable(_NONSENSE)
        if kind == LENT and number in self._segments:
            return self._segments[number].tensor(offset, size, DTYPES[dtype])
        if not (kind == LONG and size <= MOST_BYTES) and not (kind == INLINE and len(packet) == HEAD.size + size):
            raise Unusable(_NONSENSE)
        content = torch.empty(size // DTYPES[dtype].itemsize, dtype=DTYPES[dtype])
        data = raw(content)
        if kind == LONG:
            return content if self._read_long(data) else None
        data[:] = packet[HEAD.size :]
        return content

    def _receive_packet(self) -> tuple[bytes, list[int]]:
        while True:
            with suppress(ConnectionResetError):  # raised once, before the data that is still to be read
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


# --- outgoing ---------------------------------------------------------------------------------------------------------
#
# The sending side of a pair.
#
# A sender never waits for a peer that does not read: a thread sends what the socket does not take at once.


class Sending:
    """A pending send. It is done when the socket has taken all its data.

    Attributes:
        start: the first packet.
        body: data that follows in packets of its own.
        lent: a tensor whose location is in the packet.
        file: the file descriptor that goes with the packet; -1 for none.
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
    """The messages to `peer`, over `connection`. Tensors in `arena` can be lent."""

    def __init__(self, peer: str, connection: socket.socket, arena: Arena) -> None:
        self._peer = peer
        self._connection = connection
        self._arena = arena
        self._buffer = threading.Condition()
        self._waiting: deque[Sending] = deque()  # data that the socket has not taken
        self._handed_over: set[int] = set()  # our segments that the peer has
        self.closed = self._broken = False

    def send(self, tensor: torch.Tensor, tag: int) -> Sending:
        """Sends a copy of the tensor."""
        flat = tensor.view(-1)
        if flat.nbytes <= INLINE_BYTES:
            return self._go(Sending(self, head(INLINE, flat, tag) + raw(flat)))
        return self._go(Sending(self, head(LONG, flat, tag), body=flat))

    def lend(self, tensor: torch.Tensor, tag: int) -> Sending:
        """Sends the location of the tensor if it is in the arena, otherwise a copy."""
        location = self._arena.find(tensor) if tensor.nbytes >= LENT_BYTES else None
        if location is None:
            return self.send(tensor, tag)
        segment, offset = location
        with self._buffer:  # the segment is sent before any location in it
            if segment.number not in self._handed_over:
                self._handed_over.add(segment.number)
                start = HEAD.pack(SEGMENT, 0, 0, segment.number, 0, segment.size)
                self._go(Sending(self, start, file=segment.file))
            return self._go(Sending(self, head(LENT, tensor, tag, segment.number, offset), lent=tensor))

    def sent(self, sending: Sending) -> None:
        """Blocks until `sending` is done."""
        with self._buffer:
            self._buffer.wait_for(lambda: sending.done or self._broken)
        if not sending.done:
            raise PeerLost(self._peer, CLOSED)

    def close(self) -> None:
        """Closes this direction after everything that was sent until now. Idempotent."""
        with self._buffer:
            self.closed = True
            if not self._waiting:
                self._end()

    def _go(self, sending: Sending) -> Sending:
        with self._buffer:
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
        """The body of a thread that runs while there is data that the socket has not taken."""
        while True:
            with self._buffer:
                sending = self._waiting[0]
            if self._packet(sending, 0) and sending.body is not None:
                self._long(sending.body)
            with self._buffer:
                sending.done = not self._broken
                self._waiting.popleft()
                if self._broken:
                    self._waiting.clear()
                self._buffer.notify_all()
                if not self._waiting:
                    if self.closed:
                        self._end()
                    return

    def _packet(self, sending: Sending, flags: int) -> bool:
        """Sends the first packet. Returns False if the socket does not take it now, or is broken."""
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
        with self._buffer:
            self._broken = True
            self._buffer.notify_all()

    def _end(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)


# --- pair -------------------------------------------------------------------------------------------------------------


class ShmConnection(socket.socket):
    """A socket that is closed with its last reference, and in each forked process.

    An open copy in a child would hide the end of its parent from the peer.
    """

    def __init__(self, original: socket.socket) -> None:
        """Takes over the descriptor of `original`."""
        super().__init__(fileno=original.detach())
        _open.add(self)

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


_open: weakref.WeakSet[ShmConnection] = weakref.WeakSet()


def _in_child() -> None:
    for connection in tuple(_open):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class Pair:
    """One worker's end of the connection to a peer of its host; see the docstring of the module.

    Takes over `connection`, which is connected. Tensors in `arena` can be lent.
    """

    def __init__(self, peer: str, connection: socket.socket, arena: Arena) -> None:
        self.connection = connection = ShmConnection(connection)
        self._outgoing = Outgoing(peer, connection, arena)
        self._incoming = Incoming(peer, connection)

    def send(self, tensor: torch.Tensor, tag: int) -> Sending:
        """Sends a copy of the tensor."""
        return self._outgoing.send(tensor, tag)

    def lend(self, tensor: torch.Tensor, tag: int) -> Sending:
        """Sends the location of the tensor if it is in the arena, otherwise a copy."""
        return self._outgoing.lend(tensor, tag)

    def receive(self, buffer: ReceiveBuffer, tag: int, *, borrows: bool = False) -> Receiving:
        if self._outgoing.closed:
            raise PeerLost(self._incoming.peer, "the links are closed")
        return self._incoming.receive(buffer, tag, borrows=borrows)

    def close(self) -> None:
        """Ends sending after everything that was sent until now, and refuses new receives. Idempotent."""
        self._outgoing.close()


# --- handover ---------------------------------------------------------------------------------------------------------
#
# How workers of one host set up shared memory before their group is used: pair by pair, so that both ends agree.
#
# Workers report their host (`View.hosts`, the kernel's boot id). The report counts only after memory has really been
# handed over. Of two workers, a before b in the view, a listens at a Unix socket with a random name, and publishes the
# name over the control connection; b connects. Each end then
#
# 1. asks the kernel for the user of the other process, and closes the connection of another user at once;
# 2. proves that it holds the group's key, as on any connection (section `proof` of `gloo.py`);
# 3. hands over memory of its arena that contains random bytes. The other end maps it, and sends the bytes back.
#
# b reports its result over the control connection. a waits for that, and publishes which of its pairs work. So both
# ends follow the decision of a, and every member knows the transport of each pair. A container with its own network
# namespace has its own sockets, and a machine with a copied boot id has no such socket at all: such pairs use the next
# transport, and a warning is logged.

_log = logging.getLogger(__name__)
LIMIT_S = 20.0  # for each packet from the other end
_NAME_BYTES = 16
_PLACE = struct.Struct("<IQ")  # segment, offset


def boot_id() -> str:
    """Returns the boot id of the running kernel; "" if it has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class Meeting:
    """Connects `me` to the members in `near` that share memory with it.

    `near` lists the members of its host, in the order of the view and including itself.
    """

    def __init__(
        self, view: View, me: str, near: Sequence[str], rendezvous: Rendezvous, key: bytes, arena: Arena | None
    ) -> None:
        self._view, self._me, self._near = view, me, near
        self._rendezvous, self._key = rendezvous, key
        self._arena = arena if arena is not None and arena.works else None
        self._pairs: dict[str, Pair] = {}
        self._change = threading.Condition()

    def hold(self) -> dict[str, Pair]:
        """Blocks until each pair is decided. Returns this worker's pairs that share memory, by peer.

        Raises:
            RuntimeError: the view was given up, or not all members reported their result in time.
        """
        rendezvous, me = self._rendezvous, self._me
        listener, address = self._listen()
        after = [peer for peer in self._near if self._near.index(peer) > self._near.index(me)]
        before = [peer for peer in self._near if self._near.index(peer) < self._near.index(me)]
        try:
            if listener is not None:
                threading.Thread(target=self._take_in, args=(listener, set(after)), daemon=True).start()
            for peer in self._near:
                if peer != me:
                    rendezvous.tell(f"host {me}", address.encode(), to=peer)
            for peer in before:
                rendezvous.wait([f"host {peer}"])
                shared = self._visit(peer, rendezvous.said(f"host {peer}")[""].decode("ascii", "replace"), address)
                rendezvous.tell(f"{me} met {peer}", b"yes" if shared else b"no", to=peer)
            rendezvous.wait([f"{peer} met {me}" for peer in after])
            stand = [
                peer for peer in after if rendezvous.said(f"{peer} met {me}")[""] == b"yes" and self._has_come(peer)
            ]
            rendezvous.set(f"shared {me}", "\n".join(stand))
            return self._settled(before, stand)
        finally:
            if listener is not None:
                with suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                listener.close()

    def _settled(self, before: Sequence[str], stand: Sequence[str]) -> dict[str, Pair]:
        self._rendezvous.wait([f"shared {peer}" for peer in before])
        agreed = {peer for peer in before if self._me in standing(self._rendezvous, peer)}.union(stand)
        with self._change:
            pairs, self._pairs = self._pairs, {}
        for peer in pairs.keys() - agreed:
            pairs.pop(peer).close()
        return pairs

    # --- the two ends ----------------------------------------------------------------------------------------

    def _listen(self) -> tuple[socket.socket | None, str]:
        """Returns the listening socket and its address, boot id and name; (None, "") if it shares no memory."""
        if self._arena is None or not boot_id() or len(self._near) == 1:
            return None, ""
        name = secrets.token_hex(_NAME_BYTES)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0farandole-{name}")  # an abstract name: it disappears with its owner
        listener.listen(len(self._near) + 8)
        return listener, f"{boot_id()} {name}"

    def _take_in(self, listener: socket.socket, expected: set[str]) -> None:
        with suppress(OSError):  # until it is closed
            while True:
                connection, _ = listener.accept()
                if _user(connection) != os.getuid():
                    connection.close()
                    continue
                threading.Thread(target=self._receive_one, args=(connection, expected), daemon=True).start()

    def _receive_one(self, connection: socket.socket, expected: set[str]) -> None:
        try:
            connection.settimeout(LIMIT_S)
            peer = connection.recv(256).decode("ascii", "replace")
            if peer not in expected:
                raise Unusable("the process that connected is not an expected member")
            self._shake_hands(connection, peer)
        except (OSError, Unusable) as error:
            connection.close()
            _log.info("rejected a connection from this host: %s", error)

    def _visit(self, peer: str, address: str, own_address: str) -> bool:
        """Connects to a peer at `address`. Returns False if no memory is shared with it."""
        if not own_address or not address or own_address.split()[0] != address.split()[0]:
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(LIMIT_S)
            connection.connect(f"\0farandole-{address.split()[-1]}")
            if _user(connection) != os.getuid():
                raise Unusable("a process of another user owns its socket")
            connection.send(self._me.encode())
            self._shake_hands(connection, peer)
        except (OSError, Unusable) as error:
            connection.close()
            warn_once(_log, f"no shared memory with {peer}, which is on this host: {error}")
            return False
        return True

    def _shake_hands(self, connection: socket.socket, peer: str) -> None:
        """Executes 2 and 3 of the comment above, and makes the connection a pair."""
        arena, view = self._arena, self._view
        assert arena is not None
        ours = secrets.token_bytes(NONCE_BYTES)
        connection.send(ours)
        nonces = {self._me: ours, peer: _packet(connection, NONCE_BYTES)}
        connection.send(proof(self._key, view.group, view.members, nonces, of=self._me))
        expected = proof(self._key, view.group, view.members, nonces, of=peer)
        if not hmac.compare_digest(_packet(connection, PROOF_BYTES), expected):
            raise Unusable("its proof of the group's key is wrong")
        page = arena.empty(PAGE, torch.uint8)
        written = secrets.token_bytes(NONCE_BYTES)
        page[:NONCE_BYTES] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
        location = arena.find(page)
        if location is None:
            raise Unusable("this worker's own memory can't be shared")
        segment, offset = location
        socket.send_fds(connection, [_PLACE.pack(segment.number, offset)], [segment.file])
        place, files, _, _ = socket.recv_fds(connection, _PLACE.size, 1, socket.MSG_CMSG_CLOEXEC)
        if len(files) != 1 or len(place) != _PLACE.size:
            raise Unusable("it sent no memory file")
        theirs = mapped(files[0]).tensor(_PLACE.unpack(place)[1], NONCE_BYTES, torch.uint8)
        connection.send(bytes(theirs.numpy()))
        if _packet(connection, NONCE_BYTES) != written:
            raise Unusable("it read other bytes in the shared memory than this worker wrote there")
        connection.settimeout(None)
        with self._change:
            self._pairs[peer] = Pair(peer, connection, arena)
            self._change.notify_all()

    def _has_come(self, peer: str) -> bool:
        """Waits for this end's pair with `peer`, whose end is ready. Returns False if this end failed."""
        with self._change:
            return self._change.wait_for(lambda: peer in self._pairs, LIMIT_S)


def standing(rendezvous: Rendezvous, member: str) -> set[str]:
    """Returns the members after `member` in the view that it has reported to share memory with."""
    report = rendezvous.said(f"shared {member}").get("", b"")
    return set(report.decode("ascii", "replace").split("\n")) - {""}


def _packet(connection: socket.socket, size: int) -> bytes:
    packet = connection.recv(size + 1)
    if len(packet) != size:
        raise Unusable("it closed the connection" if not packet else _NONSENSE)
    return packet


def _user(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", packed)[1])


# --- by host ----------------------------------------------------------------------------------------------------------
#
# The transport of a run: shared memory between workers of one host, Gloo between all others.
#
# Gloo connects all members of a group or none. So Gloo is not used if all pairs share memory, as in a view of one host.


class ByHost:
    """The transport of a run. Tensors in `memory` can be lent, and those of dtype `compressed` are compressed between
    hosts, with a `payoff` only where that saves time; `meter` measures what goes between hosts; the other arguments are
    those of `Gloo`.
    """

    def __init__(
        self, rendezvous: Rendezvous, key: bytes, interface: str, *, memory: Memory,
        compressed: torch.dtype | None = None, payoff: Payoff | None = None, meter: LinkMeter | None = None,
    ) -> None:  # fmt: skip
        self._compressed, self._payoff = compressed, payoff
        self._meter = meter or LinkMeter()
        self._rendezvous, self._key, self._interface = rendezvous, key, interface
        self._arena = memory if isinstance(memory, Arena) else None

    def connect(self, view: View, me: str) -> Links:
        hosts = view.hosts_of(view.members) or ("",) * view.size
        mine = hosts[view.rank(me)]
        near = [member for member, host in zip(view.members, hosts, strict=True) if host == mine]
        pairs = Meeting(view, me, near, self._rendezvous, self._key, self._arena).hold()
        if len(near) == view.size and self._all_stand(view):
            return LinksByHost(pairs, None)
        gloo = Gloo(self._rendezvous, self._key, self._interface).connect(view, me)
        far = {member: host for member, host in zip(view.members, hosts, strict=True) if host != mine}
        others = self._meter.metered(gloo, far, gloo.sockets)
        if self._compressed is None:
            return LinksByHost(pairs, others)
        return LinksByHost(pairs, Compressed(others, self._compressed, self._payoff))

    def _all_stand(self, view: View) -> bool:
        self._rendezvous.wait([f"shared {member}" for member in view.members])
        return all(
            set(view.members[rank + 1 :]) <= standing(self._rendezvous, member)
            for rank, member in enumerate(view.members)
        )


class LinksByHost:
    """The links of a group. `pairs` are those that share memory; `others` reach all members, None if not needed."""

    def __init__(self, pairs: Mapping[str, Pair], others: Links | None) -> None:
        self.pairs = pairs
        self._others = others
        self._kept: list[object] = []

    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        pair = self.pairs.get(peer)
        return pair.send(tensor, tag) if pair else self._beyond().send(tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        pair = self.pairs.get(peer)
        return pair.receive(ReceiveBuffer.of(tensor), tag) if pair else self._beyond().receive(tensor, peer, tag)

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        pair = self.pairs.get(peer)
        return pair.lend(tensor, tag) if pair else self._beyond().lend(tensor, peer, tag)

    def borrow(self, buffer: ReceiveBuffer, peer: str, tag: int) -> Borrowing:
        pair = self.pairs.get(peer)
        return pair.receive(buffer, tag, borrows=True) if pair else self._beyond().borrow(buffer, peer, tag)

    def shares(self, peer: str) -> bool:
        return peer in self.pairs

    def keep_alive(self, memory: object) -> None:
        self._kept.append(memory)
        if self._others is not None:
            self._others.keep_alive(memory)

    def close(self) -> None:
        for pair in self.pairs.values():
            pair.close()
        if self._others is not None:
            self._others.close()

    def _beyond(self) -> Links:
        assert self._others is not None, "all pairs share memory"
        return self._others
