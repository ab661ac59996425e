"""Traces of spot markets in their published formats, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.errors import UsageError
from farandole.market.traces import MarketTrace, SpotMarket, read, zone_of
from tests.support.market import market
from tests.support.mentioned import mentions

BAMBOO = "0,add,a\n0,add,b\n70000,remove,a\n130000,add,c\n200000,remove,b\n"
PARCAE = '[0, "add", {"nodes": ["a", "b"]}]\n[70000, "remove", {"nodes": ["a"]}]\n[130000, "no-op", {"nodes": []}]\n'


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "gap_s", "counts"),
    [
        ("zone.json", '{"metadata": {"gap_seconds": 300}, "data": [0, 16, 3]}', 300, (0, 16, 3)),
        ("zone.json", '{"metadata": {"gap_seconds": 195.0}, "data": [1]}', 195, (1,)),
        ("p3.csv", BAMBOO, 60, (2, 1, 1, 1)),
        ("p3.csv", "0,1\n0,2\n60000,3\n90000,1\n240000,2\n", 60, (2, 1, 1, 1, 2)),
        ("hh.txt", PARCAE, 60, (2, 1, 1)),
    ],
)
def test_formats(tmp_path: Path, name: str, text: str, gap_s: int, counts: tuple[int, ...]) -> None:
    trace = read(written(tmp_path, name, text))
    assert (trace.name, trace.gap_s, trace.counts) == (name.split(".")[0], gap_s, counts)
    assert trace.duration_s == gap_s * len(counts)


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("zone.json", '{"metadata": {"gap_seconds": 300},\n"data": [1,]}', ("zone.json", "line 2")),
        ("zone.json", '{"metadata": {}, "data": [1]}', ("gap_seconds", "None")),
        ("zone.json", '{"metadata": {"gap_seconds": 0.5}, "data": [1]}', ("gap_seconds", "0.5")),
        ("zone.json", '{"metadata": {"gap_seconds": 300}, "data": []}', ("data",)),
        ("zone.json", '{"metadata": {"gap_seconds": 300}, "data": [1, -2]}', ("data[1]", "-2")),
        ("zone.json", '{"metadata": {"gap_seconds": 300}, "data": [1, true]}', ("data[1]", "True")),
        ("zone.json", "[1, 2]", ("gap_seconds",)),
        ("p3.csv", "0,add,a\n60000,remove,b\n", ("p3.csv", "line 2", "b")),
        ("p3.csv", "0,add,a\n60000,moved,a\n", ("line 2", "moved")),
        ("p3.csv", "60000,add,a\n0,add,b\n", ("line 2",)),
        ("p3.csv", "soon,add,a\n", ("line 1", "soon")),
        ("p3.csv", "0,1\n60000,-1\n", ("line 2", "-1")),
        ("p3.csv", "60000,1\n0,2\n", ("line 2",)),
        ("p3.csv", "nan,add,a\n", ("line 1", "nan")),
        ("hh.txt", '[0, "add", {"nodes": ["a"]}]\n[60000, "add"]\n', ("hh.txt", "line 2")),
        ("hh.txt", "[0\n", ("hh.txt", "line 1")),
        ("empty.csv", "\n", ("empty.csv",)),
        ("zone.csv", "\x00\xff", ("zone.csv",)),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path: Path, name: str, text: str, named: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        read(written(tmp_path, name, text))
    assert mentions(str(caught.value), *named)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path / "gone.json")
    assert mentions(str(caught.value), "gone.json")


def test_the_part_of_the_time_with_machines() -> None:
    assert MarketTrace(name="t", gap_s=60, counts=(0, 3, 5, 0)).availability == 0.5


def test_a_market_of_zones() -> None:
    zones = market((1, 2, 3, 4), (5, 6, 7), gap_s=300)
    assert (zones.gap_s, zones.intervals, zones.duration_s) == (300, 3, 900)
    assert zones.counts == [(1, 5), (2, 6), (3, 7)]
    assert zones.window(1, 2).counts == [(2, 6), (3, 7)]


def test_zones_of_a_market_have_equal_intervals() -> None:
    one, other = (MarketTrace(name=f"t{gap_s}", gap_s=gap_s, counts=(1,)) for gap_s in (195, 300))
    with pytest.raises(UsageError) as caught:
        SpotMarket(zones=(one, other))
    assert mentions(str(caught.value), "t195", "195", "t300", "300")


@pytest.mark.parametrize(
    ("name", "zone"),
    [
        ("us-west-2a_v100_1", "us-west-2a"),
        ("availability-1-node-us-west-2b_v100_8", "us-west-2b"),
        ("us-gov-east-1a", "us-gov-east-1a"),
        ("my.ap-southeast-2c", "ap-southeast-2c"),
        ("us-west-2av100", ""),
        ("bamboo", ""),
    ],
)
def test_the_zone_in_the_name_of_a_trace(name: str, zone: str) -> None:
    assert zone_of(name) == zone
