"""An agent and its connection: it is answered, and where it is not, it goes and looks for another coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from farandole.control.subscription import subscribe
from farandole.coordinator import agents
from farandole.coordinator.connection import Connection
from farandole.membership import hosts
from farandole.membership import messages as m
from farandole.pool.agents import agent, post
from farandole.pool.agents.agent import Agent
from farandole.pool.agents.post import Post
from tests.support.stage import Scenario, Stage, stage


def play(folder: Path, scenario: Scenario) -> None:
    async def perform() -> None:
        async with stage(folder) as scene:
            await asyncio.wait_for(scenario(scene), 30)

    asyncio.run(perform())


def test_each_report_is_answered(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        hello = m.Hello(kind="agent", host="node", pid=1, pool="rack")
        async with subscribe(scene.ticket, hello) as subscription:
            for _ in range(2):
                await subscription.send(hosts.Report(instance="a", state="ready"))
                assert await subscription.receive() == m.Heard()

    play(tmp_path, scenario)


def test_a_silent_agent_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "SILENT_S", 0.1)

    async def scenario(scene: Stage) -> None:
        pool = m.Hello(kind="agents", host="here", pid=2, pool="rack")
        node = m.Hello(kind="agent", host="node", pid=1, pool="rack")
        async with subscribe(scene.ticket, pool) as link, subscribe(scene.ticket, node) as subscription:
            report = hosts.Report(instance="a", state="ready")
            await subscription.send(report)
            assert await link.receive() == hosts.FromHost(host="node", said=report)
            assert await link.receive() == hosts.FromHost(host="node")

    play(tmp_path, scenario)


def test_one_that_is_not_answered_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "SILENT_S", 0.2)
    monkeypatch.setattr(agent, "BEAT_S", 0.05)
    instances: list[str] = []

    async def serve_agent(connection: Connection, hello: m.Hello) -> None:
        instances.append(hello.session)
        while await connection.receive() is not None:
            pass

    async def scenario(scene: Stage) -> None:
        monkeypatch.setattr(scene.server._agents, "serve_agent", serve_agent)
        folder = tmp_path / "agent"
        (folder / "logs").mkdir(parents=True)
        post.leave_ticket(folder, msgspec.json.encode(scene.ticket))
        (folder / post.TICKET).chmod(0o600)
        serving = asyncio.create_task(
            Agent(Post(folder=folder, pool="rack", host="node", notices="none"), print).serve()
        )
        await scene.until(lambda: len(instances) == 3)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    play(tmp_path, scenario)
