"""Starts that come to nothing: whose fault it is, when and where it is tried again, and what is said."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from farandole.pool.base import Host, Started
from farandole.pool.reconciler import FIRST_REST_S, GRACE_S, QUIET_S, START_S, STOOD_S, restart_delay_s
from farandole.pool.reconciler import LONGEST_REST_S as LONGEST_REST_S
from farandole.protocol import messages as m
from farandole.protocol.messages import Roster
from tests.support.kept import Play, two_hosts


def test_a_start_that_fails_is_no_worker_that_was_lost() -> None:
    play = Play()
    play.pool.failing["here"] = "no such program"
    play.roster(wanted=1)
    assert play.said == [m.StartFailed(worker="w1", host="here", reason="no such program")]
    assert play.reconciler.running == []
    play.pool.failing.clear()
    play.at(FIRST_REST_S)
    assert play.reconciler.started == ["w2"], "and its id is not used again"
    assert not play.told(m.WorkerProcessExited)


def test_a_host_that_fails_again_and_again_is_left_alone_for_longer_each_time() -> None:
    play = Play()
    play.pool.failing["here"] = "no"
    play.roster(wanted=1)
    times = [0.0]
    while play.now < 4 * LONGEST_REST_S:
        before = len(play.pool.started)
        play.at(play.now + FIRST_REST_S / 2)
        times += [play.now] * (len(play.pool.started) - before)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[:6] == [FIRST_REST_S * 2**each for each in range(6)]
    assert max(gaps) == LONGEST_REST_S
    assert len(play.told(m.StartFailed)) == len(times)
    play.pool.failing.clear()
    play.tick(play.now + LONGEST_REST_S)
    play.tick(play.now + STOOD_S)
    play.pool.failing["here"] = "again"
    play.exits(play.reconciler.running[0], play.now)
    failed = len(play.pool.started)
    play.at(play.now + FIRST_REST_S)
    assert len(play.pool.started) == failed + 1, "one has stood there: it begins anew"


def test_another_host_is_asked_meanwhile() -> None:
    play = two_hosts(slots=None)
    play.pool.failing["north"] = "no"
    play.roster(wanted=2)
    assert sorted(play.pool.at.values()) == ["south", "south"]
    play.pool.failing.clear()
    play.roster(LONGEST_REST_S, wanted=3)
    assert sorted(play.pool.at.values()) == ["north", "south", "south"]


def test_a_host_on_which_workers_end_too_soon_is_left_alone_if_there_is_another() -> None:
    play = two_hosts(slots=None)
    play.roster(wanted=1)
    assert play.pool.at == {"w1": "north"}
    play.exits("w1", 1.0)
    assert play.pool.at == {"w2": "south"}
    play.exits("w2", 1.5)
    assert play.pool.at == {"w3": "north"}, "both did: that is for the run to judge"
    play.at(100.0)
    play.exits("w3", 200.0)
    assert play.pool.at == {"w4": "north"}, "one had stood there"


@pytest.mark.parametrize("losses", [0, 1, 4])
def test_who_is_evicted_before_its_pool_has_seen_its_end_is_lost(losses: int) -> None:
    """What it died of is not counted yet: it may be the last one that is started."""
    reconciler = Play().reconciler
    hosts = [Host(name="here")]
    reconciler.update(Roster(wanted=2, losses=losses), 0.0)
    for worker, host in reconciler.take_actions(hosts, 0.0).start:
        reconciler.on_event(Started(worker, host), 0.0)
    wait = restart_delay_s(losses, others=True)
    reconciler.update(Roster(wanted=2, losses=losses, evicted=("w2",)), 100.0)
    assert reconciler.take_actions(hosts, 100.0).start == ()
    reconciler.update(Roster(wanted=2, losses=losses, evicted=("w2",)), 100.0 + wait / 2)  # that is no further loss
    assert reconciler.take_actions(hosts, 100.0 + wait - 0.01).start == ()
    assert reconciler.take_actions(hosts, 100.0 + wait).start == (("w3", "here"),)


def test_who_was_asked_to_go_is_no_trouble_of_its_host() -> None:
    play = two_hosts(slots=None)
    play.roster(wanted=1)
    play.roster(1.0, wanted=1, evicted=("w1",))
    play.roster(1.2 + QUIET_S, wanted=2, evicted=("w1",))
    assert play.pool.at == {"w2": "north", "w3": "north"}
    play.roster(10.0, wanted=2, released=("w2",))
    play.exits("w2", 10.1, "exited with code 0")
    play.roster(10.2 + QUIET_S, wanted=3, released=("w2",))
    assert set(play.pool.at.values()) == {"north"}


def test_a_start_that_never_comes_is_called_off() -> None:
    play = two_hosts(slots=None)
    play.pool.mute = True
    play.roster(wanted=1)
    play.at(START_S)
    assert play.reconciler.running == ["w1"]
    assert play.reconciler.started == []
    play.at(START_S + 1)
    assert play.reconciler.running == ["w2"], "it is tried again, elsewhere"
    [failed] = play.said
    assert isinstance(failed, m.StartFailed)
    assert (failed.worker, failed.host) == ("w1", "north")
    assert "601 s" in failed.reason
    play.pool.wake()
    play.act()
    assert play.pool.at == {"w2": "south"}
    assert play.pool.stopped == ["w1"], "it came after all"
    assert not play.told(m.WorkerProcessExited)


def test_at_the_end_nobody_waits_for_a_start_that_never_comes() -> None:
    play = Play()
    play.pool.mute = True
    play.roster(wanted=1)
    play.roster(1.0, wanted=0, over=0)
    assert not play.reconciler.is_done
    play.at(1.0 + GRACE_S + 1)
    assert play.reconciler.is_done
    assert play.said == []


def test_a_pool_without_capacity_is_asked_again_and_that_is_said_once() -> None:
    play = two_hosts(slots=None)
    play.pool.capacity = 0
    play.roster(wanted=2)
    times = [0.0]
    assert len(play.pool.started) == 2, "both were on their way"
    asked = len(play.pool.started)
    for _ in range(400):
        play.at(play.now + FIRST_REST_S / 2)
        times += [play.now] if len(play.pool.started) > asked else []
        asked = len(play.pool.started)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 10 * gaps[0]
    assert isinstance(play.said[0], m.NoCapacity)
    assert len(play.told(m.NoCapacity)) == 1
    assert m.Capacity(workers=0) in play.said, "so others are asked"
    play.pool.capacity = 2
    play.at(play.now + LONGEST_REST_S)
    assert sorted(play.pool.at.values()) == ["north", "north"], "no host is to blame"
    play.pool.capacity = 0
    play.exits(play.reconciler.running[0], play.now)
    play.tick(play.now + QUIET_S)
    assert len(play.told(m.NoCapacity)) == 2, "it had some meanwhile"


def test_full_hosts_get_no_more_and_that_is_said_once() -> None:
    play = two_hosts(slots=2)
    play.roster(wanted=5)
    assert list(play.pool.at.values()) == ["north", "north", "south", "south"]
    play.tick(5)
    [said] = play.told(m.NoCapacity)
    assert isinstance(said, m.NoCapacity)
    assert re.findall(r"\d+", said.reason) == ["4", "2"]
    play.exits("w1", 100)
    play.at(100 + QUIET_S)
    assert play.pool.at["w5"] == "north"
    assert len(play.told(m.NoCapacity)) == 2


def test_a_pool_whose_first_host_is_yet_to_come_names_no_number_of_slots() -> None:
    play = two_hosts(slots=2)
    play.pool.hosts = []
    play.roster(wanted=1)
    [said] = play.told(m.NoCapacity)
    assert isinstance(said, m.NoCapacity)
    assert said.reason
    assert not re.findall(r"\d+", said.reason)


def test_what_stands_for_a_host_that_is_yet_to_come_is_at_peace_once_one_has_come() -> None:
    play = two_hosts()
    play.pool.hosts = [Host(name="another")]
    play.pool.failing = {"another": "it has never come"}
    play.roster(wanted=1)
    for _ in range(4):
        play.at(play.now + LONGEST_REST_S)
    play.pool.failing, play.pool.elsewhere = {}, {"another": "i-1"}
    play.at(play.now + LONGEST_REST_S)
    assert list(play.pool.at.values()) == ["i-1"]
    play.pool.failing = {"another": "it has never come"}
    play.roster(wanted=2)
    failed = len(play.pool.started)
    play.at(play.now + FIRST_REST_S)
    play.at(play.now + FIRST_REST_S)
    assert len(play.pool.started) > failed, "soon again: its troubles begin anew"
