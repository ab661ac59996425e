"""Hosts that go, with notice and without: who is replaced where, and when."""

from __future__ import annotations

import re

from farandole.pool.base import GATHER_S, Host, RunningWorker
from farandole.pool.reconciler import OVERDUE_S, QUIET_S
from farandole.protocol import messages as m
from tests.support.kept import Play, two_hosts


def test_a_host_that_goes_without_notice_is_replaced_elsewhere() -> None:
    play = two_hosts()
    play.roster(wanted=2)
    assert set(play.pool.at.values()) == {"north"}
    play.at(100)
    play.pool.lose("north")
    play.act()
    assert [said.worker for said in play.told(m.WorkerProcessExited) if isinstance(said, m.WorkerProcessExited)] == [
        "w1",
        "w2",
    ]
    assert play.pool.at == {"w3": "south", "w4": "south"}


def test_the_workers_of_a_host_with_notice_are_told_of_and_replaced_before_they_go() -> None:
    play = two_hosts(slots=None)
    play.roster(wanted=2)
    play.pool.notice("north", 120.4)
    play.at(10)
    assert play.said == [m.PreemptionNotice(workers=("w1", "w2"), host="north", within_s=120, reason="it is reclaimed")]
    assert play.pool.at == {"w1": "north", "w2": "north", "w3": "south", "w4": "south"}
    play.pool.notice("north", 110.0)
    play.at(20)
    assert len(play.said) == 1, "told twice, it counts once"
    play.pool.lose("north")
    play.at(30)
    assert len(play.pool.started) == 4
    assert len(play.told(m.WorkerProcessExited)) == 2
    play.pool.hosts.insert(0, Host(name="north"))
    play.roster(40, wanted=3)
    assert play.pool.at["w5"] == "north", "who comes under that name is another one"


def test_a_sooner_end_is_told_also_to_those_who_leave_already() -> None:
    """Those may be in an evaluation, through which a leaving worker stays."""
    play = two_hosts(slots=None)
    play.roster(wanted=2)
    play.pool.notice("north", 3600.0)
    play.at(1)
    play.pool.notice("north", 120.0)
    play.at(2)
    assert [said.within_s for said in play.told(m.PreemptionNotice)] == [3600, 120]
    assert play.told(m.PreemptionNotice)[1].workers == ("w1", "w2")
    assert len(play.pool.started) == 4, "each is replaced once"


def test_advice_and_then_notice_replace_once() -> None:
    play = two_hosts(slots=None)
    play.roster(wanted=1)
    play.pool.advise("north")
    play.at(1)
    assert play.pool.at == {"w1": "north", "w2": "south"}
    play.pool.notice("north", 120.0)
    play.at(2)
    assert play.pool.at == {"w1": "north", "w2": "south"}
    assert [said.workers for said in play.told(m.PreemptionNotice)] == [("w1",)]


def test_a_host_that_stays_beyond_its_notice_is_used_again() -> None:
    play = Play()
    play.roster(wanted=1)
    play.pool.notice("here", 60.0)
    play.at(1)
    play.at(61 + OVERDUE_S - 1)
    assert play.pool.started == ["w1"], "there is no other"
    play.at(61 + OVERDUE_S)
    assert play.pool.started == ["w1", "w2"], "w1 leaves all the same: it was told to"


def test_advice_is_a_reason_to_ask_for_another_host_and_none_to_leave() -> None:
    play = two_hosts(slots=None)
    play.roster(wanted=1)
    for now in (1, 2):
        play.pool.advise("north")
        play.at(now)
    assert play.said == [m.RebalanceAdvice(host="north", reason="its price rises")]
    assert play.pool.at == {"w1": "north", "w2": "south"}
    play.tick(200)
    assert play.pool.started == ["w1", "w2"]
    assert play.pool.stopped == []
    play.pool.lose("north")
    play.at(300)
    play.pool.hosts.insert(0, Host(name="north"))
    play.roster(400, wanted=2)
    assert play.pool.at == {"w2": "south", "w3": "north"}, "who comes under that name is another one"


def test_a_worker_is_where_it_has_started() -> None:
    """The host comes under another name than it was asked for."""
    play = two_hosts(slots=None)
    play.pool.elsewhere["north"] = "north-7"
    play.roster(wanted=1)
    play.pool.notice("north-7")
    play.act()
    assert play.told(m.PreemptionNotice)[0].workers == ("w1",)  # type: ignore[union-attr]


def test_a_host_that_is_gone_is_replaced_at_once() -> None:
    """There is nobody left on it who would need its cores."""
    play = two_hosts(slots=1)
    play.roster(wanted=1)
    play.pool.lose("north")
    play.act()
    assert list(play.pool.at.values()) == ["south"]


def test_one_of_two_on_a_host_is_replaced_when_the_other_has_had_the_cores() -> None:
    play = two_hosts(slots=2)
    play.roster(wanted=2)
    play.exits("w1", play.now)
    assert play.reconciler.started == ["w2"]
    play.at(play.now + QUIET_S)
    assert play.reconciler.started == ["w2", "w3"]


def test_a_worker_that_was_found_is_ours_and_its_number_is_not_used_again() -> None:
    """An earlier process of the pool has started it."""
    play = two_hosts(slots=2)
    play.pool.at["w7"] = "south"
    play.pool.repeat(RunningWorker("w7", "south"))
    play.roster(wanted=2)
    assert play.reconciler.started == ["w7", "w8"]


def test_a_host_with_fewer_slots_lets_its_newest_workers_go() -> None:
    play = two_hosts(slots=2)
    play.roster(wanted=3)
    assert list(play.pool.at.values()) == ["north", "north", "south"]
    play.pool.hosts[0] = Host(name="north", slots=1)
    play.act()
    [noticed] = play.told(m.PreemptionNotice)
    assert isinstance(noticed, m.PreemptionNotice)
    assert noticed.workers == ("w2",)
    assert re.search(r"\bnorth\b.*\b1\b", noticed.reason)
    assert list(play.pool.at.values()) == ["north", "north", "south", "south"], "and is replaced before it is gone"
    play.act()
    assert len(play.told(m.PreemptionNotice)) == 1


def test_what_a_pool_can_have_is_told_when_it_changes_and_whether_it_gathers() -> None:
    play = Play(Host(name="north", slots=2))
    play.roster(wanted=4)
    first = m.Capacity(workers=2, gathers=True)
    assert play.told(m.Capacity) == [first], "others may be on their way"
    play.at(GATHER_S)
    assert play.told(m.Capacity) == [first, m.Capacity(workers=2)]
    play.pool.hosts.append(Host(name="south", slots=3))
    play.act()
    play.act()
    assert play.told(m.Capacity) == [first, m.Capacity(workers=2), m.Capacity(workers=5)]
    play.pool.hosts.append(Host(name="west"))
    play.act()
    assert play.told(m.Capacity)[-1] == m.Capacity(workers=None), "as many as are asked for"
