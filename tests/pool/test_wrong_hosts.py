"""No pool starts a worker on a host whose worker computed wrong."""

from __future__ import annotations

from farandole.pool.base import Host
from farandole.pool.reconciler import PoolReconciler
from farandole.protocol.messages import Roster

HOSTS = (Host(name="h-1"), Host(name="h-2"))


def started(*wrong: str) -> list[str]:
    reconciler = PoolReconciler()
    reconciler.update(Roster(wanted=1, wrong_hosts=wrong), 0.0)
    return [host for _, host in reconciler.take_actions(HOSTS, 1000.0).start]


def test_the_next_host_is_asked_and_none_where_all_are_wrong() -> None:
    assert started() == ["h-1"]
    assert started("h-1") == ["h-2"]
    assert started("h-1", "h-2") == []
