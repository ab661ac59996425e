"""A list of files, cut into shards that are to be made of it: arithmetic, so who cuts the same list has the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec


class Source(NamedTuple):
    """One image: its path under the source folder, its class, its length in bytes, when it was changed."""

    path: str
    label: int
    size: int
    changed_ns: int


class Part(msgspec.Struct, frozen=True):
    """Which of the shards are made here: of each `of` the one at `number`, from 1 on."""

    number: int = 1
    of: int = 1

    def has(self, shard: int) -> bool:
        return shard % self.of == self.number - 1


WHOLE = Part()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One shard to make, as it is sent to a process. `first`: the number of its first sample. `check`: whether every
    image is decoded.
    """

    folder: str
    url: str
    name: str
    first: int
    files: tuple[Source, ...]
    short_side: int
    check: bool = False

    @property
    def made_from(self) -> str:
        return digest_of([2, self.first, self.short_side, self.files])

    @property
    def holds(self) -> str:
        return digest_of([2, self.first, self.short_side, [(file.path, file.label, file.size) for file in self.files]])


class Sized(Protocol):
    @property
    def size(self) -> int: ...


_S = TypeVar("_S", bound=Sized)


def cut(files: Sequence[_S], shard_bytes: int) -> Iterator[tuple[int, tuple[_S, ...]]]:
    """The number of each shard's first sample, and its files, at least one."""
    first, length = 0, 0
    for number, file in enumerate(files):
        if length and length + file.size > shard_bytes:
            yield first, tuple(files[first:number])
            first, length = number, 0
        length += file.size
    yield first, tuple(files[first:])


def files_of(files: Sequence[Source], shard_bytes: int, part: Part) -> int:
    """How many files that part's shards hold."""
    return sum(len(its) for n, (_, its) in enumerate(cut(files, shard_bytes)) if part.has(n))


def digest_of(of: list[Any]) -> str:
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()
