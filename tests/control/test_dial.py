"""The client's side of a connection: an impostor, or a server without TLS, never sees the ticket's secret."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from farandole.control import security
from farandole.control.api import Api
from farandole.control.client import dial
from farandole.control.ticket import Ticket, new_secret
from farandole.errors import CoordinatorUnreachable, NotTheCoordinator
from tests.support.stage import Stage, play

pytestmark = pytest.mark.timeout(60)


class Impostor:
    """Answers at the coordinator's address with a certificate of its own, and keeps all that it is sent."""

    def __init__(self, folder: Path) -> None:
        self.context = security.certificate(folder).context
        self.heard = b""
        self.met = asyncio.Event()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            self.heard += await reader.read()
        self.met.set()
        writer.close()

    async def listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._meet, "127.0.0.1", 0, ssl=self.context)


async def by_rest(ticket: Ticket) -> None:
    await asyncio.to_thread(Api(ticket).status)


async def by_websocket(ticket: Ticket) -> None:
    async with dial(ticket):
        pass


@pytest.mark.parametrize("reach", [by_rest, by_websocket])
def test_an_impostor_never_sees_the_secret(tmp_path: Path, reach: Callable[[Ticket], Awaitable[None]]) -> None:
    async def meet() -> bytes:
        impostor = Impostor(tmp_path)
        server = await impostor.listen()
        port = server.sockets[0].getsockname()[1]
        pin = hashlib.sha256(b"the run's own").hexdigest()
        ticket = Ticket(address=f"https://127.0.0.1:{port}", secret=new_secret(), run="r", fingerprint=pin)
        with pytest.raises(NotTheCoordinator, match=re.escape(ticket.address)):
            await reach(ticket)
        await asyncio.wait_for(impostor.met.wait(), 20)
        server.close()
        return impostor.heard

    assert asyncio.run(meet()) == b""


@pytest.mark.parametrize("reach", [by_rest, by_websocket])
def test_a_server_without_tls_never_sees_the_secret(reach: Callable[[Ticket], Awaitable[None]]) -> None:
    async def meet() -> bytes:
        heard = b""
        met = asyncio.Event()

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal heard
            heard = await reader.read(10_000)
            writer.close()
            met.set()

        server = await asyncio.start_server(hear, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        ticket = Ticket(address=f"https://127.0.0.1:{port}", secret=new_secret(), run="r", fingerprint="0" * 64)
        with pytest.raises((CoordinatorUnreachable, aiohttp.ClientError)):
            await reach(ticket)
        await asyncio.wait_for(met.wait(), 20)
        server.close()
        assert ticket.secret.encode() not in heard
        return heard

    assert asyncio.run(meet())[:1] == b"\x16", "a TLS handshake's first byte"


def test_a_connection_that_opens_in_the_moment_of_its_cancellation_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[aiohttp.ClientWebSocketResponse]()
    connect = aiohttp.ClientSession.ws_connect

    async def scenario(stage: Stage) -> None:
        async def reach() -> None:
            async with dial(stage.ticket):
                raise AssertionError("it was cancelled")

        async def ws_connect(session: aiohttp.ClientSession, *args: Any, **kwargs: Any) -> Any:
            opened.append(await connect(session, *args, **kwargs))
            dialing.cancel()
            return opened[0]

        monkeypatch.setattr(aiohttp.ClientSession, "ws_connect", ws_connect)
        dialing = asyncio.create_task(reach())
        await asyncio.wait({dialing})
        monkeypatch.undo()
        assert dialing.cancelled()

    play(tmp_path, scenario)
    assert [socket.closed for socket in opened] == [True]
