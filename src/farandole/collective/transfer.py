"""The state's way to joiners: the veterans send one stripe of its bytes each, piece by piece.

A piece is copied into memory of the veteran's arena and lent: a joiner of its host reads it there and copies it to its
place, any other receives it there. So of each state one process copies each byte, and each joiner once more; beside the
state itself a veteran has `IN_FLIGHT` pieces in shared memory, a joiner all of the state, until it is loaded.

Who knows what when:

1. A veteran reads its live tensors, in the background, while the script computes the next step. Nothing writes to
   parameters or optimizer state before that step's update, and the joiner's control word, without which the step can't
   end, says that it has everything (R1): so it comes after the last piece was read, and after the last checksum was
   made. Buffers do change in a forward pass; the caller hands in copies of their values at the start of the step.
2. What is lent stays as it is until each joiner has said that it has taken it: then its memory is used for a later
   piece. A joiner says so once the bytes are in memory of its own, and looks only at those from then on.
3. If a joiner is lost, another one may still read. So what was lent then is kept until the links are closed, which is
   after everyone within reach has abandoned the view. A veteran that is lost leaves its memory as it was, and a joiner
   that lacks a piece, or a checksum, holds no state and says no word.
4. Who stands still holds up this veteran's thread, or this joiner's, and the step, until the control plane gives the
   view up. The thread that goes on later sends what the parameters are then, to nobody who would take it: the joiner
   of a view that was given up is told so before it looks (`Member.become_synced`).

With each piece a veteran makes a checksum of the next veteran's, of its own memory, so that a joiner does not take one
veteran's word for any part of the state if there is another; made and compared off the training threads.
"""

from __future__ import annotations

import mmap
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch

from farandole.collective.arena import Memory
from farandole.collective.state import Snapshot, cut, restore
from farandole.collective.tags import STATE, of_round, place
from farandole.collective.transport import Borrowing, Links, PeerLost, Pending, Room
from farandole.errors import StateDisputed
from farandole.membership.view import View
from farandole.plan.shards import Position

PIECE_BYTES = 4 << 20
IN_FLIGHT = 4  # pieces of a veteran's stripe

_HEADER, _SKELETON, _STRIPE, _CHECK, _TAKEN = range(5)
_ROW = 1023  # words of 8 bytes
_WEIGHTS = torch.arange(1, _ROW + 1, dtype=torch.int64) * (0x9E3779B97F4A7C15 >> 2) * 2 + 1


def send_state(
    view: View, veterans: Sequence[str], worker: str, links: Links, round_: int, position: Position,
    snapshot: Snapshot, memory: Memory,
) -> None:  # fmt: skip
    """A veteran's part: header and skeleton from the first veteran, a stripe and the next one's checksum from each, to
    every joiner. `veterans`: those who send. `memory`: what is lent lies there.

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
    mine = _pieces(snapshot.bytes, part, len(veterans))
    next_ = (part + 1) % len(veterans)
    theirs = _pieces(snapshot.bytes, next_, len(veterans)) if len(veterans) > 1 else []
    checksum = 0 if next_ else zlib.crc32(snapshot.skeleton)  # the first one has sent that too
    lending = _Lending(view, links, memory)
    try:
        for lent, checked in zip_longest(mine, theirs):
            if lent:
                lending.lend(snapshot.piece(*lent))
            if checked:
                checksum = _checksum(snapshot.piece(*checked), checksum)
        if theirs:
            check = torch.tensor([checksum], dtype=torch.int64)
            sent += [links.send(check, joiner, _tag(view, _CHECK)) for joiner in view.joining]
        lending.wait()
        for pending in sent:
            pending.wait()
    except PeerLost:
        links.keep(lending)
        raise


class _Lending:
    """Pieces on their way to all joiners of `view`, of which so many are `IN_FLIGHT`."""

    def __init__(self, view: View, links: Links, memory: Memory) -> None:
        self._view, self._links, self._memory = view, links, memory
        self._slots: list[torch.Tensor] = []  # that no joiner reads
        self._under_way: deque[tuple[torch.Tensor, list[Pending]]] = deque()

    def lend(self, piece: torch.Tensor) -> None:
        """Waits for a place where to."""
        if len(self._under_way) == IN_FLIGHT:
            self._wait_for_one()
        slot = self._slots.pop() if self._slots else self._memory.empty(PIECE_BYTES, torch.uint8)
        there = slot[: piece.numel()].copy_(piece)
        pending: list[Pending] = []
        self._under_way.append((slot, pending))
        for joiner in self._view.joining:
            pending.append(self._links.lend(there, joiner, _tag(self._view, _STRIPE)))
            taken = torch.empty(1, dtype=torch.int64)
            pending.append(self._links.receive(taken, joiner, _tag(self._view, _TAKEN)))

    def wait(self) -> None:
        """Until all joiners have taken everything."""
        while self._under_way:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        for each in self._under_way[0][1]:
            each.wait()
        self._slots.append(self._under_way.popleft()[0])


class Arrival:
    """A joiner's part: `header` first, then `state`. Both block until the veterans send, or raise PeerLost. `ahead`:
    memory that was made for it, used if it is large enough.

    `state` raises StateDisputed if one veteran's stripe is not what another one has there.
    """

    def __init__(
        self, view: View, veterans: Sequence[str], links: Links, parameters: int, ahead: torch.Tensor | None = None
    ) -> None:
        self._view = view
        self._veterans = veterans
        self._links = links
        self._parameters = parameters
        self._ahead = ahead
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
        size, ahead, self._ahead = self._sizes[1], self._ahead, None
        payload = ahead[:size] if ahead is not None and len(ahead) >= size else touched(size)
        veterans, key = self._veterans, _tag(self._view, _STRIPE)
        waits: list[list[tuple[Borrowing, Room]]] = []
        for part, veteran in enumerate(veterans):
            rooms = [Room.of(payload[a:b]) for a, b in _pieces(size, part, len(veterans))]
            waits.append([(self._links.borrow(room, veteran, key), room) for room in rooms])
        self._take(skeleton, veterans[0], _SKELETON)
        checksums = [zlib.crc32(skeleton.numpy().data), *(0 for _ in veterans[1:])]
        told: list[Pending] = []
        taken = torch.zeros(1, dtype=torch.int64)
        for pieces in zip_longest(*waits):  # one of each veteran, in turn: none of them is held up
            for part, piece in enumerate(pieces):
                if piece is None:
                    continue
                borrowing, room = piece
                there = borrowing.wait()
                if not room.holds(there):
                    room.memory.copy_(there)
                told.append(self._links.send(taken, veterans[part], _tag(self._view, _TAKEN)))
                if len(veterans) > 1:
                    checksums[part] = _checksum(room.memory, checksums[part])
        self._compare(checksums)
        for pending in told:
            pending.wait()
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
                    f"{witness} has there: one of the two holds, or sends, something else than the run's state",
                    veterans[part],
                    witness,
                )

    def _take(self, tensor: torch.Tensor, peer: str, kind: int) -> None:
        self._links.receive(tensor, peer, _tag(self._view, kind)).wait()


def _pieces(total: int, part: int, parts: int) -> list[tuple[int, int]]:
    """A stripe in pieces of at most `PIECE_BYTES`, in the order in which they are sent."""
    start, stop = cut(total, part, parts)
    return [(low, min(low + PIECE_BYTES, stop)) for low in range(start, stop, PIECE_BYTES)]


def _checksum(piece: torch.Tensor, before: int) -> int:
    """Of a piece and what came before it, modulo 2^32. In rows of words, each weighted by its place there, modulo 2^64.

    Weights are odd, so that no change of one word passes. So is the length of a row: of a word's highest bit, a sign,
    only whether it has changed in an even number of a row's words counts. It takes a third of a CRC's time.
    """
    words = piece.view(torch.int64)
    whole = words.numel() // _ROW * _ROW
    rows = torch.mv(words[:whole].view(-1, _ROW), _WEIGHTS)
    rest = torch.dot(words[whole:], _WEIGHTS[: words.numel() - whole])
    return zlib.crc32(rest.view(1).numpy().data, zlib.crc32(rows.numpy().data, before))


def touched(size: int) -> torch.Tensor:
    """Memory for a state of `size` bytes, touched, in huge pages where there are some."""
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _tag(view: View, part: int) -> int:
    return of_round(view, 0) | place(STATE, part)
