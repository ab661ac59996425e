"""Files that another process may read at any moment: they appear whole or not at all. They are private, too.

And files of the user's that are read while a run is on, which may be anything.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

from farandole.platform.private import FILE_MODE


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside `path`, then rename. Its mode is 0600 from the first byte: a secret is never readable in between."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except OSError:  # the disk is full: nothing half-written stays
        beside.unlink(missing_ok=True)
        raise


def open_regular(path: Path) -> BinaryIO:
    """A regular file, for reading, without a buffer. A pipe is never waited for.

    Raises:
        OSError: it can't be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        os.set_blocking(descriptor, True)
        return cast("BinaryIO", os.fdopen(descriptor, "rb", buffering=0))
    except BaseException:
        os.close(descriptor)
        raise
