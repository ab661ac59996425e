"""Markets and a strategy for tests of jobs on a spot market."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from farandole.market.play import Machines, Moment, PlannedJob, Price, SpotType, Strategy
from farandole.market.traces import MarketTrace, SpotMarket


def market(*zones: Sequence[int], gap_s: int = 100) -> SpotMarket:
    """Return the market of zones with so many machines in each interval."""
    traces = [MarketTrace(name=f"z{n}", gap_s=gap_s, counts=tuple(counts)) for n, counts in enumerate(zones)]
    return SpotMarket(zones=tuple(traces))


def typed(place: SpotMarket, *types: tuple[float, float | None]) -> SpotMarket:
    """Return the market with machines of this speed and price in each zone."""
    found = list[MarketTrace]()
    for zone, (speed, spot) in zip(place.zones, types, strict=True):
        prices = None if spot is None else (spot,) * len(zone.counts)
        found.append(replace(zone, speed=speed, spot=prices))
    return SpotMarket(zones=tuple(found))


def fleet(*spot: int, on_demand: int = 0) -> Machines:
    """Return machines: so many spot machines by zone."""
    return Machines(spot=spot, on_demand=on_demand)


def moment(**fields: object) -> Moment:
    """Return a moment of a job at the beginning, with these fields."""
    known: dict[str, object] = {
        "time_s": 0,
        "gap_s": 300,
        "available": (0,),
        "fleet": fleet(0),
        "starts_s": (),
        "left_s": 36_000,
        "unsaved_s": 0,
        "dollars": 0.0,
        "price": Price(on_demand=3.06, spot=0.97),
    }
    known |= fields
    types = (SpotType(speed=1.0, dollars=known["price"].spot),) * len(known["available"])  # type: ignore[arg-type,attr-defined]
    return Moment(**({"types": types} | known))  # type: ignore[arg-type]


def scripted(*fleets: Machines, restarts: bool = False) -> Callable[[PlannedJob], Strategy]:
    """A strategy that wants these machines, one after the other."""

    class Scripted(Strategy):
        def decide(self, now: Moment) -> Machines:
            return fleets[now.time_s // now.gap_s]

    Scripted.restarts = restarts
    return Scripted
