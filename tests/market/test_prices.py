"""Prices from a file: of one day, and the history that AWS publishes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from farandole.errors import UsageError
from farandole.market.play import PlannedJob, Price, play
from farandole.market.prices import PriceFile, on_demand_price, read_prices, with_spot_prices
from farandole.market.strategies import FarandoleSpot
from farandole.market.traces import MarketTrace, SpotMarket
from tests.support.mentioned import mentions

DAY = """# 2026-11-01
type,zone,market,dollars
g4dn.xlarge,us-east-1a,spot,0.21
g4dn.xlarge,,spot,0.25
g4dn.xlarge,,on-demand,0.526
"""


def trace(name: str, intervals: int = 4, **options: Any) -> MarketTrace:
    return MarketTrace(name=name, gap_s=3600, counts=(1,) * intervals, **options)


def entry(time: str, dollars: str, zone: str = "us-east-1a", kind: str = "g4dn.xlarge", of: str = "Linux/UNIX") -> Any:
    return {
        "AvailabilityZone": zone, "InstanceType": kind, "ProductDescription": of, "SpotPrice": dollars,
        "Timestamp": time,
    }  # fmt: skip


def day_file(folder: Path, text: str = DAY) -> PriceFile:
    path = folder / "prices.csv"
    path.write_text(text)
    return read_prices(path)


def history(folder: Path, *entries: Any) -> PriceFile:
    path = folder / "history.json"
    path.write_text(json.dumps({"SpotPriceHistory": entries}))
    return read_prices(path)


def test_prices_of_a_day(tmp_path: Path) -> None:
    prices = day_file(tmp_path)
    zones, dates = with_spot_prices([trace("us-east-1a_t4"), trace("us-east-1b_t4")], prices)
    assert [zone.spot for zone in zones] == [(0.21,) * 4, (0.25,) * 4]
    assert dates == [datetime(2026, 11, 1, tzinfo=timezone.utc)]
    assert on_demand_price(zones, prices) == 0.526


def test_a_history_begins_with_the_trace_when_all_zones_have_a_price(tmp_path: Path) -> None:
    """AWS lists the newest first, and of each zone also the price from before the time that was asked for."""
    prices = history(
        tmp_path, entry("2026-11-03T03:30:00+00:00", "0.4"), entry("2026-11-03T02:00:00+00:00", "0.3"),
        entry("2026-11-01T00:00:00Z", "0.2"), entry("2026-11-03T01:00:00.000Z", "0.5", "us-east-1b"),
    )  # fmt: skip
    zones, dates = with_spot_prices([trace("us-east-1a"), trace("us-east-1b")], prices)
    assert [zone.spot for zone in zones] == [(0.2, 0.3, 0.3, 0.4), (0.5,) * 4]
    assert [f"{date:%d %H:%M}" for date in dates] == ["03 01:00", "03 02:00", "03 03:30"]


def test_other_operating_systems_are_passed_over(tmp_path: Path) -> None:
    prices = history(
        tmp_path, entry("2026-11-01T00:00:00Z", "9", of="Windows"),
        entry("2026-11-01T00:00:00Z", "0.2", of="Linux/UNIX (Amazon VPC)"),
    )  # fmt: skip
    [zone], _ = with_spot_prices([trace("us-east-1a")], prices)
    assert zone.spot == (0.2,) * 4


def test_types_have_prices_of_their_own_and_a_trace_keeps_its_price(tmp_path: Path) -> None:
    prices = day_file(tmp_path, DAY + "g5.xlarge,,spot,0.5\ng5.xlarge,,on-demand,1.006\n")
    traces = [trace("a", kind="g5.xlarge"), trace("b", kind="g4dn.xlarge", speed=0.4), trace("c", spot=(7.0,) * 4)]
    zones, _ = with_spot_prices(traces, prices)
    assert [zone.spot for zone in zones] == [(0.5,) * 4, (0.25,) * 4, (7.0,) * 4]
    assert on_demand_price(zones[:2], prices) == 1.006, "of the type with the speed 1"


@pytest.mark.parametrize(
    ("kind", "zone", "named"),
    [
        ("", "us-east-1a", ("us-east-1a", "type=NAME", "g4dn.xlarge, g5.xlarge")),
        ("p9.large", "us-east-1a", ("us-east-1a", "type=p9.large", "g4dn.xlarge, g5.xlarge")),
        ("g5.xlarge", "us-east-1b", ("g5.xlarge", "us-east-1b", "unknown")),
        ("g5.xlarge", "anywhere", ("g5.xlarge", "anywhere", "unknown")),
    ],
)
def test_a_price_that_is_not_there_is_unknown(tmp_path: Path, kind: str, zone: str, named: tuple[str, ...]) -> None:
    prices = day_file(tmp_path, DAY + "g5.xlarge,us-east-1a,spot,0.5\n")
    with pytest.raises(UsageError) as caught:
        with_spot_prices([trace(zone, kind=kind)], prices)
    assert mentions(str(caught.value), "prices.csv", *named)


@pytest.mark.parametrize(
    ("speeds", "named"), [((1.0, 1.0), ("0.526", "1.006", "--on-demand")), ((0.5, 0.5), ("speed 1", "--on-demand"))]
)
def test_on_demand_prices_that_are_ambiguous(tmp_path: Path, speeds: tuple[float, ...], named: tuple[str, ...]) -> None:
    prices = day_file(tmp_path, DAY + "g5.xlarge,,on-demand,1.006\n")
    kinds = zip(("g4dn.xlarge", "g5.xlarge"), speeds, strict=True)
    with pytest.raises(UsageError) as caught:
        on_demand_price([trace(kind, kind=kind, speed=speed) for kind, speed in kinds], prices)
    assert mentions(str(caught.value), *named)


def test_a_history_has_no_price_on_demand(tmp_path: Path) -> None:
    prices = history(tmp_path, entry("2026-11-01T00:00:00Z", "0.2"))
    with pytest.raises(UsageError) as caught:
        on_demand_price([trace("us-east-1a")], prices)
    assert mentions(str(caught.value), "unknown", "--on-demand")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"SpotPriceHistory": [\n,]}', ("line 2",)),
        ("[]", ("describe-spot-price-history",)),
        ('{"SpotPriceHistory": []}', ("Linux/UNIX",)),
        (json.dumps({"SpotPriceHistory": [entry("2026-11-01T00:00:00Z", "0")]}), ("SpotPriceHistory[0]", "'0'")),
        (json.dumps({"SpotPriceHistory": [entry("2026-11-01T00:00:00", "1")]}), ("SpotPriceHistory[0]", "Timestamp")),
        (json.dumps({"SpotPriceHistory": [entry("yesterday", "1")]}), ("SpotPriceHistory[0].Timestamp",)),
        (
            json.dumps({"SpotPriceHistory": [entry("0001-01-01T00:00:00+14:00", "1")]}),
            ("SpotPriceHistory[0].Timestamp",),
        ),
        (json.dumps({"SpotPriceHistory": [entry("2026-11-01T00:00:00Z", "1")], "NextToken": "more"}), ("part",)),
        (
            json.dumps({"SpotPriceHistory": [entry("2026-11-01T00:00:00Z", price) for price in ("1", "1.0", "2")]}),
            ("SpotPriceHistory[2]", "1", "2"),
        ),
        ('{"SpotPriceHistory": ' + "9" * 5000 + "}", ("not JSON",)),
        ("[" * 200_000, ("not JSON",)),
    ],
)
def test_a_history_that_is_refused(tmp_path: Path, text: str, named: tuple[str, ...]) -> None:
    path = tmp_path / "history.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_prices(path)
    assert mentions(str(caught.value), "history.json", *named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (DAY + "g5,,spot,0\n", ("line 6", "'0'")),
        (DAY + "g5,,spot,nan\n", ("line 6", "'nan'")),
        (DAY + "\ng5,,Spot,1\n", ("line 7", "'Spot'", "on-demand")),
        (DAY + "# 2026-11-02\n", ("line 6", "# 2026-11-02", "one day")),
        (DAY + "g4dn.xlarge,us-east-1a,spot,0.3\n", ("line 6", "g4dn.xlarge,us-east-1a,spot", "0.21")),
        ("type\n", ("first line", "'type'")),
        ("", ("first line",)),
        ("# 2026-11-01\n", ("second line",)),
        (DAY + "g" * 200_000 + "\n", ("not CSV",)),
    ],
)
def test_a_file_of_a_day_that_is_refused(tmp_path: Path, text: str, named: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        day_file(tmp_path, text)
    assert mentions(str(caught.value), "prices.csv", *named)


def test_a_file_of_a_day_as_a_spreadsheet_writes_it(tmp_path: Path) -> None:
    quoted = DAY.replace("g4dn.xlarge,us-east-1a,", '"g4dn.xlarge","us-east-1a",')
    prices = day_file(tmp_path, "\ufeff" + quoted.replace(",spot,", ", spot, ") + "\n")
    [zone], _ = with_spot_prices([trace("us-east-1a")], prices)
    assert zone.spot == (0.21,) * 4


@pytest.mark.parametrize("name", ["prices.csv", "history.json"])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "prices.csv").write_bytes(b"\xff\xfe")
    (tmp_path / "history.json").mkdir()
    for path in (tmp_path / name, tmp_path / f"no-{name}"):
        with pytest.raises(UsageError) as caught:
            read_prices(path)
        assert mentions(str(caught.value), str(path))


def test_a_history_that_goes_on_after_the_trace_is_not_used_to_its_end(tmp_path: Path) -> None:
    prices = history(
        tmp_path, entry("2026-11-01T00:00:00Z", "0.2"), entry("2026-11-01T03:00:00Z", "0.3"),
        entry("2026-12-01T00:00:00Z", "9"),
    )  # fmt: skip
    _, dates = with_spot_prices([trace("us-east-1a")], prices)
    assert [f"{date:%m-%d %H}" for date in dates] == ["11-01 00", "11-01 03"]


def test_each_interval_is_paid_at_its_price() -> None:
    zone = replace(trace("z"), spot=(1.0, 3.0, 5.0, 7.0))
    job = PlannedJob(work_s=9000, start_s=0)
    assert play(job, SpotMarket(zones=(zone,)), Price(on_demand=9.0), FarandoleSpot).dollars == pytest.approx(6.5)
    part = SpotMarket(zones=(zone,)).window(1, 3)
    assert play(job, part, Price(on_demand=9.0), FarandoleSpot).dollars == pytest.approx(3 + 5 + 3.5)
