"""Who may look: a link that works once, and then a cookie. Pure, but for the random numbers.

1. `farandole dashboard` prints a link with a random token. Whoever runs the command reads it, and nobody else.
2. The first request with the token spends it, and gets a cookie with another random number, which scripts can't read
   (HttpOnly) and other sites can't use (SameSite=Strict). The browser is sent on to an address without the token: what
   stays in its history opens nothing.
3. A token that was used, or is older than `LINK_S`, is one that is not known.

What is kept are digests, compared in a time that tells nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

LINK_S = 600.0
MOST = 64  # of links, and of browsers; the oldest go first


class Login:
    """`link` gives a token, `enter` takes it for a cookie's value, which `knows` then."""

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
        """The cookie's value, "" for a token that is not known, or not any more."""
        known = _among(_digest(token), self._links)
        if known is None or self._links.pop(known) < self._clock():
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


def _among(digest: bytes, known: dict[bytes, float] | dict[bytes, None]) -> bytes | None:
    """All are compared."""
    found = [each for each in known if hmac.compare_digest(each, digest)]
    return found[0] if found else None
