"""The REST side of the coordinator's port: the requests of the command line to a live run.

    GET  /api/alive                             {}
    GET  /api/status                            Status
    GET  /api/numerics                          Numerics
    GET  /api/job                               Job: the work of a worker that has no files of the run
    GET  /api/code                              the run's code, packed (see `code/pack.py`)
    POST /api/scale    {"wanted": 4}            {"wanted": 4}
    POST /api/release  {"name": "w2"}           {"released": ["w2"]}
    POST /api/stop     {"reason": .., "code": 0}  {"state": "ending"}
    POST /api/tickets                           {}, after FOLDER/tickets has been read again
    POST /api/trace    {"steps": 20}            Traced: the members were asked to trace the next 20 steps
    GET  /api/trace                             Traced: the progress of that
    POST /api/trace/end                         Traced: members that have not answered must send what they have
    GET  /api/trace/of?worker=w2                the answer of w2 (`Spans`), as msgpack

An impossible request answers 400 with {"error": text}, one that the ticket does not allow 403 (see
`control/security.py`); an internal error 500.
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
BODY_S = 10.0  # time for a request's body to arrive
NOT_PACKED = (
    "the run's code is not packed, since it has no pool of other hosts: copy the script to this machine and name it, "
    "as in `farandole join TICKET train.py`, or start the run with --files"
)
READING = (  # these requests decide nothing
    *("/api/alive", "/api/status", "/api/numerics", "/api/job", "/api/code"),
    *("/api/trace", "/api/trace/end", "/api/trace/of"),
)
B = TypeVar("B")


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    wanted: Annotated[int, msgspec.Meta(ge=0, le=100_000)]
    pool: Name = ""  # "": the run's own


class Release(msgspec.Struct, forbid_unknown_fields=True):
    name: Name


class StopRequest(msgspec.Struct, forbid_unknown_fields=True):
    reason: Name = "farandole stop"
    code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0


class TraceRequest(msgspec.Struct, forbid_unknown_fields=True):
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]


class RestServer(Protocol):
    """The parts of the server that the handlers need."""

    coordinator: Coordinator

    def now(self) -> float: ...

    def flush(self) -> None:
        """Carry out the coordinator's decisions."""
        ...

    def status(self) -> Status: ...

    def reread_tickets(self) -> None: ...


class RestHandlers:
    """The handlers. Each changes the coordinator and flushes, as a message from a worker does."""

    def __init__(self, server: RestServer) -> None:
        self._server = server

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
            web.get("/api/trace", self._trace_status),
            web.post("/api/trace/end", self._trace_end),
            web.get("/api/trace/of", self._trace_of),
        ]

    async def _alive(self, request: web.Request) -> web.Response:
        """The health check that `farandole run` makes every second."""
        del request
        return _answer({})

    async def _status(self, request: web.Request) -> web.Response:
        del request
        return _answer(self._server.status())

    async def _numerics(self, request: web.Request) -> web.Response:
        del request
        return _answer(numerics.of_run(self._server.coordinator))

    async def _job(self, request: web.Request) -> web.Response:
        del request
        job = self._server.coordinator.settings.job
        if job is None:
            raise UsageError(NOT_PACKED)
        return _answer(job)

    async def _code(self, request: web.Request) -> web.StreamResponse:
        del request
        settings = self._server.coordinator.settings
        place = Path(settings.folder) / PACK
        if settings.job is None:
            raise UsageError(NOT_PACKED)
        if not place.is_file():
            raise UsageError(
                f"{place} does not exist any more: workers that have the run's code train on, and no new worker starts"
            )
        return web.FileResponse(place)

    async def _scale(self, request: web.Request) -> web.Response:
        body = await _body(request, ScaleRequest)
        self._server.coordinator.scale(body.wanted, self._server.now(), body.pool)
        self._server.flush()
        return _answer({"wanted": body.wanted})

    async def _release(self, request: web.Request) -> web.Response:
        body = await _body(request, Release)
        released = self._server.coordinator.release(body.name, self._server.now())
        self._server.flush()
        return _answer({"released": released})

    async def _stop(self, request: web.Request) -> web.Response:
        body = await _body(request, StopRequest)
        self._server.coordinator.request_end(body.reason, body.code, self._server.now())
        self._server.flush()
        return _answer({"state": "over" if self._server.coordinator.over else "ending"})

    async def _tickets(self, request: web.Request) -> web.Response:
        del request
        self._server.reread_tickets()
        return _answer({})

    async def _trace(self, request: web.Request) -> web.Response:
        body = await _body(request, TraceRequest)
        accounting.start_trace(self._server.coordinator, body.steps, 1 + secrets.randbits(52), self._server.now())
        self._server.flush()
        return await self._trace_status(request)

    async def _trace_status(self, request: web.Request) -> web.Response:
        del request
        return _answer(accounting.trace_answers(self._server.coordinator, self._server.now()))

    async def _trace_end(self, request: web.Request) -> web.Response:
        accounting.end_trace(self._server.coordinator)
        self._server.flush()
        return await self._trace_status(request)

    async def _trace_of(self, request: web.Request) -> web.Response:
        answer = accounting.trace_answer(self._server.coordinator, request.query.get("worker", ""))
        return web.Response(body=answer, content_type="application/msgpack")


async def _body(request: web.Request, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(await within(BODY_S, request.read()), type=kind)
    except asyncio.TimeoutError:
        raise UsageError(f"{request.path}: the body did not arrive within {BODY_S:g} s") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"{request.path}: {error}") from None


def _answer(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def refusal(reason: str, status: int = 400) -> web.Response:
    return _answer({"error": reason}, status)


def internal_error(subject: str, error: Exception, record: UnauthenticatedPeers) -> web.Response:
    """The answer to an error of our own in a handler that only reports: one answer is missing, and nothing else."""
    sentence = f"{subject} can't be answered: an internal error of farandole ({type(error).__name__})"
    if record.report_error(sentence):
        _log.error("%s", sentence, exc_info=error)
    return web.Response(status=500, reason=sentence, text=sentence)


# --- cost -------------------------------------------------------------------------------------------------------------
#
# The account of a live run (`protocol/coordinator/account.py`), for its status and `/metrics`.
#
# The coordinator reads its own metrics.jsonl, a part at a time. So a restarted coordinator knows of workers that left
# before it began, and it reports what `farandole account` prints for the same lines. Until it has read all of them, and
# if they can't be read, the account is unknown. Nothing is decided by it. It reads in a thread, and nothing waits for
# it.

EVERY_S = 5.0  # interval between two sums
READ_S = 0.5  # interval between two reads of the file


class RunCost:
    """The cost of a run so far. Call `look_soon` regularly; `account` is the result, None if unknown."""

    def __init__(self, settings: RunSettings, folder: Path) -> None:
        self.account: AccountStatus | None = None
        self._run, self._prices = settings.run, settings.prices
        self._tail = Tail(folder / METRICS)
        self._reading = AccountReader()
        self._look_at = self._sum_at = 0.0
        self._files = FileThread("spent")
        self._looking = False

    def look_soon(self, now: float) -> None:
        """Call `look` in the thread, unless that is running or it is too early."""
        if now >= self._look_at and not self._looking:
            self._looking = True
            self._files.post(partial(self._look, now))

    def close(self) -> None:
        """The thread ends after its current work."""
        self._files.end()

    def _look(self, now: float) -> None:
        try:
            self.look(now)
        finally:
            self._looking = False

    def look(self, now: float) -> None:
        """Read at most one part of the file, and update the account."""
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
        account = self._reading.account(self._run, self._prices)
        if account.seconds is None or account.worker_hours is None:
            return None
        return AccountStatus(
            seconds=account.seconds,
            goodput=account.goodput,
            worker_hours=account.worker_hours,
            dollars=account.dollars,
            traffic=account.traffic,
        )
