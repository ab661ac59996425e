"""The connections of a view: a Gloo process group with a rendezvous over the control connection.

Sends and receives are tagged with the view's number, so a view that only shrinks goes on over the connections of an
earlier one while leftovers of the abandoned view are still in flight (rule R3). Gloo has no way to wake a pending
receive and closes the pair of one that times out, so receives never time out here: the control plane decides who hangs.

A group takes connections from its members alone (`listener`); that they are what they seem shows `proof`.

Fault contract: `send`, `receive` and the waits on what they return raise `PeerLost` when the peer's connection is
broken. The other pairs of the group are unharmed. A wait on a peer that is frozen hangs, on a thread of the view, until
that peer is dead.

A forked process (a loader process) inherits groups without their threads, and Gloo's destructor waits for them: a group
that is garbage in a cycle by then would hang the child in its first full collection. So what a child inherits is left
out of its collections.
"""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farandole.collective.listener import Listener, introductions
from farandole.errors import FarandoleError

# torch's annotations leave these out
_Store: Any = getattr(dist, "Store")  # noqa: B009
_Gloo: Any = dist.ProcessGroupGloo

_FOREVER = timedelta(days=3650)
_CONNECT_TIMEOUT = timedelta(seconds=60)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=gc.freeze)

# Kinds of message in a tag: partial sums, reduced slices, control words, state.
PARTIAL, REDUCED, WORD, STATE = range(4)

# Purposes of a round: a training step (or waiting for one), or anything else.
TRAINING, OTHER = range(2)

MOST_BUCKETS = 256  # of a layout, which makes them larger rather than more
MOST_SUMS = 512  # of a worker in a round: a contiguous range of shards has at most 62, each loss in a step adds some


class PeerLost(FarandoleError):
    """The connection to a peer is broken."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class Unproved(FarandoleError):
    """Who is connected as a peer has not proved that it is that one."""

    def __init__(self, peer: str, address: str) -> None:
        super().__init__(f"{address} has not proved that it is {peer}")
        self.peer = peer
        self.address = address


def tag(view: int, round_: int, kind: int, bucket: int = 0, node: int = 0, *, purpose: int = TRAINING) -> int:
    """A Gloo tag, 31 bits: purpose, view mod 512, round mod 4, kind, bucket (256), node (512).

    Gloo ends the process where a message and what waits for it differ in size, so their tags must differ where their
    sizes might: what the purpose is for says `membership/calls.py`.

    Within a view, rounds go in lockstep, so two bits tell them apart; a group is replaced by another one of the same
    members long before its views have had 512 numbers (`membership/planned.py`).
    """
    assert bucket < MOST_BUCKETS, f"bucket {bucket}: at most {MOST_BUCKETS} buckets"
    assert node < MOST_SUMS, f"node {node}: at most {MOST_SUMS} partial sums a worker"
    return purpose << 30 | (view % 512) << 21 | (round_ % 4) << 19 | kind << 17 | bucket << 9 | node


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

    def wait(self, keys: list[str], timeout: timedelta = _CONNECT_TIMEOUT) -> None:
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


class Pending:
    """A send or receive under way. Holds its tensor: Gloo reads or writes it until the wait returns."""

    __slots__ = ("_peer", "_tensor", "_work")

    def __init__(self, work: dist.Work, peer: str, tensor: torch.Tensor) -> None:
        self._work = work
        self._peer = peer
        self._tensor = tensor

    def wait(self, timeout: timedelta = _FOREVER) -> None:
        """After `timeout` the connection is broken."""
        try:
            self._work.wait(timeout)
        except RuntimeError as error:
            raise PeerLost(self._peer, _reason(error)) from error


class Group:
    """Connections between `members`; peers are named by worker id."""

    def __init__(self, number: int, worker: str, members: tuple[str, ...], store: Rendezvous, interface: str) -> None:
        self.number = number
        self.members = members
        self._store = store
        self.graveyard: list[object] = []  # buffers that a frozen peer may still write into (R3)
        options = _Gloo._Options()
        self._listener = Listener(lambda: _Gloo.create_device(hostname=interface), interface)
        options._devices = [self._listener.device]
        options._timeout = _CONNECT_TIMEOUT
        options._threads = 1
        with introductions(self._listener, worker, members, store) as order:
            self._gloo = _Gloo(store, order.index(worker), len(members), options)
        self._ranks = {member: rank for rank, member in enumerate(order)}

    def address(self, peer: str) -> str:
        """Where the connection that stands for `peer` leads to, for people."""
        return self._listener.address(peer, self._store)

    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        """Start sending a contiguous tensor; it may not change until everyone is known to have it."""
        try:
            return Pending(self._gloo.send([tensor], self._ranks[peer], tag), peer, tensor)
        except RuntimeError as error:
            raise PeerLost(peer, _reason(error)) from error

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        """Start receiving into a contiguous tensor."""
        try:
            return Pending(self._gloo.recv([tensor], self._ranks[peer], tag), peer, tensor)
        except RuntimeError as error:
            raise PeerLost(peer, _reason(error)) from error


def _reason(error: Exception) -> str:
    """Its first sentence, without the place in Gloo's sources that it begins with."""
    first = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).partition("\n")[0].partition(". ")[0]
    return first[:200] or type(error).__name__
