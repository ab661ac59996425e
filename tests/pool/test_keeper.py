"""What a pool is told to do: the decision as a truth table, and the keeper over time with a fake pool."""

from __future__ import annotations

from itertools import pairwise

import pytest

from farandole.membership import messages as m
from farandole.membership.messages import Roster
from farandole.pool.base import Gone, Host, Started
from farandole.pool.fake import FakePool
from farandole.pool.keeper import GRACE_S, LONGEST_S, QUIET_S, START_S, Decision, Keeper, decide, pause
from farandole.pool.placing import FIRST_S, OVERDUE_S, STOOD_S
from farandole.pool.placing import LONGEST_S as LONGEST_REST_S

DECISIONS = [
    # roster, running, earlier leavers, start, stop, remark
    (Roster(wanted=2), (), (), 2, (), "a run begins"),
    (Roster(wanted=2), ("w1", "w2"), (), 0, (), "as wanted"),
    (Roster(wanted=3), ("w1", "w2"), (), 1, (), "scaled up, or one has exited"),
    (Roster(wanted=1), ("w1", "w2"), (), 0, (), "too many: the coordinator says who leaves, not the pool"),
    (Roster(wanted=2, leaving=("w1",)), ("w1", "w2"), (), 1, (), "notice: replaced before it is gone"),
    (Roster(wanted=1, leaving=("w1",)), ("w1", "w2"), (), 0, (), "released: not replaced"),
    (Roster(wanted=2), ("w1", "w2"), ("w1",), 1, (), "has left, its process is still there"),
    (Roster(wanted=2, evicted=("w2",)), ("w1", "w2"), (), 1, ("w2",), "evicted: killed and replaced"),
    (Roster(wanted=2, evicted=("w2",)), ("w1", "w3"), (), 0, (), "evicted long ago"),
    (Roster(wanted=2, evicted=("x1",)), ("w1", "w2"), (), 0, (), "not ours: never touched"),
    (Roster(wanted=0), ("w1",), (), 0, (), "ending: no replacements"),
    (Roster(wanted=0, over=0, present=("w1",)), ("w1",), (), 0, (), "over: they exit by themselves"),
    (Roster(wanted=0, over=0, present=("w1",)), ("w1", "w2"), (), 0, ("w2",), "over, and one is only starting"),
    (Roster(wanted=0, over=0, released=("w1",)), ("w1",), ("w1",), 0, (), "over, and one was let go before"),
    (Roster(wanted=2, over=1, evicted=("w1",), present=("w1",)), ("w1",), (), 0, ("w1",), "over, and one is frozen"),
]


@pytest.mark.parametrize(("roster", "running", "out", "start", "stop", "remark"), DECISIONS)
def test_decide(
    roster: Roster, running: tuple[str, ...], out: tuple[str, ...], start: int, stop: tuple[str, ...], remark: str
) -> None:
    assert decide(roster, running, out) == Decision(start=start, stop=stop), remark


class Play:
    """A keeper and its fake pool at a time of the test's own. `said`: what the coordinator was told."""

    def __init__(self, *hosts: Host, count: int = 0) -> None:
        self.pool = FakePool(hosts=hosts or (Host(name="here"),))
        self.keeper = Keeper(count)
        self.said: list[m.FromPool] = []
        self.now = 0.0

    def roster(self, now: float | None = None, **roster: object) -> None:
        self.now = self.now if now is None else now
        self.keeper.update(Roster(**roster), self.now)  # type: ignore[arg-type]
        self.act()

    def at(self, now: float) -> Play:
        self.now = now
        return self.act()

    def act(self) -> Play:
        """Until the pool has nothing more to say."""
        while True:
            for event in self.pool.waiting():
                self.keeper.heard(event, self.now)
            due = self.keeper.due(self.pool.list(), self.now)
            self.said += self.keeper.said()
            for worker in due.stop:
                self.pool.stop(worker)
            for worker, host in due.start:
                self.pool.start(worker, host)
            if not (due.stop or due.start):
                return self

    def tick(self, until: float, every: float = 0.5) -> Play:
        while self.now + every <= until:
            self.at(self.now + every)
        return self.at(until)

    def exits(self, worker: str, now: float, reason: str = "exited with code 1") -> None:
        self.pool.exit(worker, reason)
        self.at(now)

    def told(self, kind: type[m.FromPool]) -> list[m.FromPool]:
        return [message for message in self.said if isinstance(message, kind)]


def two_hosts(slots: int | None = 2) -> Play:
    return Play(Host(name="north", slots=slots), Host(name="south", slots=slots))


def test_ids_are_never_used_twice() -> None:
    play = Play()
    play.roster(wanted=2)
    for number, worker in enumerate(("w2", "w1", "w3")):
        play.exits(worker, 100.0 * number)
        play.at(100.0 * number + QUIET_S)
    assert play.pool.started == ["w1", "w2", "w3", "w4", "w5"]


def test_a_resumed_run_counts_on_and_ids_carry_the_pools_mark() -> None:
    play = Play(count=5)
    play.roster(wanted=2, mark="there-")
    assert play.pool.started == ["there-w6", "there-w7"]


def test_a_lost_worker_is_replaced_after_the_others_recovery() -> None:
    play = Play()
    play.roster(wanted=2)
    play.exits("w1", 5.0)
    play.at(5.0 + QUIET_S / 2)
    assert play.pool.started == ["w1", "w2"]
    play.at(5.0 + QUIET_S)
    assert play.pool.started == ["w1", "w2", "w3"]
    play.pool.exit("w2")
    play.exits("w3", 7.0)  # nobody is left who could be disturbed
    assert play.pool.started == ["w1", "w2", "w3", "w4", "w5"]
    assert play.keeper.running == ["w4", "w5"]


@pytest.mark.parametrize(
    ("losses", "others", "seconds", "remark"),
    [
        (0, True, QUIET_S, "an accident: the others recover first"),
        (0, False, 0.0, "nobody is left who could be disturbed"),
        (1, True, QUIET_S, "the first of a row looks like an accident"),
        (1, False, QUIET_S, "the coordinator's count may be on its way"),
        (2, False, 2 * QUIET_S, "again in the same place"),
        (3, True, 4 * QUIET_S, "and again"),
        (6, False, 32 * QUIET_S, "a pool does not know when it is to end"),
        (100, False, LONGEST_S, "no longer than this"),
    ],
)
def test_how_long_a_replacement_waits(losses: int, others: bool, seconds: float, remark: str) -> None:
    assert pause(losses, others=others) == seconds, remark


def test_replacements_in_a_row_of_losses_come_slower_and_slower() -> None:
    play = Play()
    play.roster(wanted=1)
    play.exits("w1", 10)
    assert play.pool.started == ["w1", "w2"], "at once, the first time"
    play.roster(wanted=1, losses=1)
    play.pool.exit("w2")
    play.keeper.heard(play.pool.waiting()[-1], 20)
    play.roster(20.01, wanted=1, losses=2)  # the count comes after the exit
    play.at(20 + 2 * QUIET_S - 0.1)
    assert play.pool.started == ["w1", "w2"]
    play.at(20 + 2 * QUIET_S)
    assert play.pool.started == ["w1", "w2", "w3"]
    play.roster(30, wanted=1)  # it got further
    play.exits("w3", 30)
    assert play.pool.started == ["w1", "w2", "w3", "w4"]


def test_a_leaver_that_does_not_exit_is_stopped_after_its_grace() -> None:
    play = Play()
    play.roster(wanted=2)
    play.roster(100, wanted=2, leaving=("w1",))
    play.at(100 + 10 * GRACE_S)
    assert play.pool.stopped == [], "it may take as long as it needs to leave the view"
    assert play.pool.started == ["w1", "w2", "w3"]
    play.roster(300, wanted=2, released=("w1",))
    play.roster(300 + GRACE_S - 1, wanted=2, released=("w1",))  # said again
    assert play.pool.stopped == []
    play.at(300 + GRACE_S + 1)
    assert play.pool.stopped == ["w1"]
    assert play.pool.started == ["w1", "w2", "w3"], "its replacement was there already"


def test_when_the_run_is_over_workers_get_a_grace_and_nothing_is_started() -> None:
    play = Play()
    play.roster(wanted=2)
    play.roster(10, wanted=0, over=0, present=("w1", "w2"))
    play.exits("w2", 11)
    play.roster(10 + GRACE_S - 1, wanted=0, over=0, present=("w1",))
    assert (play.pool.started, play.pool.stopped, play.keeper.done) == (["w1", "w2"], [], False)
    play.at(10 + GRACE_S + 1)
    assert play.pool.stopped == ["w1"]
    assert play.keeper.done


# --- starts that come to nothing -----------------------------------------------------------------------------


def test_a_start_that_fails_is_no_worker_that_was_lost() -> None:
    play = Play()
    play.pool.failing["here"] = "no such program"
    play.roster(wanted=1)
    assert play.said == [m.StartFailed(worker="w1", host="here", reason="no such program")]
    assert play.keeper.running == []
    play.pool.failing.clear()
    play.at(FIRST_S)
    assert play.keeper.started == ["w2"], "and its id is not used again"
    assert not play.told(m.Exited)


def test_a_host_that_fails_again_and_again_is_left_alone_for_longer_each_time() -> None:
    play = Play()
    play.pool.failing["here"] = "no"
    play.roster(wanted=1)
    times = [0.0]
    while play.now < 4 * LONGEST_REST_S:
        before = len(play.pool.started)
        play.at(play.now + FIRST_S / 2)
        times += [play.now] * (len(play.pool.started) - before)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[:6] == [FIRST_S * 2**each for each in range(6)]
    assert max(gaps) == LONGEST_REST_S
    assert len(play.told(m.StartFailed)) == len(times)
    play.pool.failing.clear()
    play.tick(play.now + LONGEST_REST_S)
    play.tick(play.now + STOOD_S)
    play.pool.failing["here"] = "again"
    play.exits(play.keeper.running[0], play.now)
    failed = len(play.pool.started)
    play.at(play.now + FIRST_S)
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
    keeper = Play().keeper
    hosts = [Host(name="here")]
    keeper.update(Roster(wanted=2, losses=losses), 0.0)
    for worker, host in keeper.due(hosts, 0.0).start:
        keeper.heard(Started(worker, host), 0.0)
    wait = pause(losses, others=True)
    keeper.update(Roster(wanted=2, losses=losses, evicted=("w2",)), 100.0)
    assert keeper.due(hosts, 100.0).start == ()
    keeper.update(Roster(wanted=2, losses=losses, evicted=("w2",)), 100.0 + wait / 2)  # that is no further loss
    assert keeper.due(hosts, 100.0 + wait - 0.01).start == ()
    assert keeper.due(hosts, 100.0 + wait).start == (("w3", "here"),)


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
    assert play.keeper.running == ["w1"]
    assert play.keeper.started == []
    play.at(START_S + 1)
    assert play.keeper.running == ["w2"], "it is tried again, elsewhere"
    assert play.said == [m.StartFailed(worker="w1", host="north", reason="nothing was heard of it for 601 s")]
    play.pool.wake()
    play.act()
    assert play.pool.at == {"w2": "south"}
    assert play.pool.stopped == ["w1"], "it came after all"
    assert not play.told(m.Exited)


def test_at_the_end_nobody_waits_for_a_start_that_never_comes() -> None:
    play = Play()
    play.pool.mute = True
    play.roster(wanted=1)
    play.roster(1.0, wanted=0, over=0)
    assert not play.keeper.done
    play.at(1.0 + GRACE_S + 1)
    assert play.keeper.done
    assert play.said == []


def test_a_pool_without_capacity_is_asked_again_and_that_is_said_once() -> None:
    play = two_hosts(slots=None)
    play.pool.capacity = 0
    play.roster(wanted=2)
    times = [0.0]
    assert len(play.pool.started) == 2, "both were on their way"
    asked = len(play.pool.started)
    for _ in range(400):
        play.at(play.now + FIRST_S / 2)
        times += [play.now] if len(play.pool.started) > asked else []
        asked = len(play.pool.started)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 10 * gaps[0]
    assert play.said == [m.NoCapacity(reason="no host is to be had")]
    play.pool.capacity = 2
    play.at(play.now + LONGEST_REST_S)
    assert sorted(play.pool.at.values()) == ["north", "north"], "no host is to blame"
    play.pool.capacity = 0
    play.exits(play.keeper.running[0], play.now)
    play.tick(play.now + QUIET_S)
    assert len(play.told(m.NoCapacity)) == 2, "it had some meanwhile"


def test_full_hosts_get_no_more_and_that_is_said_once() -> None:
    play = two_hosts(slots=2)
    play.roster(wanted=5)
    assert list(play.pool.at.values()) == ["north", "north", "south", "south"]
    play.tick(5)
    assert play.said == [m.NoCapacity(reason="all 4 slots of its 2 hosts are taken")]
    play.exits("w1", 100)
    play.at(100 + QUIET_S)
    assert play.pool.at["w5"] == "north"
    assert len(play.told(m.NoCapacity)) == 2


# --- hosts that go -------------------------------------------------------------------------------------------


def test_a_host_that_goes_without_notice_is_replaced_elsewhere() -> None:
    play = two_hosts()
    play.roster(wanted=2)
    assert set(play.pool.at.values()) == {"north"}
    play.at(100)
    play.pool.lose("north")
    play.act()
    assert play.told(m.Exited) == [m.Exited(worker=worker, reason="its host has gone") for worker in ("w1", "w2")]
    assert play.pool.at == {"w3": "south", "w4": "south"}


def test_the_workers_of_a_host_with_notice_are_told_of_and_replaced_before_they_go() -> None:
    play = two_hosts(slots=None)
    play.roster(wanted=2)
    play.pool.notice("north", 120.4)
    play.at(10)
    assert play.said == [m.Noticed(workers=("w1", "w2"), host="north", within_s=120, reason="it is reclaimed")]
    assert play.pool.at == {"w1": "north", "w2": "north", "w3": "south", "w4": "south"}
    play.pool.notice("north", 110.0)
    play.at(20)
    assert len(play.said) == 1, "told twice, it counts once"
    play.pool.lose("north")
    play.at(30)
    assert len(play.pool.started) == 4
    assert len(play.told(m.Exited)) == 2
    play.pool.hosts.insert(0, Host(name="north"))
    play.roster(40, wanted=3)
    assert play.pool.at["w5"] == "north", "who comes under that name is another one"


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
    assert play.said == [m.Advised(host="north", reason="its price rises")]
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
    assert play.told(m.Noticed)[0].workers == ("w1",)  # type: ignore[union-attr]


def test_what_is_told_twice_or_of_nobody_counts_once_or_not_at_all() -> None:
    play = Play()
    play.roster(wanted=1)
    play.exits("w1", 100)
    play.pool.repeat(Gone("w1", "exited with code 1"))
    play.pool.repeat(Gone("x1", "exited with code 1"))
    play.at(200)
    assert play.told(m.Exited) == [m.Exited(worker="w1", reason="exited with code 1")]
    play.pool.repeat(Started("w2", "here"))
    play.act()
    assert play.keeper.running == ["w2"]
    assert play.pool.stopped == []


def test_nothing_is_done_before_the_first_roster() -> None:
    assert not Play().act().pool.started
