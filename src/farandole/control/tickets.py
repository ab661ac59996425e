"""The tickets of a run: its owner's, and those issued for others, which may expire and can be taken back.

FOLDER/ticket is the owner's: it never expires and may do everything. An issued one lets workers join and reads the
status; it does not steer, has no pools, and issues nothing. `farandole ticket` writes FOLDER/tickets (mode 0600, whole
or not at all) and asks the coordinator to read it again: so no secret goes over the wire, and a coordinator that comes
back knows them all. A file that can't be read leaves what was read before, and after a restart the owner's alone: what
is not known is not let in.

An *expired* ticket lets nobody new in. Whose worker is in stays, and may connect again: what is over is the invitation.
A *revoked* one is good for nothing: the connections that it has opened are closed and its workers put out, told not to
come back. Both stay in the file, so that whoever shows one is told why it is not let in.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from farandole.control.challenge import ticket_id
from farandole.errors import UsageError
from farandole.membership import events
from farandole.platform.file_thread import bounded
from farandole.platform.files import open_regular, write_atomically

MOST = 1000
LONGEST = 1024 * 1024  # bytes of the file
OPEN = (  # what an issued ticket may ask for
    *("/control", "/api/alive", "/api/status", "/api/numerics", "/api/job", "/api/code"),
)
TicketName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class Issued(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


def read(path: Path) -> tuple[Issued, ...]:
    """Those in the file at `path`, none if it is not there.

    Raises:
        UsageError: it can't be read, or holds something else; the message never quotes its content.
    """
    try:
        with open_regular(path) as file:
            content = file.read(LONGEST + 1)
        found = msgspec.json.decode(content[:LONGEST], type=tuple[Issued, ...])
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise UsageError(f"{path}: not the run's tickets; remove it, and issue them anew") from None
    if len(found) > MOST or len({each.name for each in found}) < len(found):
        raise UsageError(f"{path}: more than {MOST} tickets, or two of one name; remove it, and issue them anew")
    return found


def write(path: Path, tickets: tuple[Issued, ...]) -> None:
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
        self._issued: dict[str, Issued] = {}
        self._read = False
        self.known = dict(self._owners)

    def reread(self) -> list[events.Event]:
        """What has become of them since they were first read.

        Raises:
            UsageError: the file is damaged; all is as before.
        """
        before, again = self._issued, self._read
        try:
            found = bounded(partial(read, self._path))
        except TimeoutError as error:
            raise UsageError(f"{self._path}: {error}") from None
        self._read = True
        self._issued = {ticket_id(each.secret): each for each in found}
        self.known.clear()
        self.known.update({**{key: each.secret for key, each in self._issued.items()}, **self._owners})
        new = [each.name for key, each in self._issued.items() if again and key not in before]
        gone = [each.name for key, each in before.items() if not each.revoked and self.revoked(key)]
        return [*(events.TicketIssued(ticket=n) for n in new), *(events.TicketRevoked(ticket=n) for n in gone)]

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
