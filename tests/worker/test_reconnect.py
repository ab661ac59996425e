"""Connections that break and come back, with the real server and the real client over loopback, in one process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import msgspec
import pytest

from farandole.protocol import messages as m
from farandole.protocol.view import CommitMessage
from farandole.protocol.worker.session import Session
from farandole.settings import Settings
from farandole.worker.connection import Connected
from tests.support.crew import crew
from tests.support.mentioned import mentions
from tests.support.proxy import DOWN, UP
from tests.support.stage import stage


def test_a_connection_that_is_reset(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with crew(tmp_path, minimum=2, wanted=2) as it:
            await it.join("w1", proxied=True)
            await it.join("w2")
            await it.in_view(1, "w1", "w2")
            for number in (2, 3):
                it.proxy.reset()
                await it.in_view(number, "w1", "w2")
            assert it.attempt("w1") == 3
            assert it.attempt("w2") == 1
            assert it.scene.events("lost") == []

    asyncio.run(scenario())


def test_all_connections_are_reset_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with crew(tmp_path, minimum=2, wanted=2) as it:
            await it.join("w1", proxied=True)
            await it.join("w2", proxied=True)
            await it.in_view(1, "w1", "w2")
            it.proxy.reset()
            await it.scene.until(lambda: it.attempt("w1") == it.attempt("w2") == 2)
            await it.scene.until(lambda: not it.scene.server.coordinator.stopping)
            view = it.scene.server.coordinator.view
            assert view is not None
            await it.in_view(view.number, "w1", "w2")
            assert it.scene.events("lost") == []

    asyncio.run(scenario())


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_a_dumb_connection_is_noticed_and_replaced(tmp_path: Path, direction: str) -> None:
    """Nobody is told of it: no FIN, no RST, only silence one way."""

    async def scenario() -> None:
        async with crew(tmp_path, heartbeat_timeout_s=1.0) as it:
            await it.join("w1", proxied=True)
            await it.in_view(1, "w1")
            it.proxy.silence(direction)
            await it.steps(3)  # nothing of a step waits for the coordinator
            await it.in_view(2, "w1")
            assert it.attempt("w1") == 2
            assert it.scene.events("lost") == []

    asyncio.run(scenario())


def test_a_dumb_connection_costs_no_live_worker(tmp_path: Path) -> None:
    """With others in the view, the coordinator need not wait for w1: it must have come back before."""

    async def scenario() -> None:
        async with crew(tmp_path, minimum=2, wanted=2, heartbeat_s=0.2, heartbeat_timeout_s=2.0) as it:
            await it.join("w1", proxied=True)
            await it.join("w2")
            await it.in_view(1, "w1", "w2")
            for attempt in range(2, 5):
                it.proxy.silence(UP)
                await it.scene.until(lambda attempt=attempt: it.scene.events("lost") or it.attempt("w1") == attempt)
                assert it.scene.events("lost") == []
                await it.scene.until(lambda: not it.scene.server.coordinator.stopping)
                await it.steps(3)

    asyncio.run(scenario())


def test_rank_0_sends_again_what_the_coordinator_has_not_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with crew(tmp_path, heartbeat_timeout_s=1.0) as it:
            trainer = await it.join("w1", proxied=True)
            await it.in_view(1, "w1")
            for direction in (UP, DOWN):
                it.proxy.silence(direction)  # lines are on their way into nowhere
                attempt = it.attempt("w1")
                await it.scene.until(lambda attempt=attempt: it.attempt("w1") > attempt)
                await it.steps(20)
            step = trainer.step
            lines = tmp_path / "metrics.jsonl"
            await it.scene.until(lambda: f'{{"step":{step},' in lines.read_text())
            written = [
                line["step"]
                for line in map(msgspec.json.decode, lines.read_bytes().splitlines())
                if "step" in line and "event" not in line
            ]
            assert written == list(range(len(written))), "each once, in order"

    asyncio.run(scenario())


def test_without_a_coordinator_it_trains_on_until_its_lease_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with crew(tmp_path, heartbeat_timeout_s=1.0, orphan_s=2.0) as it:
            trainer = await it.join("w1")
            client, member = trainer.client, trainer.client.state_machine
            await it.in_view(1, "w1")
            it.scene.serving.cancel()
            await it.scene.server.close()
            closed = time.monotonic()
            await it.steps(10)
            await it.scene.until(lambda: client.instructions.exit is not None)
            assert time.monotonic() - closed > 1.0, "it had been heard shortly before"
            assert client.instructions.exit is not None
            assert (client.instructions.exit.code, client.instructions.save_before_exit) == (4, True)
            assert mentions(client.instructions.exit.reason, "2 s")
            assert member.phase == "member", "nobody has stopped it"
            view = trainer.view
            assert view is not None
            round_ = member.round
            assert client.commit_message(view=view.number, round_=round_, compute_us=0, shards=1) is None
            word = CommitMessage(view=view.number, round=round_, prepared=0, compute_us=0, shards=1)
            assert not client.end_round([word])
            assert member.round == round_

    asyncio.run(scenario())


def test_the_metrics_up_to_a_failure_are_written_however_seldom_heartbeats_are(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with crew(tmp_path, minimum=2, wanted=2, heartbeat_s=20.0, heartbeat_timeout_s=100.0) as it:
            await it.join("w1")
            trainer = await it.join("w2")
            await it.in_view(1, "w1", "w2")
            step = trainer.step
            trainer.client.tell(m.ScriptFailed(traceback="OSError: no disk"))
            await it.scene.until(lambda: it.scene.server.coordinator.over)
            lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
            steps = [line["step"] for line in lines if "event" not in line]
            assert steps == list(range(len(steps)))
            assert len(steps) >= step, "the steps before the one in hand"

    asyncio.run(scenario())


def test_what_is_told_before_a_close_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if both come while the newest messages are on their way out already."""

    async def scenario() -> None:
        async with stage(tmp_path, heartbeat_s=0.1) as scene:
            client = await asyncio.to_thread(
                Connected, scene.ticket, Settings(worker="w1"), leave=lambda *_, **__: None
            )
            take = Session.take

            def meanwhile(session: Session) -> list[m.Message]:
                messages = take(session)
                monkeypatch.setattr(Session, "take", take)
                client.tell(m.ScriptFailed(traceback="OSError: no disk"))
                closing = threading.Thread(target=client.close)
                closing.start()
                closing.join(0.2)  # it waits for this one
                return messages

            monkeypatch.setattr(Session, "take", meanwhile)
            await scene.until(lambda: scene.events("failed"))
            assert scene.events("failed")[0]["traceback"] == "OSError: no disk"

    asyncio.run(scenario())
