"""Prices of machines from a file, with their dates.

Two formats are read:

    *.csv   of an EC2 pool (docs/ec2.md): prices of one day, by type, zone and market
    *.json  of `aws ec2 describe-spot-price-history`: prices of spot machines of Linux, each from a time on

Traces have no dates. So a history begins with the traces of a market, at the first moment at which each of them has a
price. After the last change the prices stay.

A price that is not in the file is unknown, and never 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from farandole.errors import UsageError
from farandole.market.traces import MarketTrace, positive, read_json, zone_of
from farandole.pool import ec2

_Change = tuple[float, float]  # the Unix time, and dollars for an hour from then on
_LINUX = "Linux/UNIX"


class _Entry(msgspec.Struct, rename="pascal"):
    """One price of AWS's history."""

    availability_zone: str
    instance_type: str
    product_description: str
    spot_price: str
    timestamp: datetime


class _Answer(msgspec.Struct, rename="pascal"):
    spot_price_history: list[_Entry]
    next_token: str = ""


@dataclass(frozen=True, kw_only=True)
class PriceFile:
    """What a file says.

    Attributes:
        path: of the file.
        spot: the changes of the price of spot machines, by type and zone, in order of time; an empty zone: all others.
        on_demand: dollars for an hour of an on-demand machine, by type and zone; an empty zone: all others.
    """

    path: Path
    spot: Mapping[tuple[str, str], Sequence[_Change]]
    on_demand: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    @property
    def kinds(self) -> list[str]:
        """The types of machines, sorted."""
        return sorted({kind for kind, _ in (*self.spot, *self.on_demand)})


def read_prices(path: Path) -> PriceFile:
    """Return what a file says.

    Raises:
        UsageError: the file can't be read, or is none of the formats; it names the line, or the entry.
    """
    if path.suffix.lower() == ".json":
        return PriceFile(path=path, spot=_history(path))
    table = ec2.read(path)
    assert table.day is not None
    begins = datetime(table.day.year, table.day.month, table.day.day, tzinfo=timezone.utc).timestamp()
    entries = table.dollars.items()
    return PriceFile(
        path=path,
        spot={(kind, zone): [(begins, dollars)] for (kind, zone, market), dollars in entries if market == "spot"},
        on_demand={(kind, zone): dollars for (kind, zone, market), dollars in entries if market == "on-demand"},
    )


def _history(path: Path) -> dict[tuple[str, str], list[_Change]]:
    """Return the changes of the prices in a file of AWS, by type and zone, in order of time."""
    name = f"--prices {path}"
    try:
        answer = msgspec.convert(read_json(path.read_text(), name), _Answer)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    except (UnicodeDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{name}: it must be what `aws ec2 describe-spot-price-history` prints: {error}") from None
    if answer.next_token:
        raise UsageError(f"{name}: it is only a part of the history; ask AWS without --max-items")
    changes = dict[tuple[str, str], dict[float, float]]()
    for place, entry in enumerate(answer.spot_price_history):
        if not entry.product_description.startswith(_LINUX):
            continue
        here = f"{name}: SpotPriceHistory[{place}]"
        dollars, time = positive(entry.spot_price), _unix_time(entry.timestamp)
        if not dollars:
            raise UsageError(f"{here}.SpotPrice is {entry.spot_price!r}; it must be dollars an hour, above 0")
        if time is None:
            raise UsageError(f"{here}.Timestamp is {entry.timestamp}; it must be a time such as 2026-11-01T00:00:00Z")
        known = changes.setdefault((entry.instance_type, entry.availability_zone), {})
        if known.setdefault(time, dollars) != dollars:
            raise UsageError(f"{here}: {dollars:g} dollars, and {known[time]:g} at the same time, in the same zone")
    if not changes:
        raise UsageError(f"{name}: it has no price of a {_LINUX} machine")
    return {key: sorted(each.items()) for key, each in changes.items()}


def _unix_time(moment: datetime) -> float | None:
    """Return the Unix time, None if the moment has no time zone or is outside the years 1 to 9999 in UTC."""
    try:
        return None if moment.tzinfo is None else moment.astimezone(timezone.utc).timestamp()
    except OverflowError:
        return None


def with_spot_prices(
    traces: Sequence[MarketTrace], prices: PriceFile
) -> tuple[tuple[MarketTrace, ...], list[datetime]]:
    """Return the traces of a market with the prices of their types and zones, and the dates of these prices in order.

    A trace that has a price keeps it. A trace's zone is in its name, as in us-west-2a_v100_1. Its type may be left out
    if the file has a single one.

    Raises:
        UsageError: a trace's type is not known, or a price is unknown; it names the trace.
    """
    changes = [None if trace.spot else _changes(trace, prices) for trace in traces]
    known = [each for each in changes if each]
    begins = max((each[0][0] for each in known), default=0.0)
    found = [
        trace if each is None else replace(trace, spot=_by_interval(trace, each, begins))
        for trace, each in zip(traces, changes, strict=True)
    ]
    ends = begins + max(trace.duration_s for trace in traces)
    times = {max(time, begins) for each in known for time, _ in each if time < ends}
    return tuple(found), [datetime.fromtimestamp(time, timezone.utc) for time in sorted(times)]


def on_demand_price(traces: Sequence[MarketTrace], prices: PriceFile) -> float:
    """Return dollars for an hour of an on-demand machine. It is of the type of the traces with the speed 1.

    Raises:
        UsageError: the price is unknown, or differs between the traces.
    """
    found = dict[float, str]()
    for trace in traces:
        if trace.speed == 1:
            kind, zone = _kind(trace, prices), zone_of(trace.name)
            dollars = prices.on_demand.get((kind, zone), prices.on_demand.get((kind, "")))
            if dollars is None:
                raise UsageError(
                    f"--prices {prices.path}: the price of an on-demand {kind} is unknown, for {_named(trace)}; give "
                    f"--on-demand"
                )
            found[dollars] = trace.name
    if len(found) != 1:
        differ = ", ".join(f"{dollars:g} for {name}" for dollars, name in found.items()) or "no trace has the speed 1"
        raise UsageError(f"--prices {prices.path}: which on-demand price? {differ}; give --on-demand")
    return next(iter(found))


def _changes(trace: MarketTrace, prices: PriceFile) -> Sequence[_Change]:
    """Return the changes of a trace's price, in order of time."""
    kind, zone = _kind(trace, prices), zone_of(trace.name)
    found = prices.spot.get((kind, zone), prices.spot.get((kind, "")))
    if found is None:
        raise UsageError(
            f"--prices {prices.path}: the price of a spot {kind} is unknown, for {_named(trace)}; give "
            f"TRACE,spot=DOLLARS, or a file that has it"
        )
    return found


def _kind(trace: MarketTrace, prices: PriceFile) -> str:
    kinds = prices.kinds
    if trace.kind not in kinds and (trace.kind or len(kinds) != 1):
        asked = f"type={trace.kind} is none of them" if trace.kind else "say which one, as TRACE,type=NAME"
        raise UsageError(
            f"--prices {prices.path}: the file has prices of {', '.join(kinds) or 'no type'}; for {trace.name}, {asked}"
        )
    return trace.kind or kinds[0]


def _named(trace: MarketTrace) -> str:
    zone = zone_of(trace.name)
    return f"zone {zone} of {trace.name}" if zone else f"{trace.name}, whose name has no zone such as us-west-2a"


def _by_interval(trace: MarketTrace, changes: Sequence[_Change], begins: float) -> tuple[float, ...]:
    """Return the price at the beginning of each interval of a trace that begins at the Unix time `begins`."""
    times = [time for time, _ in changes]
    places = (bisect_right(times, begins + place * trace.gap_s) - 1 for place in range(len(trace.counts)))
    return tuple(changes[place][1] for place in places)
