"""At the coordinator's port: who has no ticket, and says what it likes, or nothing."""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import time
from collections.abc import Sequence

from attack.base import STRANGER, Attack, Succeeded
from attack.live import Live
from farandole.control.security import ticket_id

Address = tuple[str, int]
SILENT = 1000
TIMES = 20
PATIENCE_S = 8.0  # a stranger is sent away after five
WRONG = b"Authorization: Farandole proof=" + b"0" * 64 + b"\r\n"
UPGRADE = (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
    + b"A" * 22
    + b"==\r\n"
)
PLACES = (
    b"/",
    b"/control",
    b"/api/status",
    b"/api/scale",
    b"http://127.0.0.1/api/status",
    b"//x/api/status",
    b"/api/../api/status",
)
ASKED = tuple(
    b"GET " + place + b" HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n"
    for place in PLACES
    for head in (
        b"",
        WRONG,
        UPGRADE,
        WRONG + UPGRADE,
        b"Authorization: Farandole \xe9\r\n",
        b"Authorization: Basic Zg==\r\n",
        b"Authorization: Farandole id=" + b"0" * 64 + b", nonce=" + b"0" * 64 + b"\r\n",
    )
)
PROOF = re.compile(rb"proof=([0-9a-f]{64})")
EXPECTED = tuple(
    b"POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n" + head + b"\r\n{}"
    for head in (
        b"Expect: foo\r\n",
        b"Expect: 100-continue\r\n",
        WRONG + b"Expect: foo\r\n",
        b"Content-Encoding: gzip\r\n",
    )
)
JUNK = (bytes(range(256)) * 8, b"A" * 200_000, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"\0")


def say(address: Address, everything: Sequence[bytes]) -> bytes:
    """Each on a connection of its own, all of them at once; what came back until they were closed."""
    got = b""
    with selectors.DefaultSelector() as selector:
        for data in everything:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(address, 5)
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ)
                connection.send(data)
        deadline = time.monotonic() + PATIENCE_S
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(0.5):
                assert isinstance(key.fileobj, socket.socket)
                data = b""
                with contextlib.suppress(OSError):
                    data = key.fileobj.recv(65536)
                got += data + b"\n"
                if not data:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    return got


def asking(live: Live) -> str:
    """Every place, with no ticket and with wrong ones: 401, and nothing of what serves here."""
    answers = _answers(live.by_stranger(say, live.address, ASKED))
    if set(answers) != {b"401"}:
        raise Succeeded(f"answers {_counted(answers)}, where only 401 is due")
    return f"{len(answers)} requests: {_counted(answers)}"


def expecting(live: Live) -> str:
    got = live.by_stranger(say, live.address, EXPECTED)
    if b"aiohttp" in got or b"Python" in got:
        raise Succeeded(f"server and version told: {got[:120]!r}")
    if set(_answers(got)) - {b"401"}:
        raise Succeeded(f"answers {_counted(_answers(got))}, where only 401 is due")
    return _counted(_answers(got))


def reflecting(live: Live) -> str:
    """The ticket's name is no secret: who knows it asks the coordinator for its proof, and shows it that as his own."""
    got = live.by_stranger(reflect, live.address, ticket_id(live.ticket.secret).encode())
    if _answers(got) != [b"401", b"401"]:
        raise Succeeded(f"answers {_counted(_answers(got))}, where only 401 is due")
    return "the coordinator's own proof, said to it: 401"


def reflect(address: Address, name: bytes) -> bytes:
    request = b"GET /api/status HTTP/1.1\r\nHost: x\r\nAuthorization: Farandole %s\r\n\r\n"
    with socket.create_connection(address, 5) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(request % (b"id=" + name + b", nonce=" + b"5" * 64))
        got = connection.recv(65536)
        found = PROOF.search(got)
        connection.sendall(request % (b"proof=" + (found[1] if found else b"")))
        return got + connection.recv(65536)


def junk(live: Live) -> str:
    got = live.by_stranger(say, live.address, JUNK * TIMES)
    if b"aiohttp" in got or b"Python" in got:
        raise Succeeded("server and version told")
    return f"{len(JUNK) * TIMES} connections closed"


def silence(live: Live) -> str:
    """A thousand connections that stay; the owner's command gets through meanwhile."""
    with live.stranger(stay, live.address, SILENT, 3.0):
        status = live.run.command("status")
        live.until(lambda: status.poll() is not None, 20, "an answer to `farandole status`")
        if status.returncode != 0:
            raise Succeeded("`farandole status` got no answer")
    return f"{SILENT} silent connections; `farandole status` answered"


def stay(address: Address, count: int, seconds: float) -> bytes:
    """So many connections that say nothing, for so long; what they were sent."""
    held: list[socket.socket] = []
    with contextlib.suppress(OSError):
        for _ in range(count):
            held.append(socket.create_connection(address, 2))
    time.sleep(seconds)
    got = b""
    for each in held:
        each.setblocking(False)
        with contextlib.suppress(OSError):
            got += each.recv(4096)
        each.close()
    return got


def _answers(got: bytes) -> list[bytes]:
    return [part[2:5] for part in got.split(b"HTTP/1.")[1:]]


def _counted(answers: list[bytes]) -> str:
    return ", ".join(f"{answers.count(code)} x {code.decode(errors='replace')}" for code in sorted(set(answers)))


ATTACKS = (
    Attack(name="port: wrong tickets", who=STRANGER, act=asking, short=True),
    Attack(name="port: the coordinator's proof, reflected", who=STRANGER, act=reflecting),
    Attack(name="port: Expect", who=STRANGER, act=expecting, short=True),
    Attack(name="port: junk", who=STRANGER, act=junk),
    Attack(name="port: silence", who=STRANGER, act=silence),
)
