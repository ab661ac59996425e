"""A simulated worker's own memory of one view. See `collective/buffers.Buffers`, which it stands for.

The memory says whose bucket, stretch and sum it holds, and in which round's place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farandole.collective.schedule import LANDINGS, PARTIAL, REDUCED, WORD, Add, ExchangeMessage, Fold, Levels
from farandole.plan.shards import Node, combine, root
from farandole.protocol.view import View
from farandole.simulate.links import GIVEN_BACK, Memory, Parcel
from farandole.simulate.pieces import SimulatedBucket, SimulatedPiece, Sum, covered
from farandole.simulate.replica import GARBAGE
from farandole.simulate.witness import Violation


class SimulatedBuffers:
    """See the module's head."""

    def __init__(self, worker: str, view: View) -> None:
        self.memory: Memory = {}
        self._worker, self._view, self._levels = worker, view, Levels.of(view)
        self._place = ("idle", 0)
        self._turn = 0  # the sums of training rounds are in two places in turn where not everyone is heard
        self._buckets: Sequence[SimulatedBucket] = ()
        self._shards = 0
        self._own: dict[int, Mapping[Node, Sum]] = {}
        self._of_host: dict[tuple[int, int, int], dict[Node, Any]] = {}  # by the slice: where they are

    def begin(self, kind: str, buckets: Sequence[SimulatedBucket], shards: int, *, heard: bool) -> None:
        if kind == "train" and not heard:
            self._turn = 1 - self._turn
        self._place = (kind, self._turn)
        self._buckets, self._shards = buckets, shards
        self._own, self._of_host = {}, {}

    def hold(self, bucket: int, own: Mapping[Node, Sum]) -> None:
        """The sums of what this worker has computed."""
        self._own[bucket] = own

    def give_back(self) -> None:
        """It is used for other things."""
        self.memory[GIVEN_BACK] = True

    def where(self, message: ExchangeMessage) -> Any:
        """Of what is received, or sent on."""
        if message.kind == WORD:
            return message.whose
        if message.kind == PARTIAL and (message.landing or message.peer in self._levels.near(self._worker)):
            return ("landing", message.bucket % LANDINGS, message.landing)
        cut = (message.bucket, message.start, message.stop)
        if message.kind == PARTIAL and message.node in self._of_host.get(cut, {}):
            return self._of_host[cut][message.node]
        return (*cut, self._place)

    def fold(self, act: Fold) -> None:
        """The first sum that takes adding up is made where the slices will be. If a settlement has landed there, this
        worker has been given up: what it makes of that stays garbage.
        """
        pieces = self._pieces(act)
        for number, node in enumerate(act.nodes):
            made = combine(pieces, self._shards, _added, node)
            in_place = not number and made is not pieces.get(node)
            for start, stop in self._slices(act.bucket):
                cut = (act.bucket, start, stop)
                where = (*cut, self._place) if in_place else ("of the host", *cut, node)
                self._of_host.setdefault(cut, {})[node] = where
                if not (in_place and self.memory.get(where) == GARBAGE):
                    self.memory[where] = _part(made, *cut)

    def add(self, act: Add) -> None:
        if act.start < act.stop:
            total = combine(self._pieces(act), self._shards, _added, root(self._shards))
            self.memory[act.bucket, act.start, act.stop, self._place] = total

    def to_send(self, message: ExchangeMessage) -> Any:
        """Where it is."""
        stretch = self._levels.stretch(self._buckets[message.bucket], self._worker) if message.kind == REDUCED else ()
        if stretch == (message.start, message.stop):
            self._join(message.bucket)
        return self.where(message)

    def result(self, round_: int) -> Any:
        """What all parts of all buckets agree to be the round's result."""
        held: set[Any] = set()
        for number, bucket in enumerate(self._buckets):
            self._join(number)
            for worker in (self._worker, *self._levels.near(self._worker)):
                start, stop = self._levels.stretch(bucket, worker)
                if start == stop:
                    continue
                piece = self.memory.get((number, start, stop, self._place))
                piece = piece.read() if isinstance(piece, Parcel) else piece
                if piece == GARBAGE:
                    return GARBAGE
                if piece is None or piece.shards != tuple(range(self._shards)):
                    raise Violation(f"{self._worker} vouches for round {round_}, of which it holds {piece}")
                held.add(piece.values)
        if len(held) > 1:
            raise Violation(f"{self._worker}: the slices of round {round_} do not agree: {held}")
        return held.pop() if held else ()

    def _join(self, bucket: int) -> None:
        """The slices that this worker has for its host are one stretch, if they are all there.

        In a view that has been left they may not agree, and nobody looks at them: what they hold is said, all of it.
        """
        start, stop = self._levels.stretch(self._buckets[bucket], self._worker)
        parts = [self.memory.get((bucket, *cut, self._place)) for cut in self._slices(bucket) if cut[0] < cut[1]]
        if len(parts) > 1 and None not in parts:
            self.memory[(bucket, start, stop, self._place)] = _joined(parts, bucket, start, stop)

    def _slices(self, bucket: int) -> list[tuple[int, int]]:
        columns, hosts = self._levels.served(self._worker), range(len(self._levels.hosts))
        return [self._levels.slice(self._buckets[bucket], column, host) for column in columns for host in hosts]

    def _pieces(self, act: Fold | Add) -> dict[Node, Any]:
        cut = (act.bucket, act.start, act.stop)
        pieces: dict[Node, Any] = {node: SimulatedPiece(*cut, *sum_) for node, sum_ in self._own[act.bucket].items()}
        if cut in self._of_host:
            pieces = {node: self.memory[where] for node, where in self._of_host[cut].items()}
        for message in act.taken:
            piece = pieces[message.node] = self.memory[self.where(message)]
            expected = (*cut, covered(message.node, self._shards))
            if piece != GARBAGE and (piece.bucket, piece.start, piece.stop, piece.shards) != expected:
                raise Violation(f"{self._worker} takes {piece} of {message.peer} for {expected}")
        return pieces


def _added(left: Any, right: Any, last: bool) -> Any:
    del last
    if GARBAGE in (left, right):
        return GARBAGE
    return SimulatedPiece(left.bucket, left.start, left.stop, left.shards + right.shards, left.values + right.values)


def _part(piece: Any, bucket: int, start: int, stop: int) -> Any:
    return piece if piece == GARBAGE else SimulatedPiece(bucket, start, stop, piece.shards, piece.values)


def _joined(parts: Sequence[Any], bucket: int, start: int, stop: int) -> Any:
    if GARBAGE in parts:
        return GARBAGE
    values = {part.values for part in parts}
    return SimulatedPiece(bucket, start, stop, parts[0].shards, sum(sorted(values), ()))
