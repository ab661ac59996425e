"""Mutual authentication by a ticket's secret: both sides prove that they know it, and neither sends it.

    client    Authorization:    Farandole id=ID, nonce=C
    server    WWW-Authenticate: Farandole nonce=S, proof=HMAC(secret, "server", ID, C, S)
    client    Authorization:    Farandole proof=HMAC(secret, "client", ID, C, S)

All three go over one connection, which is then admitted as a whole. HMAC is HMAC-SHA256. The secret, C and S are 256
random bits each; C and S are drawn for this connection by the side that sends them. ID = HMAC(secret, "id") names the
ticket: the server finds it in a table, and the secret can't be computed from it.

The argument. *The client* sends its proof only after it has checked the server's, which covers the client's own C. No
peer without the secret can make that proof, and no recorded one fits. So a server at the coordinator's address without
the secret gets ID and C, which open nothing. *The server* admits only a proof over its own S, for the ID and the C of
the same connection, and takes one proof for each S, right or wrong: a recorded proof is worth nothing on another
connection or a second time. *Reflection*: the labels differ, so a proof that one side can be made to give is not valid
for the other side. All fields have one length and the label comes first, so no two different inputs are the same bytes.

The server also answers an unknown ID, with a key that only this process has. A client without the secret can't
distinguish the two answers, and so does not learn which tickets exist.

Limits: a relay that passes all messages on between both sides then holds that one connection, and without TLS can also
read and change its data, though it gets neither the secret nor a second connection. Off loopback the pinned certificate
is checked before all this (see "tls" below). On loopback no relay gets between the two, since the coordinator's port is
never free (`coordinator/listener.py`). The run's name is not part of it: a secret belongs to one run, and the name is
its folder's, which may be moved.
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
_no_key = secrets.token_hex(32)  # the key for unknown tickets


def ticket_id(secret: str) -> str:
    """The public id of a ticket, which others may read."""
    return _mac(secret, "id")


class TicketProof:
    """The client's side of one connection: send `opening`, then the result of `answer` for the server's challenge."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._id = ticket_id(ticket.secret)
        self._nonce = secrets.token_hex(32)
        self.opening = f"Farandole id={self._id}, nonce={self._nonce}"

    def answer(self, challenge: str | None) -> str:
        """The second Authorization header, for the WWW-Authenticate header `challenge`.

        Raises:
            NotTheCoordinator: the server has not proved that it knows the secret.
        """
        match = CHALLENGE.fullmatch(challenge or "")
        if match is None or not _same(match[2], _mac(self._ticket.secret, "server", self._id, self._nonce, match[1])):
            raise NotTheCoordinator(
                f"run {self._ticket.run}: the server at {self._ticket.address} does not know the ticket's secret: "
                f"another program answers there, or the ticket is an old one; the secret was not sent"
            )
        return f"Farandole proof={_mac(self._ticket.secret, 'client', self._id, self._nonce, match[1])}"


class Examination:
    """The server's side of one connection. `known`: the secrets by the ids of their tickets."""

    def __init__(self, secrets_by_id: Mapping[str, str]) -> None:
        self._secrets_by_id = secrets_by_id
        self._opening: tuple[str, str, str] | None = None

    def challenge(self, authorization: str) -> str:
        """The WWW-Authenticate header for an opening; "" if it is invalid or the second one."""
        match = OPENING.fullmatch(authorization)
        if match is None or self._opening is not None:
            return ""
        ticket, theirs = match.groups()
        ours = secrets.token_hex(32)
        self._opening = (ticket, theirs, ours)
        secret = self._secrets_by_id.get(ticket, _no_key)
        return f"Farandole nonce={ours}, proof={_mac(secret, 'server', ticket, theirs, ours)}"

    def passed(self, authorization: str) -> str:
        """The id of the ticket whose secret the client has proved to know; "" if it has not."""
        opening, self._opening = self._opening, None
        match = ANSWER.fullmatch(authorization)
        if match is None or opening is None:
            return ""
        expected = _mac(self._secrets_by_id.get(opening[0], _no_key), "client", *opening)
        return opening[0] if _same(match[1], expected) and opening[0] in self._secrets_by_id else ""


def _mac(secret: str, label: str, *fields: str) -> str:
    return hmac.new(secret.encode(), " ".join(("farandole", label, *fields)).encode(), hashlib.sha256).hexdigest()


def _same(received: str, expected: str) -> bool:
    return hmac.compare_digest(received.encode(), expected.encode())


# --- tls --------------------------------------------------------------------------------------------------------------
#
# The run's certificate: created once for the run, pinned by its ticket.
#
# Off loopback all control traffic is TLS 1.3. The certificate is self-signed and names no host: its sha256 fingerprint
# is in the ticket. A client compares it after the handshake, in which the server proves that it holds the key, and
# before it sends anything. So names, clocks and authorities do not matter, and another server never sees the secret.
# FOLDER/tls.pem holds key and certificate, mode 0600; a restarted coordinator reads them there.

NAME = "farandole"  # for other programs, which need a name; ours do not check it
BEGIN = "-----BEGIN CERTIFICATE-----"


@dataclass(frozen=True)
class Certificate:
    """The server's side: `context` to serve with, `fingerprint` for the ticket, 64 hexadecimal digits."""

    context: ssl.SSLContext
    fingerprint: str


def certificate(folder: Path) -> Certificate:
    """The certificate of the run in `folder`, created now if it has none yet.

    Raises:
        UsageError: it can't be created without the package `cryptography`, or the existing one can't be read.
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
            f"{path}: not the run's key and certificate ({error}); remove it, and issue all tickets again"
        ) from None
    return Certificate(context, hashlib.sha256(der).hexdigest())


def check_available(listen: str) -> None:
    """Raises UsageError if a certificate can't be created, before anything is started."""
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
    signed = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=utc))  # not checked: only the pin counts
        .not_valid_after(datetime.datetime(2999, 1, 1, tzinfo=utc))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private + signed.public_bytes(pem)


# --- the client's side ---------------------------------------------------------------------------------------


def pin(ticket: Ticket) -> aiohttp.Fingerprint | bool:
    """The value for aiohttp's `ssl`: it compares before it writes the request. A loopback ticket pins nothing."""
    import aiohttp

    return aiohttp.Fingerprint(bytes.fromhex(ticket.fingerprint)) if ticket.fingerprint else True


def stranger(ticket: Ticket) -> NotTheCoordinator:
    """The error for a certificate with another fingerprint."""
    return NotTheCoordinator(
        f"run {ticket.run}: the certificate at {ticket.address} is not the one in the ticket: another program answers "
        f"there, or the ticket is an old one; nothing was sent"
    )


def http_connection(ticket: Ticket, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to the ticket's own coordinator, over TLS off loopback.

    Raises:
        OSError: nothing answers.
        NotTheCoordinator: another server answers.
    """
    url = urlsplit(ticket.address)
    if url.scheme == "http":
        return http.client.HTTPConnection(url.netloc, timeout=timeout_s)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the pin, below, replaces it
    connection = http.client.HTTPSConnection(url.netloc, timeout=timeout_s, context=context)
    connection.connect()
    peer_certificate = connection.sock.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(peer_certificate).hexdigest(), ticket.fingerprint):
        connection.close()
        raise stranger(ticket)
    return connection


# --- tickets ----------------------------------------------------------------------------------------------------------
#
# The tickets of a run: the owner's, and issued tickets, which may expire and can be revoked.
#
# FOLDER/ticket is the owner's: it never expires and permits everything. An issued ticket lets workers join and reads
# the status. It does not control the run, has no pools, and issues no tickets. `farandole ticket` writes FOLDER/tickets
# (mode 0600, whole or not at all) and asks the coordinator to read it again. So no secret is sent, and a restarted
# coordinator knows all tickets. If the file can't be read, the tickets read before stay valid; after a restart only the
# owner's is, because an unknown ticket admits nobody.
#
# An *expired* ticket admits no new worker. Workers that it has admitted stay, and may reconnect: only the invitation is
# over. A *revoked* ticket permits nothing: its connections are closed and its workers are evicted, and told not to come
# back. Both stay in the file, so that a peer that shows one is told why it is not admitted.

MOST = 1000
LONGEST = 1024 * 1024  # bytes of the file
OPEN = (  # the requests that an issued ticket permits
    *("/control", "/api/alive", "/api/status", "/api/numerics", "/api/job", "/api/code"),
)
TicketName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class IssuedTicket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ticket issued to others. `expires`: Unix time, 0 for never."""

    name: TicketName
    secret: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    expires: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    revoked: bool = False

    def __repr__(self) -> str:
        return f"Issued(name={self.name!r}, expires={self.expires}, revoked={self.revoked})"

    def over(self, now: float) -> str:
        """The reason why the ticket admits nobody any more, "" while it does."""
        if self.revoked:
            return f"ticket {self.name} has been revoked"
        if self.expires and now >= self.expires:
            return f"ticket {self.name} has expired: ask the run's owner for another one"
        return ""


def read_tickets(path: Path) -> tuple[IssuedTicket, ...]:
    """The tickets in the file at `path`, none if it does not exist.

    Raises:
        UsageError: it can't be read, or holds something else; the message never quotes its content.
    """
    try:
        with open_regular(path) as file:
            content = file.read(LONGEST + 1)
        tickets = msgspec.json.decode(content[:LONGEST], type=tuple[IssuedTicket, ...])
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise UsageError(f"{path}: not the run's tickets; remove it, and issue them again") from None
    if len(tickets) > MOST or len({each.name for each in tickets}) < len(tickets):
        raise UsageError(f"{path}: more than {MOST} tickets, or two with one name; remove it, and issue them again")
    return tickets


def write_tickets(path: Path, tickets: tuple[IssuedTicket, ...]) -> None:
    """Write the tickets. Raises UsageError: the file can't be written."""
    try:
        write_atomically(path, msgspec.json.encode(tickets) + b"\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; nothing has changed") from None


class Tickets:
    """The coordinator's tickets. `known`: the secrets by the ids of their tickets, including expired and revoked
    ones.
    """

    def __init__(self, secret: str, path: Path) -> None:
        self._owners = {ticket_id(secret): secret}
        self._path = path
        self._issued: dict[str, IssuedTicket] = {}
        self._read = False
        self.secrets_by_id = dict(self._owners)

    def reread(self) -> list[events.Event]:
        """Read the file again. Returns the events of tickets issued or revoked since it was first read.

        Raises:
            UsageError: the file is damaged; nothing changes.
        """
        previous, read_before = self._issued, self._read
        try:
            tickets = bounded(partial(read_tickets, self._path))
        except TimeoutError as error:
            raise UsageError(f"{self._path}: {error}") from None
        self._read = True
        self._issued = {ticket_id(each.secret): each for each in tickets}
        self.secrets_by_id.clear()
        self.secrets_by_id.update({**{key: each.secret for key, each in self._issued.items()}, **self._owners})
        new = [each.name for key, each in self._issued.items() if read_before and key not in previous]
        revoked = [each.name for key, each in previous.items() if not each.revoked and self.revoked(key)]
        return [
            *(events.TicketIssuedEvent(ticket=n) for n in new),
            *(events.TicketRevokedEvent(ticket=n) for n in revoked),
        ]

    def revoked(self, ticket: str) -> str:
        """The reason why the connections of `ticket` must be closed, "" if they may stay."""
        if ticket in self._owners or (ticket in self._issued and not self._issued[ticket].revoked):
            return ""
        return self.over(ticket)

    def over(self, ticket: str) -> str:
        """The reason why `ticket` admits nobody any more, "" while it does."""
        if ticket in self._owners:
            return ""
        return self._issued[ticket].over(time.time()) if ticket in self._issued else "the ticket is not known any more"

    def forbids(self, ticket: str, path: str) -> str:
        """The reason to refuse a request for `path`, "" to permit it. At /control the Hello decides."""
        if ticket in self._owners or path == "/control":
            return ""
        if path not in OPEN:
            return "this ticket lets workers join and reads the status; other requests need the owner's, FOLDER/ticket"
        return self.over(ticket)

    def owners(self, ticket: str) -> bool:
        return ticket in self._owners
