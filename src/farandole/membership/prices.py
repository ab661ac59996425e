"""What an hour of a host costs, as a file says, on a day. Pure; `cli/options.py` reads it.

What is not there is unknown, and never 0.
"""

from __future__ import annotations

import math

import msgspec

from farandole.errors import UsageError


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In dollars an hour of one host, however many workers are on it: of each host of a pool, or of one by name, which
    comes first. `date` is the day that they are of, as 2026-11-01; "": there are none.

    Raises:
        UsageError: a price that is none; names it.
    """

    date: str = ""
    pools: dict[str, float] = {}
    hosts: dict[str, float] = {}

    def __post_init__(self) -> None:
        for kind, prices in (("pools", self.pools), ("hosts", self.hosts)):
            for name, dollars in prices.items():
                if not 0 < dollars < math.inf:
                    raise UsageError(
                        f"{kind}.{name} = {dollars:g}: dollars an hour, above 0; leave out what is unknown"
                    )

    def of(self, host: str, pool: str) -> float | None:
        return self.hosts.get(host, self.pools.get(pool))
