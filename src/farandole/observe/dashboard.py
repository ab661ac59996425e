"""The web server of the dashboard, on the loopback interface only.

    GET  /login?once=TOKEN   a cookie, for the token of a link (see section "login"), and on to /
    GET  /                   the page; /page.js and others: its parts
    GET  /ticks              server-sent events: reading, run, about, `Tick` after `Tick` (see `observe/story.py`)
    GET  /log?worker=w2      the end of its log file
    POST /act                {"do": "release", "name": ..}, {"do": "scale", "wanted": ..}, {"do": "stop"}

A request without the cookie gets no content. Invariant: no request that another site triggers in a browser gets past
this file. The browser does not send the cookie with such a request. A request that acts must be JSON and have this
server as its Origin. A request to another host name than loopback's (DNS rebinding) is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from farandole import __version__
from farandole.control.api import Api
from farandole.control.run_folder import LOGS, METRICS, Tail
from farandole.control.status import Status
from farandole.errors import FarandoleError, UsageError
from farandole.observe import report as page
from farandole.observe.report import prices_in, settings_of
from farandole.observe.story import About, CostSummary, Story, UpdateStream, about, bill
from farandole.platform.files import opener
from farandole.platform.output import plain

# --- watch ------------------------------------------------------------------------------------------------------------
#
# The dashboard's data of a run: its lines as they come and, while a page is open, the coordinator's status.

EVERY_S = 1.0
SLICE = 2_000  # lines per turn, so that other tasks can run in between
BILL_S = 5.0  # between two updates of the cost


class RunWatch:
    """Follows one run; `await follow()` never returns. When there is news, `looked` is set and replaced by a new event.

    Attributes:
        watchers: number of open pages; if 0, the coordinator is not asked.
        behind: the part of the lines still to read, as text; "" if none.
    """

    def __init__(self, folder: Path, api: Callable[[], Api | None], live: Callable[[], bool]) -> None:
        """`api`: the coordinator's, None if there is none. `live`: returns True while the run is alive."""
        self.folder = folder
        self.name = folder.resolve().name
        self.story = Story()
        self.status: Status | None = None
        self.live = live()
        self.paid: CostSummary | None = None
        self.about: About = []
        self.watchers = 0
        self.behind = "0 %"
        self.looked = asyncio.Event()
        self._api, self._is_live = api, live
        self._tail = Tail(folder / METRICS)
        self._settings = settings_of(folder)
        self._billed = (-1, 0.0)  # events then, and when

    async def follow(self) -> None:
        while True:
            await self._read()
            self.live = await asyncio.to_thread(self._is_live)
            self.status = await asyncio.to_thread(self._ask) if self.watchers and self.live else None
            self._bill()
            looked, self.looked = self.looked, asyncio.Event()
            looked.set()
            await asyncio.sleep(EVERY_S)

    async def _read(self) -> None:
        while lines := self._tail.lines():
            for first in range(0, len(lines), SLICE):
                for line in lines[first : first + SLICE]:
                    self.story.take(line)
                await asyncio.sleep(0)
            if self.behind:
                self.behind = f"{100 * self._tail.at / max(self._tail.size, 1):.0f} %"
                self.looked.set()
                self.looked = asyncio.Event()
        self.behind = ""

    def _ask(self) -> Status | None:
        with suppress(FarandoleError, OSError):
            api = self._api()
            return None if api is None else api.status()
        return None

    def _bill(self) -> None:
        count, at = self._billed
        if self.story.count == count and time.monotonic() < at + BILL_S:
            return
        self._billed = (self.story.count, time.monotonic())
        self.about = about(self._settings, self.story, __version__)
        self.paid = bill(self.story.account.account(self.name, prices_in(self._settings)), self.story)


# --- login ------------------------------------------------------------------------------------------------------------
#
# Access control: a link that works once, then a cookie. Pure, except for the random numbers.
#
# 1. `farandole dashboard` prints a link with a random token. Only the user of the command can read it.
# 2. The first request with the token spends it, and gets a cookie with another random number, which scripts can't
#    read (HttpOnly) and other sites can't use (SameSite=Strict). The browser is sent on to an address without the
#    token: what stays in its history opens nothing.
# 3. A token that was used, or is older than `LINK_S`, counts as unknown.
#
# Only digests are stored, and they are compared in constant time.

LINK_S = 600.0
MOST = 64  # links and browsers that are stored; the oldest are dropped first


class Login:
    """Links and cookies: `link` returns a token, `enter` exchanges it for a cookie's value, `knows` checks it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._links: dict[bytes, float] = {}  # until when
        self._browsers: dict[bytes, None] = {}

    def link(self) -> str:
        token = secrets.token_urlsafe(24)
        self._links[_digest(token)] = self._clock() + LINK_S
        while len(self._links) > MOST:
            del self._links[next(iter(self._links))]
        return token

    def enter(self, token: str) -> str:
        """Returns the cookie's value; "" for a token that is unknown, used or too old."""
        stored = _among(_digest(token), self._links)
        if stored is None or self._links.pop(stored) < self._clock():
            return ""
        value = secrets.token_urlsafe(32)
        self._browsers[_digest(value)] = None
        while len(self._browsers) > MOST:
            del self._browsers[next(iter(self._browsers))]
        return value

    def knows(self, value: str) -> bool:
        return _among(_digest(value), self._browsers) is not None


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "replace")).digest()


def _among(digest: bytes, digests: dict[bytes, float] | dict[bytes, None]) -> bytes | None:
    """Returns the equal stored digest, None if there is none. Compares with all, so that the time reveals nothing."""
    matches = [each for each in digests if hmac.compare_digest(each, digest)]
    return matches[0] if matches else None


# --- server -----------------------------------------------------------------------------------------------------------

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
LOG_BYTES = 64 * 1024
BODY_BYTES = 16 * 1024
LINGER_S = 0.5
KINDS = {".js": "text/javascript", ".css": "text/css"}
SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
NOT_IN = (
    "This browser has not logged in. Open the link that `farandole dashboard` has printed: each works once, within ten "
    "minutes. Press Enter where it runs, and it prints another one.\n"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Act(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    do: Literal["release", "scale", "stop"]
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""
    wanted: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0


class DashboardServer:
    """The server. Call `await start()`, `link()` for each browser, and `await close()` at the end."""

    def __init__(self, watch: RunWatch, api: Callable[[], Api | None]) -> None:
        self._watch, self._api = watch, api
        self._login = Login(time.monotonic)
        self._cookie = ""
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_BYTES)
        app.add_routes([
            web.get("/login", self._enter), web.get("/", self._page), web.get("/ticks", self._ticks),
            web.get("/log", self._log), web.post("/act", self._act),
            *(web.get(f"/{name}", self._part) for name in (*page.STYLES, *page.LIVE)),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=LINGER_S)
        self.address = ""

    async def start(self, port: int = 0) -> str:
        """Starts to listen, and returns the address.

        Raises:
            UsageError: the port can't be used.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, LOOPBACK_HOSTS[0], port).start()
        except OSError as error:
            raise UsageError(
                f"--port {port}: {os.strerror(error.errno or 0)}; name another one, or none for any"
            ) from None
        port = self._runner.addresses[0][1]
        self._cookie = f"farandole-{port}"  # a browser keeps one jar for all ports of a host
        self.address = f"http://{LOOPBACK_HOSTS[0]}:{port}"
        return self.address

    def link(self) -> str:
        """Returns a new link, which logs in one browser once."""
        return f"{self.address}/login?once={self._login.link()}"

    async def close(self) -> None:
        await self._runner.cleanup()

    # --- who may -------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if urlsplit(f"//{request.host}").hostname not in LOOPBACK_HOSTS:
            return _words(f"{request.host} is not this dashboard's name; it answers at {self.address}\n", 403)
        if request.path != "/login" and not self._login.knows(request.cookies.get(self._cookie, "")):
            return _words(NOT_IN, 401)
        if request.method == "POST" and not _from_here(request):
            return _words("only this dashboard's own page may do that\n", 403)
        response = await handler(request)
        if not response.prepared:
            response.headers.update(SAFE)
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    async def _enter(self, request: web.Request) -> web.Response:
        value = self._login.enter(request.query.get("once", ""))
        if not value:
            if self._login.knows(request.cookies.get(self._cookie, "")):
                raise web.HTTPSeeOther("/")
            return _words(f"This link has been used, or is too old. {NOT_IN}", 401)
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(self._cookie, value, httponly=True, samesite="Strict", path="/")
        return response

    # --- what is seen --------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        del request
        return web.Response(text=page.live(), content_type="text/html")

    async def _part(self, request: web.Request) -> web.Response:
        name = request.path.removeprefix("/")
        kind = KINDS[f".{name.rpartition('.')[2]}"]
        return web.Response(text=page.part(name), content_type=kind, headers={"Cache-Control": "private, max-age=3600"})

    async def _ticks(self, request: web.Request) -> web.StreamResponse:
        watch = self._watch
        response = web.StreamResponse(
            headers={**SAFE, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        watch.watchers += 1
        try:
            while watch.behind:
                await response.write(_packet("reading", watch.behind.encode()))
                await watch.looked.wait()
            await response.write(_packet("run", msgspec.json.encode(watch.name)))
            telling, paid, sent_about = UpdateStream(watch.name, watch.story), None, None
            while True:
                if watch.about != sent_about:
                    sent_about = watch.about
                    await response.write(_packet("about", msgspec.json.encode(sent_about)))
                new, paid = (watch.paid if watch.paid is not paid else None), watch.paid
                tick = telling.tick(time.time(), watch.status, new, live=watch.live)
                await response.write(_packet("tick", msgspec.json.encode(tick)))
                await watch.looked.wait()
        except ConnectionError:
            return response  # the page was closed
        finally:
            watch.watchers -= 1

    async def _log(self, request: web.Request) -> web.Response:
        worker = request.query.get("worker", "")
        logs = {path.stem: path for path in (self._watch.folder / LOGS).glob("*.log")}
        if worker not in logs:
            return _words(f"no log of {plain(worker)} is on this machine: it is where the worker is\n", 404)
        with open(logs[worker], "rb", opener=opener) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            return _words(plain(file.read().decode(errors="replace")))

    # --- actions -----------------------------------------------------------------------------------------

    async def _act(self, request: web.Request) -> web.Response:
        try:
            act = msgspec.json.decode(await request.read(), type=Act)
        except msgspec.MsgspecError as error:
            return _words(f"{error}\n", 400)
        try:
            await asyncio.to_thread(self._do, act)
        except FarandoleError as error:
            return _words(f"{error}\n", 409)
        return _words("")

    def _do(self, act: Act) -> None:
        api = self._api()
        if api is None:
            raise UsageError(f"run {self._watch.name} is over")
        if act.do == "release":
            api.release(act.name)
        elif act.do == "scale":
            api.scale(act.wanted)
        else:
            api.stop("farandole dashboard", 0)


def _from_here(request: web.Request) -> bool:
    """Returns True if the request comes from this page, by headers that scripts of other sites can't set."""
    origin = urlsplit(request.headers.get("Origin", ""))
    return origin.netloc == request.host and request.content_type == "application/json"


def _words(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, headers={**SAFE, "Cache-Control": "no-store"})


def _packet(name: str, data: bytes) -> bytes:
    """JSON has no newlines."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
