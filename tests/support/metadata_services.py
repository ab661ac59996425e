"""The metadata services of three clouds, as real servers on loopback, from their documentation: see `pool/notices/`.

Each runs in a thread of its own, as a context; what it says is set from outside. What the documentation demands of a
request (a token, a header, a version) it demands, and `asked` counts the requests by method and path.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from datetime import datetime, timedelta, timezone
from types import TracebackType
from typing import Any, TypeVar

from aiohttp import web

S = TypeVar("S", bound="Service")


class Service:
    """Attributes:
    address: of the server.
    asked: how often each "METHOD /path" was.
    hangs: what is asked of these, "METHOD /path", gets no answer.
    broken: so many requests are answered with status 500 from now on.
    garbage: what is answered instead, to all but the question who is there.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.asked: Counter[str] = Counter()
        self.hangs: set[str] = set()
        self.broken = 0
        self.garbage: str | None = None
        self._bind = host, port
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._ready = threading.Event()

    def __enter__(self: S) -> S:
        self._thread.start()
        assert self._ready.wait(200)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(30)

    def set(self, **values: Any) -> None:
        """What it says from now on, all at once."""

        def change() -> None:
            for name, value in values.items():
                assert hasattr(self, name)
                setattr(self, name, value)
            self._changed.set()
            self._changed = asyncio.Event()

        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (change(), done.set()))
        assert done.wait(200)

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, *self._bind)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"
        self._ready.set()
        await self._stopping.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        what = f"{request.method} {request.path}"
        self.asked[what] += 1
        if what in self.hangs:
            await self._stopping.wait()
        if self.broken:
            self.broken -= 1
            return web.Response(status=500)
        return await self.answer(request)

    async def answer(self, request: web.Request) -> web.Response:
        raise NotImplementedError


class Ec2Service(Service):
    """IMDSv2: a token by PUT, without which nothing is answered.

    `action` and `rebalance` are what the two items say, "" for 404. `tokens`: those that hold.
    """

    action = rebalance = ""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(host, port)
        self.tokens: set[str] = set()
        self._given = 0

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/latest/api/token":
            return self._token(request)
        if request.method != "GET":
            return web.Response(status=405)
        if request.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return web.Response(status=401)
        said = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }.get(request.path, "")
        if self.garbage is not None:
            return web.Response(text=self.garbage)
        return web.Response(text=said) if said else web.Response(status=404)

    def _token(self, request: web.Request) -> web.Response:
        if request.method != "PUT":
            return web.Response(status=405)
        if "X-Forwarded-For" in request.headers:
            return web.Response(status=403)
        ttl = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= 21_600:
            return web.Response(status=400)
        self._given += 1
        token = f"token-{self._given}=="
        self.tokens.add(token)
        return web.Response(text=token, headers={"X-aws-ec2-metadata-token-ttl-seconds": ttl})


class GoogleService(Service):
    """The metadata server: `preempted` is TRUE or FALSE, and who waits hears of a change.

    `flavor` is what it calls itself.
    """

    preempted, flavor = "FALSE", "Google"

    async def answer(self, request: web.Request) -> web.Response:
        headers = {"Metadata-Flavor": self.flavor}
        if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
            return web.Response(status=403, headers=headers)
        if request.path == "/computeMetadata/v1/instance/id":
            return web.Response(text="4711", headers=headers)
        if request.path != "/computeMetadata/v1/instance/preempted":
            return web.Response(status=404, headers=headers)
        if request.query.get("wait_for_change") == "true":
            seconds = float(request.query.get("timeout_sec", "3600"))
            while request.query.get("last_etag", self._etag) == self._etag:
                try:
                    await asyncio.wait_for(self._changed.wait(), seconds)
                except asyncio.TimeoutError:
                    break
        text = self.preempted if self.garbage is None else self.garbage
        return web.Response(text=text, headers={**headers, "ETag": self._etag})

    @property
    def _etag(self) -> str:
        return f"{abs(hash((self.preempted, self.garbage))):x}"


class AzureService(Service):
    """The Instance Metadata Service and its Scheduled Events. `name` is this VM's, `events` are as in the document."""

    name = "VM-1"
    events: tuple[dict[str, Any], ...] = ()

    async def answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata") != "true" or not request.query.get("api-version"):
            return web.Response(status=400)
        if request.path == "/metadata/instance/compute/name" and request.query.get("format") == "text":
            return web.Response(text=self.name)
        if request.path != "/metadata/scheduledevents":
            return web.Response(status=404)
        if self.garbage is not None:
            return web.Response(text=self.garbage)
        assert request.method == "GET", "nobody acknowledges"
        return web.json_response({"DocumentIncarnation": 1, "Events": list(self.events)})


def interruption(within_s: float) -> str:
    """What spot/instance-action says."""
    return json.dumps({"action": "terminate", "time": _utc(within_s)})


def recommendation() -> str:
    """What events/recommendations/rebalance says."""
    return json.dumps({"noticeTime": _utc(0.0)})


def _utc(within_s: float) -> str:
    return f"{datetime.now(timezone.utc) + timedelta(seconds=within_s):%Y-%m-%dT%H:%M:%SZ}"


def azure_event(kind: str, not_before: str = "", **fields: Any) -> dict[str, Any]:
    """As in the documentation's example."""
    return {
        "EventId": f"id-{kind}", "EventStatus": "Scheduled" if not_before else "Started", "EventType": kind,
        "ResourceType": "VirtualMachine", "Resources": ["vm-1"], "NotBefore": not_before, "Description": "",
        "EventSource": "Platform", "DurationInSeconds": -1, **fields,
    }  # fmt: skip
