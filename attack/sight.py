"""At what shows a run: `/metrics` without its token, and the dashboard's port without its cookie."""

from __future__ import annotations

import signal
import subprocess
import sys
from urllib.parse import urlsplit

from attack.base import STRANGER, USER, Attack, NotMade, Succeeded
from attack.live import Live
from attack.port import say
from farandole.observe import report

METRICS = b"/metrics"
TOKENS = (b"", b"Bearer ", b"Bearer " + b"A" * 32, b"Bearer \xff\x00", b"Basic QTpB", b"bearer " + b"A" * 32)
PAGES = (b"/", b"/ticks", b"/log?worker=w1", b"/login?once=", b"/login?once=" + b"A" * 32)
COOKIES = (
    b"",
    b"Cookie: farandole-1=A\r\n",
    b"Cookie: " + b"; ".join(b"farandole-%d=" % n for n in range(400)) + b"\r\n",
)


def metrics(live: Live) -> str:
    """With no token, wrong ones, and one in the address, where it does not belong."""
    asked = [
        b"GET "
        + place
        + b" HTTP/1.1\r\nHost: x\r\n"
        + (b"Authorization: " + token + b"\r\n" if token else b"")
        + b"\r\n"
        for place in (METRICS, METRICS + b"?token=" + b"A" * 32, b"/metrics/../metrics")
        for token in TOKENS
    ]
    got = live.by_stranger(say, live.address, asked)
    if b"farandole" in got or set(_codes(got)) != {b"401"}:
        raise Succeeded(f"answers {sorted(set(_codes(got)))}, where only 401 is due")
    return f"{len(asked)} requests: 401"


def dashboard(live: Live) -> str:
    """The owner looks at the run; another one finds the port."""
    command = [sys.executable, "-m", "farandole", "dashboard", "--run", str(live.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            link = urlsplit(process.stdout.readline().split()[-1])
            if not link.port:
                raise NotMade("the dashboard did not start")
            here = b"Host: 127.0.0.1:%d\r\n" % link.port
            places = (*PAGES, *(b"/" + name.encode() for name in (*report.STYLES, *report.LIVE)))
            asked = [
                b"GET " + place + b" HTTP/1.1\r\n" + here + cookie + b"\r\n" for place in places for cookie in COOKIES
            ]
            asked += [
                b"POST /act HTTP/1.1\r\n" + here + b"Origin: http://127.0.0.1:%d\r\n" % link.port
                + b'Content-Type: application/json\r\nContent-Length: 13\r\n\r\n{"do":"stop"}',
                b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
            ]  # fmt: skip
            got = live.by_stranger(say, ("127.0.0.1", link.port), asked)
        finally:
            process.send_signal(signal.SIGINT)
    if set(_codes(got)) - {b"401", b"403", b"400"} or live.folder.name.encode() in got:
        raise Succeeded(f"answers {sorted(set(_codes(got)))}, where only 401, 403 and 400 are due")
    return f"{len(asked)} requests: nothing but how to log in"


def _codes(got: bytes) -> list[bytes]:
    return [part[2:5] for part in got.split(b"HTTP/1.")[1:]]


ATTACKS = (
    Attack(name="sight: /metrics", who=STRANGER, act=metrics, short=True),
    Attack(name="sight: the dashboard's port", who=USER, act=dashboard),
)
