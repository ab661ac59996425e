"""Where the next instance is asked for, what AWS's errors mean, what a template must have, what is paid: pure."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import pytest

from farandole.errors import UsageError
from farandole.pool import ec2
from farandole.pool.base import Priced
from farandole.pool.ec2 import (
    CAPACITY,
    DOUBT,
    FIRST_COOLING_S,
    LONGEST_COOLING_S,
    ON_DEMAND,
    SPOT,
    THROTTLED,
    WRONG,
    Market,
    Zone,
    meaning,
    run_tag,
)
from farandole.protocol.settings import Spending, spending_of

A, B = Zone(name="a", types=("small", "large")), Zone(name="b", types=("small",))


def where(market: Market, used: list[str], now: float) -> tuple[str, str, tuple[str, ...]] | None:
    offer = market.offer(used, now)
    return offer and (offer.market, offer.zone.name, offer.types)


def test_one_zone_unless_several_are_named() -> None:
    for several, elsewhere in ((False, None), (True, (SPOT, "a", ("small", "large")))):
        market = Market([A, B], [SPOT], several=several)
        assert where(market, [], 0) == (SPOT, "a", ("small", "large"))
        assert where(market, ["b", "b", "a"], 0) == (SPOT, "b", ("small",)), "where most are"
        market.short(SPOT, "b", ["small"], 0)
        assert where(market, ["b"], 0) == elsewhere
        assert where(market, [], 0) == (SPOT, "a", ("small", "large"))


def test_types_cool_one_by_one_longer_each_time_until_one_has_come() -> None:
    market = Market([A], [SPOT])
    market.short(SPOT, "a", ["small"], 0)
    assert where(market, ["a"], 0) == (SPOT, "a", ("large",))
    assert where(market, ["a"], FIRST_COOLING_S) == (SPOT, "a", ("small", "large"))
    now, waits = FIRST_COOLING_S, list[float]()
    for _ in range(8):
        market.short(SPOT, "a", ["small", "large"], now)
        waits.append(next(s for s in range(1, 700) if where(market, ["a"], now + s)))
        now += LONGEST_COOLING_S
    assert waits[:3] == [30, 60, 120]
    assert waits[-1] == LONGEST_COOLING_S
    market.came(SPOT, "a", "small")
    assert where(market, ["a"], now - LONGEST_COOLING_S) == (SPOT, "a", ("small",))


def test_what_spot_has_not_on_demand_may_have() -> None:
    market = Market([A], [SPOT, ON_DEMAND])
    market.short(SPOT, "a", ["small", "large"], 0)
    assert where(market, ["a"], 0) == (ON_DEMAND, "a", ("small", "large"))
    assert where(market, ["a"], FIRST_COOLING_S) == (SPOT, "a", ("small", "large")), "it is asked again"


@pytest.mark.parametrize(
    ("code", "status", "means"),
    [
        ("InsufficientInstanceCapacity", 500, CAPACITY),
        ("VcpuLimitExceeded", 400, CAPACITY),
        ("RequestLimitExceeded", 503, THROTTLED),
        ("SomethingElse", 429, THROTTLED),
        ("InternalError", 500, DOUBT),
        ("SomethingElse", 502, DOUBT),
        ("UnauthorizedOperation", 403, WRONG),
    ],
)
def test_what_an_error_means(code: str, status: int, means: str) -> None:
    assert meaning(code, status) == means


GOOD: dict[str, Any] = {
    "UserData": base64.b64encode(ec2.user_data("/opt/my env/bin/python").encode()).decode(),
    "InstanceInitiatedShutdownBehavior": "terminate",
    "MetadataOptions": {"HttpTokens": "required", "InstanceMetadataTags": "enabled"},
    "IamInstanceProfile": {"Name": "farandole"},
}


def test_a_template_whose_instances_would_stay_or_talk_is_refused() -> None:
    ec2.check("t", GOOD)
    for other, word in [
        ({"UserData": "not base64"}, "farandole pool user-data"),
        ({"UserData": base64.b64encode(b"#!/bin/sh").decode()}, "farandole pool user-data"),
        ({"InstanceInitiatedShutdownBehavior": "stop"}, "terminate"),
        ({"MetadataOptions": {"HttpTokens": "required"}}, "InstanceMetadataTags"),
        ({"MetadataOptions": {"HttpTokens": "optional", "InstanceMetadataTags": "enabled"}}, "HttpTokens"),
        ({"IamInstanceProfile": {}}, "IamInstanceProfile"),
    ]:
        with pytest.raises(UsageError, match=word):
            ec2.check("t", {**GOOD, **other})


def test_the_user_data_holds_no_secret_and_ends_the_instance_whatever_happens() -> None:
    script = ec2.user_data("/opt/my env/bin/python")
    assert "'/opt/my env/bin/python' -m farandole instance" in script
    assert script.index("trap 'shutdown -h now' EXIT") < script.index("farandole instance")
    assert ec2.user_data("python") == ec2.user_data("python"), "the same for all runs"


def test_two_runs_of_one_name_have_tags_of_their_own() -> None:
    tags = {run_tag("digits", host, folder) for host in ("a", "b") for folder in ("/x/digits", "/y/digits")}
    assert len(tags) == 4
    assert all(tag.startswith("digits-") for tag in tags)
    assert ec2.secret_name(run_tag("mé run", "a", "/x"), "my pool").isascii()


def test_prices_are_of_a_day_and_what_is_not_there_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("# 2026-11-01\ntype,zone,market,dollars\nsmall,a,spot,0.1\nsmall,,spot,0.2\n")
    known = ec2.read(path)
    assert [known.price("small", zone, SPOT) for zone in ("a", "b")] == [0.1, 0.2]
    assert known.price("small", "a", ON_DEMAND) is None
    bill = ec2.InstanceHours(known)
    told = [bill.saw(*row, SPOT, 0.0, now) for now in (3600.0, 7200.0)
            for row in (("i-1", "small", "a"), ("i-2", "large", "a"))]  # fmt: skip
    assert told == [(Priced("i-1", 0.1, 0.0, "2026-11-01"),), (Priced("i-2", None, 0.0, ""),), (), ()], "once"
    assert math.isclose(bill.dollars(), 0.2)
    assert bill.unknown() == 1
    for text, word in [
        ("type,zone,market,dollars\n", "2026-11-01"),
        ("# 2026-11-01\nsmall,a,spot,0.1\n", "type,zone,market,dollars"),
        ("# 2026-11-01\ntype,zone,market,dollars\nsmall,a,spot,0\n", "line 3"),
        ("# 2026-11-01\ntype,zone,market,dollars\nsmall,spot,0.1\n", "line 3"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError, match=word):
            ec2.read(path)


def test_when_a_run_has_lasted_or_cost_enough() -> None:
    spending = spending_of(2.0, 5.0, 0.0, 1000.0)
    assert spending.over(1000 + 7199, 4.99) == ""
    assert "--max-hours" in spending.over(1000 + 7200, 0.0)
    assert "--max-cost" in spending.over(1000.0, 5.0)
    assert Spending().over(1e12, 1e12) == ""
    for wrong in ({"max_hours": 0.0}, {"max_cost": -1.0}, {"max_cost": math.nan}, {"keep_failed_s": -60.0}):
        with pytest.raises(UsageError):
            Spending(**wrong)
