"""Prices of machines from a file, with their dates.

Two formats are read:

    *.csv   of an EC2 pool (docs/ec2.md): prices of one day, by type, zone and market
    *.json  of `aws ec2 describe-spot-price-history`: prices of spot machines of Linux, each from a time on

Traces have no dates. So a history begins with the trace at the first moment at which all zones of the traces have a
price, and goes on with it. After its end the last prices stay.

A price that is not in the file is unknown, and never 0.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from farandole.errors import UsageError
from farandole.market.traces import MarketTrace
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
    if path.suffix != ".json":
        table = ec2.read(path)
        assert table.day is not None
        begins = datetime(table.day.year, table.day.month, table.day.day, tzinfo=timezone.utc).timestamp()
        entries = table.dollars.items()
        return PriceFile(
            path=path,
            spot={(kind, zone): [(begins, dollars)] for (kind, zone, market), dollars in entries if market == "spot"},
            on_demand={(kind, zone): dollars for (kind, zone, market), dollars in entries if market == "on-demand"},
        )
    try:
        entries = msgspec.convert(json.loads(path.read_bytes()), _Answer).spot_price_history
    except json.JSONDecodeError as error:
        raise UsageError(f"--prices {path}, line {error.lineno}: not JSON: {error.msg}") from None
    except (OSError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise UsageError(
            f"--prices {path}: it must be what `aws ec2 describe-spot-price-history` prints: {error}"
        ) from None
    changes = dict[tuple[str, str], list[_Change]]()
    for place, entry in enumerate(entries):
        try:
            dollars = float(entry.spot_price)
        except ValueError:
            dollars = 0.0
        if not 0 < dollars < 1e6:
            raise UsageError(
                f"--prices {path}: SpotPriceHistory[{place}].SpotPrice is {entry.spot_price!r}; it must be dollars an "
                f"hour, above 0"
            )
        if entry.timestamp.tzinfo is None:
            raise UsageError(f"--prices {path}: SpotPriceHistory[{place}].Timestamp has no time zone, as Z or +00:00")
        if entry.product_description.startswith(_LINUX):
            key = entry.instance_type, entry.availability_zone
            changes.setdefault(key, []).append((entry.timestamp.timestamp(), dollars))
    if not changes:
        raise UsageError(f"--prices {path}: none of its {len(entries)} prices is of {_LINUX} machines")
    return PriceFile(path=path, spot={key: sorted(each) for key, each in changes.items()})


def with_spot_prices(
    traces: Sequence[MarketTrace], prices: PriceFile
) -> tuple[tuple[MarketTrace, ...], list[datetime]]:
    """Return the traces with the prices of their types and zones, and the dates of the prices in order.

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
    times = {max(time, begins) for each in known for time, _ in each}
    return tuple(found), [datetime.fromtimestamp(time, timezone.utc) for time in sorted(times)]


def on_demand_price(traces: Sequence[MarketTrace], prices: PriceFile) -> float:
    """Return dollars for an hour of an on-demand machine. It is of the type of the traces with the speed 1.

    Raises:
        UsageError: the price is unknown, or differs between the traces.
    """
    found = dict[float, str]()
    for trace in traces:
        if trace.speed == 1:
            kind, zone = _kind(trace, prices), _zone(trace)
            dollars = prices.on_demand.get((kind, zone), prices.on_demand.get((kind, "")))
            if dollars is None:
                raise UsageError(
                    f"--prices {prices.path}: the price of an on-demand {kind} in {zone or 'all zones'} is unknown; "
                    f"add it to the file, or give --on-demand"
                )
            found[dollars] = trace.name
    if len(found) != 1:
        differ = ", ".join(f"{dollars:g} for {name}" for dollars, name in found.items()) or "no trace has the speed 1"
        raise UsageError(f"--prices {prices.path}: which on-demand price? {differ}; give --on-demand")
    return next(iter(found))


def _changes(trace: MarketTrace, prices: PriceFile) -> Sequence[_Change]:
    """Return the changes of a trace's price, in order of time."""
    kind, zone = _kind(trace, prices), _zone(trace)
    found = prices.spot.get((kind, zone), prices.spot.get((kind, "")))
    if found is None:
        raise UsageError(
            f"--prices {prices.path}: the price of a spot {kind} in {zone or 'all zones'} is unknown, for "
            f"{trace.name}; add it to the file, or give TRACE,spot=DOLLARS"
        )
    return found


def _kind(trace: MarketTrace, prices: PriceFile) -> str:
    kinds = prices.kinds
    if trace.kind not in kinds and (trace.kind or len(kinds) != 1):
        asked = f"type={trace.kind}" if trace.kind else "no type"
        raise UsageError(
            f"--prices {prices.path}: {trace.name} has {asked}; the file has prices of {', '.join(kinds) or 'none'}: "
            f"give TRACE,type=NAME"
        )
    return trace.kind or kinds[0]


def _zone(trace: MarketTrace) -> str:
    """Return the zone in the name of a trace, "" if there is none."""
    found = re.search(r"[a-z]{2}(-[a-z]+)+-\d[a-z](?![a-z0-9])", trace.name)
    return found[0] if found else ""


def _by_interval(trace: MarketTrace, changes: Sequence[_Change], begins: float) -> tuple[float, ...]:
    """Return the price at the beginning of each interval of a trace that begins at the Unix time `begins`."""
    times = [time for time, _ in changes]
    places = (bisect_right(times, begins + place * trace.gap_s) - 1 for place in range(len(trace.counts)))
    return tuple(changes[place][1] for place in places)
