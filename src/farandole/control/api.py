"""The client of the REST interface: one short request each, with the standard library only.

Each request has its own connection, on which both sides first prove that they know the ticket's secret (see
`security.py`). Failures are the package's errors: `CoordinatorUnreachable` if nothing answers at the address,
`UsageError` with the coordinator's text if it refuses the request.
"""

from __future__ import annotations

import contextlib
import http.client
import urllib.parse
from typing import Any

import msgspec

from farandole.control import security
from farandole.control.security import TicketProof
from farandole.control.status import Numerics, Status
from farandole.control.ticket import Ticket
from farandole.errors import CoordinatorUnreachable, NotTheCoordinator, UsageError
from farandole.platform.files import decoded
from farandole.protocol.messages import Job, Spans, Traced

TIMEOUT_S = 5.0


class Api:
    """Sends requests to the run of `ticket`."""

    def __init__(self, ticket: Ticket, *, timeout_s: float = TIMEOUT_S) -> None:
        self._ticket = ticket
        self._timeout_s = timeout_s

    def status(self) -> Status:
        return self._ask("GET", "/api/status", None, Status)

    def numerics(self) -> Numerics:
        """The numeric facts of the run."""
        return self._ask("GET", "/api/numerics", None, Numerics)

    def job(self) -> Job:
        """The work of a worker that has no files of the run. Raises UsageError: the run's code is not packed."""
        return self._ask("GET", "/api/job", None, Job)

    def code(self) -> bytes:
        """The run's packed code. Raises UsageError: it is not packed."""
        return self._read("GET", "/api/code", None)

    def alive(self) -> None:
        """Returns if the coordinator answers."""
        self._ask("GET", "/api/alive", None, dict[str, Any])

    def scale(self, wanted: int, pool: str = "") -> None:
        """Set the number of workers of one pool; without a name, of the run's own pool."""
        self._ask("POST", "/api/scale", {"wanted": wanted, "pool": pool}, dict[str, Any])

    def release(self, name: str) -> list[str]:
        """Ask workers to leave. Returns their ids."""
        return self._ask("POST", "/api/release", {"name": name}, dict[str, list[str]])["released"]

    def stop(self, reason: str, code: int) -> None:
        self._ask("POST", "/api/stop", {"reason": reason, "code": code}, dict[str, Any])

    def reread_tickets(self) -> None:
        self._ask("POST", "/api/tickets", None, dict[str, Any])

    def trace(self, steps: int) -> Traced:
        """Have every member record its next `steps` steps."""
        return self._ask("POST", "/api/trace", {"steps": steps}, Traced)

    def traced(self) -> Traced:
        """The progress of the newest trace."""
        return self._ask("GET", "/api/trace", None, Traced)

    def end_trace(self) -> Traced:
        """Have members that have not answered send what they have."""
        return self._ask("POST", "/api/trace/end", None, Traced)

    def spans(self, worker: str) -> Spans:
        """The answer of `worker` to the newest trace. Raises UsageError: there is none."""
        content = self._read("GET", f"/api/trace/of?{urllib.parse.urlencode({'worker': worker})}", None)
        try:
            return msgspec.msgpack.decode(content, type=Spans)
        except msgspec.MsgspecError:
            raise self._not_the_coordinator() from None

    def _not_the_coordinator(self) -> NotTheCoordinator:
        return NotTheCoordinator(f"run {self._ticket.run}: {self._ticket.address} is not its coordinator")

    def _ask(self, method: str, path: str, body: Any, kind: Any) -> Any:
        try:
            return decoded(self._read(method, path, body), kind)
        except msgspec.MsgspecError:
            raise self._not_the_coordinator() from None

    def _read(self, method: str, path: str, body: Any) -> bytes:
        content = b"" if body is None else msgspec.json.encode(body)
        try:
            with contextlib.closing(security.http_connection(self._ticket, self._timeout_s)) as connection:
                proof = TicketProof(self._ticket)
                connection.request("GET", path, headers={"Authorization": proof.opening})
                challenge = connection.getresponse()
                answer = proof.answer(challenge.getheader("WWW-Authenticate"))
                challenge.read()
                headers = {"Authorization": answer, "Content-Type": "application/json"}
                connection.request(method, path, content or None, headers)
                response = connection.getresponse()
                content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._ticket.no_answer(error) from None
        if response.status in (400, 403):
            raise UsageError(decoded(content, dict[str, str])["error"])
        if response.status != 200:
            raise CoordinatorUnreachable(
                f"run {self._ticket.run}: {self._ticket.address} answers {response.status} {response.reason}"
            )
        return content
