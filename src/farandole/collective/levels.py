"""Who sums up what of a bucket: within each host its workers, between hosts those that serve the same column.

A bucket is cut into *columns*, as many as the host with most workers has. Of each column every host has one *delegate*:
it adds up what the workers of its host have of it, and exchanges that with the delegates of the other hosts. So a
column is cut once more, into one slice a host, of which that host's delegate makes the sum. What goes from host to host
is then the size of the sums, whatever number of workers a host has, and a worker exchanges with those of its host and
one on each other host; with several, where the other host has more workers.

Where all workers are on one host, a column is one slice, and each worker's own. Where each has a host to itself there
is one column, of which each worker has a slice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

from farandole.membership.view import View


class Sliced(Protocol):
    """What has to be known of a bucket."""

    def slice(self, part: int, parts: int) -> tuple[int, int]:
        """One of so many parts of like size, as `[start, stop)`."""
        ...


@dataclass(frozen=True)
class Levels:
    """`hosts`: the workers of each, in the order of their ranks; the hosts in that of their first ones."""

    hosts: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, view: View) -> Levels:
        hosts: dict[str, list[str]] = {}
        for member, host in zip(view.members, view.hosts_of(view.members) or ("",) * view.size, strict=True):
            hosts.setdefault(host, []).append(member)
        return cls(tuple(map(tuple, hosts.values())))

    @functools.cached_property
    def columns(self) -> int:
        return max(map(len, self.hosts))

    @functools.cached_property
    def _host(self) -> dict[str, int]:
        return {worker: number for number, workers in enumerate(self.hosts) for worker in workers}

    def host(self, worker: str) -> int:
        return self._host[worker]

    def near(self, worker: str) -> tuple[str, ...]:
        """The others of its host."""
        return tuple(other for other in self.hosts[self.host(worker)] if other != worker)

    def delegate(self, host: int, column: int) -> str:
        workers = self.hosts[host]
        return workers[column * len(workers) // self.columns]

    def served(self, worker: str) -> range:
        """The columns of which a worker is its host's delegate: at least one, all in a row."""
        workers = self.hosts[self.host(worker)]
        place = workers.index(worker)
        return range(*(-(-each * self.columns // len(workers)) for each in (place, place + 1)))

    def shared(self, worker: str, other: str) -> range:
        """The columns that both serve, on different hosts."""
        mine, theirs = self.served(worker), self.served(other)
        return range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))

    def slice(self, bucket: Sliced, column: int, host: int) -> tuple[int, int]:
        """The part of a bucket that the host's delegate for that column makes the sum of."""
        return bucket.slice(column * len(self.hosts) + host, self.columns * len(self.hosts))

    def slices(self, bucket: Sliced, worker: str) -> list[tuple[int, int]]:
        """What a worker makes the sums of, for all."""
        return [self.slice(bucket, column, self.host(worker)) for column in self.served(worker)]

    def stretch(self, bucket: Sliced, worker: str) -> tuple[int, int]:
        """All columns that a worker serves."""
        served, last = self.served(worker), len(self.hosts) - 1
        return self.slice(bucket, served[0], 0)[0], self.slice(bucket, served[-1], last)[1]
