"""What an hour of an instance costs, as a file says. Pure but for `read`.

    # 2026-11-01
    type,zone,market,dollars
    g4dn.xlarge,us-east-1a,spot,0.2158
    g4dn.xlarge,,on-demand,0.526           a zone left out: all of them

What is not there is unknown, and never 0.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from farandole.errors import UsageError
from farandole.pool.base import Priced

COLUMNS = ["type", "zone", "market", "dollars"]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """By type, zone and market, in dollars an hour, as of `day`, None where there is no file."""

    day: date | None = None
    dollars: Mapping[tuple[str, str, str], float] = field(default_factory=dict[tuple[str, str, str], float])

    def of(self, kind: str, zone: str, market: str) -> float | None:
        return self.dollars.get((kind, zone, market), self.dollars.get((kind, "", market)))


def read(path: Path) -> Prices:
    """Raises UsageError: it is not there, or not as above."""
    try:
        first, *lines = path.read_text().splitlines()
        day = date.fromisoformat(first.lstrip("# ").strip())
    except OSError as error:
        raise UsageError(f"prices {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"prices {path}: its first line is the day that they are of, as # 2026-11-01") from None
    rows = csv.reader(lines)
    if next(rows, None) != COLUMNS:
        raise UsageError(f"prices {path}: its second line is {','.join(COLUMNS)}")
    found: dict[tuple[str, str, str], float] = {}
    for number, row in enumerate(rows, 3):
        kind, zone, market, text = (*row, "", "", "", "")[:4]
        try:
            dollars = float(text)
        except ValueError:
            dollars = math.nan
        if not 0 < dollars <= 1e6 or len(row) != len(COLUMNS):
            raise UsageError(f"prices {path}, line {number}: {','.join(COLUMNS)}, with a price above 0")
        found[kind, zone, market] = dollars
    return Prices(day=day, dollars=found)


@dataclass
class Bill:
    """Of all instances that a pool has seen: hours and price of each. Times are Unix time."""

    prices: Prices
    _seen: dict[str, tuple[float, float, float | None]] = field(
        default_factory=dict[str, tuple[float, float, float | None]]
    )

    def saw(self, instance: str, kind: str, zone: str, market: str, launched: float, now: float) -> tuple[Priced, ...]:
        """It was there just now. For the first time: what it costs."""
        price, new = self.prices.of(kind, zone, market), instance not in self._seen
        self._seen[instance] = (launched, now, price)
        day = self.prices.day.isoformat() if self.prices.day and price is not None else ""
        return (Priced(instance, price, launched, day),) if new else ()

    def dollars(self) -> float:
        """So far, of those with a known price."""
        return sum((last - first) / 3600 * price for first, last, price in self._seen.values() if price is not None)

    def unknown(self) -> int:
        """Instances whose price is not known."""
        return sum(price is None for _, _, price in self._seen.values())
