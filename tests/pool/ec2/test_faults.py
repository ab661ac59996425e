"""A pool of instances while AWS does what it does on bad days, again and again: nothing leaked, nothing counted twice,
and what was lost comes back each time.

The reconciler decides and the pool asks; AWS is moto behind a proxy (`tests/support/aws_faults.py`); the instances'
agents are the product's `Duty` over its fake pool of workers, connected to a coordinator as agents are. The clock of
all of them runs faster, so that what is given minutes is over in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from farandole.control.client import subscribe
from farandole.control.ticket import Ticket, new_secret
from farandole.coordinator.journal import Journal
from farandole.coordinator.server import Server
from farandole.errors import CoordinatorUnreachable
from farandole.pool.agent import AgentReconciler
from farandole.pool.base import Host
from farandole.pool.ec2 import Aws, Ec2Pool, settle
from farandole.pool.fake import FakePool
from farandole.pool.reconciler import PoolReconciler
from farandole.protocol import messages
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import Roster
from tests.support import fast_clock
from tests.support.aws import TEMPLATE, Moto, tags
from tests.support.aws_faults import Faults

pytestmark = [pytest.mark.processes, pytest.mark.world, pytest.mark.timeout(1200)]

TIMES = 40.0
MOST = 5
OPTIONS = {"template": TEMPLATE, "types": "c5.large+m5.large", "market": "spot+on-demand"}


class Agents:
    """An agent for each instance that moto says is running."""

    def __init__(self, moto: Moto, ticket: Ticket) -> None:
        self.moto, self.ticket = moto, ticket
        self.there: dict[str, asyncio.Task[None]] = {}

    async def tend(self) -> None:
        try:
            while True:
                rows = await asyncio.to_thread(self.moto.instances)
                running = {each["InstanceId"] for each in rows if each["State"]["Name"] == "running"}
                for me in running - set(self.there):
                    self.there[me] = asyncio.create_task(self.serve(me))
                for me in set(self.there) - running:
                    self.there.pop(me).cancel()
                await asyncio.sleep(2.0)
        finally:
            for task in self.there.values():
                task.cancel()
            await asyncio.gather(*self.there.values(), return_exceptions=True)  # their connections are closed then

    async def serve(self, me: str) -> None:
        duty, pool = AgentReconciler(me), FakePool(hosts=[Host(name=me)])
        duty.state = "ready"
        while True:
            hello = messages.Hello(kind="host_agent", host=me, pid=os.getpid(), pool="ec2")
            with contextlib.suppress(CoordinatorUnreachable):
                async with subscribe(self.ticket, hello) as subscription:
                    await subscription.send(duty.report())
                    while (message := await subscription.receive()) is not None:
                        if isinstance(message, messages.AgentOrder):
                            duty.accept(message)
                            due = duty.take_actions()
                            for worker in due.stop:
                                pool.stop(worker)
                            for worker in due.start:
                                pool.start(worker, me)
                            for event in pool.waiting():
                                duty.on_event(event)
                            await subscription.send(duty.report())
                            if message.end:
                                return
            await asyncio.sleep(1.0)


class Played:
    """The reconciler and its pool, told what is wanted."""

    def __init__(self, pool: Ec2Pool) -> None:
        self.pool, self.reconciler = pool, PoolReconciler()
        self.wanted = 0
        self.loop = asyncio.get_running_loop()

    async def tend(self) -> None:
        asking = asyncio.ensure_future(self.pool.events())
        try:
            while True:
                await asyncio.wait({asking}, timeout=1.0)
                now = self.loop.time()
                self.reconciler.update(Roster(wanted=self.wanted, mark="", leaving=self._beyond()), now)
                if asking.done():
                    for event in asking.result():
                        self.reconciler.on_event(event, now)
                    asking = asyncio.ensure_future(self.pool.events())
                self._assert_nobody_is_counted_twice()
                due = self.reconciler.take_actions(self.pool.list(), now)
                for worker in (*due.stop, *self._beyond()):
                    self.pool.stop(worker)
                for worker, host in due.start:
                    self.pool.start(worker, host)
        finally:
            asking.cancel()

    def _beyond(self) -> tuple[str, ...]:
        return tuple(self.reconciler.running[self.wanted :])

    def _assert_nobody_is_counted_twice(self) -> None:
        assert max(Counter(host.name for host in self.pool.list()).values()) == 1
        assert max(Counter(self.reconciler.running).values(), default=0) <= 1

    async def met(self) -> None:
        """As many as are wanted are there."""
        while not (len(self.reconciler.started) == len(self.reconciler.running) == self.wanted):
            await asyncio.sleep(1.0)


async def scene(moto: Moto, faults: Faults, folder: Path, number: int, seed: int) -> Counter[str]:
    chance, counts = random.Random(seed), Counter[str]()
    secret = new_secret()
    journal = Journal(folder)
    server = Server(RunSettings(run="r"), secret=secret, journal=journal)
    ticket = Ticket(address=await server.start(), secret=secret, run="r")
    serving = asyncio.create_task(server.serve())
    aws, (_, asked) = Aws(again_s=0.02), settle(OPTIONS)
    logs = folder / "logs"
    logs.mkdir()
    pool = Ec2Pool(aws, asked, run="r-1", ticket=ticket, job=messages.Job(script="s.py"), logs=logs)
    agents, played = Agents(moto, ticket), Played(pool)
    tasks = [asyncio.create_task(agents.tend()), asyncio.create_task(played.tend())]
    try:
        while faults.counts.total() < number:
            played.wanted = chance.randint(1, MOST)
            await reach(played, tasks)
            counts["changes of size reached"] += 1
            living = [each["InstanceId"] for each in await asyncio.to_thread(moto.living)]
            if living and chance.random() < 0.7:
                await asyncio.to_thread(moto.client().terminate_instances, InstanceIds=[chance.choice(living)])
                counts["instances taken back"] += 1
                await asyncio.sleep(15.0)
                await reach(played, tasks)
                counts["recoveries"] += 1
        part, faults.part = faults.part, 0.0
        played.wanted = 2
        while len(await asyncio.to_thread(moto.living)) != 2:
            await reach(played, tasks)
            await asyncio.sleep(5.0)
        counts["no more instances than wanted"] += 1
        faults.part = part
        await pool.close()
    finally:
        for task in (*tasks, serving):
            task.cancel()
        await asyncio.gather(*tasks, serving, return_exceptions=True)
        await pool.close()
        await server.close()
        journal.close()
    return counts


async def reach(played: Played, tasks: list[asyncio.Task[None]]) -> None:
    """Raises what has gone wrong beside, and AssertionError where it takes an hour of the fast clock."""
    meeting = asyncio.create_task(played.met())
    await asyncio.wait({meeting, *tasks}, timeout=3600.0, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
    assert meeting.done(), f"wanted {played.wanted}: {played.reconciler.running}, {played.pool.fleet.instances}"


def play(moto: Moto, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, seed: int) -> None:
    faults = Faults(moto, seed, 0.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
    settle(OPTIONS)  # before the bad days
    faults.part = 0.6
    try:
        counts = fast_clock.run(scene(moto, faults, folder, number, seed), TIMES)
    finally:
        faults.close()
    launched = [each for each in moto.instances() if tags(each).get("farandole:run") == "r-1"]
    print(f"{faults.counts.total()} faults: {dict(faults.counts)}; {len(launched)} instances; {dict(counts)}")
    assert moto.living() == [], "leaked"
    assert faults.counts.total() >= number
    assert len(launched) >= counts["instances taken back"]


def test_a_hundred_faults(moto: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(moto, tmp_path, monkeypatch, 100, seed=1)


@pytest.mark.long
def test_a_thousand_faults(moto: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(moto, tmp_path, monkeypatch, 1000, seed=2)
