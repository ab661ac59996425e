"""New lines of the workers' log files, as they come.

Whole lines only: what has no newline yet waits, until `flush`. Of what a progress bar overwrites (carriage returns)
the last state counts. Reading never fails on what a process writes: undecodable bytes are replaced.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

READ_BYTES = 1024 * 1024  # of one file at a time, so that a chatty worker can't hold up the display


class Follower:
    """`with Follower(folder) as follower`; then ask for `lines()` from time to time. What is there already is old."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, BinaryIO] = {}
        self._rest: dict[Path, bytes] = {}
        for path in folder.glob("*.log"):
            self._files[path] = path.open("rb")
            self._files[path].seek(0, os.SEEK_END)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def lines(self) -> list[tuple[str, str]]:
        """New (name, line) pairs, in order within each file; the name is the file's without `.log`."""
        found: list[tuple[str, str]] = []
        for path in sorted(self._folder.glob("*.log")):
            if path not in self._files:
                try:
                    self._files[path] = path.open("rb")
                except OSError:  # removed at this moment, or there are no descriptors: it is tried again
                    continue
            *whole, rest = (self._rest.get(path, b"") + self._files[path].read(READ_BYTES)).split(b"\n")
            self._rest[path] = rest
            found.extend((path.stem, _shown(line)) for line in whole)
        return found

    def flush(self) -> list[tuple[str, str]]:
        """All that is left, the unfinished last lines too: the writers have ended."""
        found: list[tuple[str, str]] = []
        while new := self.lines():
            found.extend(new)
        found.extend((path.stem, _shown(rest)) for path, rest in self._rest.items() if rest)
        self._rest.clear()
        return found


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
