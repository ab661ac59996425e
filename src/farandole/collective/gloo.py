"""The Gloo transport: TCP between all pairs of a group, with a rendezvous over the control connection.

A group accepts connections only from its members (section `listener`), and is used only after each of its pairs has
authenticated (section `proof`): data from an unauthenticated peer is never read.

Gloo can't wake a pending receive, and it closes the pair of a receive that times out. So receives never time out here.

A forked process (a loader process) inherits groups without their threads, and Gloo's destructor waits for these
threads: a group that is garbage in a reference cycle would hang the child in a garbage collection. So the child
excludes all inherited objects from its collections (`gc.freeze`), and no collection runs while other libraries' fork
handlers run.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import hmac
import ipaddress
import logging
import os
import random
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from farandole.collective.schedule import COMMIT, place
from farandole.collective.transport import PeerLost, Unproved, Unshared
from farandole.platform import files
from farandole.platform.output import warn_once
from farandole.protocol.view import View

# --- proof ------------------------------------------------------------------------------------------------------------
#
# The authentication of each pair of a new group, before any other data is sent: both ends hold the group's key.
#
# The coordinator makes a key for each group (`coordinator/server.py`) and sends it to the members of that view only,
# over connections that have authenticated with the ticket. Every pair (a, b), a before b in the view, does this in both
# directions at the same time:
#
# 1. a sends a nonce of 32 random bytes, N(a); b sends N(b).
# 2. a sends HMAC-SHA256(key, T | "a"); b sends HMAC-SHA256(key, T | "b"). T, the transcript, consists of the purpose,
#    the group's number, both names, N(a) and N(b), each preceded by its length.
# 3. Each end compares the received HMAC with the one that the other must send, in constant time.
#
# A process without the key can't compute the expected HMAC. It contains a's own nonce, so a replay of an earlier one
# fails. It contains the sender's name, so a's HMAC is not valid as b's. It contains both names and the group's number,
# so an HMAC of another pair or another group is not valid either. An attacker may choose its own nonce, but that does
# not help: it learns HMACs of transcripts that no other process accepts. The key is specific to the run and the group
# (both are in it).
#
# Limit: the proof authenticates the other end when the group forms; later data is not authenticated. An attacker on the
# path between two members that forwards their proofs unchanged can then read and change all data, and no proof without
# encryption can detect it. On one machine only root can do that, because the listener accepts no other process's
# connection (section `listener`). In a network, a machine can that spoofs another machine's address, or its router.
#
# All sizes are fixed. Gloo itself trusts its peers: a process that connects in place of a member and speaks Gloo's
# format can end this process before the proof begins. Only the listener's filter prevents that, because it lets no such
# connection in.

NONCE_BYTES = PROOF_BYTES = 32
LIMIT = timedelta(seconds=60)  # as for the connections: a peer may still wait for its other connections
_NONCES, _PROOFS = place(COMMIT), place(COMMIT, 1)  # nothing else is sent before a group's first view


def prove(links: GlooLinks, worker: str, key: bytes) -> None:
    """Blocks until all peers have proved that they hold `key`, and `worker` has proved it to them.

    Raises:
        Unproved: a peer's proof is wrong.
        PeerLost: a connection broke, or a peer did not answer in time.
    """
    peers = [member for member in links.members if member != worker]
    ours = {peer: secrets.token_bytes(NONCE_BYTES) for peer in peers}
    theirs = _swap(links, _NONCES, ours)
    own_proofs: dict[str, bytes] = {}
    expected: dict[str, bytes] = {}
    for peer in peers:
        nonces = {worker: ours[peer], peer: theirs[peer]}
        own_proofs[peer] = proof(key, links.number, links.members, nonces, of=worker)
        expected[peer] = proof(key, links.number, links.members, nonces, of=peer)
    for peer, received in _swap(links, _PROOFS, own_proofs).items():
        if not hmac.compare_digest(received, expected[peer]):
            raise Unproved(peer, links.address(peer))


def proof(key: bytes, group: int, members: tuple[str, ...], nonces: dict[str, bytes], *, of: str) -> bytes:
    """Returns the proof that `of` must send; `nonces` are those of the pair, by worker."""
    pair = sorted(nonces, key=members.index)
    parts = [
        b"farandole pair",
        str(group).encode(),
        *(name.encode() for name in pair),
        *(nonces[name] for name in pair),
    ]
    parts.append(of.encode())
    transcript = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(key, transcript, hashlib.sha256).digest()


def _swap(links: GlooLinks, tag_: int, ours: dict[str, bytes]) -> dict[str, bytes]:
    """Sends each peer its bytes, and receives the same number of bytes from each."""
    sent: list[GlooPending] = []
    received: dict[str, tuple[GlooPending, torch.Tensor]] = {}
    for peer, data in ours.items():
        memory = torch.empty(len(data), dtype=torch.uint8)
        received[peer] = (links.receive(memory, peer, tag_), memory)
        sent.append(links.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), peer, tag_))
    for pending in (*sent, *(pending for pending, _ in received.values())):
        pending.wait(LIMIT)
    return {peer: bytes(memory.numpy()) for peer, (_, memory) in received.items()}


# --- packet filter ----------------------------------------------------------------------------------------------------
#
# A socket's packet filter: a classic BPF program that the kernel runs on each packet.
#
# It accepts the first packet of every connection, and all packets from a list of ends; it drops everything else.

# From Linux's headers.
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _AND, _JUMP, _EQUAL, _RETURN = 0x20, 0x28, 0x30, 0x54, 0x05, 0x15, 0x06
_SOURCE_PORT, _FLAGS = 0, 13  # in a TCP header, at which a filter's offsets begin
_IP_HEADER = 0xFFF00000  # added to an offset from the IP header's beginning
_SOURCE_ADDRESS = {4: 12, 6: 8}
_SYN, _SYN_OR_ACK = 0x02, 0x12
_ALL, _NOTHING = 0xFFFFFFFF, 0
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
ALL_OUT: tuple[Instruction, ...] = ((_RETURN, 0, 0, _NOTHING),)  # drops all packets, first packets too


def only(ends: Iterable[str]) -> list[Instruction]:
    """Returns the program that accepts the first packet of every connection, and all packets from `ends`.

    An end is written "address port".

    Raises:
        ValueError: an end is not of that form.
    """
    ports: dict[Any, set[int]] = defaultdict(set)
    for end in ends:
        address, _, port = end.partition(" ")
        ports[ipaddress.ip_address(address)].add(port_of(port))
    program = [
        (_LOAD_BYTE, 0, 0, _FLAGS),
        (_AND, 0, 0, _SYN_OR_ACK),
        (_EQUAL, 0, 1, _SYN),
        (_RETURN, 0, 0, _ALL),
    ]
    for address, of_address in ports.items():
        of_ports = [(_LOAD_HALF, 0, 0, _SOURCE_PORT)]
        for port in sorted(of_address):
            of_ports += [(_EQUAL, 0, 1, port), (_RETURN, 0, 0, _ALL)]
        words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
        for number, word in enumerate(words):  # a word that differs jumps to the next address, past the rest of this
            rest = 3 * (len(words) - number - 1) + len(of_ports)
            at = _IP_HEADER + _SOURCE_ADDRESS[address.version] + 4 * number
            program += [(_LOAD_WORD, 0, 0, at), (_EQUAL, 1, 0, word), (_JUMP, 0, 0, rest)]
        program += of_ports
    return [*program, (_RETURN, 0, 0, _NOTHING)]


def port_of(text: str) -> int:
    port = int(text)
    if not 0 < port < 65536:
        raise ValueError(f"port {port}: a port is between 1 and 65535")
    return port


# --- sockets ----------------------------------------------------------------------------------------------------------
#
# Access to all sockets of this process, including those that other libraries own: their state and their filters.
#
# A socket is identified by its descriptor number. It is not duplicated, because that would keep it open; nor closed.

# From Linux's headers; Python's `socket` does not name them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_ACCEPTCONN = 26, 27, 30
_TCP_INFO, _TCP_INFO_BYTES = 11, 256
_libc = ctypes.CDLL(None, use_errno=True)


class Socket:
    """A socket that another library owns, by its descriptor number. It is neither duplicated nor closed here.

    Python's own `socket` is not used, because it changes the mode (blocking or not) of the descriptor.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def listens(self) -> bool:
        value, size = ctypes.c_int(0), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
        arguments = (self.number, socket.SOL_SOCKET, _SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(size))
        return _libc.getsockopt(*arguments) == 0 and value.value == 1

    def near(self) -> str:
        """The local end, as "address port"; "" if there is none."""
        return self._end(_libc.getsockname)

    def far(self) -> str:
        """The remote end, as "address port"; "" if there is none."""
        return self._end(_libc.getpeername)

    def tcp_info(self) -> bytes:
        """The kernel's `struct tcp_info` of this connection; shorter on an older kernel, empty if there is none."""
        info, size = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint(_TCP_INFO_BYTES)
        if _libc.getsockopt(self.number, socket.IPPROTO_TCP, _TCP_INFO, info, ctypes.byref(size)) != 0:
            return b""
        return info.raw[: size.value]

    def attach(self, program: Sequence[Instruction]) -> None:
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
        described = _Program(len(program), ctypes.addressof(code))
        self._set(_SO_ATTACH_FILTER, described)

    def detach(self) -> None:
        with contextlib.suppress(OSError):  # it has no filter, or is closed
            self._set(_SO_DETACH_FILTER, ctypes.c_int(0))

    def _end(self, ask: Any) -> str:
        name, size = ctypes.create_string_buffer(128), ctypes.c_uint(128)
        if ask(self.number, name, ctypes.byref(size)) != 0:
            return ""
        family, port = struct.unpack_from("=H", name)[0], struct.unpack_from(">H", name, 2)[0]
        if family == socket.AF_INET:
            return f"{ipaddress.IPv4Address(name.raw[4:8])} {port}"
        if family == socket.AF_INET6:
            return f"{ipaddress.IPv6Address(name.raw[8:24])} {port}"
        return ""

    def _set(self, option: int, value: Any) -> None:
        if _libc.setsockopt(self.number, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.sizeof(value)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def lowest_free() -> int:
    """Returns the number that the next descriptor will get."""
    with open(os.devnull, "rb", buffering=0) as null:
        return null.fileno()


def own_sockets() -> Iterator[Socket]:
    """Yields all sockets of this process; nothing without /proc."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    yield Socket(int(name))


def connected_at(listening: Socket) -> bool:
    """Returns True if the kernel lists a connection at this socket's port: accepted, not yet accepted, or closing."""
    address, _, port = listening.near().partition(" ")
    table = Path("/proc/self/net/tcp6" if ":" in address else "/proc/self/net/tcp")
    rows = (line.split()[:4] for line in table.read_text().splitlines()[1:])
    return any(
        local.endswith(f":{int(port):04X}") and state not in ("0A", "03")  # LISTEN, SYN_RECV
        for _, local, _, state in rows
    )


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


# --- listener ---------------------------------------------------------------------------------------------------------
#
# The listener of a group. Only the group's own members may connect to it, and only while the group is being made.
#
# Gloo accepts every connection. Each one takes a descriptor of the process for as long as the group lives. A failed
# `accept` ends the process. The first connection that sends a pair's number (a small one) gets the pair, and the data
# that it sends then can end the process too. So no connection of an unauthenticated peer may ever be accepted. A socket
# filter on the listener ensures that:
#
# 1. When the device is made, the listener gets a filter that accepts the first packet of a connection (SYN), and
#    nothing else. The kernel answers the SYN. Without the packet that completes the handshake there is no connection,
#    no descriptor and nothing for Gloo to accept. If any connection arrived between `listen` and the filter, the device
#    is dropped, with all connections that it accepted, and another one is made. That takes about 0.2 ms. An attacker
#    that only waits for this moment and is always faster can prevent the group; the worker logs that, and the attacker
#    can do no other harm.
# 2. Every member publishes where it listens. When Gloo has connected it to a peer, it reports to that peer the address
#    and port of its own end. Both go over the control connection. The listening member adds that address and port to
#    its filter. The kernel retransmits the packets that were dropped before, after at most a fifth of a second, and
#    Gloo accepts. TCP takes the dropped packets for a sign of congestion. With Reno the congestion window then grows by
#    one packet a round trip, too slowly for a link with a long queue; cubic's grows faster (benchmarks/RESULTS.md).
# 3. When all pairs are connected, the filter drops all packets: connections of others time out. An accepted connection
#    has inherited the filter of that time, which accepts its own packets; that filter is removed, to cost nothing.
#
# Assumption: no other process can send packets from an address and port of a member. On one machine the kernel gives a
# pair of ends to one socket only, and raw packets need root. In a network a machine can that spoofs another's address;
# `proof` protects against that. Addresses must be the same on both ends: address translation (NAT) between workers
# prevents the connections. A member's reports here are trusted, like everything on the data plane.
#
# A SYN costs the kernel a short-lived entry, and this process nothing; under a SYN flood the kernel uses SYN cookies.
#
# On a system without such filters (only Linux has them) the listener stays open; the worker's output has one warning.

_log = logging.getLogger(__name__)
TRIES_S = 15.0  # limit for making devices until the listener of one has no unknown connection
NEAR = 16  # largest number of descriptors that making a device takes
MOST_SOURCES = 64  # of one peer: one, and one for each connection that Gloo retried
PAUSE_S = (0.001, 0.02)  # shortest and longest pause between two looks at our own sockets while peers connect
_RANDOM = random.SystemRandom()  # Python's own generator is the script's: a draw here would change its results
_one_at_a_time = threading.Lock()  # a new device's listener is recognised by being the only new one


class Mailbox(Protocol):
    """The messages between the members of a group while it is made. `said` returns the values by key, for a prefix."""

    def set(self, key: str, value: str) -> None: ...
    def wait(self, keys: list[str]) -> None: ...
    def tell(self, key: str, value: bytes, to: str = "") -> None: ...
    def said(self, prefix: str) -> dict[str, bytes]: ...
    def wait_for_news(self, seconds: float) -> None: ...


class PeerListener:
    """A Gloo device and its listening socket, which accepts no connection at first.

    Attributes:
        device: the result of `make`.
        end: the address that it listens at, as "address port"; "" if it is unknown, and then it is open to all.
    """

    def __init__(self, make: Callable[[], Any], interface: str) -> None:
        files.allow_all()  # for connections in the instant before the filter is attached
        self.device: Any = None
        self.end = ""
        self._socket: Socket | None = None
        self._sources: dict[str, tuple[str, ...]] = {}
        with _one_at_a_time:
            self._open(make)
        if not self.end:
            warn_once(_log, f"any host that can reach {interface} can connect to its listener: see docs/security.md")

    def _open(self, make: Callable[[], Any]) -> None:
        until = time.monotonic() + TRIES_S
        while time.monotonic() < until:
            before = {own.number for own in own_sockets() if own.listens()}
            lowest = lowest_free()
            self.device = make()
            try:
                near = [Socket(number) for number in range(lowest, lowest + NEAR) if number not in before]
                candidates = [own for own in near if own.listens()]
                for own in candidates:  # first, because the full search below is slower than a waiting attacker
                    own.attach(only(()))
                new = [own for own in own_sockets() if own.listens() and own.number not in before]
                for own in candidates:
                    if len(new) != 1 or own.number != new[0].number:
                        own.detach()  # the script's own socket, which began to listen at the same moment
                if not new or (len(new) == 1 and self._take(new[0])):
                    return
            except OSError as error:
                warn_once(_log, f"this system does not support socket filters ({error})")
                return
            self.device = None
            time.sleep(_RANDOM.uniform(0, PAUSE_S[1]))
        raise OSError(
            f"for {TRIES_S:g} s, unknown processes connected to every new listener before its filter was attached"
        )

    def _take(self, own: Socket) -> bool:
        """Attaches the filter to the listener. Returns False if a connection arrived before."""
        own.attach(only(()))
        time.sleep(PAUSE_S[0])  # for a packet that is still being processed
        if connected_at(own):
            return False
        self._socket, self.end = own, own.near()
        return True

    def admit(self, peer: str, sources: Iterable[str]) -> None:
        """Accepts connections from these ends, which `peer` reported as its own."""
        sources = tuple(sources)[:MOST_SOURCES]
        if self._socket is None or self._sources.get(peer) == sources:
            return
        program = only(end for ends in {**self._sources, peer: sources}.values() for end in ends)
        self._sources[peer] = sources
        self._socket.attach(program)

    def shut(self) -> None:
        """Accepts no connection from now on: all peers are connected, or the group was given up. Idempotent."""
        if self._socket is not None:
            self._socket.attach(ALL_OUT)
            for own in own_sockets():
                if own.near() == self.end and own.far():
                    own.detach()
        self._socket = self.device = None  # the group owns the device now

    def sockets(self, peer: str, mailbox: Mailbox) -> list[Socket]:
        """Returns the connections to `peer`, whichever end made them; none if this system has no socket filters."""
        at, sources = mailbox.said("at ").get(peer, b"").decode("ascii", "replace"), self._sources.get(peer, ())
        if not (self.end and at):
            return []
        return [own for own in own_sockets() if own.far() == at or (own.near() == self.end and own.far() in sources)]

    def address(self, peer: str, mailbox: Mailbox) -> str:
        """Returns the remote end of the connection that is used for `peer`, or the possible ones."""
        at = mailbox.said("at ").get(peer, b"").decode("ascii", "replace")
        ends = {(own.near(), own.far()) for own in own_sockets()}
        if at and any(far == at for _, far in ends):
            return at
        connected = {far for near, far in ends if near == self.end and far}
        announced = {end for ends in self._sources.values() for end in ends}
        matches = connected.intersection(self._sources.get(peer, ())) or connected - announced
        return ", ".join(sorted(matches)) or "an unknown address"


@contextlib.contextmanager
def introductions(
    listener: PeerListener, worker: str, members: Sequence[str], mailbox: Mailbox
) -> Generator[tuple[str, ...]]:
    """While Gloo connects the members: reports the ends of our connections to them, and accepts theirs; then shuts.

    Gloo makes a process's connections one after the other in the order of the ranks, and of two members the one with
    the higher end connects. Yields the members in an order in which no member has to wait before it connects to others,
    so that all retransmissions happen at the same time.

    Raises:
        RuntimeError: not all members published in time where they listen.
    """
    over = threading.Event()
    thread = threading.Thread(target=_introduce, args=(listener, worker, mailbox, over), name="introductions")
    thread.daemon = True
    mailbox.set(f"at {worker}", listener.end)
    thread.start()
    try:
        mailbox.wait([f"at {member}" for member in members])
        ends = {member: value.decode("ascii", "replace") for member, value in mailbox.said("at ").items()}
        yield tuple(sorted(members, key=lambda member: _height(ends[member])) if all(ends.values()) else members)
    finally:
        over.set()
        thread.join()
        listener.shut()


def _height(end: str) -> tuple[bytes, int]:
    """Returns a sort key that compares ends as Gloo does: the port's bytes in network order, read in native order."""
    address, _, port = end.partition(" ")
    return ipaddress.ip_address(address).packed, int.from_bytes(port_of(port).to_bytes(2, "big"), sys.byteorder)


def _introduce(listener: PeerListener, worker: str, mailbox: Mailbox, over: threading.Event) -> None:
    reported: dict[str, set[str]] = {}
    pause = PAUSE_S[0]
    last = False
    while not last:
        last = over.is_set()  # one more pass, which reports the connections that Gloo made last
        for peer, value in mailbox.said("from ").items():
            with contextlib.suppress(ValueError):  # an invalid report
                listener.admit(peer, value.decode("ascii").split("\n"))
        ours: dict[str, set[str]] = defaultdict(set)
        for own in own_sockets():
            ours[own.far()].add(own.near())
        for peer, value in mailbox.said("at ").items():
            sources = ours[value.decode("ascii", "replace") or "nowhere"]
            if peer != worker and not sources <= reported.get(peer, set()):
                reported[peer] = sources
                mailbox.tell(f"from {worker}", "\n".join(sorted(sources)).encode(), to=peer)
        if not last:
            mailbox.wait_for_news(pause)
        pause = min(2 * pause, PAUSE_S[1])


# --- rendezvous -------------------------------------------------------------------------------------------------------
#
# The rendezvous of a view's group: keys and values that are pushed over the control connection.
#
# It is the store that Gloo needs, and a mailbox for the messages that Gloo does not know.

CONNECT_TIMEOUT = timedelta(seconds=60)
_Store: Any = getattr(dist, "Store")  # noqa: B009  torch's annotations leave it out


class Rendezvous(_Store):
    """A store whose keys are pushed to the group's other members over the control connection.

    `publish` takes a key, a value, and the member that gets them; "" stands for all members.
    """

    def __init__(self, publish: Callable[[str, bytes, str], None]) -> None:
        super().__init__()
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._arrived = threading.Condition()
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """Stores a key from another member."""
        with self._arrived:
            self._values[key] = value
            self._arrived.notify_all()

    def close(self) -> None:
        """Ends the rendezvous of a view that was given up: all waits for keys raise RuntimeError."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, data)
        self._publish(key, data, "")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta = CONNECT_TIMEOUT) -> None:
        with self._arrived:
            complete = self._arrived.wait_for(
                lambda: self._closed or all(key in self._values for key in keys), timeout.total_seconds()
            )
        if self._closed or not complete:
            raise RuntimeError(f"rendezvous keys {keys} did not arrive")

    # --- messages that Gloo does not know: see `Mailbox` -------------------------------------------------------

    def tell(self, key: str, value: bytes, to: str = "") -> None:
        """Sends a key to the other members, or to one of them."""
        self._publish(key, value, to)

    def said(self, prefix: str) -> dict[str, bytes]:
        """Returns the values of the keys that begin with `prefix`, by key without the prefix."""
        with self._arrived:
            return {key.removeprefix(prefix): value for key, value in self._values.items() if key.startswith(prefix)}

    def wait_for_news(self, seconds: float) -> None:
        """Waits until a key arrives, at most `seconds`."""
        with self._arrived:
            self._arrived.wait(seconds)


# --- gloo -------------------------------------------------------------------------------------------------------------

_Gloo: Any = dist.ProcessGroupGloo  # torch's annotations leave much of it out
_FOREVER = timedelta(days=3650)
_collected: list[bool] = []  # for each fork in progress: True if garbage collection was enabled before it


def _hold() -> None:
    _collected.append(gc.isenabled())
    gc.disable()


def _in_parent() -> None:
    if _collected.pop():
        gc.enable()


def _in_child() -> None:
    gc.freeze()
    if any(_collected):
        gc.enable()
    _collected.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_in_parent, after_in_child=_in_child)


class Gloo:
    """The Gloo transport. `interface` is the address that this worker's listener binds to; `key` is the group's key."""

    def __init__(self, rendezvous: Rendezvous, key: bytes, interface: str) -> None:
        self._rendezvous = rendezvous
        self._key = key
        self._interface = interface

    def connect(self, view: View, me: str) -> GlooLinks:
        links = GlooLinks(view.group, me, view.members, self._rendezvous, self._interface)
        prove(links, me, self._key)
        return links


class GlooPending:
    """A pending send or receive. Keeps its tensor alive, because Gloo accesses it until the wait returns."""

    __slots__ = ("_peer", "_tensor", "_work")

    def __init__(self, work: dist.Work, peer: str, tensor: torch.Tensor) -> None:
        self._work = work
        self._peer = peer
        self._tensor = tensor

    def wait(self, timeout: timedelta = _FOREVER) -> torch.Tensor:
        """Blocks until the operation is done. Gloo breaks the connection after `timeout`."""
        try:
            self._work.wait(timeout)
        except RuntimeError as error:
            raise PeerLost(self._peer, _reason(error)) from error
        return self._tensor


class GlooLinks(Unshared):
    """The links of one Gloo group."""

    def __init__(self, number: int, worker: str, members: tuple[str, ...], store: Rendezvous, interface: str) -> None:
        self.number = number
        self.members = members
        self._store = store
        self._kept: list[object] = []
        options = _Gloo._Options()
        self._listener = PeerListener(lambda: _Gloo.create_device(hostname=interface), interface)
        options._devices = [self._listener.device]
        options._timeout = CONNECT_TIMEOUT
        options._threads = 1
        with introductions(self._listener, worker, members, store) as order:
            self._gloo: Any = _Gloo(store, order.index(worker), len(members), options)
        self._ranks = {member: rank for rank, member in enumerate(order)}

    def address(self, peer: str) -> str:
        """Returns the remote end of the connection that is used for `peer`, for messages to the user."""
        return self._listener.address(peer, self._store)

    def sockets(self, peer: str) -> list[Socket]:
        """Returns the connections to `peer`; empty if they are unknown."""
        return self._listener.sockets(peer, self._store)

    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> GlooPending:
        try:
            return GlooPending(self._gloo.send([tensor], self._ranks[peer], tag), peer, tensor)
        except RuntimeError as error:
            raise PeerLost(peer, _reason(error)) from error

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> GlooPending:
        try:
            return GlooPending(self._gloo.recv([tensor], self._ranks[peer], tag), peer, tensor)
        except RuntimeError as error:
            raise PeerLost(peer, _reason(error)) from error

    def keep_alive(self, memory: object) -> None:
        self._kept.append(memory)

    def close(self) -> None:
        self._gloo = _Closed()  # pending operations keep Gloo's own connections alive
        self._kept.clear()


class _Closed:
    """The replacement of a closed group; every operation raises."""

    def send(self, *_: object) -> NoReturn:
        raise RuntimeError("the links are closed")

    recv = send


def _reason(error: Exception) -> str:
    """Returns the first sentence of an error, without its location in Gloo's sources."""
    first = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).partition("\n")[0].partition(". ")[0]
    return first[:200] or type(error).__name__
