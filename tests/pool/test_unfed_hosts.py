"""Hosts that can't get workers the data: another one is asked at once, and this one is left alone, longer each time."""

from __future__ import annotations

import re
from itertools import pairwise

from farandole.pool.base import Host
from farandole.pool.reconciler import FIRST_REST_S, LONGEST_REST_S, QUIET_S, STOOD_S
from farandole.pool.remote import RemoteHosts
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import EXIT_DATA_UNAVAILABLE
from farandole.protocol.messages import Report
from tests.support.kept import Play, two_hosts

EXIT = f"exited with code {EXIT_DATA_UNAVAILABLE}"


def says_so(play: Play, worker: str, now: float, wanted: int = 1) -> None:
    """The run lets it go, and so it exits."""
    out = (*(play.reconciler.roster.unfed if play.reconciler.roster else ()), worker)
    play.roster(now, wanted=wanted, released=out, unfed=out)
    play.exits(worker, now, EXIT)


def test_another_host_is_asked_before_it_has_exited() -> None:
    play = two_hosts(slots=2)
    play.roster(wanted=2)
    assert set(play.pool.at.values()) == {"north"}
    for each, worker in enumerate(("w1", "w2")):
        play.roster(100.0 * (each + 1), wanted=2, released=("w1", "w2")[: each + 1], unfed=("w1", "w2")[: each + 1])
        assert len(play.pool.started) == 2 + each, "the others recover first"
        play.at(play.now + QUIET_S)
        assert play.pool.at[f"w{3 + each}"] == "south"
        play.exits(worker, play.now + 0.5, EXIT)
    said = [said.reason for said in play.told(m.HostSeen)]  # type: ignore[union-attr]
    assert [re.findall(r"\d+ s\b|\bw\d", reason) for reason in said] == [["1 s", "w1"], ["2 s", "w2"]]


def test_its_exit_code_says_it_too_and_it_counts_once() -> None:
    """A worker that had not joined yet may be gone before the roster is here."""
    play = two_hosts(slots=None)
    play.roster(wanted=1)
    play.exits("w1", 100.0, EXIT)
    assert play.pool.at == {"w2": "south"}, "nobody is left who would need the cores"
    play.roster(100.1, wanted=1, released=("w1",), unfed=("w1",))
    assert len(play.told(m.HostSeen)) == 1


def test_a_host_elsewhere_says_so_by_its_agent() -> None:
    """What a worker ends by comes with the agent's report, as it is."""
    far, play = RemoteHosts("s"), two_hosts(slots=1)
    far.on_report("north", Report(instance="i", state="ready"), 0.0)
    play.roster(wanted=1)
    far.start("w1", "north")
    for report in (
        Report(instance="i", state="ready", running=("w1",)),
        Report(instance="i", state="ready", ended={"w1": EXIT}),
    ):
        for event in far.on_report("north", report, 0.0):
            play.reconciler.on_event(event, 100.0)
    play.at(100.0)
    assert play.pool.at["w2"] == "south"
    assert play.told(m.HostSeen)


def test_the_only_host_is_tried_again_later_and_later_and_not_never() -> None:
    play = Play()
    play.roster(wanted=1)
    times = [0.0]
    while play.now < 4 * LONGEST_REST_S:
        says_so(play, play.reconciler.running[0], play.now)
        began = len(play.pool.started)
        while len(play.pool.started) == began:
            play.at(play.now + FIRST_REST_S / 4)
        times.append(play.now)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[:8] == [FIRST_REST_S * 2**each for each in range(8)]
    assert gaps[-1] == LONGEST_REST_S
    assert max(gaps) == LONGEST_REST_S


def test_another_worker_that_stands_there_proves_nothing_and_peace_does() -> None:
    """It may have had all that it needs before the disk was full."""
    play = Play()
    play.roster(wanted=2)
    play.at(2 * STOOD_S)
    for expected in (1.0, 2.0, 4.0):
        says_so(play, play.reconciler.running[-1], play.now, wanted=2)
        began = play.now
        play.at(began + expected - 0.05)
        assert len(play.reconciler.running) == 1
        play.at(began + expected + QUIET_S)
        assert len(play.reconciler.running) == 2
        play.at(play.now + 2 * STOOD_S)
    play.at(play.now + LONGEST_REST_S)
    says_so(play, play.reconciler.running[-1], play.now, wanted=2)
    play.at(play.now + FIRST_REST_S + QUIET_S)
    assert len(play.reconciler.running) == 2, "it begins anew"


def test_all_that_are_struck_at_once_count_once() -> None:
    play = Play()
    play.roster(wanted=3)
    out = ("w1", "w2", "w3")
    play.roster(50.0, wanted=3, released=out, unfed=out)
    for worker in out:
        play.exits(worker, 50.2, EXIT)
    play.at(50.0 + FIRST_REST_S)
    assert play.reconciler.started == ["w4", "w5", "w6"]


def test_it_has_no_capacity_beyond_who_stands_there_so_that_other_pools_are_asked() -> None:
    play = Play(Host(name="north", slots=4))
    play.roster(wanted=2)
    play.at(100.0)
    assert play.told(m.Capacity)[-1] == m.Capacity(workers=4)
    says_so(play, "w1", 100.0, wanted=2)
    assert play.told(m.Capacity)[-1] == m.Capacity(workers=1)
    play.at(100.0 + FIRST_REST_S + QUIET_S)
    assert play.told(m.Capacity)[-1] == m.Capacity(workers=4)
