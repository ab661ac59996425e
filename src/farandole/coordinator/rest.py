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
    POST /api/trace    {"steps": 20}            Traced: the members have been asked for so many steps to come
    GET  /api/trace                             Traced: how far that is
    POST /api/trace/end                         Traced: who owes its part is to tell what it has
    GET  /api/trace/of?worker=w2                what w2 has answered (`Spans`), as msgpack

What can't be done as asked answers 400 with {"error": text}, what the ticket does not allow 403 (see
`control/security.py`); what can't be told for an error of our own, 500.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from farandole.control import status as numerics
from farandole.control.run_folder import METRICS, PACK, Tail
from farandole.control.status import AccountStatus, Status
from farandole.coordinator.listener import UnauthenticatedPeers
from farandole.errors import FarandoleError, UsageError
from farandole.platform.files import FileThread
from farandole.platform.process import within
from farandole.protocol.coordinator import accounting
from farandole.protocol.coordinator.account import AccountReader
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import MOST_STEPS, Name

# --- rest -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
BODY_S = 10.0  # for a request's body to arrive
NOT_PACKED = (
    "the run's code is not packed: it has no pools of other hosts; name a script of your own, or start it with --files"
)
READING = (  # decide nothing
    *("/api/alive", "/api/status", "/api/numerics", "/api/job", "/api/code"),
    *("/api/trace", "/api/trace/end", "/api/trace/of"),
)
B = TypeVar("B")


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    wanted: Annotated[int, msgspec.Meta(ge=0, le=100_000)]
    pool: Name = ""  # the run's own


class Release(msgspec.Struct, forbid_unknown_fields=True):
    name: Name


class StopRequest(msgspec.Struct, forbid_unknown_fields=True):
    reason: Name = "farandole stop"
    code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0


class TraceRequest(msgspec.Struct, forbid_unknown_fields=True):
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]


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
            web.post("/api/trace", self._trace),
            web.get("/api/trace", self._traced),
            web.post("/api/trace/end", self._trace_end),
            web.get("/api/trace/of", self._trace_of),
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
        body = await _body(request, ScaleRequest)
        self._desk.coordinator.scale(body.wanted, self._desk.now(), body.pool)
        self._desk.flush()
        return _answer({"wanted": body.wanted})

    async def _release(self, request: web.Request) -> web.Response:
        body = await _body(request, Release)
        released = self._desk.coordinator.release(body.name, self._desk.now())
        self._desk.flush()
        return _answer({"released": released})

    async def _stop(self, request: web.Request) -> web.Response:
        body = await _body(request, StopRequest)
        self._desk.coordinator.stop(body.reason, body.code, self._desk.now())
        self._desk.flush()
        return _answer({"state": "over" if self._desk.coordinator.over else "ending"})

    async def _tickets(self, request: web.Request) -> web.Response:
        del request
        self._desk.reread_tickets()
        return _answer({})

    async def _trace(self, request: web.Request) -> web.Response:
        body = await _body(request, TraceRequest)
        accounting.start_trace(self._desk.coordinator, body.steps, 1 + secrets.randbits(52), self._desk.now())
        self._desk.flush()
        return await self._traced(request)

    async def _traced(self, request: web.Request) -> web.Response:
        del request
        return _answer(accounting.trace_answers(self._desk.coordinator, self._desk.now()))

    async def _trace_end(self, request: web.Request) -> web.Response:
        accounting.end_trace(self._desk.coordinator)
        self._desk.flush()
        return await self._traced(request)

    async def _trace_of(self, request: web.Request) -> web.Response:
        answer = accounting.trace_answer(self._desk.coordinator, request.query.get("worker", ""))
        return web.Response(body=answer, content_type="application/msgpack")


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


def untold(what: str, error: Exception, record: UnauthenticatedPeers) -> web.Response:
    """An error of our own in a handler that only tells: one of the answers is missing, and nothing else."""
    sentence = f"{what} can't be answered: an error of farandole's own ({type(error).__name__})"
    if record.untold(sentence):
        _log.error("%s", sentence, exc_info=error)
    return web.Response(status=500, reason=sentence, text=sentence)


# --- spent ------------------------------------------------------------------------------------------------------------
#
# What a live run's account comes to (`protocol/coordinator/account.py`), for its status and `/metrics`.
#
# The coordinator reads its own metrics.jsonl on, a part at a time: so one that comes again knows of workers that went
# before it began, and what it tells is what `farandole account` says of the same lines. Before it has read all of them,
# and where they can't be read, nothing is known. Nothing is decided by it. It reads in a thread: nobody waits for it.

EVERY_S = 5.0  # between two sums
READ_S = 0.5  # between two looks at the file


class RunCost:
    """`look_soon` now and then; `account` is what is known."""

    def __init__(self, settings: RunSettings, folder: Path) -> None:
        self.account: AccountStatus | None = None
        self._run, self._prices = settings.run, settings.prices
        self._tail = Tail(folder / METRICS)
        self._reading = AccountReader()
        self._look_at = self._sum_at = 0.0
        self._files = FileThread("spent")
        self._looking = False

    def look_soon(self, now: float) -> None:
        """`look`, in the thread, unless it is at it or it is too early."""
        if now >= self._look_at and not self._looking:
            self._looking = True
            self._files.post(partial(self._look, now))

    def close(self) -> None:
        """The thread ends when it has done what it is at."""
        self._files.end()

    def _look(self, now: float) -> None:
        try:
            self.look(now)
        finally:
            self._looking = False

    def look(self, now: float) -> None:
        """At most one part of the file."""
        if now < self._look_at:
            return
        try:
            lines = self._tail.lines()
        except (OSError, FarandoleError):
            lines = []
        for line in lines:
            self._reading.take(line)
        behind = self._tail.at < self._tail.size
        self._look_at = now + (0.0 if lines and behind else READ_S)
        if not behind and (now >= self._sum_at or self.account is None):
            self._sum_at = now + EVERY_S
            self.account = self._summed()

    def _summed(self) -> AccountStatus | None:
        found = self._reading.account(self._run, self._prices)
        if found.seconds is None or found.worker_hours is None:
            return None
        return AccountStatus(
            seconds=found.seconds, goodput=found.goodput, worker_hours=found.worker_hours, dollars=found.dollars
        )
