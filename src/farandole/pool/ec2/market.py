"""Where the next instance is asked for; pure, times are the caller's, in seconds.

A request names one zone and one market, and all instance types that are not cooling there: AWS takes one of them.

- One zone, unless several are named: traffic between zones is paid for. While instances are there, it is theirs; when
  none is, the first that has not cooled down. Of several that are named, those that have instances come first.
- A type without capacity in a zone is left alone there, and so is one of which a zone has taken an instance back: twice
  as long each time, until one has come. On that market alone: what spot has not, on-demand may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_S, LONGEST_S = 30.0, 600.0
SPOT, ON_DEMAND = "spot", "on-demand"
MARKETS = {"spot": (SPOT,), "on-demand": (ON_DEMAND,), "spot+on-demand": (SPOT, ON_DEMAND)}


@dataclass(frozen=True, kw_only=True)
class Zone:
    """`subnet`: of it; both are "" where the launch template says it."""

    name: str = ""
    subnet: str = ""
    types: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What may be asked for."""

    market: str
    zone: Zone
    types: tuple[str, ...]


@dataclass(kw_only=True)
class _Cooling:
    count: int = 0
    until: float = 0.0


class Market:
    """`several`: the zones were named by who pays, so that all may be used at once."""

    def __init__(self, zones: Sequence[Zone], markets: Sequence[str], *, several: bool = False) -> None:
        self._zones, self._markets, self._several = tuple(zones), tuple(markets), several
        self._cooling: dict[tuple[str, str, str], _Cooling] = {}  # market, zone, type

    def offer(self, used: Sequence[str], now: float) -> Offer | None:
        """The best one; None: all that may be asked for is cooling. `used`: the zones of the instances there are."""
        homes = [zone for zone in self._zones if zone.name in used]
        homes.sort(key=lambda zone: -used.count(zone.name))
        others = [zone for zone in self._zones if zone not in homes]
        for market in self._markets:
            for zone in (*homes, *(others if self._several or not homes else ())):
                types = tuple(t for t in zone.types if self._of(market, zone.name, t).until <= now)
                if types:
                    return Offer(market=market, zone=zone, types=types)
        return None

    def short(self, market: str, zone: str, types: Sequence[str], now: float) -> None:
        """There was no capacity, or some was taken back."""
        for each in types:
            cooling = self._of(market, zone, each)
            cooling.until = now + min(FIRST_S * 2.0**cooling.count, LONGEST_S)
            cooling.count += 1

    def came(self, market: str, zone: str, kind: str) -> None:
        """An instance has joined."""
        self._cooling.pop((market, zone, kind), None)

    def _of(self, market: str, zone: str, kind: str) -> _Cooling:
        return self._cooling.setdefault((market, zone, kind), _Cooling())
