"""Which shards a cache fetches next, and which copies make way for them: pure.

- Shards come in the order in which the samples want them, as far as there is room.
- A copy that is wanted does not make way for another one that is. So where the data is larger than the cache, in a
  shuffled order, a part of it stays here for good, and of the rest samples are read one by one (`fetcher.py`): to
  exchange copies would fetch a whole shard for almost every sample. In the dataset's own order what has been read is
  wanted no more.
- Of copies that are not wanted the least recently used goes first, and none that somebody else has used within
  `STAYS_S`: two runs with caches too small for both would else go on fetching what the other one has removed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

STAYS_S = 180.0


@dataclass(frozen=True)
class File:
    """A file elsewhere, of so many bytes, with its MD5 in hex."""

    url: str
    size: int
    md5: str

    @property
    def name(self) -> str:
        """Of its copy: what is made anew elsewhere under the same name is another copy here."""
        return f"{self.md5}-{self.url.rsplit('/', 1)[-1]}"


@dataclass(frozen=True)
class Copy:
    """A file in the cache, or one that is being fetched. `used_s`: how long ago it was used last."""

    name: str
    size: int
    used_s: float
    coming: bool = False


@dataclass(frozen=True)
class Next:
    """`file` is fetched, after copies of these names have gone."""

    file: File
    makes_way: tuple[str, ...] = ()


def choose(wanted: Sequence[File], there: Collection[Copy], limit: int, busy: Collection[str] = ()) -> Next | None:
    """What is fetched next; None: nothing. `wanted`: in that order. `busy`: names that somebody is fetching, or that
    could not be fetched just now.
    """
    copies = {copy.name: copy for copy in there}
    names = {file.name for file in wanted}
    idle = sorted(
        (copy for copy in there if copy.name not in names and not copy.coming and copy.used_s > STAYS_S),
        key=lambda copy: -copy.used_s,
    )
    total = sum(copy.size for copy in there)
    for file in wanted:
        if file.name in copies or file.name in busy:
            continue
        makes_way = room_for(total + file.size - limit, idle)
        if makes_way is not None:
            return Next(file, makes_way)
    return None


def room_for(excess: int, idle: Sequence[Copy]) -> tuple[str, ...] | None:
    """The first of these copies that together have so many bytes; None: all of them have less."""
    gone: list[str] = []
    for copy in idle:
        if excess <= 0:
            break
        gone.append(copy.name)
        excess -= copy.size
    return tuple(gone) if excess <= 0 else None
