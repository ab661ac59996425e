"""The transport of a run: memory that both can read between workers of one host, Gloo between all others.

Gloo connects all members of a group or none. So there is none where all pairs share memory, as in a view of one host.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from farandole.collective.arena import Arena, Memory
from farandole.collective.gloo import Gloo
from farandole.collective.handover import Meeting, standing
from farandole.collective.pair import Pair
from farandole.collective.rendezvous import Rendezvous
from farandole.collective.transport import Borrowing, Links, Pending, Room
from farandole.membership.view import View


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
