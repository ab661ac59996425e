"""What hosts have cost: once for a host, however many workers it has, and never 0 for what is unknown."""

from __future__ import annotations

import pytest

from farandole.errors import UsageError
from farandole.protocol.cost import GAP_S, HostUse, Prices, cost, paid_s

PRICES = Prices(date="2026-11-01", pools={"gpus": 3.6}, hosts={"dear": 36.0})


def stay(host: str, began: float, seconds: float, pool: str = "gpus") -> HostUse:
    return HostUse(host=host, pool=pool, began=began, seconds=seconds)


def test_a_host_is_paid_for_once() -> None:
    assert paid_s([stay("h", 100, 50), stay("h", 110, 20), stay("h", 120, 100)]) == 120


def test_a_gap_while_a_worker_is_replaced_is_paid_for_too() -> None:
    assert paid_s([stay("h", 0, 10), stay("h", 10 + GAP_S, 10)]) == 20 + GAP_S
    assert paid_s([stay("h", 0, 10), stay("h", 11 + GAP_S, 10)]) == 20
    assert paid_s([]) == 0


def test_a_host_has_its_own_price_or_its_pools() -> None:
    found = cost([stay("dear", 0, 100), stay("h", 0, 100), stay("h", 50, 50, pool="")], PRICES)
    assert [(each.host, each.dollars) for each in found.hosts] == [("dear", 1.0), ("h", pytest.approx(0.1))]
    assert found.dollars == pytest.approx(1.1)
    assert (found.unknown, found.date) == ((), "2026-11-01")


def test_what_is_unknown_is_not_free() -> None:
    found = cost([stay("dear", 0, 100), stay("other", 0, 100, pool="lent")], PRICES)
    assert found.dollars is None
    assert (found.at_least, found.unknown) == (1.0, ("other",))
    assert cost([], PRICES).dollars is None


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_price_that_is_none(bad: float) -> None:
    with pytest.raises(UsageError, match=rf"pools\.gpus = {bad:g}"):
        Prices(date="2026-11-01", pools={"gpus": bad})
