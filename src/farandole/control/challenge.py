"""How two sides show each other that they know a ticket's secret, before whoever may listen, and neither sends it.

    client    Authorization:    Farandole id=ID, nonce=C
    server    WWW-Authenticate: Farandole nonce=S, proof=HMAC(secret, "server", ID, C, S)
    client    Authorization:    Farandole proof=HMAC(secret, "client", ID, C, S)

All of it on one connection, which is then admitted as a whole. HMAC is HMAC-SHA256; the secret, C and S are 256 random
bits each, C and S drawn for this connection by the side that sends them. ID = HMAC(secret, "id") says which ticket is
meant: it is found in a table, and nobody computes the secret from it.

The argument. *The client* sends its proof only when it has checked the server's, which is over its own C: nobody
without the secret can make that, and none that was recorded fits. So whoever holds the coordinator's address gets ID
and C, which open nothing. *The server* admits a proof over its own S alone, for the ID and the C that came on the same
connection, and takes one proof for each S, right or wrong: what was recorded is worth nothing on another connection or
a second time. *Reflection*: the labels differ, so a proof that one side can be made to give is none of the other's. All
fields have one length and the label comes first, so no two different inputs are the same bytes.

An ID that the server does not know is answered as well, with a key that only this process has: who knows no secret
can't tell the one answer from the other, and so learns of no ticket whether there is one.

What it does not do: whoever passes all on between both sides has that one connection from then on, without TLS also to
read and to alter, though neither the secret nor a second connection. Off loopback the pinned certificate comes before
all this (`tls.py`); on loopback nobody gets between the two, since the coordinator's port is never free
(`listener.py`). The run's name is not part of it: a secret belongs to one run, and the name is its folder's, which may
be moved.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping

from farandole.control.ticket import Ticket
from farandole.errors import NotTheCoordinator

OPENING = re.compile(r"Farandole id=([0-9a-f]{64}), nonce=([0-9a-f]{64})")
CHALLENGE = re.compile(r"Farandole nonce=([0-9a-f]{64}), proof=([0-9a-f]{64})")
ANSWER = re.compile(r"Farandole proof=([0-9a-f]{64})")
_nobody = secrets.token_hex(32)  # the key for tickets that are not known


def ticket_id(secret: str) -> str:
    """What a ticket is called where others may listen."""
    return _mac(secret, "id")


class Claim:
    """The client's side, for one connection: send `opening`, then what `answer` makes of what came back."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._id = ticket_id(ticket.secret)
        self._nonce = secrets.token_hex(32)
        self.opening = f"Farandole id={self._id}, nonce={self._nonce}"

    def answer(self, challenge: str | None) -> str:
        """The second Authorization header, for the WWW-Authenticate header `challenge`.

        Raises:
            NotTheCoordinator: who answers has not shown that it knows the secret.
        """
        match = CHALLENGE.fullmatch(challenge or "")
        if match is None or not _same(match[2], _mac(self._ticket.secret, "server", self._id, self._nonce, match[1])):
            raise NotTheCoordinator(
                f"run {self._ticket.run}: who answers at {self._ticket.address} does not know the ticket's secret: "
                f"somebody else answers there, or the ticket is an old one; the secret was not sent"
            )
        return f"Farandole proof={_mac(self._ticket.secret, 'client', self._id, self._nonce, match[1])}"


class Examination:
    """The server's side, for one connection. `known` has the secrets by their tickets' ids."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = known
        self._asked: tuple[str, str, str] | None = None

    def challenge(self, authorization: str) -> str:
        """The WWW-Authenticate header for an opening; "" where it is none, or another one."""
        match = OPENING.fullmatch(authorization)
        if match is None or self._asked is not None:
            return ""
        ticket, theirs = match.groups()
        ours = secrets.token_hex(32)
        self._asked = (ticket, theirs, ours)
        return f"Farandole nonce={ours}, proof={_mac(self._known.get(ticket, _nobody), 'server', ticket, theirs, ours)}"

    def passed(self, authorization: str) -> str:
        """The id of the ticket whose secret the client has now shown to know; "" where it has not."""
        asked, self._asked = self._asked, None
        match = ANSWER.fullmatch(authorization)
        if match is None or asked is None:
            return ""
        expected = _mac(self._known.get(asked[0], _nobody), "client", *asked)
        return asked[0] if _same(match[1], expected) and asked[0] in self._known else ""


def _mac(secret: str, label: str, *fields: str) -> str:
    return hmac.new(secret.encode(), " ".join(("farandole", label, *fields)).encode(), hashlib.sha256).hexdigest()


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
