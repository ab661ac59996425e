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
all this (`security.py`); on loopback nobody gets between the two, since the coordinator's port is never free
(`listener.py`). The run's name is not part of it: a secret belongs to one run, and the name is its folder's, which may
be moved.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import importlib.util
import os
import re
import secrets
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec

from farandole.control.run_folder import CERTIFICATE
from farandole.control.ticket import Ticket
from farandole.errors import NotPrivate, NotTheCoordinator, UsageError
from farandole.platform.extras import how_to_install
from farandole.platform.files import bounded, open_regular, read, write_atomically
from farandole.protocol import events

if TYPE_CHECKING:
    import aiohttp


# --- challenge --------------------------------------------------------------------------------------------------------

OPENING = re.compile(r"Farandole id=([0-9a-f]{64}), nonce=([0-9a-f]{64})")
CHALLENGE = re.compile(r"Farandole nonce=([0-9a-f]{64}), proof=([0-9a-f]{64})")
ANSWER = re.compile(r"Farandole proof=([0-9a-f]{64})")
_nobody = secrets.token_hex(32)  # the key for tickets that are not known


def ticket_id(secret: str) -> str:
    """What a ticket is called where others may listen."""
    return _mac(secret, "id")


class TicketProof:
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


# --- tls --------------------------------------------------------------------------------------------------------------
#
# The run's certificate: made once for the run, pinned by its ticket.
#
# Off loopback all control traffic is TLS 1.3. The certificate is self-signed and names nobody: its sha256 fingerprint
# is in the ticket. A client compares it after the handshake, in which the server proves that it holds the key, and
# before it sends anything. So neither names nor clocks nor authorities matter, and a server that is not the run's
# never sees the secret. FOLDER/tls.pem holds key and certificate, mode 0600; a coordinator that comes back finds them
# there.

NAME = "farandole"  # for programs of others, which want one; nobody of ours looks
BEGIN = "-----BEGIN CERTIFICATE-----"


@dataclass(frozen=True)
class Certificate:
    """The server's side: `context` to serve with, `fingerprint` for the ticket, 64 hexadecimal digits."""

    context: ssl.SSLContext
    fingerprint: str


def certificate(folder: Path) -> Certificate:
    """The certificate of the run in `folder`, made now if it has none yet.

    Raises:
        UsageError: it can't be made without the package `cryptography`, or what is there can't be read.
    """
    path = folder / CERTIFICATE
    if not os.path.lexists(path):
        write_atomically(path, _new())
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        text = read(path).decode()
        context.load_cert_chain(path)
        der = ssl.PEM_cert_to_DER_cert(text[text.index(BEGIN) :])
    except NotPrivate:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: not the run's key and certificate ({error}); remove it, and everyone needs a new ticket"
        ) from None
    return Certificate(context, hashlib.sha256(der).hexdigest())


def check_available(listen: str) -> None:
    """Raises UsageError where a certificate could not be made, before anything is started."""
    if importlib.util.find_spec("cryptography") is None:
        raise UsageError(
            f"--listen {listen}: off loopback the run needs a certificate, made by the package cryptography; "
            f"{how_to_install('tls')}"
        )


def _new() -> bytes:
    check_available("off loopback")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    utc = datetime.timezone.utc
    made = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=utc))  # nobody looks: the pin is what counts
        .not_valid_after(datetime.datetime(2999, 1, 1, tzinfo=utc))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private + made.public_bytes(pem)


# --- the client's side ---------------------------------------------------------------------------------------


def pin(ticket: Ticket) -> aiohttp.Fingerprint | bool:
    """For aiohttp's `ssl`: it compares before it writes the request. A ticket of loopback has nothing to pin."""
    import aiohttp

    return aiohttp.Fingerprint(bytes.fromhex(ticket.fingerprint)) if ticket.fingerprint else True


def stranger(ticket: Ticket) -> NotTheCoordinator:
    """What to say when the fingerprints differ."""
    return NotTheCoordinator(
        f"run {ticket.run}: the certificate at {ticket.address} is not the one in the ticket: somebody else answers "
        f"there, or the ticket is an old one; nothing was sent"
    )


def http_connection(ticket: Ticket, timeout_s: float) -> http.client.HTTPConnection:
    """Connected, and over TLS to the ticket's own coordinator.

    Raises:
        OSError: nobody answers.
        NotTheCoordinator: another does.
    """
    url = urlsplit(ticket.address)
    if url.scheme == "http":
        return http.client.HTTPConnection(url.netloc, timeout=timeout_s)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the pin, below, takes its place
    connection = http.client.HTTPSConnection(url.netloc, timeout=timeout_s, context=context)
    connection.connect()
    shown = connection.sock.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(shown).hexdigest(), ticket.fingerprint):
        connection.close()
        raise stranger(ticket)
    return connection


# --- tickets ----------------------------------------------------------------------------------------------------------
#
# The tickets of a run: its owner's, and those issued for others, which may expire and can be taken back.
#
# FOLDER/ticket is the owner's: it never expires and may do everything. An issued one lets workers join and reads the
# status; it does not steer, has no pools, and issues nothing. `farandole ticket` writes FOLDER/tickets (mode 0600,
# whole or not at all) and asks the coordinator to read it again: so no secret goes over the wire, and a coordinator
# that comes back knows them all. A file that can't be read leaves what was read before, and after a restart the
# owner's alone: what is not known is not let in.
#
# An *expired* ticket lets nobody new in. Whose worker is in stays, and may connect again: what is over is the
# invitation. A *revoked* one is good for nothing: the connections that it has opened are closed and its workers put
# out, told not to come back. Both stay in the file, so that whoever shows one is told why it is not let in.

MOST = 1000
LONGEST = 1024 * 1024  # bytes of the file
OPEN = (  # what an issued ticket may ask for
    *("/control", "/api/alive", "/api/status", "/api/numerics", "/api/job", "/api/code"),
)
TicketName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class IssuedTicket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`expires`: seconds since the epoch, 0 for never."""

    name: TicketName
    secret: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    expires: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    revoked: bool = False

    def __repr__(self) -> str:
        return f"Issued(name={self.name!r}, expires={self.expires}, revoked={self.revoked})"

    def over(self, now: float) -> str:
        """Why it lets nobody in any more, "" while it does."""
        if self.revoked:
            return f"ticket {self.name} has been revoked"
        if self.expires and now >= self.expires:
            return f"ticket {self.name} has expired: ask the run's owner for another one"
        return ""


def read_tickets(path: Path) -> tuple[IssuedTicket, ...]:
    """Those in the file at `path`, none if it is not there.

    Raises:
        UsageError: it can't be read, or holds something else; the message never quotes its content.
    """
    try:
        with open_regular(path) as file:
            content = file.read(LONGEST + 1)
        found = msgspec.json.decode(content[:LONGEST], type=tuple[IssuedTicket, ...])
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise UsageError(f"{path}: not the run's tickets; remove it, and issue them anew") from None
    if len(found) > MOST or len({each.name for each in found}) < len(found):
        raise UsageError(f"{path}: more than {MOST} tickets, or two of one name; remove it, and issue them anew")
    return found


def write_tickets(path: Path, tickets: tuple[IssuedTicket, ...]) -> None:
    """Raises UsageError where it can't be written."""
    try:
        write_atomically(path, msgspec.json.encode(tickets) + b"\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; nothing has changed") from None


class Tickets:
    """What the coordinator knows of them. `known` has the secrets by their tickets' ids, also where those are over."""

    def __init__(self, secret: str, path: Path) -> None:
        self._owners = {ticket_id(secret): secret}
        self._path = path
        self._issued: dict[str, IssuedTicket] = {}
        self._read = False
        self.known = dict(self._owners)

    def reread(self) -> list[events.Event]:
        """What has become of them since they were first read.

        Raises:
            UsageError: the file is damaged; all is as before.
        """
        before, again = self._issued, self._read
        try:
            found = bounded(partial(read_tickets, self._path))
        except TimeoutError as error:
            raise UsageError(f"{self._path}: {error}") from None
        self._read = True
        self._issued = {ticket_id(each.secret): each for each in found}
        self.known.clear()
        self.known.update({**{key: each.secret for key, each in self._issued.items()}, **self._owners})
        new = [each.name for key, each in self._issued.items() if again and key not in before]
        gone = [each.name for key, each in before.items() if not each.revoked and self.revoked(key)]
        return [
            *(events.TicketIssuedEvent(ticket=n) for n in new),
            *(events.TicketRevokedEvent(ticket=n) for n in gone),
        ]

    def revoked(self, ticket: str) -> str:
        """Why nothing of what `ticket` has opened may stay, "" where it may."""
        if ticket in self._owners or (ticket in self._issued and not self._issued[ticket].revoked):
            return ""
        return self.over(ticket)

    def over(self, ticket: str) -> str:
        """Why `ticket` lets nobody in any more, "" while it does."""
        if ticket in self._owners:
            return ""
        return self._issued[ticket].over(time.time()) if ticket in self._issued else "the ticket is known no more"

    def forbids(self, ticket: str, path: str) -> str:
        """Why a request for `path` is declined, "" where it is not. Who is let in at /control, its Hello decides."""
        if ticket in self._owners or path == "/control":
            return ""
        if path not in OPEN:
            return "this ticket lets workers join and reads the status; the rest takes the owner's, FOLDER/ticket"
        return self.over(ticket)

    def owners(self, ticket: str) -> bool:
        return ticket in self._owners
