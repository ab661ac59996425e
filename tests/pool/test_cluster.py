"""What is due of the units of a cluster: pure, on a clock of the test's own, with an engine that fails at random."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from farandole.pool.agent import AgentReconciler
from farandole.pool.base import (
    Event,
    HostPreempted,
    HostRebalance,
    HostState,
    RunningWorker,
    Started,
    WorkerExited,
    WorkerStartFailed,
)
from farandole.pool.cluster import (
    ADVICE_S,
    AGENT_END_S,
    CANCEL_AGAIN_S,
    CLOSING_S,
    DOUBT_S,
    ENDING,
    FIRST_REST_S,
    GONE,
    IDLE_S,
    JOIN_S,
    LOST_S,
    MISSING_S,
    NOTICE_S,
    PENDING,
    RUNNING,
    ListedUnit,
    UnitActions,
    Units,
    names,
)
from farandole.pool.remote import RemoteHosts
from farandole.protocol.messages import Job


def row(name: str, state: str = RUNNING, *, id: str = "", node: str = "n", left_s: float = math.inf) -> ListedUnit:
    return ListedUnit(name=name, id=id or f"id-{name}", state=state, node=node, reason="r", left_s=left_s)


def wanting(workers: int, slots: int = 1, fixed: int = 0) -> tuple[Units, list[str]]:
    """Units of a pool that has just begun, and the names of those that it submits."""
    units = Units(names("s"), slots=slots, fixed=fixed)
    units.listed([], 0.0, 0.0)
    units.want(workers)
    return units, units.take_actions(0.0).submit


def joined(units: Units, name: str, now: float, workers: int = 0, state: str = "ready") -> None:
    units.agent(name, connected=True, state=state, reason="", workers=workers, now=now)


def lost(units: Units, name: str, now: float, workers: int = 0) -> None:
    units.agent(name, connected=False, state="ready", reason="", workers=workers, now=now)


def hosts(units: Units) -> list[str]:
    return [host.name for host in units.hosts()]


def reported(due: UnitActions) -> list[tuple[str, str]]:
    return [(event.host, event.state) for event in due.events if isinstance(event, HostState)]


def test_nothing_is_submitted_before_both_the_list_and_what_is_wanted_are_known() -> None:
    units = Units(names("s"))
    units.want(2)
    assert units.take_actions(0.0).submit == []
    units.listed([row("old-1", PENDING)], 0.0, 0.1)
    assert len(units.take_actions(0.2).submit) == 1, "one is there already"
    other = Units(names("s"))
    other.listed([row("old-1", PENDING)], 0.0, 0.1)
    due = other.take_actions(0.2)
    assert (due.submit, due.cancel) == ([], [])


def test_a_unit_is_counted_once_whichever_source_names_it_first() -> None:
    for order in itertools.permutations(("answer", "list", "agent")):
        units, [name] = wanting(1)
        for now, way in enumerate(order, 1):
            if way == "answer":
                units.submitted(name, f"id-{name}", now)
            elif way == "list":
                units.listed([row(name)], now - 0.5, now)
            else:
                joined(units, name, now)
            assert units.take_actions(now).submit == [], order
        assert list(units.units) == [name], order
        assert hosts(units) == [name], order


def test_units_hold_several_workers() -> None:
    assert len(wanting(17, slots=8)[1]) == 3
    assert len(wanting(0, fixed=2)[1]) == 2, "an allocation's nodes are used in any case"


def test_a_submission_without_an_answer_is_neither_repeated_nor_forgotten() -> None:
    units, [name] = wanting(1)
    units.doubtful(name, 1.0)
    units.listed([], 2.0, 2.1)
    assert units.take_actions(2.2).submit == []
    units.listed([row(name)], 3.0, 3.1)
    assert units.units[name].id == f"id-{name}"
    units, [name] = wanting(1)
    units.doubtful(name, 1.0)
    after = 1.0 + DOUBT_S + 1.0
    units.listed([], after, after)
    [another] = units.take_actions(after + FIRST_REST_S).submit
    assert another != name
    units.listed([row(name), row(another)], after + 3, after + 3)  # it came after all
    assert len(units.take_actions(after + 3).cancel) == 1, "one too many"


def test_a_refused_submission_is_tried_again_later_and_later() -> None:
    units, [name] = wanting(1)
    now, pauses = 0.0, []
    for _ in range(4):
        units.refused(name, now)
        began = now
        while not (submitted := units.take_actions(now).submit):
            now += 0.5
        [name] = submitted
        pauses.append(now - began)
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 4 * pauses[0]


def test_a_unit_that_ends_before_its_agent_connects_is_a_failure_and_one_that_is_released_is_not() -> None:
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.1)
    units.listed([row(name, GONE)], 1.0, 1.0)
    due = units.take_actions(1.0)
    assert reported(due) == [(name, "failed")]
    assert due.forget == [name]
    assert due.submit == []
    [name] = units.take_actions(1.0 + FIRST_REST_S).submit
    units.submitted(name, f"id-{name}", 3.1)
    units.want(0)
    assert units.take_actions(3.2).cancel == [f"id-{name}"]
    units.listed([row(name, GONE)], 4.0, 4.0)
    assert reported(units.take_actions(4.0)) == []


def test_a_unit_without_an_agent_for_long_is_cancelled_but_not_while_the_coordinator_is_away() -> None:
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.0)
    units.listed([row(name)], 1.0, 1.0)
    units.take_actions(JOIN_S, linked=False)
    assert units.take_actions(JOIN_S + 2).cancel == []
    due = units.take_actions(2 * JOIN_S + 2)
    assert due.cancel == [f"id-{name}"]
    assert reported(due) == [(name, "failed")]
    assert units.take_actions(2 * JOIN_S + 3).cancel == []
    assert units.take_actions(2 * JOIN_S + 2 + CANCEL_AGAIN_S).cancel == [f"id-{name}"], "until it is gone"


def test_a_host_out_of_reach_is_cancelled_and_gone_only_when_the_engine_says_so() -> None:
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.0)
    units.listed([row(name)], 1.0, 1.0)
    joined(units, name, 2.0, workers=1)
    lost(units, name, 10.0, workers=1)
    assert hosts(units) == []
    assert units.take_actions(10.0).submit == [], "it may come back"
    due = units.take_actions(11.0 + LOST_S + AGENT_END_S)
    assert due.cancel == [f"id-{name}"]
    assert due.forget == []
    units.listed([row(name, GONE)], 200.0, 200.0)
    assert units.take_actions(200.0).forget == [name]


@pytest.mark.parametrize("listed", [[], [GONE]])
def test_a_connected_agent_is_believed_more_than_the_list(listed: list[str]) -> None:
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.0)
    joined(units, name, 2.0, workers=1)
    for now in (5.0, 30.0, 60.0):
        units.listed([row(name, state) for state in listed], now, now)
        assert units.take_actions(now).forget == []
    lost(units, name, 61.0, workers=1)
    units.listed([row(name, state) for state in listed], 62.0, 62.0 + MISSING_S)
    assert units.take_actions(62.0 + MISSING_S).forget == [name]


def test_a_unit_that_is_gone_is_preempted_only_if_its_agent_stays_connected() -> None:
    """The engine's list may be quicker than the end of the agent's connection."""
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.0)
    joined(units, name, 2.0, workers=1)
    units.listed([row(name, GONE)], 3.0, 3.0)
    due = units.take_actions(3.0)
    assert [event for event in due.events if isinstance(event, HostPreempted)] == []
    assert len(due.submit) == 1, "its place is taken at once"
    joined(units, name, 3.2, workers=0)
    assert hosts(units) == [], "nothing starts there"
    joined(units, name, 3.4, workers=1)
    units.listed([row(name, GONE)], 4.0, 4.0)
    due = units.take_actions(3.0 + CLOSING_S + 0.1)
    assert [event.host for event in due.events if isinstance(event, HostPreempted)] == [name]


def test_a_unit_that_is_listed_again_after_an_error_of_the_list_is_not_preempted() -> None:
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.0)
    joined(units, name, 2.0, workers=1)
    units.listed([row(name, GONE)], 3.0, 3.0)
    units.listed([row(name)], 4.0, 4.0)
    due = units.take_actions(4.0 + CLOSING_S)
    assert [event for event in due.events if isinstance(event, HostPreempted)] == []


def test_a_host_that_is_preempted_is_replaced_at_once_and_ended_when_its_workers_have_left() -> None:
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.0)
    units.listed([row(name)], 1.0, 1.0)
    joined(units, name, 2.0, workers=1)
    units.leaves(name)
    due = units.take_actions(3.0)
    assert len(due.submit) == 1
    assert (due.end_agents, due.cancel) == ([], [])
    assert hosts(units) == [name], "its worker still runs there"
    joined(units, name, 4.0, workers=0)
    due = units.take_actions(4.0)
    assert due.end_agents == [name]
    assert due.cancel == [], "the agent ends it"
    assert hosts(units) == []
    assert units.take_actions(4.0 + AGENT_END_S).cancel == [f"id-{name}"], "if it doesn't"


@pytest.mark.parametrize("state", [RUNNING, ENDING])
def test_a_time_limit_and_an_end_are_notices_with_a_deadline(state: str) -> None:
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.0)
    joined(units, name, 2.0, workers=1)
    units.listed([row(name, left_s=10 * NOTICE_S)], 2.5, 2.5)
    units.listed([row(name, state, left_s=NOTICE_S - 1)], 3.0, 3.0)
    due = units.take_actions(3.0)
    [notice] = [event for event in due.events if isinstance(event, HostPreempted)]
    assert notice.host == name
    assert 0 < notice.deadline_s < NOTICE_S
    assert len(due.submit) == 1
    units.listed([row(name, state, left_s=NOTICE_S - 2)], 4.0, 4.0)
    assert not [event for event in units.take_actions(4.0).events if isinstance(event, HostPreempted)], "once"


def test_an_announced_end_of_its_node_is_a_notice_at_once_and_the_unit_is_ended_when_it_has_no_workers() -> None:
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.0)
    joined(units, name, 2.0, workers=1)
    units.listed([row(name)], 2.5, 2.5)
    for now in (3.0, 4.0):
        units.listed([replace(row(name), notice_s=1000.0 - now)], now, now)
    due = units.take_actions(4.0)
    notices = [event for event in due.events if isinstance(event, HostPreempted)]
    assert [(notice.host, notice.deadline_s) for notice in notices] == [(name, 997.0)], "once"
    assert len(due.submit) == 1
    joined(units, name, 5.0, workers=0)
    assert units.take_actions(5.0).end_agents == [name]
    assert units.take_actions(5.0 + AGENT_END_S).cancel == [f"id-{name}"], "nobody else ends it"


def test_an_end_is_a_second_notice_since_its_deadline_may_be_sooner() -> None:
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.0)
    joined(units, name, 2.0, workers=1)
    units.leaves(name)  # its agent has a notice
    units.listed([row(name, ENDING)], 3.0, 3.0)
    [notice] = [event for event in units.take_actions(3.0).events if isinstance(event, HostPreempted)]
    assert notice.deadline_s == 30.0


def test_the_deadline_of_an_end_is_the_engine_s_if_it_is_sooner() -> None:
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.0)
    joined(units, name, 2.0, workers=1)
    units.listed([row(name, ENDING, left_s=7.0)], 3.0, 3.0)
    [notice] = [event for event in units.take_actions(3.0).events if isinstance(event, HostPreempted)]
    assert notice.deadline_s == 7.0


def test_a_unit_that_is_listed_no_more_has_the_reason_of_its_end() -> None:
    units, [name] = wanting(1)
    units.submitted(name, f"id-{name}", 0.0)
    joined(units, name, 2.0)
    units.listed([row(name, ENDING)], 3.0, 3.0)
    lost(units, name, 4.0)
    units.take_actions(4.0)
    units.listed([], 3.0 + 2 * MISSING_S, 3.0 + 2 * MISSING_S)
    [gone] = [event for event in units.take_actions(30.0).events if isinstance(event, HostState)]
    assert gone.state == "gone"
    assert gone.reason.endswith(": r"), "the row's"


def test_a_unit_is_replaced_before_its_time_limit_and_short_limits_give_it_time_to_work() -> None:
    for limit_s in (60.0, 100_000.0):
        units, [name] = wanting(1)
        units.submitted(name, f"id-{name}", 0.0)
        joined(units, name, 2.0, workers=1)
        units.listed([row(name, left_s=limit_s)], 3.0, 3.0)
        due = units.take_actions(3.0)
        assert due.submit == []
        assert not [event for event in due.events if isinstance(event, HostRebalance | HostPreempted)]
        for left_s, kind in (
            (min(limit_s / 2, ADVICE_S) - 1, HostRebalance),
            (min(limit_s / 4, NOTICE_S) - 1, HostPreempted),
        ):
            units.listed([row(name, left_s=left_s)], 4.0, 4.0)
            units.listed([row(name, left_s=left_s)], 5.0, 5.0)
            due = units.take_actions(5.0)
            assert [event.host for event in due.events if isinstance(event, kind)] == [name]
            assert len(due.submit) == (kind is HostRebalance), "another one, before its workers leave"


def test_of_too_many_units_those_that_are_queued_go_first_and_none_with_workers() -> None:
    units, [one, two, three, four] = wanting(4)
    for name in (one, two, three, four):
        units.submitted(name, f"id-{name}", 0.0)
    units.listed([row(one), row(two), row(three), row(four, PENDING)], 1.0, 1.0)
    joined(units, one, 2.0, workers=1)
    joined(units, two, 2.0, workers=1)
    joined(units, three, 2.0)
    units.take_actions(3.0)
    units.want(3)
    assert units.take_actions(4.0).cancel == [f"id-{four}"]
    units.want(1)
    due = units.take_actions(5.0 + IDLE_S)
    assert due.end_agents == [three]
    assert hosts(units) == [one, two], "the run lets a worker leave first"
    joined(units, two, 20.0, workers=0)
    units.take_actions(20.0)
    assert two in units.take_actions(20.0 + IDLE_S).end_agents


def test_a_host_of_wrong_results_or_that_can_t_be_prepared_is_replaced_on_another_node() -> None:
    for way in ("wrong", "failed"):
        units, [name] = wanting(1)
        units.submitted(name, f"id-{name}", 0.0)
        units.listed([row(name, node="bad")], 1.0, 1.0)
        joined(units, name, 2.0, state="ready" if way == "wrong" else "failed")
        units.want(1, [name] if way == "wrong" else [])
        due = units.take_actions(2.0 + FIRST_REST_S)
        assert due.avoid == ("bad",)
        assert len(due.submit) == 1
        assert due.end_agents == [name]


def test_the_end_releases_everything_and_what_appears_later_too() -> None:
    units, [one, two] = wanting(2)
    units.submitted(one, f"id-{one}", 0.0)
    joined(units, one, 1.0, workers=1)
    units.end_all(2.0)
    due = units.take_actions(2.0)
    assert due.end_agents == [one]
    units.want(5)
    assert units.take_actions(3.0).submit == []
    units.submitted(two, f"id-{two}", 4.0)
    assert units.take_actions(4.0).cancel == [f"id-{two}"], "its answer was on the way"
    units.listed([row("late-1", PENDING)], 5.0, 5.0)
    assert "id-late-1" in units.take_actions(5.0).cancel


# --- random schedules -------------------------------------------------------------------------------------------------


@dataclass
class Sim:
    """A unit of the simulated engine, with its agent."""

    name: str
    id: str
    run: str
    state: str = PENDING
    node: str = ""
    agent: AgentReconciler = field(default_factory=lambda: AgentReconciler("i"))
    connected: bool = False


class Cluster:
    """A simulated cluster. `late`: submissions that take effect later. `faults`: how many there were so far."""

    def __init__(self, rng: random.Random, nodes: int) -> None:
        self.rng, self.nodes = rng, [f"n{n}" for n in range(nodes)]
        self.units: dict[str, Sim] = {}
        self.late: list[tuple[float, str, str]] = []
        self.submissions: Counter[str] = Counter()
        self.cancels: list[tuple[str, str]] = []
        self.faults = 0

    def create(self, run: str, name: str) -> str:
        id = f"j{len(self.units)}"
        self.units[id] = Sim(name, id, run, agent=AgentReconciler(f"i-{id}"))
        return id

    def living(self, run: str) -> list[Sim]:
        return [unit for unit in self.units.values() if unit.run == run and unit.state != GONE]

    def end(self, unit: Sim) -> None:
        unit.state, unit.connected = GONE, False

    def tick(self, now: float) -> None:
        for at, run, name in [late for late in self.late if late[0] <= now]:
            self.late.remove((at, run, name))
            self.create(run, name)
        used = {unit.node for unit in self.units.values() if unit.state in (RUNNING, ENDING)}
        for unit in self.units.values():
            free = [node for node in self.nodes if node not in used]
            if unit.state == PENDING and free:
                unit.state, unit.node = RUNNING, free[0]
                used.add(free[0])


class Run:
    """A pool's process: `Units` and the state of its hosts, put together as `ClusterPool` does it."""

    def __init__(self, cluster: Cluster, name: str, rng: random.Random) -> None:
        self.cluster, self.name, self.rng, self.process = cluster, name, rng, 0
        self.started: Counter[str] = Counter()  # by worker: answers
        self.begun: dict[str, str] = {}  # the host of each worker that ran
        self.exited: Counter[str] = Counter()
        self.count, self.wanted, self.faults = 0, 0, True
        self.restart(0.0)

    def fails(self, part: float) -> bool:
        """Return True for this part of the calls, as long as there are faults."""
        fails = self.faults and self.rng.random() < part
        self.cluster.faults += fails
        return fails

    def restart(self, now: float) -> None:
        self.process += 1
        self.units, self.far = Units(names(f"{self.name}{self.process}")), RemoteHosts(f"s{self.process}")
        self.asked: tuple[float, list[ListedUnit]] | None = None
        self.unanswered, self.ending = set[str](), set[str]()
        for worker, host in self.begun.items():
            if not self.exited[worker]:
                self.units.remember(host, now)
                self.far.remember(worker, host)
        self.units.want(self.wanted)

    def take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Started(worker, host):
                    self.started[worker] += 1
                    self.begun[worker] = host
                    self.unanswered.discard(worker)
                case WorkerStartFailed(worker, _):
                    self.started[worker] += 1
                    self.unanswered.discard(worker)
                case RunningWorker(worker, host):
                    self.begun[worker] = host
                case WorkerExited(worker, _):
                    self.exited[worker] += 1
                case _:
                    pass

    def changed(self, host: str, now: float) -> None:
        if remote := self.far.hosts.get(host):
            self.units.agent(
                host, connected=remote.connected, state=remote.state, reason="", workers=len(remote.workers), now=now
            )

    def exchange(self, unit: Sim, now: float) -> None:
        """The agent reports, gets the order that follows, and acts on it."""
        for _ in range(2):
            self.take(self.far.on_report(unit.name, unit.agent.report(), now))
            self.changed(unit.name, now)
            order = self.far.order(unit.name, Job(script="s"), {}, end=unit.name in self.ending)
            assert order is not None
            unit.agent.accept(order)
            unit.agent.state = "ready"
            actions = unit.agent.take_actions()
            for worker in actions.stop:
                unit.agent.on_event(WorkerExited(worker, "killed by signal 9"))
            for worker in actions.start:
                unit.agent.on_event(Started(worker, unit.name))
            if order.end:
                self.cluster.end(unit)
                self.far.mark_disconnected(unit.name)
                self.changed(unit.name, now)
                return

    def act(self, now: float) -> None:
        due = self.units.take_actions(now)
        self.take(due.events)
        for host in due.forget:
            alive = [unit for unit in self.cluster.living(self.name) if unit.name == host and unit.state != PENDING]
            assert not alive, "it is gone for certain"
            self.take(self.far.forget(host))
        self.ending.update(due.end_agents)
        for name in due.submit:
            self.submit(name, now)
        for id in due.cancel:
            unit = self.cluster.units[id]
            self.cluster.cancels.append((self.name, unit.run))
            if not self.fails(0.3):
                self.cluster.end(unit)
                self.far.mark_disconnected(unit.name)
                self.changed(unit.name, now)

    def submit(self, name: str, now: float) -> None:
        self.cluster.submissions[name] += 1
        outcome = self.rng.choice(("refused", "lost", "never", "late")) if self.fails(2 / 3) else "ok"
        if outcome == "ok":
            self.units.submitted(name, self.cluster.create(self.name, name), now)
        elif outcome == "refused":
            self.units.refused(name, now)
        else:
            if outcome == "lost":
                self.cluster.create(self.name, name)
            elif outcome == "late":
                self.cluster.late.append((now + self.rng.uniform(0.0, 2 * DOUBT_S), self.name, name))
            self.units.doubtful(name, now)

    def look(self, now: float) -> None:
        """Ask for the list, or get the answer, which is as of the question."""
        if self.asked is None:
            mine = [unit for unit in self.cluster.units.values() if unit.run == self.name]
            shown = [unit for unit in mine if unit.state != GONE or self.rng.random() < 0.5]
            rows = [ListedUnit(name=u.name, id=u.id, state=u.state, node=u.node, reason="r") for u in shown]
            self.asked = now, rows
        else:
            asked_at, rows = self.asked
            self.asked = None
            if not self.fails(0.3):
                self.units.listed(rows, asked_at, now)

    def work(self, now: float) -> None:
        """Start what is missing on hosts that have room, as the reconciler does, and stop what is too much."""
        running = [w for remote in self.far.hosts.values() for w in remote.workers if w not in remote.stopping]
        for host in self.units.hosts():
            remote = self.far.hosts[host.name]
            if len(running) < self.wanted and not remote.workers and not self.units.units[host.name].leaving:
                self.count += 1
                worker = f"{self.name}-w{self.count}"
                running.append(worker)
                self.unanswered.add(worker)
                self.far.start(worker, host.name)
                self.changed(host.name, now)
        leaving = [name for name, unit in self.units.units.items() if unit.leaving and name in self.far.hosts]
        for worker in (*running[self.wanted :], *(w for name in leaving for w in self.far.hosts[name].workers)):
            self.far.stop(worker)

    def agents(self, now: float) -> None:
        for unit in self.cluster.living(self.name):
            if unit.state == RUNNING and self.rng.random() < 0.7:
                if unit.connected and self.fails(0.1):
                    unit.connected = False
                    self.far.mark_disconnected(unit.name)
                    self.changed(unit.name, now)
                else:
                    unit.connected = True
                    self.exchange(unit, now)


def strike(run: Run, rng: random.Random, now: float) -> None:
    """Something happens from outside."""
    living = [unit for unit in run.cluster.living(run.name) if unit.state == RUNNING]
    what = rng.random()
    run.cluster.faults += 1
    if what < 0.25 and living:
        unit = rng.choice(living)
        run.cluster.end(unit)
        run.far.mark_disconnected(unit.name)
        run.changed(unit.name, now)
    elif what < 0.5 and living:
        run.units.leaves(rng.choice(living).name)
    elif what < 0.8:
        run.wanted = rng.randrange(6)
        run.units.want(run.wanted)
    elif what < 0.9:
        run.restart(now)


def one_turn(runs: list[Run], rng: random.Random, now: float) -> None:
    for run in runs:
        run.cluster.tick(now)
        for part in rng.sample((run.act, run.look, run.agents, run.work), 4):
            part(now)


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_leak_nothing_and_answer_each_start_once(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(rng, nodes=rng.randrange(1, 8))
    foreign = cluster.create("somebody", "else")
    runs = [Run(cluster, "a", rng), Run(cluster, "b", rng)]
    now = 0.0
    for _ in range(300):
        now += rng.uniform(0.1, 4.0)
        one_turn(runs, rng, now)
        if rng.random() < 0.15:
            strike(rng.choice(runs), rng, now)
    assert cluster.faults > 100
    for run in runs:  # the faults end: what is wanted comes, and not more
        run.faults, run.wanted = False, 2
        run.units.want(2)
    cluster.nodes = [f"n{n}" for n in range(20)]
    for _ in range(400):
        now += 2.0
        one_turn(runs, rng, now)
    for run in runs:
        assert len(cluster.living(run.name)) == 2
        assert len(run.units.hosts()) == 2
    for run in runs:
        run.wanted = 0
        run.units.end_all(now)
    for _ in range(100):
        now += 2.0
        one_turn(runs, rng, now)
    for run in runs:
        assert not cluster.living(run.name), "nothing is left"
        assert not run.units.units
        assert not run.unanswered, "each start was answered"
        assert set(run.started.values()) <= {1}, "once"
        assert {run.exited[worker] for worker in run.begun} <= {1}, "and each worker's end reported once"
    assert set(cluster.submissions.values()) == {1}
    assert all(who == whose for who, whose in cluster.cancels), "nobody else's was touched"
    assert cluster.units[foreign].state != GONE
