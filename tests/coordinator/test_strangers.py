"""The server on loopback: what comes from those who don't keep to the protocol, or aren't let in. The run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import re
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from farandole.control.api import Api
from farandole.control.client import dial, subscribe
from farandole.control.ticket import Ticket, new_secret
from farandole.coordinator import connection as connection_module
from farandole.coordinator.journal import Journal
from farandole.coordinator.server import Server
from farandole.errors import CoordinatorUnreachable, NotTheCoordinator, UsageError
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import RunSettings
from tests.support.prove import prove
from tests.support.stage import Stage, play

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer 00"}, {"Authorization": "Farandole é"}])
@pytest.mark.parametrize("path", ["/control", "/api/status", "/nothing"])
def test_nobody_gets_anything_without_the_secret(tmp_path: Path, header: dict[str, str], path: str) -> None:
    async def scenario(scene: Stage) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{scene.ticket.address}{path}", headers=header) as response,
        ):
            assert response.status == 401

    play(tmp_path, scenario)


BAD_FRAMES = [
    pytest.param(b"\xc1", "malformed", id="not msgpack"),
    pytest.param(b"", "malformed", id="empty"),
    pytest.param(m.encode(m.Prepared(view=1)), "malformed", id="no Hello first"),
    pytest.param(m.encode(m.Hello(kind="king")), "malformed", id="unknown kind"),
    pytest.param(m.encode(m.Stop(stop=1)), "malformed", id="a coordinator's message"),
    pytest.param(b"\x00" * (m.MAX_MESSAGE_BYTES + 1), "malformed", id="too large"),
]


@pytest.mark.parametrize(("frame", "event"), BAD_FRAMES)
def test_what_breaks_the_protocol_is_closed_and_recorded_and_the_run_goes_on(
    tmp_path: Path, frame: bytes, event: str
) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        async with dial(scene.ticket) as socket:
            with contextlib.suppress(ConnectionError):
                await socket.send_bytes(frame)
            await asyncio.wait_for(socket.receive(), 10)
            await scene.until(lambda: scene.events(event))
            assert socket.closed or (await socket.receive()).type is not aiohttp.WSMsgType.BINARY
        step = scene.server.status().step
        await scene.until(lambda: scene.server.status().step > step)
        assert scene.events("lost") == []

    play(tmp_path, scenario)


def test_a_members_malformed_message_costs_its_connection_and_not_the_run(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        broken = scene.worker("w2")
        await scene.in_view("w1", "w2")
        await broken.socket.send_str("text")
        await scene.in_view("w1")
        assert [e["source"] for e in scene.events("malformed")] == ["worker w2"]
        assert [e["worker"] for e in scene.events("lost")] == ["w2"], "it has not come back"

    play(tmp_path, scenario, heartbeat_s=0.2, heartbeat_timeout_s=4.0)


def test_a_hello_said_again_is_refused_and_the_worker_keeps_its_place(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        second = scene.worker("w2")
        await scene.in_view("w1", "w2")
        async with dial(scene.ticket) as socket:
            await socket.send_bytes(m.encode(second.hello))
            assert (await asyncio.wait_for(socket.receive(), 10)).type is not aiohttp.WSMsgType.BINARY
        await scene.until(lambda: scene.events("malformed"))
        step = second.step
        await scene.until(lambda: scene.server.coordinator.workers["w2"].heartbeat.step > step + 3)
        assert (second.got(m.Stop), scene.events("lost")) == ([], [])

    play(tmp_path, scenario)


def test_a_peer_that_never_reads_costs_its_connection_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "LIMIT_BYTES", 1_000_000)

    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        host, port = scene.ticket.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        handshake = (
            f"GET /control HTTP/1.1\r\nHost: x\r\n{await prove(reader, writer, scene.ticket)}Upgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        writer.write(handshake.encode())
        await reader.readuntil(b"\r\n\r\n")
        hello = m.encode(m.Hello(kind="worker", worker="deaf"))
        masked = bytes([0x82, 0x80 | len(hello), 0, 0, 0, 0]) + hello  # a frame with a mask of zeros
        writer.write(masked)
        await scene.until(lambda: "deaf" in scene.server.coordinator.workers)
        huge = m.JoinRefused(reason="x" * 500_000)
        connection = scene.server._workers["deaf"]
        for _ in range(40):
            connection.send(m.encode(huge))
        await scene.until(lambda: not scene.server.coordinator.workers["deaf"].connected)
        writer.close()
        assert scene.server.coordinator.view

    play(tmp_path, scenario)


def test_requests_that_cannot_be_met_answer_with_the_reason(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        with pytest.raises(UsageError, match="--min 1"):
            await asyncio.to_thread(scene.api.scale, 0)
        with pytest.raises(UsageError, match=r"\bw9\b.*\bw1\b.*\bhere\b"):
            await asyncio.to_thread(scene.api.release, "w9")
        for body in ([], {"wanted": "many"}, {"wanted": 2, "more": 3}):
            with pytest.raises(UsageError, match="/api/scale"):
                await asyncio.to_thread(scene.api._ask, "POST", "/api/scale", body, dict[str, int])

    play(tmp_path, scenario)


def test_strange_secret_and_dead_address_are_unreachable(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        other = Ticket(address=scene.ticket.address, secret=new_secret(), run="old")
        with pytest.raises(NotTheCoordinator, match=re.escape(other.address)):
            await asyncio.to_thread(Api(other).status)
        with pytest.raises(NotTheCoordinator, match=re.escape(other.address)):
            async with subscribe(other, m.Hello(kind="observer")):
                pass
        dead = Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="old")
        with pytest.raises(CoordinatorUnreachable, match=re.escape(dead.address)):
            await asyncio.to_thread(Api(dead).status)
        with pytest.raises(CoordinatorUnreachable, match=re.escape(dead.address)):
            async with subscribe(dead, m.Hello(kind="observer")):
                pass

    play(tmp_path, scenario)


def test_only_loopback_is_served(tmp_path: Path) -> None:
    async def start() -> None:
        with closing(Journal(tmp_path)) as journal:
            await Server(RunSettings(run="r"), secret="s", journal=journal).start("0.0.0.0")

    with pytest.raises(UsageError, match=r"\b0\.0\.0\.0\b.*\bTLS\b"):
        asyncio.run(start())


def test_a_request_cut_short_is_no_error_of_ours(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        host, port = scene.ticket.address.removeprefix("http://").split(":")
        for body in (b"", b"{", b"5\r\n{", b"zz\r\n{"):
            for kind in (b"Content-Length: 100", b"Transfer-Encoding: chunked"):
                reader, writer = await asyncio.open_connection(host, int(port))
                head = f"POST /api/stop HTTP/1.1\r\nHost: x\r\n{await prove(reader, writer, scene.ticket)}"
                writer.write(head.encode() + kind + b"\r\n\r\n" + body)
                await writer.drain()
                await asyncio.to_thread(scene.api.status)  # what came is being worked on
                writer.transport.abort()
        await asyncio.to_thread(scene.api.scale, 2)
        assert not scene.serving.done()
        assert scene.server.status().state == "starting"

    play(tmp_path, scenario)
