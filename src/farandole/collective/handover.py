"""How workers of one host come to share memory, before their group is used: pair by pair, and both ends agree on it.

That two workers are of one host is what they say (`View.hosts`, the kernel's boot id). It counts when memory has really
been handed over. Of two, a before b in the view, a listens at a Unix socket whose name is random, and says so over the
control connection; b connects. Each end then

1. asks the kernel whose process the other one is: another user's is sent away at once;
2. proves that it holds the group's key, as over any connection (`proof`);
3. hands over memory of its arena in which random bytes lie. The other maps it, and says what it reads there.

b says over the control connection how that went for it, a waits for that and says which pairs stand: so both go by what
a says, and everybody knows what to use for whom. A container with a network of its own has sockets of its own, and a
machine that only has another one's boot id has no such socket at all: there the next transport is taken, which is told.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from farandole.collective.arena import PAGE, Arena, Unusable, mapped
from farandole.collective.pair import Pair
from farandole.collective.proof import NONCE_BYTES, PROOF_BYTES, proof
from farandole.collective.rendezvous import Rendezvous
from farandole.membership.view import View
from farandole.platform.output import warn_once

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
