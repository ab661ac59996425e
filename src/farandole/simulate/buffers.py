"""A simulated worker's memory of one view. It replaces `ExchangeBuffers` of `collective/exchange.py`.

Each place in memory records the bucket, the elements and the sum that it holds, and the place of its round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farandole.collective.schedule import (
    COMMIT,
    LANDINGS,
    PARTIAL,
    REDUCED,
    Add,
    ExchangeMessage,
    ExchangeOrder,
    HostSum,
    Levels,
    ZoneSum,
)
from farandole.plan.shards import Node, combine, root
from farandole.protocol.view import View
from farandole.simulate.links import GIVEN_BACK, Memory, Parcel
from farandole.simulate.pieces import SimulatedBucket, SimulatedPiece, Sum, covered
from farandole.simulate.replica import GARBAGE
from farandole.simulate.witness import Violation


class SimulatedBuffers:
    """The memory of one view; see the docstring of the module."""

    def __init__(self, worker: str, view: View) -> None:
        self.memory: Memory = {}
        self._worker, self._view, self._levels = worker, view, Levels.of(view)
        self._place = ("idle", 0)
        self._turn = 0  # training rounds use two places in turn, unless `all_begun` (see `Routes`)
        self._buckets: Sequence[SimulatedBucket] = ()
        self._shards = 0
        self._in_pieces = False
        self._own: dict[int, Mapping[Node, Sum]] = {}
        self._of_level: dict[tuple[int, int, int], dict[Node, Any]] = {}  # by part: the keys of the host's sums,
        # and of the zone's as soon as they are made

    def begin(self, kind: str, buckets: Sequence[SimulatedBucket], order: ExchangeOrder) -> None:
        if kind == "train" and not order.all_begun:
            self._turn = 1 - self._turn
        self._place = (kind, self._turn)
        self._buckets, self._shards, self._in_pieces = buckets, order.shards, order.in_pieces
        self._own, self._of_level = {}, {}

    def hold(self, bucket: int, own: Mapping[Node, Sum]) -> None:
        """Sets the sums of the shards that this worker has computed."""
        self._own[bucket] = own

    def give_back(self) -> None:
        """Frees this memory, which is then used for other data."""
        self.memory[GIVEN_BACK] = True

    def where(self, message: ExchangeMessage) -> Any:
        """Returns the key of the memory of a message that is received or forwarded."""
        if message.kind == COMMIT:
            return message.whose
        if message.kind == PARTIAL and (message.landing or message.peer in self._levels.near(self._worker)):
            return ("landing", message.bucket % LANDINGS, message.landing)
        cut = (message.bucket, message.start, message.stop)
        if message.kind == PARTIAL and message.node in self._of_level.get(cut, {}):
            return self._of_level[cut][message.node]
        return (*cut, self._place)

    def sum_on_host(self, act: HostSum) -> None:
        """Makes the host's sums; the first one that needs an addition goes to the place of the sum.

        If data of `release_peers` has arrived there, this worker was evicted: the result is garbage.
        """
        pieces, totals = self._totals(act)
        for number, (node, total) in enumerate(totals.items()):
            in_place = not number and total is not pieces.get(node)
            for start, stop in self._parts(act.bucket):
                cut = (act.bucket, start, stop)
                where = (*cut, self._place) if in_place else ("of the host", *cut, node)
                self._of_level.setdefault(cut, {})[node] = where
                if not (in_place and self.memory.get(where) == GARBAGE):
                    self.memory[where] = _part(total, *cut)

    def sum_in_zone(self, act: ZoneSum) -> None:
        """Makes the zone's sums of the strips that this worker serves, in memory of their own."""
        _, totals = self._totals(act)
        for start, stop in self._parts(act.bucket):
            if act.start <= start and stop <= act.stop:
                cut = (act.bucket, start, stop)
                held = self._of_level.setdefault(cut, {})
                if start < stop:  # one without elements may be a part of other strips too
                    held.clear()
                held |= {node: ("of the zone", *cut, node) for node in totals}
                self.memory |= {("of the zone", *cut, node): _part(total, *cut) for node, total in totals.items()}

    def add(self, act: Add) -> None:
        if act.start < act.stop:
            total = combine(self._pieces(act), self._shards, _added, root(self._shards))
            self.memory[act.bucket, act.start, act.stop, self._place] = total

    def to_send(self, message: ExchangeMessage) -> Any:
        """Returns the key of the memory of a message to send."""
        if message.kind == REDUCED:
            self._join(message.bucket, message.start, message.stop)
        return self.where(message)

    def result(self, round_: int) -> Any:
        """Returns the round's result, after verifying that all parts of all buckets agree on it."""
        slice_values: set[Any] = set()
        for number, bucket in enumerate(self._buckets):
            self._join(number, *self._levels.stretch(bucket, self._worker))
            for worker in (self._worker, *self._levels.near(self._worker)):
                start, stop = self._levels.stretch(bucket, worker)
                if start == stop:
                    continue
                piece = self.memory.get((number, start, stop, self._place))
                piece = piece.read() if isinstance(piece, Parcel) else piece
                if piece == GARBAGE:
                    return GARBAGE
                if piece is None or piece.shards != tuple(range(self._shards)):
                    raise Violation(f"{self._worker} commits round {round_}, and holds only {piece} of it")
                slice_values.add(piece.values)
        if len(slice_values) > 1:
            raise Violation(f"{self._worker}: the slices of round {round_} do not agree: {slice_values}")
        return slice_values.pop() if slice_values else ()

    def _join(self, bucket: int, start: int, stop: int) -> None:
        """Joins the parts of these elements, if there are several and they are all there.

        In an abandoned view their values may differ, and no worker uses them: the joined piece has all of them.
        """
        cuts = [cut for cut in self._parts(bucket) if start <= cut[0] < cut[1] <= stop]
        parts = [self.memory.get((bucket, *cut, self._place)) for cut in cuts]
        if len(parts) > 1 and None not in parts:
            self.memory[(bucket, start, stop, self._place)] = _joined(parts, bucket, start, stop)

    def _parts(self, bucket: int) -> list[tuple[int, int]]:
        """Returns the parts of its columns, as they are summed up or arrive: its slices and those of the other zones,
        and the strips of the other hosts of its zone.
        """
        levels, worker, whole = self._levels, self._worker, self._buckets[bucket]
        zones = range(len(levels.zones))
        parts: set[tuple[int, int]] = set()
        for column in levels.served(worker):
            parts |= {
                levels.slice(whole, column, strip, zone) for strip in levels.strips_served(worker) for zone in zones
            }
            delegates = (levels.hosts[host][0] for host in levels.zones[levels.zone(worker)])
            parts |= {
                levels.strips_of(whole, column, other)
                for other in delegates
                if levels.host(other) != levels.host(worker)
            }
        return sorted(piece for cut in parts for piece in (whole.pieces(*cut) if self._in_pieces else [cut]))

    def _totals(self, act: HostSum | ZoneSum) -> tuple[dict[Node, Any], dict[Node, Any]]:
        """Returns what an act adds, and its sums."""
        if act.start == act.stop:
            return {}, dict.fromkeys(act.nodes, SimulatedPiece(act.bucket, act.start, act.stop, (), ()))
        pieces = self._pieces(act)
        return pieces, {node: combine(pieces, self._shards, _added, node) for node in act.nodes}

    def _pieces(self, act: HostSum | ZoneSum | Add) -> dict[Node, Any]:
        cut = (act.bucket, act.start, act.stop)
        pieces: dict[Node, Any] = {node: SimulatedPiece(*cut, *sum_) for node, sum_ in self._own[act.bucket].items()}
        held = [
            {node: self.memory[where] for node, where in self._of_level[part].items()}
            for part in ((act.bucket, *each) for each in self._parts(act.bucket))
            if part in self._of_level and act.start <= part[1] < part[2] <= act.stop
        ]
        if held:
            pieces = {node: _joined([each[node] for each in held], *cut) for node in held[0]}
        for message in act.taken:
            piece = pieces[message.node] = self.memory[self.where(message)]
            expected = (*cut, covered(message.node, self._shards))
            if piece != GARBAGE and (piece.bucket, piece.start, piece.stop, piece.shards) != expected:
                raise Violation(f"{self._worker} got {piece} from {message.peer} and expected {expected}")
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
