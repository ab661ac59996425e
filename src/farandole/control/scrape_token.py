"""The token by which a Prometheus reads `/metrics`: one line in a file of the user's, the same that Prometheus has as
its `credentials_file`. It opens that one page, and nothing else of the run (`coordinator/scraping.py`).

It is read from the file by whoever needs it, and is in no setting, argument, log or journal; those hold the path.
A file that others can read is refused, for it opens the page to them; one that a group reads is not, since Prometheus
has a user of its own. A symbolic link is followed: that is how secrets are mounted into containers.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from farandole.errors import UsageError
from farandole.platform.private import foreign, user

SHORTEST, LONGEST = 16, 4096  # characters; what is shorter could be guessed
FORM = re.compile(rb"[A-Za-z0-9._~+/-]+=*")  # of a bearer token, RFC 6750
_OTHERS = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP


def load(path: str | os.PathLike[str]) -> bytes:
    """The token in a file, without the line's end.

    Raises:
        UsageError: it is not there, empty, or no token, or others can read it; the message never quotes its content.
    """
    place, option = Path(path), f"--metrics-token {path}"
    try:
        with open(place, "rb", opener=_opener) as file:
            info = os.fstat(file.fileno())
            content = file.read(LONGEST + 2) if stat.S_ISREG(info.st_mode) else b""
    except OSError as error:
        raise UsageError(
            f"{option}: {error.strerror}; make one with `(umask 077; openssl rand -hex 32 > {place.name})`"
        ) from None
    if not stat.S_ISREG(info.st_mode):
        raise UsageError(f"{option}: no regular file")
    if foreign(info) and info.st_uid != 0:
        raise UsageError(f"{option}: it belongs to {user(info.st_uid)}, who can change it; name a file of your own")
    if info.st_mode & _OTHERS:
        mode = stat.S_IMODE(info.st_mode)
        raise UsageError(f"{option}: others can read or change it (mode {mode:04o}); chmod 600 {path}, or 640")
    token = content.strip(b"\r\n")
    if not token:
        raise UsageError(f"{option}: it is empty; put a line of at least {SHORTEST} characters there")
    if not (SHORTEST <= len(token) <= LONGEST and FORM.fullmatch(token)):
        raise UsageError(
            f"{option}: not a token; it has {SHORTEST} to {LONGEST} letters, digits and any of ._~+/-, in one line"
        )
    return token


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe that is there would be waited for
