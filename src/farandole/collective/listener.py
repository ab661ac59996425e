"""Who may connect to the listener of a group: the group's own members, and only while it is being made.

Gloo accepts everyone: each connection costs the process a descriptor for as long as the group lives, a failed `accept`
ends the process, whoever first sends a pair's number (a small one) has the pair, and what it sends then can end the
process too. So no connection of a stranger may ever come to be accepted. A socket filter on the listener sees to it:

1. When the device has been made, the listener gets a filter that lets the first packet of a connection (SYN) pass, and
   nothing else. The kernel answers for us; without the packet that completes the handshake there is no connection, no
   descriptor and nothing for Gloo to accept. Should anybody have come in between `listen` and the filter, the device is
   thrown away, with whatever it has accepted, and another one is made. That takes some 0.2 ms; who watches for nothing
   else and is always faster keeps the group from being made, which is said, and does no other harm.
2. Every member says where it listens, and, when Gloo has connected it to a peer, that peer which address and port the
   connection comes from, both over the control connection. The one who listens adds that address and port to what its
   filter lets pass. The packets that were dropped before are sent again by the kernel, after a fifth of a second at
   the latest, and Gloo accepts.
3. When all pairs are connected, the filter lets nothing pass any more: strangers time out. An accepted connection has
   inherited the filter as it was then, which lets its own packets pass; it is taken off, to cost nothing.

What that rests on: nobody else can send packets from an address and a port of a member. On one machine the kernel gives
a pair of ends to one socket only, and raw packets need root. In a network who can put packets with another's address
on the wire can; that is what `proof` is for. Addresses must be the same on both ends: translation (NAT) between workers
would keep them apart. A member is trusted with what it says here, as with everything on the data plane.

A SYN costs the kernel a short-lived entry, and us nothing; where too many come it does without (SYN cookies).

On a system without such filters (they are Linux's) the listener stays open; that is said once, in the worker's output.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

from farandole.collective.packet_filter import ALL_OUT, only, port_of
from farandole.collective.sockets import Socket, connected_at, lowest_free, own_sockets
from farandole.platform import files
from farandole.platform.output import warn_once

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


class Listener:
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
    listener: Listener, worker: str, members: Sequence[str], mailbox: Mailbox
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


def _introduce(listener: Listener, worker: str, mailbox: Mailbox, over: threading.Event) -> None:
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
