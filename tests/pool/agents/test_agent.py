"""An agent and its connection: it is answered, and where it is not, it goes and looks for another coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from farandole.control.client import Subscription, subscribe
from farandole.control.ticket import Ticket, load, new_secret, newest
from farandole.coordinator import server
from farandole.coordinator.connection import Connection
from farandole.coordinator.process import since
from farandole.pool import agent
from farandole.pool.agent import Agent, AgentIdentity
from farandole.protocol import messages
from tests.support.stage import Scenario, Stage, stage


def play(folder: Path, scenario: Scenario, limit_s: float = 30.0) -> None:
    async def perform() -> None:
        async with stage(folder) as scene:
            await asyncio.wait_for(scenario(scene), limit_s)

    asyncio.run(perform())


def test_each_report_is_answered(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        hello = messages.Hello(kind="host_agent", host="node", pid=1, pool="rack")
        async with subscribe(scene.ticket, hello) as subscription:
            for _ in range(2):
                await subscription.send(messages.Report(instance="a", state="ready"))
                assert await subscription.receive() == messages.HeartbeatAnswer()

    play(tmp_path, scenario)


def test_a_silent_agent_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENT_S", 0.1)

    async def scenario(scene: Stage) -> None:
        pool = messages.Hello(kind="agent_pool", host="here", pid=2, pool="rack")
        node = messages.Hello(kind="host_agent", host="node", pid=1, pool="rack")
        async with subscribe(scene.ticket, pool) as link, subscribe(scene.ticket, node) as subscription:
            report = messages.Report(instance="a", state="ready")
            await subscription.send(report)
            assert await link.receive() == messages.FromHost(host="node", message=report)
            assert await link.receive() == messages.FromHost(host="node")

    play(tmp_path, scenario)


def test_one_that_is_not_answered_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "SILENT_S", 0.2)
    monkeypatch.setattr(agent, "BEAT_S", 0.05)
    instances: list[str] = []

    async def serve_agent(connection: Connection, hello: messages.Hello) -> None:
        instances.append(hello.session)
        while await connection.receive() is not None:
            pass

    async def scenario(scene: Stage) -> None:
        monkeypatch.setattr(scene.server._agents, "serve_agent", serve_agent)
        folder = tmp_path / "agent"
        (folder / "logs").mkdir(parents=True)
        agent.leave_ticket(folder, scene.ticket)
        (folder / agent.TICKET).chmod(0o600)
        serving = asyncio.create_task(
            Agent(AgentIdentity(folder=folder, pool="rack", host="node", notices="none"), print).serve()
        )
        await scene.until(lambda: len(instances) == 3)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    play(tmp_path, scenario)


def prepared(folder: Path, ticket: Ticket) -> Path:
    """An agent's folder with a ticket."""
    (folder / "logs").mkdir(parents=True)
    agent.leave_ticket(folder, ticket)
    return folder


@pytest.mark.long
@pytest.mark.processes
def test_the_job_s_variables_are_in_the_environment_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the agent changes the folder of its process; this one is the tests' own
    (tmp_path / "train.py").write_text("import os, sys\nopen(sys.argv[1], 'w').write(os.environ['MINE'])\n")
    job = messages.Job(
        script="train.py", arguments=(str(tmp_path / "seen"),), folder=str(tmp_path), environ={"MINE": "{a: 1}"}
    )

    async def scenario(scene: Stage) -> None:
        folder = prepared(tmp_path / "agent", scene.ticket)
        pool = messages.Hello(kind="agent_pool", host="here", pid=2, pool="rack")
        identity = AgentIdentity(folder=folder, pool="rack", host="node", notices="none")
        async with subscribe(scene.ticket, pool) as link:
            serving = asyncio.create_task(Agent(identity, lambda _: None).serve())
            instance = (await next_report(link)).instance
            order = messages.AgentOrder(job=job, session="s", serial=1, instance=instance, workers=("w1",))
            await link.send(messages.ToHost(host="node", order=order))
            await scene.until(lambda: (tmp_path / "seen").exists() and (tmp_path / "seen").read_text(), 100.0)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    play(tmp_path, scenario, 120.0)  # a process loads torch
    assert (tmp_path / "seen").read_text() == "{a: 1}"


def test_with_a_grace_time_sigterm_is_a_notice_once_and_ends_nothing(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        folder = prepared(tmp_path / "agent", scene.ticket)
        pool = messages.Hello(kind="agent_pool", host="here", pid=2, pool="rack")
        identity = AgentIdentity(folder=folder, pool="rack", host="node", notices="none", grace_s=20.0)
        async with subscribe(scene.ticket, pool) as link:
            its = Agent(identity, lambda _: None)
            serving = asyncio.create_task(its.serve())
            assert (await next_report(link)).notified is None
            os.kill(os.getpid(), signal.SIGTERM)
            while (notified := (await next_report(link)).notified) is None:
                pass
            assert 0 < notified.at - time.time() <= 20.0
            assert not notified.advice
            its._on_sigterm()
            assert its._reconciler.notified == notified
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    play(tmp_path, scenario)


async def next_report(link: Subscription) -> messages.Report:
    message = await link.receive()
    assert isinstance(message, messages.FromHost)
    assert isinstance(message.message, messages.Report)
    return message.message


def test_an_agent_follows_the_run_s_ticket_in_a_folder_that_both_see(tmp_path: Path) -> None:
    """It was given one whose address is wrong by now, and so its workers get the right one too."""

    async def scenario(scene: Stage) -> None:
        current = msgspec.structs.replace(scene.ticket, since=2.0)
        old = msgspec.structs.replace(scene.ticket, address="http://127.0.0.1:1", since=1.0)
        folder, source = prepared(tmp_path / "agent", old), tmp_path / "shared"
        current.save(source)
        pool = messages.Hello(kind="agent_pool", host="here", pid=2, pool="rack")
        identity = AgentIdentity(folder=folder, pool="rack", host="node", notices="none", source=str(source))
        async with subscribe(scene.ticket, pool) as link:
            serving = asyncio.create_task(Agent(identity, lambda _: None).serve())
            await next_report(link)
            assert load(str(folder / agent.TICKET)) == current
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    play(tmp_path, scenario)


def test_without_a_coordinator_each_attempt_waits_whatever_has_changed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody hears of a change then, and an event that stays set would end each pause at once: a core is lost."""
    ended_at_once: list[bool] = []
    nowhere = Ticket(run="r", secret=new_secret(), address="http://127.0.0.1:1")
    identity = AgentIdentity(folder=prepared(tmp_path / "agent", nowhere), pool="rack", host="node", notices="none")

    async def up_to(seconds: float, event: asyncio.Event) -> None:
        ended_at_once.append(event.is_set())
        its._over = len(ended_at_once) == 3
        event.set()  # one of its workers has ended
        assert seconds > 0

    monkeypatch.setattr(agent, "up_to", up_to)
    its = Agent(identity, lambda _: None)
    its._reconciler.state = "ready"
    its._changed.set()
    asyncio.run(its.serve())
    assert ended_at_once == [False, False, False]


def test_a_ticket_of_who_was_there_before_does_not_replace_that_of_who_has_taken_over(tmp_path: Path) -> None:
    """The old machine may only be cut off, and still reach the host."""
    old = Ticket(address="http://127.0.0.1:1", secret="a" * 64, run="r", since=1.0)
    new = Ticket(address="http://127.0.0.2:1", secret="a" * 64, run="r", since=2.0)
    path = tmp_path / agent.TICKET
    for left, there in ((old, old), (new, new), (old, new), (new, new)):
        agent.leave_ticket(tmp_path, left)
        assert load(str(path)) == there
    old.save(path)
    assert newest(new, str(path)) == new, "nor does a worker go back"
    assert newest(old, str(path)) == old
    assert newest(msgspec.structs.replace(old, secret="b" * 64), str(path)).secret == "b" * 64, "another run's is none"


def test_who_serves_a_run_elsewhere_does_so_later_whatever_its_clock_says() -> None:
    before = Ticket(address="http://127.0.0.1:1", secret="a" * 64, run="r", since=time.time() + 3600.0)
    assert since(before, before.address) == before.since, "the same coordinator again, or its replacement"
    assert since(before, "http://127.0.0.2:1") > before.since
    assert 0 < since(None, before.address) <= time.time()
