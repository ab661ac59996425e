"""Gloo as a transport: TCP between all pairs of a group, with a rendezvous over the control connection.

A group takes connections from its members alone (`listener`), and is used only when each of its pairs has proved itself
(`proof`): nothing that a stranger sends over one is read.

Gloo has no way to wake a pending receive and closes the pair of one that times out, so receives never time out here.

A forked process (a loader process) inherits groups without their threads, and Gloo's destructor waits for them: a group
that is garbage in a cycle by then would hang the child in a collection. So what a child inherits is left out of its
collections, and there is none while others' functions are called that have to do with forking.
"""

from __future__ import annotations

import gc
import os
import re
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from farandole.collective.listener import Listener, introductions
from farandole.collective.proof import prove
from farandole.collective.rendezvous import CONNECT_TIMEOUT, Rendezvous
from farandole.collective.transport import PeerLost, Unshared
from farandole.membership.view import View

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
        self._listener = Listener(lambda: _Gloo.create_device(hostname=interface), interface)
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
