"""A pool and the agent of a host, each as a pure machine, with messages lost, doubled and old between them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from farandole.pool.agent import AgentReconciler
from farandole.pool.base import (
    Event,
    HostPreempted,
    HostRebalance,
    RunningWorker,
    Started,
    WorkerExited,
    WorkerStartFailed,
)
from farandole.pool.remote import AGENT_RESTARTED, CALLED_OFF, RemoteHosts
from farandole.protocol.messages import AgentOrder, HostPreemption, Job, Report

JOB = Job(script="train.py")


def ordered(far: RemoteHosts) -> AgentOrder:
    order = far.order("h", JOB, {})
    assert order is not None
    return order


def ready(instance: str = "a") -> AgentReconciler:
    duty = AgentReconciler(instance)
    duty.state = "ready"
    return duty


def test_a_worker_starts_ends_and_is_forgotten() -> None:
    far, duty = RemoteHosts("s"), ready()
    assert far.order("h", JOB, {}) is None, "nothing was heard of it"
    assert far.on_report("h", duty.report(), 0.0) == []
    far.start("w1", "h")
    assert duty.accept(ordered(far))
    assert duty.take_actions().start == ("w1",)
    duty.on_event(Started("w1", "h"))
    assert far.on_report("h", duty.report(), 0.0) == [Started("w1", "h")]
    duty.on_event(WorkerExited("w1", "exited with code 0"))
    assert far.on_report("h", duty.report(), 0.0) == [WorkerExited("w1", "exited with code 0")]
    assert far.on_report("h", duty.report(), 0.0) == [], "said again, it is no news"
    assert duty.accept(ordered(far))
    assert duty.report().ended == {}, "it was heard"


def test_one_that_is_called_off_before_it_is_there() -> None:
    far, duty = RemoteHosts("s"), ready()
    far.on_report("h", duty.report(), 0.0)
    far.start("w1", "h")
    assert far.stop("w1") == "h"
    duty.accept(ordered(far))
    assert duty.take_actions().start == ()
    assert far.on_report("h", duty.report(), 0.0) == [WorkerStartFailed("w1", CALLED_OFF)]


def test_an_agent_that_begins_anew_has_lost_its_workers_and_obeys_no_order_for_the_one_before() -> None:
    far, duty = RemoteHosts("s"), ready("a")
    far.on_report("h", duty.report(), 0.0)
    far.start("w1", "h")
    old = ordered(far)
    duty.accept(old)
    duty.take_actions()
    duty.on_event(Started("w1", "h"))
    far.on_report("h", duty.report(), 0.0)
    far.start("w2", "h")
    anew = ready("b")
    assert not anew.accept(old)
    assert anew.take_actions().start == ()
    assert set(far.on_report("h", anew.report(), 0.0)) == {
        WorkerExited("w1", AGENT_RESTARTED),
        WorkerStartFailed("w2", AGENT_RESTARTED),
    }


def test_a_pool_that_begins_anew_finds_what_runs() -> None:
    duty = ready()
    far = RemoteHosts("s")
    far.on_report("h", duty.report(), 0.0)
    far.start("w1", "h")
    duty.accept(ordered(far))
    duty.take_actions()
    duty.on_event(Started("w1", "h"))
    again = RemoteHosts("t")
    again.remember("w1", "h")
    again.remember("w9", "h")
    assert again.on_report("h", duty.report(), 0.0) == [WorkerExited("w9", AGENT_RESTARTED)]
    assert ordered(again).workers == ("w1",)
    third = RemoteHosts("u")
    assert third.on_report("h", duty.report(), 0.0) == [RunningWorker("w1", "h")]


def test_what_a_host_knows_of_its_own_end_is_told_once() -> None:
    far, duty = RemoteHosts("s"), ready()
    duty.notified = HostPreemption(at=130.0, reason="rebalance", advice=True)
    assert far.on_report("h", duty.report(), 10.0) == [HostRebalance("h", "rebalance")]
    duty.notified = HostPreemption(at=140.0, reason="reclaimed")
    assert far.on_report("h", duty.report(), 20.0) == [HostPreempted("h", 120.0, "reclaimed")]
    assert far.on_report("h", duty.report(), 21.0) == []


class Play:
    """One host, whose messages arrive late, twice, or never; an agent and a pool that begin anew."""

    def __init__(self, seed: int) -> None:
        self.rng, self.number, self.agents = random.Random(seed), 0, 0
        self.alive = dict[str, str]()  # workers, and the agent that has them
        self.started, self.told = Counter[str](), list[Event]()
        self.far, self.duty = RemoteHosts("s"), ready("a0")
        self.orders, self.reports = list[AgentOrder](), list[Report]()

    def step(self) -> None:
        self.rng.choice((self.ask, self.stop, self.order, self.deliver, self.act, self.end, self.report, self.hear))()
        if self.rng.random() < 0.03:
            self.anew()

    def ask(self) -> None:
        if "h" in self.far.hosts:
            self.number += 1
            self.far.start(f"w{self.number}", "h")

    def stop(self) -> None:
        if far := self.far.hosts.get("h"):
            for worker in self.rng.sample(far.workers, min(1, len(far.workers))):
                self.far.stop(worker)

    def order(self) -> None:
        if order := self.far.order("h", JOB, {}):
            self.orders.append(order)

    def deliver(self) -> None:
        """The newest, or one that was there before: who connects anew is told the newest again."""
        if self.orders:
            self.duty.accept(self.orders[-1])

    def act(self) -> None:
        due = self.duty.take_actions()
        for worker in due.stop:
            if self.alive.pop(worker, None):
                self.duty.on_event(WorkerExited(worker, "killed"))
        for worker in due.start:
            self.started[worker] += 1
            self.alive[worker] = f"a{self.agents}"
            self.duty.on_event(Started(worker, "h"))

    def end(self) -> None:
        for worker in self.rng.sample(sorted(self.alive), min(1, len(self.alive))):
            del self.alive[worker]
            self.duty.on_event(WorkerExited(worker, "exited"))

    def report(self) -> None:
        self.reports.append(self.duty.report())

    def hear(self) -> None:
        if self.reports and self.rng.random() < 0.7:
            self.take(self.reports[-1])

    def take(self, report: Report) -> None:
        for event in self.far.on_report("h", report, 0.0):
            self.told.append(event)
            if isinstance(event, WorkerExited | WorkerStartFailed):
                assert event.worker not in self.alive, f"{event} is told, and it runs"

    def anew(self) -> None:
        """The agent is killed, and its workers with it."""
        self.agents += 1
        self.alive.clear()
        self.duty = ready(f"a{self.agents}")
        self.reports.clear()  # its connection is gone, and so is what was on it

    def settle(self) -> None:
        for worker in list(self.far.hosts["h"].workers) if "h" in self.far.hosts else ():
            self.far.stop(worker)
        for _ in range(4):
            self.take(self.duty.report())
            self.order()
            self.deliver()
            self.act()
        self.take(self.duty.report())


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_nobody_is_started_twice_and_each_has_one_end(first: int) -> None:
    for seed in range(first, first + 100):
        play = Play(seed)
        for _ in range(200):
            play.step()
        play.settle()
        assert not play.alive, seed
        assert set(play.started.values()) <= {1}, seed
        begun = Counter(event.worker for event in play.told if isinstance(event, Started))
        ended = Counter(event.worker for event in play.told if isinstance(event, WorkerExited))
        failed = Counter(event.worker for event in play.told if isinstance(event, WorkerStartFailed))
        assert begun == ended, seed
        assert set((begun + failed).values()) <= {1}, seed
        assert len(begun) + len(failed) == play.number, seed
