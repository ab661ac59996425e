"""A list of pieces, cut into shards that are to be made of it: arithmetic, so who cuts the same list has the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec


class Piece(Protocol):
    """What is not cut further: one image, some bytes of a text, some rows of a table.

    Attributes:
        size: in bytes, or about so many.
        samples: how many it holds.
        content: what tells it from another piece, on every machine that has a copy: without the time of its change.
    """

    @property
    def size(self) -> int: ...

    @property
    def samples(self) -> int: ...

    @property
    def content(self) -> tuple[Any, ...]: ...


class Part(msgspec.Struct, frozen=True):
    """Which of the shards are made here: of each `of` the one at `number`, from 1 on."""

    number: int = 1
    of: int = 1

    def has(self, shard: int) -> bool:
        return shard % self.of == self.number - 1


WHOLE = Part()
P = TypeVar("P", bound=Piece)


def cut(pieces: Sequence[P], shard_bytes: int) -> Iterator[tuple[int, tuple[P, ...]]]:
    """The number of each shard's first sample, and its pieces, at least one."""
    first, samples, begin, length = 0, 0, 0, 0
    for number, piece in enumerate(pieces):
        if length and length + piece.size > shard_bytes:
            yield first, tuple(pieces[begin:number])
            first, begin, length = samples, number, 0
        length += piece.size
        samples += piece.samples
    yield first, tuple(pieces[begin:])


def samples_of(pieces: Sequence[Piece], shard_bytes: int, part: Part) -> int:
    """How many samples that part's shards hold."""
    return sum(piece.samples for n, (_, its) in enumerate(cut(pieces, shard_bytes)) if part.has(n) for piece in its)


def digest_of(of: list[Any]) -> str:
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()
