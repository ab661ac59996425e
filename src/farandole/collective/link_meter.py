"""The measurement of a worker's links to other hosts: the bytes that it sends, and the rate at which they arrive.

`Metered` wraps the links that share no memory, below the compression: it counts the bytes of each send to a worker of
another host. Memory that is shared within a host, and connections within a host, are not counted. `LinkMeter` adds the
counts up by host, over all groups that this worker has had, and each heartbeat carries the sums (`LinkUse`).

**A slow link is not a slow worker.** A worker that computes slowly makes its peers wait as well, so the time that a
receiver waits can't tell the two apart. The sender's kernel can. For each connection it adds up the time in which bytes
were queued or in flight, `busy_time`: it begins when the sender hands over bytes, and ends when all of them are
acknowledged. A worker that computes hands over nothing, so its connections are not busy. The part of that time in which
the receiver's buffer was full, `rwnd_limited`, is the time of a receiver that does not read, because it is frozen or
has no CPU; it is subtracted. What is left is the time that the network took. So

    rate of a link = acknowledged bytes / (busy_time - rwnd_limited)

is the rate of that direction of that link while it was used, whoever computes how fast. Loss and a long round trip
lower it too, as far as they cost time. `protocol/link_speed.py` compares the rates, and asks in addition whether the
receiving worker waited for that host (`waited`), since a slow link that nobody waits for costs nothing.

**Limits.** An acknowledgement may be delayed by up to 40 ms, which counts as busy: so the rate of a link that carries
only small messages says little. A worker that is frozen in the middle of a message looks idle once its queue is empty.
The figures need Linux 4.10 or newer; elsewhere `acknowledged_bytes` and `sending_us` stay 0, which means unknown.

**Cost.** A send takes a lock and three additions. A heartbeat makes three system calls for each connection.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from farandole.collective.schedule import STATE, kind_of
from farandole.protocol.values import MOST_LINKS, LinkUse

if TYPE_CHECKING:
    import torch

    from farandole.collective.transport import Borrowing, Links, Pending, ReceiveBuffer

# From Linux's struct tcp_info: the offsets of the fields that are read.
_RTT, _BYTES_ACKED, _BUSY_TIME, _RWND_LIMITED, _BYTES_RETRANS = 68, 120, 168, 176, 208


class TcpConnection(Protocol):
    """A TCP connection that another library owns: its ends, and the kernel's `struct tcp_info`."""

    def near(self) -> str: ...
    def far(self) -> str: ...
    def tcp_info(self) -> bytes: ...


class Transfer(NamedTuple):
    """The kernel's figures of one connection; see `LinkUse`."""

    acknowledged_bytes: int = 0
    sending_us: int = 0
    resent_bytes: int = 0
    rtt_us: int = 0


def transfer_of(info: bytes) -> Transfer:
    """Returns the figures in a `struct tcp_info`; all 0 if the kernel is too old to have them."""
    if len(info) < _RWND_LIMITED + 8:
        return Transfer()
    (rtt_us,) = struct.unpack_from("=I", info, _RTT)
    acknowledged, busy_us, full_us = (
        struct.unpack_from("=Q", info, at)[0] for at in (_BYTES_ACKED, _BUSY_TIME, _RWND_LIMITED)
    )
    resent = struct.unpack_from("=Q", info, _BYTES_RETRANS)[0] if len(info) >= _BYTES_RETRANS + 8 else 0
    return Transfer(acknowledged, max(0, busy_us - full_us), resent, rtt_us)


class LinkMeter:
    """The meter of one worker's links, over all of its groups. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[str, _HostUse] = {}
        self._host_of: dict[str, str] = {}  # by peer
        self._open: list[Metered] = []

    def metered(
        self, links: Links, hosts: Mapping[str, str], connections: Callable[[str], Iterable[TcpConnection]]
    ) -> Metered:
        """Returns `links`, counted from now on. `hosts`: the peers on other hosts, with those; `connections`: those to
        a peer.
        """
        made = Metered(links, self, {peer: list(connections(peer)) for peer in hosts})
        with self._lock:
            self._host_of.update(hosts)
            self._open.append(made)
        return made

    def sent(self, peer: str, tag: int, size: int) -> None:
        """Counts a message of `size` bytes to `peer`."""
        with self._lock:
            host = self._host_of.get(peer)
            if host is not None:
                use = self._use(host)
                if kind_of(tag) == STATE:
                    use.state_bytes += size
                else:
                    use.exchange_bytes += size

    def count_saved(self, peer: str, size: int) -> None:
        """Counts `size` bytes that need not be sent to `peer`, since its message is compressed."""
        with self._lock:
            if host := self._host_of.get(peer):
                self._use(host).saved_bytes += size

    def closed(self, links: Metered) -> None:
        """Adds the last figures of `links` to the sums. Idempotent."""
        with self._lock:
            if links in self._open:
                self._open.remove(links)
                for peer, transfer in links.transfers():
                    self._use(self._host_of[peer]).transfers.append(transfer)

    def said(self, waited_ns: Mapping[str, int]) -> tuple[LinkUse, ...]:
        """Returns the use of the links so far, by host. `waited_ns`: how long rounds have waited for each peer.

        With more than `MOST_LINKS` hosts, the others are left out.
        """
        with self._lock:
            open_: dict[str, list[Transfer]] = {}
            for links in self._open:
                for peer, transfer in links.transfers():
                    open_.setdefault(self._host_of[peer], []).append(transfer)
            waited: dict[str, int] = {}
            for peer, ns in list(waited_ns.items()):
                if host := self._host_of.get(peer):
                    waited[host] = waited.get(host, 0) + ns // 1000
            names = sorted({*self._hosts, *open_, *waited})[:MOST_LINKS]
            return tuple(self._use(name).said(name, open_.get(name, ()), waited.get(name, 0)) for name in names)

    def _use(self, host: str) -> _HostUse:
        return self._hosts.setdefault(host, _HostUse())


@dataclass
class _HostUse:
    """The sums of one host; `transfers` are those of closed connections."""

    exchange_bytes: int = 0
    state_bytes: int = 0
    saved_bytes: int = 0
    transfers: list[Transfer] = field(default_factory=list[Transfer])

    def said(self, host: str, open_: Iterable[Transfer], waited_us: int) -> LinkUse:
        closed = [sum(column) for column in zip(*self.transfers, strict=True)] or [0, 0, 0, 0]
        self.transfers = [Transfer(*closed[:3])]
        every = [*self.transfers, *open_]
        return LinkUse(
            host=host, exchange_bytes=self.exchange_bytes, state_bytes=self.state_bytes,
            acknowledged_bytes=sum(each.acknowledged_bytes for each in every),
            sending_us=sum(each.sending_us for each in every), resent_bytes=sum(each.resent_bytes for each in every),
            rtt_us=max(each.rtt_us for each in every), waited_us=waited_us,
            saved_bytes=self.saved_bytes,
        )  # fmt: skip


class Metered:
    """Links whose sends to other hosts are counted; see the docstring of the module."""

    def __init__(self, links: Links, meter: LinkMeter, connections: Mapping[str, list[TcpConnection]]) -> None:
        self._links = links
        self._meter = meter
        self._connections = [
            (peer, connection, (connection.near(), connection.far()))
            for peer, connections_ in connections.items()
            for connection in connections_
        ]
        self._newest = [Transfer() for _ in self._connections]

    def transfers(self) -> list[tuple[str, Transfer]]:
        """Returns the figures of each connection, with its peer; of one that is closed, the last known ones."""
        for place, (_, connection, ends) in enumerate(self._connections):
            with contextlib.suppress(struct.error):
                if (connection.near(), connection.far()) == ends:  # else its descriptor was closed, and used again
                    newest = transfer_of(connection.tcp_info())
                    if newest.acknowledged_bytes >= self._newest[place].acknowledged_bytes:
                        self._newest[place] = newest
        return [(peer, newest) for (peer, _, _), newest in zip(self._connections, self._newest, strict=True)]

    def transfer_to(self, peer: str) -> Transfer:
        """Returns the kernel's figures of the connections to `peer`, added up."""
        columns = zip(*(transfer for to, transfer in self.transfers() if to == peer), strict=True)
        return Transfer(*map(sum, columns))

    def count_saved(self, peer: str, size: int) -> None:
        """Counts `size` bytes that need not be sent to `peer`, since its message is compressed."""
        self._meter.count_saved(peer, size)

    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        self._meter.sent(peer, tag, tensor.nbytes)
        return self._links.send(tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        return self._links.receive(tensor, peer, tag)

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        self._meter.sent(peer, tag, tensor.nbytes)
        return self._links.lend(tensor, peer, tag)

    def borrow(self, buffer: ReceiveBuffer, peer: str, tag: int) -> Borrowing:
        return self._links.borrow(buffer, peer, tag)

    def shares(self, peer: str) -> bool:
        return self._links.shares(peer)

    def keep_alive(self, memory: object) -> None:
        self._links.keep_alive(memory)

    def close(self) -> None:
        self._meter.closed(self)
        self._links.close()
