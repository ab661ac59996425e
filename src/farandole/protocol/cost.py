"""The cost of hosts, by the hour. Pure.

If a pool reports the prices of its hosts (`Priced`), a host costs from its launch until it is gone, with or without
workers. Otherwise a host costs from the start of its first worker to the end of its last one. A gap without workers
counts too if it is shorter than `GAP_S`, since the machine is still reserved while a worker is replaced. The number of
workers on the host does not matter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from farandole.errors import UsageError
from farandole.run_options import RUN_OPTIONS, default

# --- prices -----------------------------------------------------------------------------------------------------------
#
# The price of an hour of a host, from a file, on a given day. Pure; `cli/options.py` reads the file.
#
# A price that is missing is unknown, and never 0.


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices in dollars an hour of one host, however many workers it has.

    `pools`: for each host of a pool. `hosts`: for one host by name, which comes first. `date`: the day of the prices,
    as 2026-11-01; "" if there are no prices. `traffic_price`: dollars for each GB (1e9 bytes) that a worker sends to
    another zone, or to another host if no host reports a zone; None: unknown.

    Raises:
        UsageError: a price is not above 0 and finite; names it.
    """

    date: str = ""
    pools: dict[str, float] = {}
    hosts: dict[str, float] = {}
    traffic_price: float | None = default("traffic_price")

    def __post_init__(self) -> None:
        for kind, prices in (("pools", self.pools), ("hosts", self.hosts)):
            for name, dollars in prices.items():
                if not 0 < dollars < math.inf:
                    raise UsageError(
                        f"{kind}.{name} = {dollars:g}: dollars an hour, above 0; leave out an unknown price"
                    )

        RUN_OPTIONS["traffic_price"].check(self.traffic_price)

    def with_traffic_price(self, dollars: float | None) -> Prices:
        """Return these prices with `dollars` for each GB of traffic; None: as they are."""
        return self if dollars is None else msgspec.structs.replace(self, traffic_price=dollars)

    def of(self, host: str, pool: str) -> float | None:
        """Return the price of an hour of `host` in dollars, None if it is unknown."""
        return self.hosts.get(host, self.pools.get(pool))


# --- traffic ----------------------------------------------------------------------------------------------------------
#
# The bytes between hosts and between zones, and their cost. A cloud charges for each GB that leaves a zone, usually
# nothing within one. So if a host reports its zone, each GB between two zones has the price; else each GB between two
# hosts. The hosts that report none are in one zone, whose name is "".

GB = 1_000_000_000


class HostTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that the workers of one host sent to other hosts, and received from those.

    `zone`: that of the host, "" if it reports none.
    """

    host: str
    sent_bytes: int
    received_bytes: int
    zone: str = ""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that workers sent to other hosts, after compression. Unknown values are None, never 0.

    Attributes:
        sent_bytes: all of them; None if those of some worker are unknown.
        at_least_bytes: those of the other workers.
        state_bytes: the part of `at_least_bytes` that was the state for joiners.
        exchange_bytes_per_step: the rest of `sent_bytes`, by the number of steps; None before the first step.
        between_zones_bytes: the part of `at_least_bytes` that went to another zone; None if no host reports a zone, or
            if one that received bytes is unknown.
        hosts: by host, sorted by name.
        price: dollars for each GB; None: unknown.
        dollars: the cost of `between_zones_bytes` if a host reports a zone, else of `sent_bytes`. It is not in the cost
            of the hosts.
        unknown: the workers whose bytes are unknown.
    """

    sent_bytes: int | None
    at_least_bytes: int
    state_bytes: int
    exchange_bytes_per_step: float | None
    between_zones_bytes: int | None
    hosts: tuple[HostTraffic, ...]
    price: float | None
    dollars: float | None
    unknown: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WorkerTraffic:
    """Bytes that one worker sent to each other host: in rounds, and as the state for joiners; None: unknown.

    `zone`: that of `host`, "" if it reports none.
    """

    worker: str
    host: str
    zone: str = ""
    sent: Mapping[str, tuple[int, int]] | None


def traffic(workers: Iterable[WorkerTraffic], steps: int, price: float | None) -> Traffic:
    """Return the traffic of all workers, which took `steps` steps. `price`: dollars for each GB, None if unknown."""
    workers = list(workers)
    zones = {each.host: each.zone for each in workers}
    sent, received = Counter[str](), Counter[str]()
    exchanged = state = 0
    between: int | None = 0 if any(zones.values()) else None
    unknown: list[str] = []
    for each in workers:
        sent[each.host] += 0
        if each.sent is None:
            unknown.append(each.worker)
        for host, (exchange_bytes, state_bytes) in (each.sent or {}).items():
            sent[each.host] += exchange_bytes + state_bytes
            received[host] += exchange_bytes + state_bytes
            exchanged += exchange_bytes
            state += state_bytes
            if host not in zones:
                between = None
            elif between is not None and zones[host] != each.zone:
                between += exchange_bytes + state_bytes
    known = None if unknown or not sent else exchanged + state
    paid = between if known is not None and any(zones.values()) else known
    return Traffic(
        sent_bytes=known, at_least_bytes=exchanged + state, state_bytes=state,
        exchange_bytes_per_step=exchanged / steps if known is not None and steps else None,
        between_zones_bytes=between,
        hosts=tuple(
            HostTraffic(
                host=host, sent_bytes=sent[host], received_bytes=received[host], zone=zones.get(host, "")
            )
            for host in sorted({*sent, *received})
        ),
        price=price, dollars=None if paid is None or price is None else paid / GB * price, unknown=tuple(unknown),
    )  # fmt: skip


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
