"""`/metrics` at the coordinator's port: the token's holder gets that page and no more, others what strangers get."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "prometheus_client", reason="prometheus_client is not installed: pip install 'farandole[prometheus]'"
)

from farandole.control import security
from farandole.coordinator import listener as listeners
from farandole.coordinator import prometheus
from farandole.coordinator.listener import DISMISSAL, NO_TICKET, WRONG_TICKET
from farandole.coordinator.prometheus import Exposition
from farandole.protocol.settings import Exports
from tests.support.intruder import unverified
from tests.support.mentioned import mentions
from tests.support.stage import Stage, play

pytestmark = pytest.mark.timeout(60)
TOKEN = "s3cret-0123456789abcdef"
GET = "GET /metrics HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


async def ask(scene: Stage, request: str, *, secure: bool = False) -> bytes:
    """All that comes until the connection is closed."""
    host, port = scene.ticket.address.partition("://")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=unverified() if secure else None)
    writer.write(request.encode("latin-1"))
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return answer


def shown(folder: Path, token: Path, scenario: Callable[[Stage], Awaitable[None]], **more: Any) -> None:
    play(folder, scenario, exports=Exports(metrics_token=str(token)), **more)


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_the_tokens_holder_gets_the_page(tmp_path: Path, token: Path, kind: str) -> None:
    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        await scene.until(lambda: scene.server.status().step > 2)
        for extra in ("", "Accept: application/openmetrics-text;version=1.0.0\r\nAccept-Encoding: gzip\r\n"):
            head, _, page = (
                await ask(scene, f"{GET}{extra}Authorization: Bearer {TOKEN}\r\n\r\n", secure=kind == "tls")
            ).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n")
            assert f"Content-Length: {len(page)}\r\n".encode() in head
            assert b"\nfarandole_view_workers 1.0\n" in page
            assert b'farandole_events_total{event="view"} ' in page
        assert scene.events("stranger") == []
        listener = scene.server._listener
        assert listener is not None
        assert not listener._peers

    certificate = security.certificate(tmp_path) if kind == "tls" else None
    shown(tmp_path, token, scenario, certificate=certificate)
    told = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path != token)
    assert TOKEN.encode() not in told


STRANGE = [
    (f"{GET}\r\n", NO_TICKET),
    (f"{GET}Authorization: Bearer {TOKEN[:-1]}\r\n\r\n", WRONG_TICKET),
    (f"{GET}Authorization: Bearer {TOKEN}x\r\n\r\n", WRONG_TICKET),
    (f"{GET}Authorization: Bearer {TOKEN.upper()}\r\n\r\n", WRONG_TICKET),
    (f"{GET}Authorization: Bearer \r\n\r\n", WRONG_TICKET),
    (f"{GET}Authorization: Bearer \xff\r\n\r\n", WRONG_TICKET),
    (f"{GET}Authorization: Basic {TOKEN}\r\n\r\n", WRONG_TICKET),
    (f"{GET}Authorization: {TOKEN}\r\n\r\n", WRONG_TICKET),
    (f"{GET}Authorization: Bearer {TOKEN}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n", WRONG_TICKET),
    (f"GET /metrics?token={TOKEN} HTTP/1.1\r\nHost: x\r\n\r\n", NO_TICKET),
]


def test_without_the_token_one_is_dismissed_as_everybody_is(tmp_path: Path, token: Path) -> None:
    async def scenario(scene: Stage) -> None:
        reasons: list[str] = []
        listener = scene.server._listener
        assert listener is not None
        listener.on_rejected = lambda _, reason: reasons.append(reason)  # all of them, not a few
        for request, reason in STRANGE:
            assert await ask(scene, request) == DISMISSAL, request
            assert reasons == [reason], request
            reasons.clear()

    shown(tmp_path, token, scenario)


def test_the_token_opens_nothing_else(tmp_path: Path, token: Path) -> None:
    async def scenario(scene: Stage) -> None:
        bearer = f"Host: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        gets = ("/api/status", "/control", "/", "/metrics/", "http://x/metrics", "//metrics", "/metrics/../api/status")
        others = ("POST /api/stop", "POST /metrics", "HEAD /metrics")
        for line in (*(f"GET {path}" for path in gets), *others):
            answer = await ask(scene, f"{line} HTTP/1.1\r\n{bearer}\r\n")
            assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n"), line
            assert b"farandole_" not in answer, line
        two = f"{GET}Authorization: Bearer {TOKEN}\r\n\r\nPOST /api/stop HTTP/1.1\r\n{bearer}\r\n"
        answer = await ask(scene, two)
        assert answer.count(b"HTTP/1.1 ") == 1, "one request, and the connection ends"
        upgrade = (
            "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n"
        )
        answer = await ask(scene, f"GET /control HTTP/1.1\r\n{bearer}{upgrade}\r\n")
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert scene.server.coordinator.ending is None

    shown(tmp_path, token, scenario)


def test_without_a_token_of_the_runs_there_is_no_page(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        assert await ask(scene, f"{GET}Authorization: Bearer {TOKEN}\r\n\r\n") == DISMISSAL

    play(tmp_path, scenario)


def test_a_token_that_is_gone_when_the_coordinator_comes_again_ends_nothing(tmp_path: Path, token: Path) -> None:
    token.unlink()

    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        assert await ask(scene, f"{GET}Authorization: Bearer {TOKEN}\r\n\r\n") == DISMISSAL
        await scene.until(lambda: scene.events("not told"))
        assert mentions(scene.events("not told")[0]["reason"], "/metrics", "--metrics-token")

    shown(tmp_path, token, scenario)


def test_an_error_of_our_own_costs_the_answer_and_nothing_else(
    tmp_path: Path, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Exposition) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Exposition, "text", broken)

    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        answer = await ask(scene, f"{GET}Authorization: Bearer {TOKEN}\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 500 ")
        await scene.until(lambda: scene.events("not told"))
        step = scene.server.status().step
        await scene.until(lambda: scene.server.status().step > step)

    shown(tmp_path, token, scenario)


def test_lines_that_it_can_not_take_cost_it_the_rest_and_nothing_else(
    tmp_path: Path, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []

    def broken(_: Exposition, line: object) -> None:
        taken.append(line)
        raise RuntimeError("a bug")

    monkeypatch.setattr(Exposition, "take", broken)

    async def scenario(scene: Stage) -> None:
        scene.worker("w1")
        await scene.in_view("w1")
        await scene.until(lambda: scene.events("not told"))
        step = scene.server.status().step
        await scene.until(lambda: scene.server.status().step > step)
        assert len(taken) == 1
        assert mentions(scene.events("not told")[0]["reason"], "/metrics")

    shown(tmp_path, token, scenario)


def test_who_does_not_take_the_page_is_sent_away(tmp_path: Path, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the kernel keeps for a connection, and nobody who reads it."""
    monkeypatch.setattr(listeners, "PAGE_S", 0.3)
    monkeypatch.setattr(Exposition, "text", lambda _: b"x" * 64_000_000)

    async def scenario(scene: Stage) -> None:
        host, port = scene.ticket.address.partition("://")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(f"{GET}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        got = await reader.readexactly(1)
        await asyncio.sleep(listeners.PAGE_S)  # by this loop's clock, as the listener's: its time ends before
        with contextlib.suppress(ConnectionError):
            got += await asyncio.wait_for(reader.read(), 20)
        assert len(got) < 64_000_000
        writer.close()

    shown(tmp_path, token, scenario)


def test_who_takes_a_page_slowly_leaves_nothing_behind(
    tmp_path: Path, token: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is closed when the page has gone out, before its time ends."""
    monkeypatch.setattr(listeners, "PAGE_S", 2.0)
    monkeypatch.setattr(Exposition, "text", lambda _: b"x" * 16_000_000)

    async def scenario(scene: Stage) -> None:
        await ask(scene, f"{GET}Authorization: Bearer {TOKEN}\r\n\r\n")
        await asyncio.sleep(listeners.PAGE_S)
        assert not [record for record in caplog.records if record.name == "asyncio"]

    shown(tmp_path, token, scenario)


def test_tokens_are_compared_in_a_time_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hmac.compare_digest, of digests: of equal length, whatever is given."""
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append((len(given), len(expected)))
        return real(given, expected)

    monkeypatch.setattr(prometheus.hmac, "compare_digest", compare)
    page = prometheus.Page(TOKEN.encode(), Exposition.__new__(Exposition), None)  # type: ignore[arg-type]
    for given in ("", "x", TOKEN[:-1], "x" * 8000):
        assert page.answer(f"Bearer {given}", "GET /metrics") == b""
    assert compared == [(32, 32)] * 4
