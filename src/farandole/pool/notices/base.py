"""The seam between a cloud's metadata service and who wants to know of this machine's end.

A `Reader` says what is known now. Every request is bounded in time and size, goes to the machine's own service and
nowhere else (no proxy, no redirect), and what is no proper answer is `Unanswered`, in words: who asks tries again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from farandole.membership.hosts import Notified

ADDRESS = "http://169.254.169.254"  # of all three clouds
CONNECT_S, ANSWER_S = 1.0, 2.0
MOST_BYTES = 64 * 1024


class Unanswered(Exception):
    """Nobody answered, or not so that it could be understood; says what is wrong. Who asks tries again."""


class Silent(Unanswered):
    """The request went out, and nothing has come back in time."""


@dataclass(frozen=True)
class Answer:
    """Of a metadata service."""

    status: int
    headers: dict[str, str]  # their names in small letters
    body: bytes


class Reader(Protocol):
    """Of one cloud. `name` is the cloud's; `pause_s`: how long to wait between two reads."""

    name: str
    pause_s: float

    async def here(self) -> bool:
        """Whether this machine is that cloud's. Raises Unanswered: not known, for nobody answers."""
        ...

    async def read(self) -> Notified | None:
        """What is known of the machine's end; None: nothing, which is healthy. It may wait for something to change.

        Raises:
            Unanswered: nothing is known.
        """
        ...


class Metadata:
    """The metadata service at `address`."""

    def __init__(self, session: aiohttp.ClientSession, address: str = "") -> None:
        self._session = session
        self._address = (address or ADDRESS).rstrip("/")

    async def ask(
        self, method: str, path: str, headers: dict[str, str], *, answer_s: float = ANSWER_S, **parameters: str
    ) -> Answer:
        """One request.

        Raises:
            Silent: no answer within `answer_s`.
            Unanswered: nobody is there, or it is more than `MOST_BYTES`.
        """
        timeout = aiohttp.ClientTimeout(total=answer_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(
                method, self._address + path, headers=headers, params=parameters, timeout=timeout, allow_redirects=False
            ) as response:
                names = {name.lower(): value for name, value in response.headers.items()}
                return Answer(response.status, names, await _body(response))
        except aiohttp.ServerTimeoutError as error:  # it could not connect
            raise Unanswered(str(error)) from error
        except asyncio.TimeoutError as error:
            raise Silent(f"no answer to {method} {path} within {answer_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"{method} {path}: {error or type(error).__name__}") from error


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for part in response.content.iter_any():
        body += part
        if len(body) > MOST_BYTES:
            raise Unanswered(f"an answer of more than {MOST_BYTES} bytes")
    return body


def refused(answer: Answer, path: str) -> Unanswered:
    """What an answer is that none of the service's documented ones is."""
    return Unanswered(f"{path}: status {answer.status}, {answer.body[:80]!r}")
