"""The port as a stranger meets it, plain and over TLS, while a worker trains and its operator asks for the status."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from farandole.control import security
from farandole.control.client import dial, subscribe
from farandole.control.security import TicketProof
from farandole.coordinator import connection
from farandole.coordinator import listener as listeners
from farandole.coordinator.listener import CROWDED, LINES, MAX_PEERS, NO_TICKET, NOT_HTTP, NOT_TLS, SILENT, WRONG_TICKET
from farandole.protocol import messages as m
from tests.support.intruder import unverified
from tests.support.stage import Stage, stage

pytestmark = pytest.mark.timeout(60)
Scenario = Callable[[Stage], Awaitable[None]]


@pytest.fixture(params=["plain", "tls"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    """A server with two training workers; at the end they train on, in the same view, and nobody was lost."""

    async def perform(scenario: Scenario) -> None:
        certificate = security.certificate(tmp_path) if request.param == "tls" else None
        async with stage(tmp_path, certificate=certificate) as scene:
            scene.worker("w1")
            scene.worker("w2")
            await scene.in_view("w1", "w2")
            view = scene.server.coordinator.view
            assert view is not None
            await scenario(scene)
            step = scene.server.status().step
            await scene.until(lambda: scene.server.status().step > step)
            assert scene.server.coordinator.view == view
            assert scene.events("lost") == []
        told = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert scene.ticket.secret.encode() not in told

    return lambda scenario: asyncio.run(perform(scenario))


def place(scene: Stage) -> tuple[str, int]:
    host, port = scene.ticket.address.partition("://")[2].split(":")
    return host, int(port)


@asynccontextmanager
async def connected(scene: Stage) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """A stranger's connection, as far as TLS goes."""
    secure = scene.ticket.address.startswith("https")
    reader, writer = await asyncio.open_connection(*place(scene), ssl=unverified() if secure else None)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What the server said until it closed."""
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""


def reasons(scene: Stage) -> list[str]:
    return [event["reason"] for event in scene.events("stranger")]


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ("", NO_TICKET),
        ("Authorization: Bearer " + "0" * 64 + "\r\n", WRONG_TICKET),
        ("Authorization: Bearer \xe9\r\n", WRONG_TICKET),
        ("Content-Length: 1000000\r\n", NO_TICKET),
    ],
)
def test_without_the_ticket_one_is_refused_recorded_and_sent_away(
    play: Callable[[Scenario], None], head: str, reason: str
) -> None:
    async def scenario(scene: Stage) -> None:
        async with connected(scene) as (reader, writer):
            writer.write(f"GET /control HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode("latin-1"))
            answer = await closed(reader)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"aiohttp" not in answer
        await scene.until(lambda: reason in reasons(scene))
        [event] = scene.events("stranger")
        assert set(event) == {"event", "time", "source", "reason"}, "nothing of what was sent"
        assert event["source"] == "127.0.0.1"

    play(scenario)


@pytest.mark.parametrize("sent", [b"\x00\xff" * 100, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000])
def test_what_is_no_request_is_recorded_and_logs_no_traceback(
    play: Callable[[Scenario], None],
    sent: bytes,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(scene: Stage) -> None:
        async with connected(scene) as (reader, writer):
            writer.write(sent)
            assert (await closed(reader)).startswith((b"HTTP/1.", b""))
        await scene.until(lambda: NOT_HTTP in reasons(scene))

    play(scenario)
    assert capfd.readouterr().err == ""
    assert not caplog.records


@pytest.mark.parametrize("play", ["tls"], indirect=True)
def test_plain_http_on_the_tls_port_is_refused(play: Callable[[Scenario], None]) -> None:
    async def scenario(scene: Stage) -> None:
        reader, writer = await asyncio.open_connection(*place(scene))
        writer.write(f"GET /api/status HTTP/1.1\r\nAuthorization: {TicketProof(scene.ticket).opening}\r\n\r\n".encode())
        assert b"HTTP" not in await closed(reader)
        writer.close()
        await scene.until(lambda: NOT_TLS in reasons(scene))

    play(scenario)


@pytest.mark.parametrize("play", ["tls"], indirect=True)
def test_older_tls_is_refused(play: Callable[[Scenario], None]) -> None:
    async def scenario(scene: Stage) -> None:
        context = unverified()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(*place(scene), ssl=context)
        await scene.until(lambda: NOT_TLS in reasons(scene))

    play(scenario)


def test_a_thousand_silent_connections_hold_nobody_up(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are opened in a row; in between, the operator is answered, and afterwards one more observer gets in."""
    monkeypatch.setattr(listeners, "PEER_S", 2.0)

    async def scenario(scene: Stage) -> None:
        silent: list[socket.socket] = []
        took: list[float] = []
        loop = asyncio.get_running_loop()
        try:
            for number in range(1000):
                silent.append(socket.socket())
                silent[-1].setblocking(False)
                await loop.sock_connect(silent[-1], place(scene))
                if number % 50 == 49:
                    began = time.monotonic()
                    await asyncio.to_thread(scene.api.status)
                    took.append(time.monotonic() - began)
            listener = scene.server._listener
            assert listener is not None
            assert len(listener._peers) <= MAX_PEERS
            await scene.until(lambda: CROWDED in reasons(scene))
            async with subscribe(scene.ticket, m.Hello(kind="observer")) as late:
                assert isinstance(await asyncio.wait_for(late.receive(), 20), m.Note)
            print(f"status beside 1,000 silent connections: at most {1000 * max(took):.1f} ms")
            await scene.until(lambda: not listener._peers)
            await scene.until(lambda: SILENT in reasons(scene))
            assert len(scene.events("stranger")) <= 2 * LINES
        finally:
            for each in silent:
                each.close()

    play(scenario)


def test_who_dawdles_over_a_request_is_sent_away(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "PEER_S", 1.5)  # enough for a handshake, whatever else computes

    async def scenario(scene: Stage) -> None:
        async with connected(scene) as (reader, writer):
            writer.write(b"GET /control HTTP/1.1\r\n")
            ended = asyncio.create_task(closed(reader))
            while not ended.done():
                writer.write(b"X-Header: and another one\r\n")
                await asyncio.sleep(0.05)
            assert await ended == b""
        await scene.until(lambda: SILENT in reasons(scene))

    play(scenario)


def test_the_rest_of_a_flood_is_counted(play: Callable[[Scenario], None]) -> None:
    """So nobody fills the disk, and nothing is lost from the record."""

    async def scenario(scene: Stage) -> None:
        for _ in range(30):
            async with connected(scene) as (reader, writer):
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await closed(reader)
        scene.server._peers.count(float("inf"))
        await scene.until(lambda: scene.events("strangers"))
        assert reasons(scene).count(NO_TICKET) == LINES
        assert [(e["reason"], e["more"]) for e in scene.events("strangers")] == [(NO_TICKET, 30 - LINES)]

    play(scenario)


def test_a_flood_of_messages_slows_its_sender_and_nobody_else(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BURST", 50.0)

    async def scenario(scene: Stage) -> None:
        async with dial(scene.ticket) as flood:
            await flood.send_bytes(m.encode(m.Hello(kind="observer")))
            for _ in range(200):
                await flood.send_bytes(b"\x00" * 10)
            await scene.until(lambda: bool(reasons(scene)))
            assert len(reasons(scene)) == 1

    play(scenario)
