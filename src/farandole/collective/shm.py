"""One worker's end of the connection to another one of its host: a Unix socket, and memory that the other can map.

A message is one packet of the socket. What lies in the sender's arena is *lent*: the packet says where it lies, and
before the first of a segment goes the segment itself, as an open file. Anything else goes through the socket, after its
head if it is long. Each direction of the socket keeps the order; the head names the tag that a receive waits for.

The end of the peer's process ends the socket, which is how its loss shows. What it had sent until then is read first,
and what it had lent stays readable. See `transport` for what all of this keeps.
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
from farandole.collective.gloo import NONCE_BYTES, PROOF_BYTES, Gloo, Rendezvous, proof
from farandole.collective.transport import Borrowing, Links, PeerLost, Pending, Room
from farandole.platform.output import warn_once
from farandole.protocol.view import View

# --- packets ----------------------------------------------------------------------------------------------------------
#
# What goes over the connection of a pair: the heads of its packets, and what they stand for.

INLINE_BYTES = 16 << 10  # of a message that goes in one packet with its head
LENT_BYTES = 256  # of a message that is worth lending
CHUNK_BYTES = 64 << 10  # of a longer one, packet by packet after its head
MOST_BYTES = 1 << 40  # of one message: what is more is none
CLOSED = "connection closed by peer"
HEAD = struct.Struct("<BBIIQQ")  # kind, dtype, tag, segment, offset, bytes
INLINE, LONG, LENT, SEGMENT = range(4)
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def head(kind: int, tensor: torch.Tensor, tag: int, segment: int = 0, offset: int = 0) -> bytes:
    """Of a message. For a `LENT` one, where in which segment it lies."""
    return HEAD.pack(kind, DTYPES.index(tensor.dtype), tag, segment, offset, tensor.nbytes)


def raw(flat: torch.Tensor) -> memoryview:
    """A flat tensor's bytes."""
    return flat.view(torch.uint8).numpy().data


# --- incoming ---------------------------------------------------------------------------------------------------------
#
# What a worker receives from one peer of its host.
#
# Who waits reads: of all threads that wait for this peer one reads, and notes what comes for the others. So between a
# sender's call and the thread that waits for it there is one hop through the kernel, which also makes what was written
# before visible to the other's core.

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


# --- outgoing ---------------------------------------------------------------------------------------------------------
#
# What a worker sends to one peer of its host.
#
# Nobody who sends waits for a peer that does not read: what the socket does not take at once is sent by a thread.


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


# --- pair -------------------------------------------------------------------------------------------------------------


class ShmConnection(socket.socket):
    """Closed when nobody holds it any more, and in each forked process: else its parent's end would not be seen."""

    def __init__(self, made: socket.socket) -> None:
        """Takes over what `made` has."""
        super().__init__(fileno=made.detach())
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
    """See the module's head. `connection` is connected, and taken over; `arena` is where what is lent lies."""

    def __init__(self, peer: str, connection: socket.socket, arena: Arena) -> None:
        self.connection = connection = ShmConnection(connection)
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


# --- handover ---------------------------------------------------------------------------------------------------------
#
# How workers of one host come to share memory, before their group is used: pair by pair, and both ends agree on it.
#
# That two workers are of one host is what they say (`View.hosts`, the kernel's boot id). It counts when memory has
# really been handed over. Of two, a before b in the view, a listens at a Unix socket whose name is random, and says
# so over the control connection; b connects. Each end then
#
# 1. asks the kernel whose process the other one is: another user's is sent away at once;
# 2. proves that it holds the group's key, as over any connection (`proof`);
# 3. hands over memory of its arena in which random bytes lie. The other maps it, and says what it reads there.
#
# b says over the control connection how that went for it, a waits for that and says which pairs stand: so both go by
# what a says, and everybody knows what to use for whom. A container with a network of its own has sockets of its own,
# and a machine that only has another one's boot id has no such socket at all: there the next transport is taken,
# which is told.

_log = logging.getLogger(__name__)
LIMIT_S = 20.0  # for each packet of the other end's
_NAME_BYTES = 16
_PLACE = struct.Struct("<IQ")  # segment, offset


def boot_id() -> str:
    """Of the kernel that runs; "" where it has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class Meeting:
    """Connects `me` with those of `near` that share memory with it. `near`: the members of its host, with itself."""

    def __init__(
        self, view: View, me: str, near: Sequence[str], rendezvous: Rendezvous, key: bytes, arena: Arena | None
    ) -> None:
        self._view, self._me, self._near = view, me, near
        self._rendezvous, self._key = rendezvous, key
        self._arena = arena if arena is not None and arena.works else None
        self._pairs: dict[str, Pair] = {}
        self._change = threading.Condition()

    def hold(self) -> dict[str, Pair]:
        """Blocks until it is decided for each pair; returns those of this worker that stand.

        Raises:
            RuntimeError: the view was given up, or not all have said in time what they found.
        """
        rendezvous, me = self._rendezvous, self._me
        listener, here = self._listen()
        after = [peer for peer in self._near if self._near.index(peer) > self._near.index(me)]
        before = [peer for peer in self._near if self._near.index(peer) < self._near.index(me)]
        try:
            if listener is not None:
                threading.Thread(target=self._take_in, args=(listener, set(after)), daemon=True).start()
            for peer in self._near:
                if peer != me:
                    rendezvous.tell(f"host {me}", here.encode(), to=peer)
            for peer in before:
                rendezvous.wait([f"host {peer}"])
                went = self._visit(peer, rendezvous.said(f"host {peer}")[""].decode("ascii", "replace"), here)
                rendezvous.tell(f"{me} met {peer}", b"yes" if went else b"no", to=peer)
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
        """The socket and where this worker is: boot id and name; "" if it shares nothing."""
        if self._arena is None or not boot_id() or len(self._near) == 1:
            return None, ""
        name = secrets.token_hex(_NAME_BYTES)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0farandole-{name}")  # without a file: gone with its owner
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
                raise Unusable("who has connected is none of those who may")
            self._shake_hands(connection, peer)
        except (OSError, Unusable) as error:
            connection.close()
            _log.info("a connection of this host was not taken: %s", error)

    def _visit(self, peer: str, there: str, here: str) -> bool:
        """Connect to a peer that is `there`. False: nothing is shared with it."""
        if not here or not there or here.split()[0] != there.split()[0]:
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(LIMIT_S)
            connection.connect(f"\0farandole-{there.split()[-1]}")
            if _user(connection) != os.getuid():
                raise Unusable("another user's process has its socket")
            connection.send(self._me.encode())
            self._shake_hands(connection, peer)
        except (OSError, Unusable) as error:
            connection.close()
            warn_once(_log, f"no memory is shared with {peer}, which is on this host: {error}")
            return False
        return True

    def _shake_hands(self, connection: socket.socket, peer: str) -> None:
        """See the module's head, 2 and 3. Then the connection is a pair's."""
        arena, view = self._arena, self._view
        assert arena is not None
        ours = secrets.token_bytes(NONCE_BYTES)
        connection.send(ours)
        nonces = {self._me: ours, peer: _packet(connection, NONCE_BYTES)}
        connection.send(proof(self._key, view.group, view.members, nonces, of=self._me))
        expected = proof(self._key, view.group, view.members, nonces, of=peer)
        if not hmac.compare_digest(_packet(connection, PROOF_BYTES), expected):
            raise Unusable("it has not proved that it is the run's")
        page = arena.empty(PAGE, torch.uint8)
        written = secrets.token_bytes(NONCE_BYTES)
        page[:NONCE_BYTES] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
        found = arena.find(page)
        if found is None:
            raise Unusable("its own memory can't be shared")
        segment, offset = found
        socket.send_fds(connection, [_PLACE.pack(segment.number, offset)], [segment.file])
        place, files, _, _ = socket.recv_fds(connection, _PLACE.size, 1, socket.MSG_CMSG_CLOEXEC)
        if len(files) != 1 or len(place) != _PLACE.size:
            raise Unusable("it handed over no memory")
        theirs = mapped(files[0]).tensor(_PLACE.unpack(place)[1], NONCE_BYTES, torch.uint8)
        connection.send(bytes(theirs.numpy()))
        if _packet(connection, NONCE_BYTES) != written:
            raise Unusable("what it reads in the memory that it was handed is not what is there")
        connection.settimeout(None)
        with self._change:
            self._pairs[peer] = Pair(peer, connection, arena)
            self._change.notify_all()

    def _has_come(self, peer: str) -> bool:
        """What `peer` has found to be so is known here a moment later, or never."""
        with self._change:
            return self._change.wait_for(lambda: peer in self._pairs, LIMIT_S)


def standing(rendezvous: Rendezvous, member: str) -> set[str]:
    """With whom of those after it `member` shares memory, as it has said."""
    said = rendezvous.said(f"shared {member}").get("", b"")
    return set(said.decode("ascii", "replace").split("\n")) - {""}


def _packet(connection: socket.socket, size: int) -> bytes:
    packet = connection.recv(size + 1)
    if len(packet) != size:
        raise Unusable("it went away" if not packet else "it sent what no worker sends")
    return packet


def _user(connection: socket.socket) -> int:
    """Whose process is at the other end."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", packed)[1])


# --- by host ----------------------------------------------------------------------------------------------------------
#
# The transport of a run: memory that both can read between workers of one host, Gloo between all others.
#
# Gloo connects all members of a group or none. So there is none where all pairs share memory, as in a view of one host.


class ByHost:
    """The transport. `memory`: where what this worker lends lies; the others are Gloo's."""

    def __init__(self, rendezvous: Rendezvous, key: bytes, interface: str, *, memory: Memory) -> None:
        self._rendezvous, self._key, self._interface = rendezvous, key, interface
        self._arena = memory if isinstance(memory, Arena) else None

    def connect(self, view: View, me: str) -> Links:
        hosts = view.hosts_of(view.members) or ("",) * view.size
        mine = hosts[view.rank(me)]
        near = [member for member, host in zip(view.members, hosts, strict=True) if host == mine]
        pairs = Meeting(view, me, near, self._rendezvous, self._key, self._arena).hold()
        if len(near) == view.size and self._all_stand(view):
            return LinksByHost(pairs, None)
        return LinksByHost(pairs, Gloo(self._rendezvous, self._key, self._interface).connect(view, me))

    def _all_stand(self, view: View) -> bool:
        self._rendezvous.wait([f"shared {member}" for member in view.members])
        return all(
            set(view.members[rank + 1 :]) <= standing(self._rendezvous, member)
            for rank, member in enumerate(view.members)
        )


class LinksByHost:
    """See `Links`. `pairs`: with those that share memory; `others`: with everybody, None if nobody else is there."""

    def __init__(self, pairs: Mapping[str, Pair], others: Links | None) -> None:
        self.pairs = pairs
        self._others = others
        self._kept: list[object] = []

    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        pair = self.pairs.get(peer)
        return pair.send(tensor, tag) if pair else self._beyond().send(tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        pair = self.pairs.get(peer)
        return pair.receive(Room.of(tensor), tag) if pair else self._beyond().receive(tensor, peer, tag)

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        pair = self.pairs.get(peer)
        return pair.lend(tensor, tag) if pair else self._beyond().lend(tensor, peer, tag)

    def borrow(self, room: Room, peer: str, tag: int) -> Borrowing:
        pair = self.pairs.get(peer)
        return pair.receive(room, tag, borrows=True) if pair else self._beyond().borrow(room, peer, tag)

    def shares(self, peer: str) -> bool:
        return peer in self.pairs

    def keep(self, memory: object) -> None:
        self._kept.append(memory)
        if self._others is not None:
            self._others.keep(memory)

    def close(self) -> None:
        for pair in self.pairs.values():
            pair.close()
        if self._others is not None:
            self._others.close()

    def _beyond(self) -> Links:
        assert self._others is not None, "all pairs share memory"
        return self._others
