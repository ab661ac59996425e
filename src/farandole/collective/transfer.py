"""The state's way to joiners: the veterans send one stripe of its bytes each.

They send out of the live tensors, while they compute the next step: nothing writes to parameters or optimizer state
before that step's update, and the joiner's control word, without which the step can't end, says that it has everything
(R1). Buffers do change in a forward pass; the caller hands in copies of their values at the start of the step.

With its stripe each veteran sends a checksum of the next veteran's, made of its own memory, so that a joiner does not
take one veteran's word for any part of the state if there is another; made and compared off the training threads.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from farandole.collective.state import Snapshot, cut, restore
from farandole.collective.tags import STATE, of_round, place
from farandole.collective.transport import Links, Pending
from farandole.errors import StateDisputed
from farandole.membership.view import View
from farandole.plan.shards import Position

PIECE_BYTES = 4 << 20

_HEADER, _SKELETON, _STRIPE, _CHECK = range(4)


def send_state(
    view: View, veterans: Sequence[str], worker: str, links: Links, round_: int, position: Position, snapshot: Snapshot
) -> None:
    """A veteran's part: header and skeleton from the first veteran, a stripe and the next one's checksum from each, to
    every joiner. `veterans`: those who send.

    Raises:
        PeerLost: a joiner is gone.
    """
    part = veterans.index(worker)
    sent: list[Pending] = []
    skeleton = torch.frombuffer(bytearray(snapshot.skeleton), dtype=torch.uint8)
    header = torch.tensor(
        [round_, position.step, position.epoch, position.offset, skeleton.numel(), snapshot.bytes, *snapshot.flags],
        dtype=torch.int64,
    )
    if part == 0:
        for joiner in view.joining:
            sent.append(links.send(header, joiner, _tag(view, _HEADER)))
            sent.append(links.send(skeleton, joiner, _tag(view, _SKELETON)))
    for start, stop in _pieces(snapshot.bytes, part, len(veterans)):
        piece = snapshot.piece(start, stop)
        under_way = [links.send(piece, joiner, _tag(view, _STRIPE)) for joiner in view.joining]
        for pending in under_way:  # one piece at a time: the state is never in memory twice
            pending.wait()
    if len(veterans) > 1:
        next_ = (part + 1) % len(veterans)
        checksum = 0 if next_ else zlib.crc32(snapshot.skeleton)  # the first one has sent that too
        for start, stop in _pieces(snapshot.bytes, next_, len(veterans)):
            checksum = zlib.crc32(snapshot.piece(start, stop).numpy().data, checksum)
        check = torch.tensor([checksum], dtype=torch.int64)
        sent += [links.send(check, joiner, _tag(view, _CHECK)) for joiner in view.joining]
    for pending in sent:
        pending.wait()


class Arrival:
    """A joiner's part: `header` first, then `state`. Both block until the veterans send, or raise PeerLost.

    `state` raises StateDisputed if one veteran's stripe is not what another one has there.
    """

    def __init__(self, view: View, veterans: Sequence[str], links: Links, parameters: int) -> None:
        self._view = view
        self._veterans = veterans
        self._links = links
        self._parameters = parameters
        self._sizes = (0, 0)

    def header(self) -> tuple[int, Position, list[bool]]:
        """The round that the view begins with, the position of the run, each parameter's requires_grad."""
        header = torch.empty(6 + self._parameters, dtype=torch.int64)
        self._take(header, self._veterans[0], _HEADER)
        round_, step, epoch, offset, skeleton, payload, *flags = header.tolist()
        self._sizes = (skeleton, payload)
        return round_, Position(epoch=epoch, offset=offset, step=step), [bool(flag) for flag in flags]

    def state(self) -> Any:
        skeleton = torch.empty(self._sizes[0], dtype=torch.uint8)
        payload = torch.empty(self._sizes[1], dtype=torch.uint8)
        veterans = self._veterans
        waits: list[list[tuple[Pending, int, int]]] = []
        for part, veteran in enumerate(veterans):
            key = _tag(self._view, _STRIPE)
            pieces = _pieces(self._sizes[1], part, len(veterans))
            waits.append([(self._links.receive(payload[a:b], veteran, key), a, b) for a, b in pieces])
        self._take(skeleton, veterans[0], _SKELETON)
        checksums = [zlib.crc32(skeleton.numpy().data), *(0 for _ in veterans[1:])]
        for part, stripe in enumerate(waits):
            for wait, start, stop in stripe:
                wait.wait()
                if len(veterans) > 1:
                    checksums[part] = zlib.crc32(payload[start:stop].numpy().data, checksums[part])
        self._compare(checksums)
        return restore(skeleton.numpy().tobytes(), payload)

    def _compare(self, checksums: Sequence[int]) -> None:
        veterans = self._veterans
        checks = torch.empty(len(veterans), 1, dtype=torch.int64)
        if len(veterans) == 1:
            return
        for part in range(len(veterans)):
            self._take(checks[part], veterans[part - 1], _CHECK)
        for part, checksum in enumerate(checksums):
            witness = veterans[part - 1]
            if int(checks[part]) != checksum:
                raise StateDisputed(
                    f"part {part + 1} of {len(veterans)} of the state, as {veterans[part]} sends it, is not what "
                    f"{witness} has there: one of the two holds, or sends, something else than the run's state"
                )

    def _take(self, tensor: torch.Tensor, peer: str, kind: int) -> None:
        self._links.receive(tensor, peer, _tag(self._view, kind)).wait()


def _pieces(total: int, part: int, parts: int) -> list[tuple[int, int]]:
    """A stripe in pieces of at most `PIECE_BYTES`, in the order in which they are sent."""
    start, stop = cut(total, part, parts)
    return [(low, min(low + PIECE_BYTES, stop)) for low in range(start, stop, PIECE_BYTES)]


def _tag(view: View, part: int) -> int:
    return of_round(view, 0) | place(STATE, part)
