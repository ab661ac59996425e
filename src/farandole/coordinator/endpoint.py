"""Where a run is reached and what it is known by: address, secret, certificate.

All of it survives the coordinator's process: who comes back reads its own ticket, so that every ticket handed out stays
good. Off loopback there is always a certificate; nothing switches it off.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from farandole.control import security
from farandole.control.run_folder import TICKET
from farandole.control.ticket import load, new_secret
from farandole.errors import UsageError
from farandole.platform.files import opener


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """`host` and `port` to bind, 0 for any port; `certificate` is None on loopback."""

    host: str
    port: int
    secret: str
    certificate: security.Certificate | None

    @property
    def fingerprint(self) -> str:
        return self.certificate.fingerprint if self.certificate else ""


def endpoint(folder: Path, listen: str, *, again: bool = False) -> Endpoint:
    """Of the run in `folder`, told to `listen` at HOST[:PORT]. Who comes `again` takes secret and port from its own
    FOLDER/ticket; who begins replaces whatever is there.

    Raises:
        UsageError: `listen` can't be read, the ticket is not there or another's, or there is no certificate to be had.
    """
    host, port = parse(listen)
    secret = new_secret()
    if again:
        secret, port = load(str(folder / TICKET), opener).secret, port or port_of(folder)
    certificate = None if is_loopback(host) else security.certificate(folder)
    return Endpoint(host=host, port=port, secret=secret, certificate=certificate)


def port_of(folder: Path) -> int:
    """At which the run in `folder` was served last, 0 for none. Raises UsageError: its ticket is not there."""
    return urlsplit(load(str(folder / TICKET), opener).address).port or 0


def parse(listen: str) -> tuple[str, int]:
    """HOST[:PORT] as (host, port); an IPv6 address with a port stands in brackets.

    Raises:
        UsageError: it is none.
    """
    try:
        return str(ipaddress.ip_address(listen)), 0
    except ValueError:
        pass
    try:
        url = urlsplit(f"//{listen}")
        if not url.hostname or url.netloc != listen or "@" in listen:
            raise ValueError("no host")
        return url.hostname, url.port or 0
    except ValueError as error:
        raise UsageError(
            f"--listen {listen}: {error}; give HOST or HOST:PORT, as 10.0.0.5, node1:4000 or [fd00::5]:4000"
        ) from None


def is_loopback(host: str) -> bool:
    """Names other than localhost count as not: they may mean anything tomorrow."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def advertised(host: str) -> str:
    """What others are told: for "every interface", the address that this machine's way out has."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        address = ipaddress.ip_address(_way_out(address.version))
    return f"[{address}]" if address.version == 6 else str(address)


def _way_out(version: int) -> str:
    """A connected datagram socket has chosen its route; nothing is sent. The targets are documentation addresses."""
    family, target = (socket.AF_INET, "192.0.2.1") if version == 4 else (socket.AF_INET6, "2001:db8::1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError as error:
            raise UsageError(
                f"--listen: this machine has no way out ({error.strerror}), so which of its addresses others can "
                f"reach is unknown; name one"
            ) from None
        return probe.getsockname()[0]
