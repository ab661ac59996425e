"""The ticket: all that a process needs to reach a run and be let in.

It is kept in the run folder at mode 0600 and travels as a file or on standard input. Its secret is never on a command
line, in a log or in the journal; `repr` does not show it. The certificate's fingerprint is empty while the coordinator
serves loopback only.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import msgspec

from farandole.control.files import write_atomically
from farandole.errors import UsageError

SECRET_BYTES = 32  # 256 bits


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`address` is "http://host:port" of the coordinator, for WebSocket and REST alike."""

    address: str
    secret: str
    run: str
    fingerprint: str = ""

    def __repr__(self) -> str:
        return f"Ticket(run={self.run!r}, address={self.address!r}, secret=<{len(self.secret)} characters>)"

    @property
    def authorization(self) -> str:
        """The value of the Authorization header."""
        return f"Bearer {self.secret}"

    def save(self, path: Path) -> None:
        write_atomically(path, msgspec.json.encode(self) + b"\n", mode=0o600)


def new_secret() -> str:
    return secrets.token_hex(SECRET_BYTES)


def load(source: str) -> Ticket:
    """The ticket in the file `source`, or on standard input where `source` is "-".

    Raises:
        UsageError: it is not there, not readable or not a ticket; the message never quotes its content.
    """
    where = "standard input" if source == "-" else source
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise UsageError(
            f"ticket {where}: {error.strerror}; a run keeps its ticket in its folder, as FOLDER/ticket"
        ) from None
    try:
        return msgspec.json.decode(content, type=Ticket)
    except msgspec.MsgspecError:
        raise UsageError(
            f"ticket {where}: not a ticket ({len(content)} bytes); copy the file FOLDER/ticket of the run as it is"
        ) from None
