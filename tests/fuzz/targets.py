"""What can be fed arbitrary bytes, as one table: a name, seeds that are nearly right, and a function that takes bytes.

A target returns whatever the bytes are, or raises what its module promises; anything else is a bug. Both the property
tests (`test_arbitrary_bytes.py`) and the coverage-guided harness (`harness.py`) run this table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from prove import prove

from farandole.collective.state import encode, restore
from farandole.control import head
from farandole.control import ticket as tickets
from farandole.control.challenge import CHALLENGE, Claim, Examination, ticket_id
from farandole.control.endpoint import parse
from farandole.control.journal import Journal
from farandole.control.rest import Release, Scale, Stop
from farandole.control.server import Server
from farandole.control.ticket import Ticket
from farandole.control.tickets import Issued, Tickets
from farandole.errors import CoordinatorUnreachable, ProtocolError, UsageError
from farandole.membership import messages as m
from farandole.membership.records import RunSettings

SECRET = "5e" * 32


@dataclass(frozen=True)
class Target:
    feed: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


MESSAGES: tuple[m.Message, ...] = (
    m.Hello(kind="worker", worker="w1", host="here", pid=1, pool="local"),
    m.Hello(kind="pool", pool="local"),
    m.Hello(kind="observer"),
    m.Ready(signature=m.Signature(facts=(("torch", "2"), ("weight", "3x4 float32")))),
    m.Heartbeat(view=1, round=2, step=3, lines=(m.Line(step=3, index=0, fields={"loss": 0.5, "n": 1, "s": "x"}),)),
    m.Leaving(reason="SIGTERM"),
    m.Publish(group=1, key="0/1", value=b"\x00" * 16),
    m.Prepared(view=1),
    m.Switched(view=1, round=1, step=0),
    m.Level(view=1),
    m.Suspect(view=1, peer="w2", reason="gone"),
    m.Failed(traceback="Traceback"),
    m.Saved(path="there"),
    m.Finished(fingerprint="f"),
)
ENCODED = tuple(m.encode(message) for message in MESSAGES)


def message(data: bytes) -> None:
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        decoded = m.decode_from_worker(data)
        assert m.encode(m.decode_from_worker(m.encode(decoded))) == m.encode(decoded)


def answer(data: bytes) -> None:
    """What a worker may get from whoever answers for the coordinator."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        m.decode_from_coordinator(data)


_folder = tempfile.TemporaryDirectory(prefix="farandole-fuzz-")


def ticket(data: bytes) -> None:
    path = Path(_folder.name) / "ticket"
    path.write_bytes(data)
    loaded: Ticket | None = None
    with contextlib.suppress(UsageError):
        loaded = tickets.load(str(path))
    if loaded is None:
        return
    assert loaded.address.startswith(("http://", "https://"))
    assert len(bytes.fromhex(loaded.secret)) == tickets.SECRET_BYTES
    assert loaded.address.startswith("https://") == bool(loaded.fingerprint)


TICKETS = tuple(
    msgspec.json.encode(Ticket(address=address, secret=SECRET, run="r", fingerprint=pin))
    for address, pin in (
        ("http://127.0.0.1:4000", ""),
        ("https://node1:1", "f" * 64),
        ("https://[fd00::5]:65535", SECRET),
    )
)


def issued(data: bytes) -> None:
    """FOLDER/tickets: whatever is in it, the owner gets in, and who is let in is not over."""
    path = Path(_folder.name) / "tickets"
    path.write_bytes(data)
    known = Tickets(SECRET, path)
    with contextlib.suppress(UsageError):
        known.reread()
    assert known.known[ticket_id(SECRET)] == SECRET
    for each in known.known:
        assert known.owners(each) or known.forbids(each, "/api/stop")
        assert not known.revoked(each) or known.over(each)


ISSUED = tuple(
    msgspec.json.encode(
        tuple(Issued(name=f"t{n}", secret=f"{n:064x}", expires=n, revoked=n == 2) for n in range(count))
    )
    for count in (0, 1, 3)
)


def listen(data: bytes) -> None:
    with contextlib.suppress(UsageError):
        parse(data.decode(errors="replace"))


def body(data: bytes) -> None:
    for kind in (Scale, Release, Stop):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            msgspec.json.decode(data, type=kind)


def state(data: bytes) -> None:
    payload = torch.zeros(data[0] * 8 if data else 0, dtype=torch.uint8)
    with contextlib.suppress(ProtocolError):
        restore(data[1:], payload)


SKELETONS = tuple(
    bytes([8]) + encode(nested)[0]
    for nested in ({"w": torch.zeros(2, 3), "n": [1, 2.0, None, "x"]}, [torch.zeros(4, dtype=torch.bool), {"a": (1,)}])
)


OPENING = Claim(Ticket(address="http://127.0.0.1:1", secret=SECRET, run="r")).opening
HEADS = tuple(
    f"GET /control HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode()
    for header in (f"Authorization: {OPENING}", f"authorization:Farandole proof={SECRET}", "Expect: foo", "X: \xff")
)


def knock(data: bytes) -> None:
    """A stranger's request, as the door reads it, and what came back to a client, if that was it."""
    examination = Examination({ticket_id(SECRET): SECRET})
    with contextlib.suppress(ValueError):
        given = head.authorization(data)
        if given is not None and (challenge := examination.challenge(given)):
            assert CHALLENGE.fullmatch(challenge)
        assert not examination.passed(given or "")
    with contextlib.suppress(CoordinatorUnreachable):
        Claim(Ticket(address="http://127.0.0.1:1", secret=SECRET, run="r")).answer(data.decode("latin-1"))


class Wire:
    """A server on loopback in a loop of its own; each input is one connection's bytes, TCP's, HTTP's or WebSocket's."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._unhandled)
        self.failed: list[object] = []
        logs = logging.Handler()
        logs.emit = self.failed.append
        logging.getLogger("aiohttp.server").addHandler(logs)
        self.folder = tempfile.TemporaryDirectory(prefix="farandole-fuzz-")
        self.journal = Journal(Path(self.folder.name))
        self.server = Server(RunSettings(run="r"), secret=SECRET, journal=self.journal)
        address = self.loop.run_until_complete(self.server.start())
        self.place = address.removeprefix("http://").split(":")
        self.ticket = Ticket(address=address, secret=SECRET, run="r")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        self.failed.append(context)

    def stranger(self, data: bytes) -> None:
        """What comes of a connection that has proved nothing."""
        self.loop.run_until_complete(self._send(data, proves=False))

    def request(self, data: bytes) -> None:
        """PROOF in the bytes stands for a header that the connection is admitted with: most of the server is behind."""
        self.loop.run_until_complete(self._send(data))

    def frames(self, data: bytes) -> None:
        """What comes after the handshake."""
        self.loop.run_until_complete(self._send(UPGRADE + data))

    def hello(self, data: bytes) -> None:
        """One frame, as a worker masks it."""
        self.frames(frame(data))

    def converse(self, said: Sequence[tuple[int, m.Message]]) -> None:
        """Three workers say Hello, and then each what it is told to, in this order."""
        self.loop.run_until_complete(self._converse(said))

    async def _converse(self, said: Sequence[tuple[int, m.Message]]) -> None:
        writers: list[asyncio.StreamWriter] = []
        for number in range(3):
            reader, writer = await asyncio.open_connection(*self.place)
            upgrade = UPGRADE.replace(b"PROOF", (await prove(reader, writer, self.ticket)).encode())
            writer.write(upgrade + frame(m.encode(m.Hello(kind="worker", worker=f"w{number + 1}"))))
            writers.append(writer)
        for worker, message in said:
            writers[worker].write(frame(m.encode(message)))
            await self._turns(10)
        for writer in writers:
            writer.transport.abort()
        await self._check()

    async def _turns(self, count: int) -> None:
        """Of the loop, in which the server deals with what it got."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def _send(self, data: bytes, *, proves: bool = True) -> None:
        reader, writer = await asyncio.open_connection(*self.place)
        if proves:
            data = data.replace(b"PROOF", (await prove(reader, writer, self.ticket)).encode())
        head, end, rest = data.partition(b"\r\n\r\n")
        for part in (head + end, rest):  # a body that comes later meets a handler that waits for it
            writer.write(part)
            await self._turns(30)
        writer.transport.abort()
        await self._check()

    async def _check(self) -> None:
        await self._turns(10)
        self.server.coordinator.tick(self.server.now())
        self.server.flush()
        self.server._write_lines()
        assert self.server._broken is None, repr(self.server._broken)
        assert not self.failed, f"a stranger's bytes in a log or an unhandled exception: {self.failed}"
        if self.server.coordinator.over or self.server.coordinator.ending:  # a Stop got through: begin anew
            self.server.coordinator = type(self.server.coordinator)(RunSettings(run="r"))
            self.server._over.clear()

    def close(self) -> None:
        self.loop.run_until_complete(self.server.close())
        self.loop.close()
        self.journal.close()
        self.folder.cleanup()


AUTHORIZED = "Host: x\r\nPROOF"
UPGRADE = (
    f"GET /control HTTP/1.1\r\n{AUTHORIZED}Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
).encode()
POST = f"POST /api/%s HTTP/1.1\r\n{AUTHORIZED}%s\r\n\r\n%s"
REQUESTS = (
    b"GET /api/status HTTP/1.1\r\nHost: x\r\n\r\n",
    f"GET /api/status HTTP/1.1\r\n{AUTHORIZED}\r\n".encode(),
    (POST % ("scale", "Content-Length: 12", '{"wanted":2}')).encode(),
    (POST % ("release", "Content-Length: 13", '{"name":"w1"}')).encode(),
    (POST % ("scale", "Transfer-Encoding: chunked", 'c\r\n{"wanted":2}\r\n0\r\n\r\n')).encode(),
    (POST % ("scale", "Content-Encoding: deflate\r\nContent-Length: 4", "zzzz")).encode(),
    (POST % ("scale", "Content-Encoding: gzip\r\nTransfer-Encoding: chunked", "4\r\nzzzz\r\n0\r\n\r\n")).encode(),
    b"POST / HTTP/1.1\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nzzzz\r\n0\r\n\r\n",
    (POST % ("stop", "Content-Length: 2", "{}")).encode(),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)


def frame(payload: bytes) -> bytes:
    """A binary WebSocket frame with a mask of zeros."""
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else bytes([0xFE]) + size.to_bytes(2, "big")
    return b"\x82" + length + b"\0\0\0\0" + payload


def targets(wire: Wire) -> dict[str, Target]:
    """`wire` serves the last four."""
    frames = tuple(b"".join(frame(each) for each in ENCODED[:n]) for n in (1, 5))
    return {
        "message": Target(message, ENCODED),
        "answer": Target(answer, ENCODED),
        "ticket": Target(ticket, TICKETS),
        "tickets": Target(issued, ISSUED),
        "listen": Target(listen, (b"10.0.0.5:4000", b"[fd00::5]:1", b"node1")),
        "body": Target(body, (b'{"wanted":2}', b'{"name":"w1"}', b'{"reason":"x","code":1}')),
        "state": Target(state, SKELETONS),
        "head": Target(knock, HEADS),
        "stranger": Target(wire.stranger, (*HEADS, *REQUESTS)),
        "request": Target(wire.request, REQUESTS),
        "frames": Target(wire.frames, (*frames, b"\x81\x80\0\0\0\0", b"\x88\x80\0\0\0\0", b"\x89\x81\0\0\0\0x")),
        "hello": Target(wire.hello, ENCODED),
    }
