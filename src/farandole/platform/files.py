"""Files that another process may read at any moment: they appear whole or not at all. They are private, too."""

from __future__ import annotations

import os
from pathlib import Path

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
