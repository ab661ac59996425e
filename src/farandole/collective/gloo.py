"""Gloo as a transport: TCP between all pairs of a group, with a rendezvous over the control connection.

A group takes connections from its members alone (`listener`), and is used only when each of its pairs has proved itself
(`proof`): nothing that a stranger sends over one is read.

Gloo has no way to wake a pending receive and closes the pair of one that times out, so receives never time out here.

A forked process (a loader process) inherits groups without their threads, and Gloo's destructor waits for them: a group
that is garbage in a cycle by then would hang the child in a collection. So what a child inherits is left out of its
collections, and there is none while others' functions are called that have to do with forking.
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

from farandole.collective.schedule import WORD, place
from farandole.collective.transport import PeerLost, Unproved, Unshared
from farandole.platform import files
from farandole.platform.output import warn_once
from farandole.protocol.view import View

# --- proof ------------------------------------------------------------------------------------------------------------
#
# Each pair of a new group proves itself before anything else is sent over it: both ends hold the group's key.
#
# The coordinator makes a key for each group (`coordinator/server.py`) and tells it to the members of that view
# only, over connections that have shown the ticket. Every pair (a, b), a before b in the view, does this at once in
# both directions:
#
# 1. a sends a nonce of 32 random bytes, N(a); b sends N(b).
# 2. a sends HMAC-SHA256(key, T | "a"); b sends HMAC-SHA256(key, T | "b"); where T, the transcript, is what this is for,
#    the group's number, both names, N(a) and N(b), each with its length before it.
# 3. Each compares what came with what the other must have sent, in constant time.
#
# Who does not have the key can't make what is to come: a's own nonce is in it, so nothing that was recorded before
# fits; the sender's name is in it, so what a sends does not fit as b's; the names and the group's number are in it,
# so what another pair or another group has sent does not fit either. That the nonces come from the stranger does not
# help it: it learns HMACs of transcripts that nobody but it will ever accept. The key is the run's and the group's
# (both are in it).
#
# What it does not do: the proof shows who was at the other end, and nothing that is sent afterwards carries one. Who
# sits on the wire between two members and passes their proof on unchanged can then read and change everything, and no
# proof without encryption can show it. On one machine that is root alone, since the listener lets nobody else's
# connection in (`listener`); in a network, who can put packets with another machine's address on the wire, or is its
# router.
#
# All sizes are fixed. Gloo itself trusts its peers: who speaks its format to it, in place of a member, can make it
# end the process before any proof is due. Only the listener's filter prevents that, by letting nobody have such a
# connection.

NONCE_BYTES = PROOF_BYTES = 32
LIMIT = timedelta(seconds=60)  # as for the connections: a peer may still be waiting for those to others
_NONCES, _PROOFS = place(WORD), place(WORD, 1)  # nothing else is sent before a group's first view


def prove(links: GlooLinks, worker: str, key: bytes) -> None:
    """Blocks until all peers have proved that they hold `key`, and they know that `worker` does.

    Raises:
        Unproved: one does not.
        PeerLost: a connection broke, or nothing came in time.
    """
    peers = [member for member in links.members if member != worker]
    ours = {peer: secrets.token_bytes(NONCE_BYTES) for peer in peers}
    theirs = _swap(links, _NONCES, ours)
    told: dict[str, bytes] = {}
    expected: dict[str, bytes] = {}
    for peer in peers:
        nonces = {worker: ours[peer], peer: theirs[peer]}
        told[peer] = proof(key, links.number, links.members, nonces, of=worker)
        expected[peer] = proof(key, links.number, links.members, nonces, of=peer)
    for peer, told_us in _swap(links, _PROOFS, told).items():
        if not hmac.compare_digest(told_us, expected[peer]):
            raise Unproved(peer, links.address(peer))


def proof(key: bytes, group: int, members: tuple[str, ...], nonces: dict[str, bytes], *, of: str) -> bytes:
    """What `of`, one of the two whose `nonces` these are, has to send."""
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
    """Send each peer its bytes and receive as many from each."""
    sent: list[GlooPending] = []
    received: dict[str, tuple[GlooPending, torch.Tensor]] = {}
    for peer, data in ours.items():
        room = torch.empty(len(data), dtype=torch.uint8)
        received[peer] = (links.receive(room, peer, tag_), room)
        sent.append(links.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), peer, tag_))
    for pending in (*sent, *(pending for pending, _ in received.values())):
        pending.wait(LIMIT)
    return {peer: bytes(room.numpy()) for peer, (_, room) in received.items()}


# --- packet filter ----------------------------------------------------------------------------------------------------
#
# A socket's packet filter: the program that the kernel runs on each packet, in classic BPF.
#
# It lets pass the first packet of every connection, and otherwise what comes from the ends that it names, nothing else.

# From Linux's headers.
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _AND, _JUMP, _EQUAL, _RETURN = 0x20, 0x28, 0x30, 0x54, 0x05, 0x15, 0x06
_SOURCE_PORT, _FLAGS = 0, 13  # in a TCP header, at which a filter's offsets begin
_IP_HEADER = 0xFFF00000  # added to an offset from the IP header's beginning
_SOURCE_ADDRESS = {4: 12, 6: 8}
_SYN, _SYN_OR_ACK = 0x02, 0x12
_ALL, _NOTHING = 0xFFFFFFFF, 0
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
ALL_OUT: tuple[Instruction, ...] = ((_RETURN, 0, 0, _NOTHING),)  # not even a first packet passes


def only(ends: Iterable[str]) -> list[Instruction]:
    """The program that lets pass the beginning of every connection, and all packets from `ends` ("address port").

    Raises:
        ValueError: what is no such end.
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
        for number, word in enumerate(words):  # each that differs jumps to the next address, beyond all that follows
            left = 3 * (len(words) - number - 1) + len(of_ports)
            at = _IP_HEADER + _SOURCE_ADDRESS[address.version] + 4 * number
            program += [(_LOAD_WORD, 0, 0, at), (_EQUAL, 1, 0, word), (_JUMP, 0, 0, left)]
        program += of_ports
    return [*program, (_RETURN, 0, 0, _NOTHING)]


def port_of(text: str) -> int:
    port = int(text)
    if not 0 < port < 65536:
        raise ValueError(f"port {port}: there is none below 1 or above 65535")
    return port


# --- sockets ----------------------------------------------------------------------------------------------------------
#
# This process's sockets, those that others have made and own among them: looked at, and given filters.
#
# A socket is known by its descriptor's number; it is neither copied, which would keep it open, nor closed.

# From Linux's headers; Python's `socket` does not name them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_ACCEPTCONN = 26, 27, 30
_libc = ctypes.CDLL(None, use_errno=True)


class Socket:
    """One that others own: looked at by its number, and neither copied, which would keep it open, nor closed.

    Python's own `socket` changes the mode (blocking or not) of what it is made of.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def listens(self) -> bool:
        value, size = ctypes.c_int(0), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
        asked = (self.number, socket.SOL_SOCKET, _SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(size))
        return _libc.getsockopt(*asked) == 0 and value.value == 1

    def near(self) -> str:
        """Its own end, as "address port"; "" if it has none."""
        return self._end(_libc.getsockname)

    def far(self) -> str:
        """The end that it is connected to; "" if there is none."""
        return self._end(_libc.getpeername)

    def attach(self, program: Sequence[Instruction]) -> None:
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
        described = _Program(len(program), ctypes.addressof(code))
        self._set(_SO_ATTACH_FILTER, described)

    def detach(self) -> None:
        with contextlib.suppress(OSError):  # it has none, or is gone
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
    """The number that the next descriptor gets."""
    with open(os.devnull, "rb", buffering=0) as null:
        return null.fileno()


def own_sockets() -> Iterator[Socket]:
    """All sockets of this process. None without /proc."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    yield Socket(int(name))


def connected_at(listening: Socket) -> bool:
    """Whether the kernel knows a connection at this socket's port, accepted or not, or its remains."""
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
# Who may connect to the listener of a group: the group's own members, and only while it is being made.
#
# Gloo accepts everyone: each connection costs the process a descriptor for as long as the group lives, a failed
# `accept` ends the process, whoever first sends a pair's number (a small one) has the pair, and what it sends then
# can end the process too. So no connection of a stranger may ever come to be accepted. A socket filter on the
# listener sees to it:
#
# 1. When the device has been made, the listener gets a filter that lets the first packet of a connection (SYN) pass,
#    and nothing else. The kernel answers for us; without the packet that completes the handshake there is no
#    connection, no descriptor and nothing for Gloo to accept. Should anybody have come in between `listen` and the
#    filter, the device is thrown away, with whatever it has accepted, and another one is made. That takes some 0.2
#    ms; who watches for nothing else and is always faster keeps the group from being made, which is said, and does no
#    other harm.
# 2. Every member says where it listens, and, when Gloo has connected it to a peer, that peer which address and port the
#    connection comes from, both over the control connection. The one who listens adds that address and port to what its
#    filter lets pass. The packets that were dropped before are sent again by the kernel, after a fifth of a second at
#    the latest, and Gloo accepts.
# 3. When all pairs are connected, the filter lets nothing pass any more: strangers time out. An accepted connection has
#    inherited the filter as it was then, which lets its own packets pass; it is taken off, to cost nothing.
#
# What that rests on: nobody else can send packets from an address and a port of a member. On one machine the kernel
# gives a pair of ends to one socket only, and raw packets need root. In a network who can put packets with another's
# address on the wire can; that is what `proof` is for. Addresses must be the same on both ends: translation (NAT)
# between workers would keep them apart. A member is trusted with what it says here, as with everything on the data
# plane.
#
# A SYN costs the kernel a short-lived entry, and us nothing; where too many come it does without (SYN cookies).
#
# On a system without such filters (they are Linux's) the listener stays open; that is said once, in the worker's
# output.

_log = logging.getLogger(__name__)
TRIES_S = 15.0  # for devices to be made until one has no stranger at its listener
NEAR = 16  # descriptors that making a device takes, at most
MOST_SOURCES = 64  # of one peer: one, and one for each connection that Gloo has tried again
PAUSE_S = (0.001, 0.02)  # between two looks at our own sockets while peers connect
_RANDOM = random.SystemRandom()  # Python's own generator is the script's: a draw of this thread would show in the bits
_one_at_a_time = threading.Lock()  # who makes a device recognises its listener by its being new


class Mailbox(Protocol):
    """What the members of a group say to each other while it is made."""

    def set(self, key: str, value: str) -> None: ...
    def wait(self, keys: list[str]) -> None: ...
    def tell(self, key: str, value: bytes, to: str = "") -> None: ...
    def said(self, prefix: str) -> dict[str, bytes]: ...
    def wait_for_news(self, seconds: float) -> None: ...


class PeerListener:
    """A device and its listening socket, shut for everyone at first.

    Attributes:
        device: what `make` returned.
        end: where it listens, as "address port"; "" if that could not be found out, so that it is open to all.
    """

    def __init__(self, make: Callable[[], Any], interface: str) -> None:
        files.allow_all()  # for those who connect in the instant before the filter is there
        self.device: Any = None
        self.end = ""
        self._socket: Socket | None = None
        self._sources: dict[str, tuple[str, ...]] = {}
        with _one_at_a_time:
            self._open(make)
        if not self.end:
            warn_once(_log, f"the listener at {interface} stays open to all who can reach it: see docs/security.md")

    def _open(self, make: Callable[[], Any]) -> None:
        until = time.monotonic() + TRIES_S
        while time.monotonic() < until:
            before = {own.number for own in own_sockets() if own.listens()}
            lowest = lowest_free()
            self.device = make()
            try:
                near = [Socket(number) for number in range(lowest, lowest + NEAR) if number not in before]
                soon = [own for own in near if own.listens()]
                for own in soon:  # at once: what is found out below takes longer than who waits for a listener
                    own.attach(only(()))
                new = [own for own in own_sockets() if own.listens() and own.number not in before]
                for own in soon:
                    if len(new) != 1 or own.number != new[0].number:
                        own.detach()  # the script's, which has begun to listen at the same moment: it is let go again
                if not new or (len(new) == 1 and self._take(new[0])):
                    return
            except OSError as error:
                warn_once(_log, f"this system takes no socket filter ({error})")
                return
            self.device = None
            time.sleep(_RANDOM.uniform(0, PAUSE_S[1]))
        raise OSError(f"each listener was connected to by strangers as soon as it listened, for {TRIES_S:g} s")

    def _take(self, own: Socket) -> bool:
        """Shut it. False: somebody has come in before."""
        own.attach(only(()))
        time.sleep(PAUSE_S[0])  # for a packet that was under way
        if connected_at(own):
            return False
        self._socket, self.end = own, own.near()
        return True

    def admit(self, peer: str, sources: Iterable[str]) -> None:
        """`peer` says that its connections come from these ends: they may come in."""
        sources = tuple(sources)[:MOST_SOURCES]
        if self._socket is None or self._sources.get(peer) == sources:
            return
        program = only(end for ends in {**self._sources, peer: sources}.values() for end in ends)
        self._sources[peer] = sources
        self._socket.attach(program)

    def shut(self) -> None:
        """All are connected, or nobody is to be any more: nobody comes in from now on. Idempotent."""
        if self._socket is not None:
            self._socket.attach(ALL_OUT)
            for own in own_sockets():
                if own.near() == self.end and own.far():
                    own.detach()
        self._socket = self.device = None  # which the group has now

    def address(self, peer: str, mailbox: Mailbox) -> str:
        """Where the connection that stands for `peer` leads to, as far as can be told."""
        at = mailbox.said("at ").get(peer, b"").decode("ascii", "replace")
        ends = {(own.near(), own.far()) for own in own_sockets()}
        if at and any(far == at for _, far in ends):
            return at
        here = {far for near, far in ends if near == self.end and far}
        announced = {end for ends in self._sources.values() for end in ends}
        found = here.intersection(self._sources.get(peer, ())) or here - announced
        return ", ".join(sorted(found)) or "an unknown address"


@contextlib.contextmanager
def introductions(
    listener: PeerListener, worker: str, members: Sequence[str], mailbox: Mailbox
) -> Generator[tuple[str, ...]]:
    """While Gloo connects the members: tell them where our connections come from, and let theirs in; then shut.

    Gloo makes a process's connections one after the other in the order of the ranks, and of two the one with the higher
    end connects. Yields the members in an order in which nobody has to wait before it connects to others, so that all
    that is sent again is sent again at once.

    Raises:
        RuntimeError: not all have said in time where they listen.
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
    """As Gloo compares them: the port's bytes as they are sent, taken for a number of this machine."""
    address, _, port = end.partition(" ")
    return ipaddress.ip_address(address).packed, int.from_bytes(port_of(port).to_bytes(2, "big"), sys.byteorder)


def _introduce(listener: PeerListener, worker: str, mailbox: Mailbox, over: threading.Event) -> None:
    told: dict[str, set[str]] = {}
    pause = PAUSE_S[0]
    last = False
    while not last:
        last = over.is_set()  # what Gloo has connected last is told, too
        for peer, value in mailbox.said("from ").items():
            with contextlib.suppress(ValueError):  # what no member of ours says
                listener.admit(peer, value.decode("ascii").split("\n"))
        ours: dict[str, set[str]] = defaultdict(set)
        for own in own_sockets():
            ours[own.far()].add(own.near())
        for peer, value in mailbox.said("at ").items():
            sources = ours[value.decode("ascii", "replace") or "nowhere"]
            if peer != worker and not sources <= told.get(peer, set()):
                told[peer] = sources
                mailbox.tell(f"from {worker}", "\n".join(sorted(sources)).encode(), to=peer)
        if not last:
            mailbox.wait_for_news(pause)
        pause = min(2 * pause, PAUSE_S[1])


# --- rendezvous -------------------------------------------------------------------------------------------------------
#
# How the members of a view's group find each other: keys and values, pushed over the control connection.
#
# It is the store that Gloo asks for, and a mailbox for what Gloo knows nothing of.

CONNECT_TIMEOUT = timedelta(seconds=60)
_Store: Any = getattr(dist, "Store")  # noqa: B009  torch's annotations leave it out


class Rendezvous(_Store):
    """A store whose keys are pushed to the group's other members over the control connection.

    `publish` takes key, value, and the one member that it is for, "" for all.
    """

    def __init__(self, publish: Callable[[str, bytes, str], None]) -> None:
        super().__init__()
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._arrived = threading.Condition()
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """A key from another member."""
        with self._arrived:
            self._values[key] = value
            self._arrived.notify_all()

    def close(self) -> None:
        """The view is no more: whoever waits for a key gets an error."""
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
            there = self._arrived.wait_for(
                lambda: self._closed or all(key in self._values for key in keys), timeout.total_seconds()
            )
        if self._closed or not there:
            raise RuntimeError(f"rendezvous keys {keys} did not arrive")

    # --- what Gloo knows nothing of: see `listener` ------------------------------------------------------------

    def tell(self, key: str, value: bytes, to: str = "") -> None:
        """A key for the others, or for one of them."""
        self._publish(key, value, to)

    def said(self, prefix: str) -> dict[str, bytes]:
        """The keys of others that begin so, without the prefix, and their values."""
        with self._arrived:
            return {key.removeprefix(prefix): value for key, value in self._values.items() if key.startswith(prefix)}

    def wait_for_news(self, seconds: float) -> None:
        """Until a key comes, or so long."""
        with self._arrived:
            self._arrived.wait(seconds)


# --- gloo -------------------------------------------------------------------------------------------------------------

_Gloo: Any = dist.ProcessGroupGloo  # torch's annotations leave much of it out
_FOREVER = timedelta(days=3650)
_collected: list[bool] = []  # of each fork that is under way: whether garbage was, before it


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
    """The transport. `interface`: the address that this worker's listener binds to; `key`: the group's."""

    def __init__(self, rendezvous: Rendezvous, key: bytes, interface: str) -> None:
        self._rendezvous = rendezvous
        self._key = key
        self._interface = interface

    def connect(self, view: View, me: str) -> GlooLinks:
        links = GlooLinks(view.group, me, view.members, self._rendezvous, self._interface)
        prove(links, me, self._key)
        return links


class GlooPending:
    """See `Pending`. Holds its tensor: Gloo reads or writes it until the wait returns."""

    __slots__ = ("_peer", "_tensor", "_work")

    def __init__(self, work: dist.Work, peer: str, tensor: torch.Tensor) -> None:
        self._work = work
        self._peer = peer
        self._tensor = tensor

    def wait(self, timeout: timedelta = _FOREVER) -> torch.Tensor:
        """After `timeout` the connection is broken."""
        try:
            self._work.wait(timeout)
        except RuntimeError as error:
            raise PeerLost(self._peer, _reason(error)) from error
        return self._tensor


class GlooLinks(Unshared):
    """See `Links`."""

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
        """Where the connection that stands for `peer` leads to, for people."""
        return self._listener.address(peer, self._store)

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

    def keep(self, memory: object) -> None:
        self._kept.append(memory)

    def close(self) -> None:
        self._gloo = _Closed()  # what is pending holds Gloo's own connections for as long as it is
        self._kept.clear()


class _Closed:
    """In the place of a group that is no more."""

    def send(self, *_: object) -> NoReturn:
        raise RuntimeError("the links are closed")

    recv = send


def _reason(error: Exception) -> str:
    """Its first sentence, without the place in Gloo's sources that it begins with."""
    first = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).partition("\n")[0].partition(". ")[0]
    return first[:200] or type(error).__name__
