"""Whatever comes without the ticket, the answer is the one dismissal or none: no other status, header, name or version.

A table of all that makes an HTTP server answer for itself, before or beside the program that it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from farandole.control import security
from farandole.control.security import TicketProof
from farandole.control.ticket import Ticket, new_secret
from farandole.coordinator import listener as heads
from farandole.coordinator.listener import DISMISSAL, LONGEST, NO_TICKET, NOT_HTTP, WRONG_TICKET
from tests.support.intruder import unverified
from tests.support.prove import prove
from tests.support.stage import Stage, play

pytestmark = pytest.mark.timeout(60)
CLAIM = TicketProof(Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="r"))
GET = "GET /control HTTP/1.1\r\nHost: x\r\n"
UPGRADE = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n"
CASES = [
    # what is sent, why it is dismissed
    (f"{GET}\r\n", NO_TICKET),
    (f"{GET}Expect: foo\r\n\r\n", NO_TICKET),
    (f"{GET}Expect: 100-continue\r\nContent-Length: 5\r\n\r\n", NO_TICKET),
    (f"{GET}Expect: foo\r\nAuthorization: Bearer x\r\n\r\n", WRONG_TICKET),
    (f"{GET}Authorization: Farandole proof={'0' * 64}\r\nExpect: foo\r\n\r\n", WRONG_TICKET),
    (f"{GET}Authorization: {CLAIM.opening}\r\nAuthorization: {CLAIM.opening}\r\n\r\n", WRONG_TICKET),
    (f"{GET}Authorization: {CLAIM.opening.upper()}\r\n\r\n", WRONG_TICKET),
    (f"{GET}{UPGRADE}\r\n", NO_TICKET),
    (f"{GET}Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n\r\n", NO_TICKET),
    ("GET /nothing HTTP/1.1\r\n\r\n", NO_TICKET),
    ("GET http://x/control HTTP/1.1\r\nHost: y\r\n\r\n", NO_TICKET),
    ("HEAD / HTTP/1.1\r\nHost: x\r\n\r\n", NO_TICKET),
    ("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", NO_TICKET),
    ("CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", NO_TICKET),
    ("TRACE / HTTP/1.1\r\nHost: x\r\n\r\n", NO_TICKET),
    ("PATCH /api/stop HTTP/1.1\r\nHost: x\r\n\r\n", NO_TICKET),
    ("POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", NO_TICKET),
    ("POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", NO_TICKET),
    ("POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", NO_TICKET),
    ("POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", NO_TICKET),
    ("POST /api/stop HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", NO_TICKET),
    ("POST /api/stop HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", NO_TICKET),
    ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", NO_TICKET),
    ("GET / HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\n\r\n", NO_TICKET),
    ("GET / HTTP/1.0\r\n\r\n", NOT_HTTP),
    ("GET / HTTP/9.9\r\n\r\n", NOT_HTTP),
    ("GET /\r\n\r\n", NOT_HTTP),
    ("GET\r\n\r\n", NOT_HTTP),
    ("get / HTTP/1.1\r\n\r\n", NOT_HTTP),
    ("GET / x HTTP/1.1\r\n\r\n", NOT_HTTP),
    ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", NOT_HTTP),
    (f"{GET}no colon\r\n\r\n", NOT_HTTP),
    (f"{GET}X: folded\r\n  line\r\n\r\n", NOT_HTTP),
    (f"{GET}X : space\r\n\r\n", NOT_HTTP),
    (f"{GET}X: nul\0\r\n\r\n", NOT_HTTP),
    (f"{GET}X: {'x' * LONGEST}\r\n\r\n", NOT_HTTP),
    (f"GET /{'x' * LONGEST} HTTP/1.1\r\n\r\n", NOT_HTTP),
    (GET + "".join(f"X-{n}: y\r\n" for n in range(1000)) + "\r\n", NOT_HTTP),
    ("A" * (LONGEST + 1), NOT_HTTP),
    ("\r\n\r\n", NOT_HTTP),
    ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", NOT_HTTP),
    ("\x00\xff" * 100, NOT_HTTP),
    ("\x82\x85\0\0\0\0hello", NOT_HTTP),
    ("{}\n", NOT_HTTP),
    (f"{GET}Authorization: {CLAIM.opening}\r\n\r\n{GET}Expect: foo\r\n\r\n", NO_TICKET),
    (f"{GET}Authorization: {CLAIM.opening}\r\n\r\n{GET}Authorization: {CLAIM.opening}\r\n\r\n", WRONG_TICKET),
    (f"{GET}Authorization: {CLAIM.opening}\r\n\r\n\x82\x85\0\0\0\0hello", NOT_HTTP),
]


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_there_is_one_answer_for_all_who_know_nothing(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(scene: Stage) -> None:
        host, port = scene.ticket.address.partition("://")[2].split(":")
        reasons: list[str] = []
        scene.server._peers.on_rejected = lambda _, reason: reasons.append(reason)  # all of them, not a few
        listener = scene.server._listener
        assert listener is not None
        listener.on_rejected = scene.server._peers.on_rejected
        for sent, reason in CASES:
            reader, writer = await asyncio.open_connection(host, int(port), ssl=unverified() if kind == "tls" else None)
            writer.write(sent.encode("latin-1"))
            answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            if sent.startswith(f"{GET}Authorization: {CLAIM.opening}\r\n\r\n"):  # it was asked, and knew no answer
                question, end, answer = answer.partition(heads.END)
                assert question.startswith(b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Farandole nonce="), sent
                assert end, sent
            assert answer == DISMISSAL, f"{sent!r}: {answer!r}"
            assert reasons == [reason], f"{sent[:200]!r}: {reasons}"
            reasons.clear()
        await scene.until(lambda: not listener._peers)

    certificate = security.certificate(tmp_path) if kind == "tls" else None
    play(tmp_path, scenario, certificate=certificate)
    assert capfd.readouterr().err == ""
    assert not caplog.records


def test_the_dismissal_says_nothing() -> None:
    assert DISMISSAL == b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def test_byte_by_byte_it_is_the_same(tmp_path: Path) -> None:
    """A head that comes in pieces is understood, and so is one that ends in the middle of what follows."""

    async def scenario(scene: Stage) -> None:
        host, port = scene.ticket.address.partition("://")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        proof = await prove(reader, writer, scene.ticket)
        for byte in f"GET /api/alive HTTP/1.1\r\nHost: x\r\n{proof}\r\nGET /api/alive HTTP/1.1\r\nHost: x\r\n\r\n":
            writer.write(byte.encode())
            await asyncio.sleep(0)
        for _ in range(2):
            assert (await reader.readuntil(b"\r\n\r\n{}")).startswith(b"HTTP/1.1 200 OK")
        writer.close()

    play(tmp_path, scenario)
