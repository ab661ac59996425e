"""What goes from one zone to another in a step, with and without zones: counted bytes of real exchanges over links in
memory.

    python -m benchmarks.zones

Each host has one worker, and each worker two micro-batches. A copy is the size of all sums of a step. The bits of each
exchange are compared with the tree's.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from farandole.collective.fake import FakeNetwork
from tests.support.exchanging import assert_same, expected, on_all, workers

ZONES = ("ew", "eeww", "eeeewwww", "eeeeeeeewwwwwwww", "eeew", "eewwxx")
SHARDS_PER_WORKER = 2


def main() -> None:
    table = Table("hosts", "micro-batches", "copies without zones", "with zones", title="Copies that leave all zones")
    for zones in ZONES:
        hosts = " + ".join(str(zones.count(zone)) for zone in sorted(set(zones)))
        shards = len(zones) * SHARDS_PER_WORKER
        table.add_row(hosts, str(shards), *(f"{copies(zones, on, shards):.3f}" for on in ((), tuple(zones))))
    Console().print(table)


def copies(zones: str, reported: Sequence[str], shards: int) -> float:
    """The copies that leave the `zones` of the hosts in one step, where the hosts report these zones."""
    hosts = tuple(f"h{number}" for number in range(len(zones)))
    with workers(len(hosts), network=FakeNetwork(), hosts=hosts, zones=reported) as everyone:
        view = everyone[0].exchange.view
        lineage = view.lineage(view.members).sets
        for buckets in on_all(everyone, lambda worker: worker.step(0, shards, lineage)):
            assert_same(buckets, expected(everyone[0].layout, 0, shards))  # type: ignore[arg-type]
        total = sum(bucket.numel * bucket.dtype.itemsize for bucket in everyone[0].layout.buckets)
        left = 0
        for worker, zone in zip(everyone, zones, strict=True):
            assert worker.links is not None
            left += sum(size for peer, size in worker.links.bytes.items() if zones[int(peer[1:])] != zone)
        return left / total


if __name__ == "__main__":
    main()
