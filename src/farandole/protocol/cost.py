"""The cost of hosts, by the hour. Pure.

If a pool reports the prices of its hosts (`Priced`), a host costs from its launch until it is gone, with or without
workers. Otherwise a host costs from the start of its first worker to the end of its last one. A gap without workers
counts too if it is shorter than `GAP_S`, since the machine is still reserved while a worker is replaced. The number of
workers on the host does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from farandole.errors import UsageError

# --- prices -----------------------------------------------------------------------------------------------------------
#
# The price of an hour of a host, from a file, on a given day. Pure; `cli/options.py` reads the file.
#
# A price that is missing is unknown, and never 0.


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices in dollars an hour of one host, however many workers it has.

    `pools`: for each host of a pool. `hosts`: for one host by name, which comes first. `date`: the day of the prices,
    as 2026-11-01; "" if there are no prices.

    Raises:
        UsageError: a price is not above 0 and finite; names it.
    """

    date: str = ""
    pools: dict[str, float] = {}
    hosts: dict[str, float] = {}

    def __post_init__(self) -> None:
        for kind, prices in (("pools", self.pools), ("hosts", self.hosts)):
            for name, dollars in prices.items():
                if not 0 < dollars < math.inf:
                    raise UsageError(
                        f"{kind}.{name} = {dollars:g}: dollars an hour, above 0; leave out an unknown price"
                    )

    def of(self, host: str, pool: str) -> float | None:
        """Return the price of an hour of `host` in dollars, None if it is unknown."""
        return self.hosts.get(host, self.pools.get(pool))


# --- cost -------------------------------------------------------------------------------------------------------------

GAP_S = 300.0
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class HostPrice:
    """The price of a host, as its pool reports it: `dollars` an hour, as of `day`; None: unknown.

    The host is paid for from Unix time `began` to `ends`.
    """

    host: str
    pool: str
    dollars: float | None
    day: str
    began: float
    ends: float


@dataclass(frozen=True, kw_only=True)
class HostUse:
    """The time of a worker on a host: from Unix time `began`, for `seconds`."""

    host: str
    pool: str
    began: float
    seconds: float


class HostCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one host: `hours` at `an_hour` dollars. `an_hour` and `dollars` are None if the price is unknown."""

    host: str
    pool: str
    hours: float
    an_hour: float | None
    dollars: float | None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a run. `dollars` is None if the price of some host is unknown.

    `at_least`: the dollars of the other hosts. `unknown`: the hosts without a price. `date`: of the prices.
    """

    dollars: float | None
    at_least: float
    unknown: tuple[str, ...]
    date: str
    hosts: tuple[HostCost, ...]


def cost(uses: Iterable[HostUse], prices: Prices, reported: Iterable[HostPrice] = ()) -> Cost:
    """Return the cost of all hosts, sorted by name. A price that a pool has reported comes before that of `prices`."""
    pools = {each.host: each for each in reported}
    by_host: dict[str, list[HostUse]] = {}
    for stay in uses:
        by_host.setdefault(stay.host, []).append(stay)
    names = sorted({*by_host, *pools})
    hosts = tuple(_of(name, by_host.get(name, []), prices, pools.get(name)) for name in names)
    unknown = tuple(each.host for each in hosts if each.dollars is None)
    date = " and ".join(sorted({day for day in (prices.date, *(each.day for each in pools.values())) if day}))
    known = sum(each.dollars for each in hosts if each.dollars is not None)
    return Cost(
        dollars=None if unknown or not hosts else known, at_least=known, unknown=unknown, date=date, hosts=hosts
    )


def _of(host: str, stays: list[HostUse], prices: Prices, told: HostPrice | None) -> HostCost:
    """Return the cost of one host. An external worker on it belongs to no pool."""
    pool = told.pool if told else next((stay.pool for stay in stays if stay.pool), "")
    seconds = max(0.0, told.ends - told.began) if told else paid_s(stays)
    hours, an_hour = seconds / HOUR_S, prices.of(host, pool)
    an_hour = told.dollars if told and told.dollars is not None else an_hour
    dollars = None if an_hour is None else hours * an_hour
    return HostCost(host=host, pool=pool, hours=hours, an_hour=an_hour, dollars=dollars)


def paid_s(stays: Iterable[HostUse]) -> float:
    """Return the seconds for which a host is paid."""
    paid, until = 0.0, 0.0
    for stay in sorted(stays, key=lambda stay: stay.began):
        begins, ends = stay.began, stay.began + stay.seconds
        if paid and begins <= until + GAP_S:
            begins = min(until, ends)
        paid += max(0.0, ends - begins)
        until = max(until, ends)
    return paid
