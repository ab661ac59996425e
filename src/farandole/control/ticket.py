"""The ticket: all that a process needs to reach a run and be admitted.

It is stored in the run folder with mode 0600 and is passed on as a file or on standard input. Its secret is never on a
command line, in a log or in the journal, and never sent (see `security.py`); `repr` does not show it. Invariant: a
ticket's address is loopback, or has TLS and the fingerprint of the certificate (see `security.py`). The certificate
names no host, so in a copy of the ticket the address may be changed to another route to the same coordinator.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from farandole.errors import CoordinatorUnreachable, NotPrivate, UsageError
from farandole.platform.files import OTHERS, OTHERS_WRITE, foreign, user, write_atomically

# --- ticket -----------------------------------------------------------------------------------------------------------

SECRET_BYTES = 32  # 256 bits
LONGEST = 16 * 1024  # bytes of a ticket
Opener = Callable[[str, int], int]
LOOPBACK = re.compile(r"127\.\d+\.\d+\.\d+|localhost|::1")


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address and the secret of a run.

    `address`: the coordinator's "http://host:port", for WebSocket and REST; "https:" off loopback. `bits`: the run's,
    which a worker has to know before it loads torch. `since`: Unix time from which on the run is at this address; of
    two tickets of one run the later counts.

    Raises:
        ValueError: the address is invalid, or others could read what is sent to it.
    """

    address: str
    secret: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    run: str
    fingerprint: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    bits: Annotated[str, msgspec.Meta(max_length=16)] = "same"
    since: float = 0.0

    def __post_init__(self) -> None:
        url = urlsplit(self.address)
        if not url.hostname or not url.port or self.address != f"{url.scheme}://{url.netloc}" or "@" in url.netloc:
            raise ValueError(f"{self.address!r} is not an address; it must look like http://127.0.0.1:4000")
        if url.scheme == "http" and not self.fingerprint and LOOPBACK.fullmatch(url.hostname):
            return
        if url.scheme != "https" or not self.fingerprint:
            raise ValueError(f"{self.address}: off loopback it must be https, with the certificate's fingerprint")

    def __repr__(self) -> str:
        return f"Ticket(run={self.run!r}, address={self.address!r}, secret=<{len(self.secret)} characters>)"

    def no_answer(self, reason: object) -> CoordinatorUnreachable:
        """The error that nothing answers at the address, with the remedy where hosts have several addresses."""
        remedy = (
            "; if this machine reaches the coordinator's at another address, write that one into a copy of the ticket, "
            "or start the run with `--listen ADDRESS`"
            if self.fingerprint
            else ""
        )
        return CoordinatorUnreachable(f"run {self.run}: no answer at {self.address} ({reason}){remedy}")

    def save(self, path: Path) -> None:
        write_atomically(path, msgspec.json.encode(self) + b"\n")


def new_secret() -> str:
    return secrets.token_hex(SECRET_BYTES)


@functools.cache
def read_stdin() -> bytes:
    """The content of standard input. It can be read once, and is needed before and in a worker's process."""
    return sys.stdin.buffer.read(LONGEST + 1)


def load(source: str, opener: Opener | None = None) -> Ticket:
    """The ticket in the file `source`, or on standard input if `source` is "-". For a run's own, pass a private
    `opener`.

    Raises:
        UsageError: it does not exist, can't be read or is not a ticket; the message never quotes its content.
    """
    where = "standard input" if source == "-" else source
    try:
        if source == "-":
            content = read_stdin()
        else:
            with open(source, "rb", opener=opener) as file:
                content = file.read(LONGEST + 1)
    except NotPrivate:
        raise
    except OSError as error:
        raise UsageError(
            f"ticket {where}: {error.strerror}; a run keeps its ticket in its folder, as FOLDER/ticket"
        ) from None
    try:
        return msgspec.json.decode(content[:LONGEST], type=Ticket)
    except (msgspec.MsgspecError, ValueError):
        raise UsageError(
            f"ticket {where}: not a ticket ({len(content)} bytes); copy the file FOLDER/ticket of the run as it is"
        ) from None


def newest(ticket: Ticket, source: str) -> Ticket:
    """The current ticket in the file, if it belongs to the same run and is not older. After a takeover the run may be
    at another address, and an older process may not know of it yet.
    """
    with contextlib.suppress(UsageError):
        if source not in ("", "-") and (now := load(source)).secret == ticket.secret and now.since >= ticket.since:
            return now
    return ticket


def exposed(source: str) -> str:
    """A warning about a ticket's file that others can read or change, "" for none."""
    try:
        mode = os.stat(source).st_mode
    except OSError:
        return ""
    if not (stat.S_ISREG(mode) and mode & OTHERS):
        return ""
    action = "change the ticket {}, and where its workers go" if mode & OTHERS_WRITE else "read the ticket {}, and join"
    return f"others can {action.format(source)} (mode {stat.S_IMODE(mode):04o}); chmod 600 {source}"


# --- scrape token -----------------------------------------------------------------------------------------------------
#
# The token with which Prometheus reads `/metrics`: one line in a file of the user, the same file that Prometheus has as
# its `credentials_file`. It opens only that page, and nothing else of the run (`coordinator/prometheus.py`).
#
# Each process that needs it reads it from the file. It is in no setting, argument, log or journal; those hold the path.
# A file that others can read is refused, because it opens the page to them. A file that a group can read is accepted,
# because Prometheus has a user of its own. A symbolic link is followed: secrets are mounted into containers that way.

SHORTEST, LONGEST_TOKEN = 16, 4096  # characters; a shorter token could be guessed
FORM = re.compile(rb"[A-Za-z0-9._~+/-]+=*")  # of a bearer token, RFC 6750
_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


def load_scrape_token(path: str | os.PathLike[str]) -> bytes:
    """The token in a file, without the line end.

    Raises:
        UsageError: the file does not exist, is empty, has no valid token, or others can read it; the message never
            quotes its content.
    """
    place, option = Path(path), f"--metrics-token {path}"
    try:
        with open(place, "rb", opener=_opener) as file:
            info = os.fstat(file.fileno())
            content = file.read(LONGEST_TOKEN + 2) if stat.S_ISREG(info.st_mode) else b""
    except OSError as error:
        raise UsageError(
            f"{option}: {error.strerror}; create one with `(umask 077; openssl rand -hex 32 > {place.name})`"
        ) from None
    if not stat.S_ISREG(info.st_mode):
        raise UsageError(f"{option}: not a regular file")
    if foreign(info) and info.st_uid != 0:
        raise UsageError(f"{option}: it belongs to {user(info.st_uid)}, who can change it; name a file of your own")
    if info.st_mode & _OTHERS:
        mode = stat.S_IMODE(info.st_mode)
        raise UsageError(f"{option}: others can read or change it (mode {mode:04o}); chmod 600 {path}, or 640")
    token = content.strip(b"\r\n")
    if not token:
        raise UsageError(f"{option}: it is empty; put a line of at least {SHORTEST} characters there")
    if not (SHORTEST <= len(token) <= LONGEST_TOKEN and FORM.fullmatch(token)):
        raise UsageError(
            f"{option}: not a token; it has {SHORTEST} to {LONGEST_TOKEN} letters, digits and any of ._~+/-, "
            "in one line"
        )
    return token


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
