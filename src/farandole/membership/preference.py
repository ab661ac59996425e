"""How many workers a run wants of each of its pools, which it has in an order: the first is preferred.

A pool is asked for all that the pools before it do not claim. What it claims is what it can have, as it has said itself
(`Capacity`), and no less than what is there of it: so a preferred pool that has nothing to give at the moment goes on
being asked, while the next ones fill its place; and they let go again only when it has. Until a pool has said what it
can have, and while its hosts are on their way, it claims all that it is asked for, so that at a run's beginning nobody
else is asked in its place.

Without a total (`--workers` left out) each pool is asked for all that it can have. `farandole scale --pool` and
`farandole release` fix what is wanted of a pool; the others share the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec


class PoolTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of the run. `kind`: local, or another one of `pool/base.py`, where its `options` are, too. `size`: no more
    workers than this, None: no limit.
    """

    name: str
    kind: str = "local"
    size: int | None = None
    options: dict[str, str] = msgspec.field(default_factory=dict[str, str])


def targets(
    total: int | None, sizes: Sequence[tuple[str, int | None]], fixed: Mapping[str, int],
    can: Mapping[str, int], there: Mapping[str, int], gather: Collection[str] = (),
) -> dict[str, int]:  # fmt: skip
    """Workers wanted of each pool, by its mark. `sizes`: the run's pools in their order; `fixed`: what is wanted of
    some; `can`: what they have said; `there`: workers that do not leave; `gather`: whose hosts are on their way.
    """
    found, left = dict(fixed), total
    for mark, size in sizes:
        if mark in fixed:
            continue
        its = there.get(mark, 0)
        if left is None:
            most = max(can.get(mark, size or 0), its)  # a pool that knows no limit of its own has its size
            found[mark] = most if size is None else min(most, size)
            continue
        asked = found[mark] = left if size is None else min(left, size)
        left -= asked if mark in gather else min(asked, max(can.get(mark, asked), its))
    return found


def wanted(total: int | None, found: Mapping[str, int], fixed: Mapping[str, int]) -> int:
    """In all, as people see it."""
    return sum(found.values()) if total is None else total + sum(fixed.values())
