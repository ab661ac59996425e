"""The REST side of the coordinator's port: what the command line asks of a live run.

    GET  /api/alive                             {}
    GET  /api/status                            Status
    GET  /api/numerics                          Numerics
    GET  /api/job                               Job: what a worker that has nothing of the run is to do
    GET  /api/code                              the run's code, packed (see `code/pack.py`)
    POST /api/scale    {"wanted": 4}            {"wanted": 4}
    POST /api/release  {"name": "w2"}           {"released": ["w2"]}
    POST /api/stop     {"reason": .., "code": 0}  {"state": "ending"}
    POST /api/tickets                           {}, once FOLDER/tickets has been read again

What can't be done as asked answers 400 with {"error": text}, what the ticket does not allow 403 (see `tickets.py`);
what can't be told for an error of our own, 500.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from farandole.control import numerics
from farandole.control.run_folder import PACK
from farandole.control.status import Status
from farandole.coordinator.strangers import Strangers
from farandole.errors import UsageError
from farandole.membership.coordinator import Coordinator
from farandole.membership.messages import Name
from farandole.platform.waiting import within

_log = logging.getLogger(__name__)

BODY_S = 10.0  # for a request's body to arrive
NOT_PACKED = (
    "the run's code is not packed: it has no pools of other hosts; name a script of your own, or start it with --files"
)
READING = ("/api/alive", "/api/status", "/api/numerics", "/api/job", "/api/code")  # decide nothing
B = TypeVar("B")


class Scale(msgspec.Struct, forbid_unknown_fields=True):
    wanted: Annotated[int, msgspec.Meta(ge=0, le=100_000)]
    pool: Name = ""  # the run's own


class Release(msgspec.Struct, forbid_unknown_fields=True):
    name: Name


class Stop(msgspec.Struct, forbid_unknown_fields=True):
    reason: Name = "farandole stop"
    code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0


class Desk(Protocol):
    """What the handlers need of the server."""

    coordinator: Coordinator

    def now(self) -> float: ...

    def flush(self) -> None:
        """Carry out what the coordinator has decided."""
        ...

    def status(self) -> Status: ...

    def reread_tickets(self) -> None: ...


class Rest:
    """The handlers. Each changes the coordinator and flushes, as a message from a worker does."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/alive", self._alive),
            web.get("/api/status", self._status),
            web.get("/api/numerics", self._numerics),
            web.get("/api/job", self._job),
            web.get("/api/code", self._code),
            web.post("/api/scale", self._scale),
            web.post("/api/release", self._release),
            web.post("/api/stop", self._stop),
            web.post("/api/tickets", self._tickets),
        ]

    async def _alive(self, request: web.Request) -> web.Response:
        """The sign of life that `farandole run` asks for every second."""
        del request
        return _answer({})

    async def _status(self, request: web.Request) -> web.Response:
        del request
        return _answer(self._desk.status())

    async def _numerics(self, request: web.Request) -> web.Response:
        del request
        return _answer(numerics.of_run(self._desk.coordinator))

    async def _job(self, request: web.Request) -> web.Response:
        del request
        job = self._desk.coordinator.settings.job
        if job is None:
            raise UsageError(NOT_PACKED)
        return _answer(job)

    async def _code(self, request: web.Request) -> web.StreamResponse:
        del request
        settings = self._desk.coordinator.settings
        place = Path(settings.folder) / PACK
        if settings.job is None:
            raise UsageError(NOT_PACKED)
        if not place.is_file():
            raise UsageError(
                f"{place} is gone, and with it the run's code: who has it trains on, and nobody new begins"
            )
        return web.FileResponse(place)

    async def _scale(self, request: web.Request) -> web.Response:
        body = await _body(request, Scale)
        self._desk.coordinator.scale(body.wanted, self._desk.now(), body.pool)
        self._desk.flush()
        return _answer({"wanted": body.wanted})

    async def _release(self, request: web.Request) -> web.Response:
        body = await _body(request, Release)
        released = self._desk.coordinator.release(body.name, self._desk.now())
        self._desk.flush()
        return _answer({"released": released})

    async def _stop(self, request: web.Request) -> web.Response:
        body = await _body(request, Stop)
        self._desk.coordinator.stop(body.reason, body.code, self._desk.now())
        self._desk.flush()
        return _answer({"state": "over" if self._desk.coordinator.over else "ending"})

    async def _tickets(self, request: web.Request) -> web.Response:
        del request
        self._desk.reread_tickets()
        return _answer({})


async def _body(request: web.Request, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(await within(BODY_S, request.read()), type=kind)
    except asyncio.TimeoutError:
        raise UsageError(f"{request.path}: the body did not come within {BODY_S:g} s") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"{request.path}: {error}") from None


def _answer(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def refusal(reason: str, status: int = 400) -> web.Response:
    return _answer({"error": reason}, status)


def untold(what: str, error: Exception, record: Strangers) -> web.Response:
    """An error of our own in a handler that only tells: one of the answers is missing, and nothing else."""
    sentence = f"{what} can't be answered: an error of farandole's own ({type(error).__name__})"
    if record.untold(sentence):
        _log.error("%s", sentence, exc_info=error)
    return web.Response(status=500, reason=sentence, text=sentence)
