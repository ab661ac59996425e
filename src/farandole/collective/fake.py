"""An in-memory transport for tests: the workers are threads of one process, and the test injects faults.

It guarantees what `transport` promises and no more: a tensor is read and written at the last moment, when both ends
have started. A message that a lost peer sent and that no receive has asked for is lost too.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass

import torch

from farandole.collective.transport import PeerLost, Unshared
from farandole.protocol.view import View

_Way = tuple[int, str, str, int]  # group, sender, receiver, tag


class FakeNetwork:
    """The network between the workers of one test."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._came: dict[int, set[str]] = defaultdict(set)
        self._gone: set[str] = set()
        self._frozen: set[str] = set()
        self._closed: set[tuple[int, str]] = set()
        self._sends: dict[_Way, deque[_Pending]] = defaultdict(deque)
        self._receives: dict[_Way, deque[_Pending]] = defaultdict(deque)

    # --- faults ----------------------------------------------------------------------------------------------

    def lose(self, worker: str) -> None:
        """Simulates the end of the worker's process."""
        with self.changed:
            self._gone.add(worker)
            self.changed.notify_all()

    def freeze(self, worker: str) -> None:
        """Freezes the worker's process; operations of its peers wait for it."""
        with self.changed:
            self._frozen.add(worker)

    def thaw(self, worker: str) -> None:
        with self.changed:
            self._frozen.discard(worker)
            for way in list(self._sends):
                self._hand_over(way)

    # --- the operations of links, each called with `changed` held --------------------------------------------

    def come(self, view: View, me: str) -> None:
        self._came[view.group].add(me)
        self.changed.notify_all()
        self.changed.wait_for(lambda: self._came[view.group] >= set(view.members))

    def start(self, pending: _Pending) -> None:
        group, _, _, _ = way = pending.way
        if (group, pending.me) in self._closed:
            raise PeerLost(pending.peer, "the links are closed")
        if self.lost(pending):
            raise PeerLost(pending.peer, "connection closed by peer")
        (self._sends if pending.sends else self._receives)[way].append(pending)
        self._hand_over(way)

    def close(self, group: int, me: str) -> None:
        self._closed.add((group, me))
        self.changed.notify_all()

    def is_frozen(self, worker: str) -> bool:
        return worker in self._frozen and worker not in self._gone

    def lost(self, pending: _Pending) -> bool:
        """Returns True if the operation can never complete."""
        group, peer = pending.way[0], pending.peer
        closed = (group, peer) in self._closed and not self._under_way(group, peer)
        return not pending.done and (bool({peer, pending.me} & self._gone) or closed)

    def _under_way(self, group: int, worker: str) -> bool:
        started = (p for ways in (self._sends, self._receives) for way in ways.values() for p in way)
        return any(p.way[0] == group and p.me == worker for p in started)

    def _hand_over(self, way: _Way) -> None:
        sends, receives = self._sends[way], self._receives[way]
        while sends and receives and not {way[1], way[2]} & (self._frozen | self._gone):
            sent, received = sends.popleft(), receives.popleft()
            size, room = sent.tensor.nbytes, received.tensor.nbytes
            shorter = size < room and sent.tensor.dtype == torch.uint8
            assert size == room or shorter, f"{way[1]} sends {size} bytes and {way[2]} expects {room}"
            received.tensor.view(-1).view(torch.uint8)[:size].copy_(sent.tensor.reshape(-1).view(torch.uint8))
            sent.done = received.done = True
        self.changed.notify_all()


class Fake:
    """The in-memory transport."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network

    def connect(self, view: View, me: str) -> FakeLinks:
        with self._network.changed:
            self._network.come(view, me)
        return FakeLinks(self._network, view.group, me)


class FakeLinks(Unshared):
    """The links of one group in a `FakeNetwork`."""

    def __init__(self, network: FakeNetwork, group: int, me: str) -> None:
        self._network = network
        self._group = group
        self._me = me

    def send(self, tensor: torch.Tensor, peer: str, tag: int) -> _Pending:
        return self._start(_Pending(self._network, (self._group, self._me, peer, tag), tensor, sends=True))

    def receive(self, tensor: torch.Tensor, peer: str, tag: int) -> _Pending:
        return self._start(_Pending(self._network, (self._group, peer, self._me, tag), tensor, sends=False))

    def keep_alive(self, memory: object) -> None:
        """Does nothing: pending operations keep their own tensors alive."""

    def close(self) -> None:
        with self._network.changed:
            self._network.close(self._group, self._me)

    def _start(self, pending: _Pending) -> _Pending:
        assert pending.tensor.is_contiguous()
        with self._network.changed:
            self._network.start(pending)
        return pending


@dataclass(eq=False)
class _Pending:
    network: FakeNetwork
    way: _Way
    tensor: torch.Tensor
    sends: bool
    done: bool = False

    @property
    def me(self) -> str:
        return self.way[1] if self.sends else self.way[2]

    @property
    def peer(self) -> str:
        return self.way[2] if self.sends else self.way[1]

    def wait(self) -> torch.Tensor:
        network = self.network
        with network.changed:
            network.changed.wait_for(lambda: not network.is_frozen(self.me) and (self.done or network.lost(self)))
            if not self.done:
                raise PeerLost(self.peer, "connection closed by peer")
        return self.tensor
