"""How far an export has got, in a small file beside what it writes: so that the next process goes on there.

It is replaced whole, after what it speaks of has been written. A file that is none, or of another run's metrics, is as
good as none: the export then begins at the beginning.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from farandole.membership.values import Count
from farandole.platform.files import read, write_atomically

LONGEST = 16 * 1024  # bytes


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`at`: the byte of metrics.jsonl from which on lines are wanted; what has been written is of steps before `step`.
    `file`: which file that is, by its inode. `run`: whose it is. `id`: what the tool calls the run.
    """

    at: Count = 0
    step: Count = 0
    file: Count = 0
    run: str = ""
    id: str = ""

    def save(self, path: Path) -> None:
        """Raises OSError."""
        write_atomically(path, msgspec.json.encode(self) + b"\n")


def load(path: Path, metrics: Path) -> Mark:
    """The mark at `path`, of the lines in the file `metrics`. Where there is none, or one of other lines, it is of the
    beginning; with the name of the run whose those are.
    """
    file, run = identity(metrics), metrics.absolute().parent.name
    with contextlib.suppress(OSError, ValueError, RecursionError):  # msgspec's own errors among them
        found = msgspec.json.decode(read(path)[:LONGEST], type=Mark)
        if found.file == file and found.at <= os.stat(metrics).st_size:
            return found
        run = found.run or run
    return Mark(file=file, run=run)


def identity(metrics: Path) -> int:
    """0 where the file is not there yet."""
    try:
        return os.stat(metrics).st_ino & (2**53 - 1)
    except FileNotFoundError:
        return 0
