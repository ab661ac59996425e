"""The run's certificate: made once for the run, pinned by its ticket.

Off loopback all control traffic is TLS 1.3. The certificate is self-signed and names nobody: its sha256 fingerprint is
in the ticket. A client compares it after the handshake, in which the server proves that it holds the key, and before it
sends anything. So neither names nor clocks nor authorities matter, and a server that is not the run's never sees the
secret. FOLDER/tls.pem holds key and certificate, mode 0600; a coordinator that comes back finds them there.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import importlib.util
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from farandole.control.run_folder import CERTIFICATE
from farandole.control.ticket import Ticket
from farandole.errors import NotPrivate, NotTheCoordinator, UsageError
from farandole.platform.extras import how_to_install
from farandole.platform.files import write_atomically
from farandole.platform.private import read

if TYPE_CHECKING:
    import aiohttp

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
