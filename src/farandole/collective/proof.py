"""Each pair of a new group proves itself before anything else is sent over it: both ends hold the group's key.

The coordinator makes a key for each group (`coordinator/group_keys.py`) and tells it to the members of that view only,
over connections that have shown the ticket. Every pair (a, b), a before b in the view, does this at once in both
directions:

1. a sends a nonce of 32 random bytes, N(a); b sends N(b).
2. a sends HMAC-SHA256(key, T | "a"); b sends HMAC-SHA256(key, T | "b"); where T, the transcript, is what this is for,
   the group's number, both names, N(a) and N(b), each with its length before it.
3. Each compares what came with what the other must have sent, in constant time.

Who does not have the key can't make what is to come: a's own nonce is in it, so nothing that was recorded before fits;
the sender's name is in it, so what a sends does not fit as b's; the names and the group's number are in it, so what
another pair or another group has sent does not fit either. That the nonces come from the stranger does not help it: it
learns HMACs of transcripts that nobody but it will ever accept. The key is the run's and the group's (both are in it).

What it does not do: the proof shows who was at the other end, and nothing that is sent afterwards carries one. Who sits
on the wire between two members and passes their proof on unchanged can then read and change everything, and no proof
without encryption can show it. On one machine that is root alone, since the listener lets nobody else's connection in
(`listener`); in a network, who can put packets with another machine's address on the wire, or is its router.

All sizes are fixed. Gloo itself trusts its peers: who speaks its format to it, in place of a member, can make it end
the process before any proof is due. Only the listener's filter prevents that, by letting nobody have such a connection.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from farandole.collective.tags import WORD, place
from farandole.collective.transport import Unproved

if TYPE_CHECKING:
    from farandole.collective.gloo import GlooLinks, GlooPending

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
