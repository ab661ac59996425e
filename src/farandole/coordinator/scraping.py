"""`/metrics` at the coordinator's port, for who shows the scrape token: one request, one answer, and the connection
ends.

Whoever comes here is a stranger still: it has shown no ticket, and gets no further. The head of its request is all that
is read of it, by the few lines that read every stranger's (`request_head.py`); the HTTP library never sees it. The
token opens this page alone: another path is answered 404. It is compared by a digest, in a time that tells nothing of
it, and a wrong one is dismissed as every stranger is. Where no token was asked for, or its file can't be read, there is
no page, and a bearer's token is like any other word of a stranger's.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable

from farandole.control import ticket
from farandole.control.status import Status
from farandole.coordinator.exposition import Exposition
from farandole.coordinator.listener import no_page
from farandole.coordinator.observers import Observers
from farandole.coordinator.strangers import Strangers
from farandole.errors import UsageError
from farandole.membership.records import RunSettings

_log = logging.getLogger(__name__)

PATH = "/metrics"
_BEARER = "Bearer "
_HEAD = "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
_TEXT, _METRICS = "text/plain; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"


def metrics_page(
    settings: RunSettings, status: Callable[[], Status], observers: Observers, record: Strangers
) -> Callable[[str, str], bytes]:
    """What answers a stranger's Authorization and request, "METHOD PATH"; with b"" unless it shows the run's token."""
    token = settings.exports.metrics_token
    if not token:
        return no_page
    try:
        page = Page(ticket.load_scrape_token(token), Exposition(status), record)
    except UsageError as error:  # all was there when the run began; the training goes on without
        _log.warning("there is no %s: %s", PATH, error)
        record.untold(f"there is no {PATH}: {error}")
        return no_page
    observers.here.append(page.exposition)
    return page.answer


class Page:
    """What `exposition` has, for who shows `token`. `record`: what can't be told."""

    def __init__(self, token: bytes, exposition: Exposition, record: Strangers) -> None:
        self.exposition = exposition
        self._digest, self._record = _digest(token), record

    def answer(self, authorization: str, target: str) -> bytes:
        """The whole answer to a request for `target`; b"" for who does not show the token."""
        if not authorization.startswith(_BEARER):
            return b""
        given = authorization.removeprefix(_BEARER).strip(" ").encode("latin-1", "replace")
        if not hmac.compare_digest(_digest(given), self._digest):
            return b""
        if target.partition("?")[0] != f"GET {PATH}":
            return _answer("404 Not Found", f"this token opens GET {PATH} alone\n".encode(), _TEXT)
        try:
            return _answer("200 OK", self.exposition.text(), _METRICS)
        except Exception as error:  # noqa: BLE001  it only tells: one of the answers is missing, and nothing else
            sentence = f"{PATH} can't be answered: an error of farandole's own ({type(error).__name__})"
            if self._record.untold(sentence):
                _log.error("%s", sentence, exc_info=error)
            return _answer("500 Internal Server Error", f"{sentence}\n".encode(), _TEXT)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _answer(status: str, content: bytes, kind: str) -> bytes:
    return _HEAD.format(status, kind, len(content)).encode() + content
