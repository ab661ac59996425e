"""New lines of the workers' log files, as they come, as far as anybody can read them.

Whole lines only: what has no newline yet waits, until `flush`. Of what a progress bar overwrites (carriage returns)
the last state counts. Reading never fails on what a process writes: undecodable bytes are replaced.

It never falls behind. Each look goes to the end of every file: of what is more than `READ_BYTES` the lines are counted
(up to `COUNT_BYTES`), and not kept; of what is left `flow.py` says what is shown. A line of any length takes
`LONGEST` characters at most.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from farandole.control.run_folder import ASIDE
from farandole.observe.flow import Flow
from farandole.platform.files import open_regular

READ_BYTES = 1024 * 1024  # of one file in a look
COUNT_BYTES = 32 * READ_BYTES
LONGEST = 10_000  # characters
_KEPT = 4 * LONGEST + 4  # bytes of a line: a character takes 4 at most, and one too many is told
_ASIDE = ASIDE.encode()


class _Log:
    """One file. `passed` and `unread`: lines and bytes that the newest look has left out."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.file: BinaryIO = open_regular(path)
        self.flow = Flow(path.stem)
        self.rest = b""
        self.lines: list[bytes] = []
        self.passed = self.unread = 0

    def look(self) -> None:
        """Everything to the end of now."""
        self.passed, self.unread = 0, 0
        behind = os.fstat(self.file.fileno()).st_size - self.file.tell() - READ_BYTES
        if behind > 0:
            self._pass_over(behind)
        *whole, rest = (self.rest + (self.file.read(READ_BYTES) or b"")).split(b"\n")
        if behind > 0 and whole:  # the end of a line whose beginning is gone
            self.passed += 1
            del whole[0]
        self.rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :][:_KEPT]
        self.lines = [line for line in whole if not line.startswith(_ASIDE)]

    def _pass_over(self, size: int) -> None:
        self.rest = b""
        counted = min(size, COUNT_BYTES)
        self.unread = size - counted
        self.file.seek(self.unread, os.SEEK_CUR)
        while counted > 0 and (data := self.file.read(min(counted, READ_BYTES))):
            self.passed += data.count(b"\n")
            counted -= len(data)


class Follower:
    """`with Follower(folder) as follower`; then ask for `lines()` from time to time. What is there already is old."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._logs: dict[Path, _Log] = {}
        for path in folder.glob("*.log"):
            with contextlib.suppress(OSError):  # no file: it is tried again
                self._logs[path] = _Log(path)
                self._logs[path].file.seek(0, os.SEEK_END)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *error: object) -> None:
        for log in self._logs.values():
            log.file.close()

    def lines(self) -> list[tuple[str, str]]:
        """New (name, line) pairs, in order within each file; the name is the file's without `.log`, "" for a word of
        ours on what is not shown.
        """
        for path in sorted(self._folder.glob("*.log")):
            if path not in self._logs:
                try:
                    self._logs[path] = _Log(path)
                except OSError:  # removed at this moment, or there are no descriptors: it is tried again
                    continue
        logs = [self._logs[path] for path in sorted(self._logs)]
        for log in logs:
            log.look()
        part, now = 1 / max(1, sum(bool(log.lines) for log in logs)), self._clock()
        found: list[tuple[str, str]] = []
        for log in logs:
            first, word, then = log.flow.take(log.lines, now, part=part, passed=log.passed, unread=log.unread)
            log.lines = []
            found += _pairs(log.name, first, word, then)
        return found

    def flush(self) -> list[tuple[str, str]]:
        """All that is left, the unfinished last lines too: the writers have ended."""
        found = self.lines()
        for log in self._logs.values():
            found += _pairs(log.name, (), *log.flow.end())
            found += [(log.name, _shown(log.rest))] if log.rest and not log.rest.startswith(_ASIDE) else []
            log.rest = b""
        return found


def _pairs(name: str, first: Sequence[bytes], word: str, then: Sequence[bytes]) -> list[tuple[str, str]]:
    said = [("", word)] if word else []
    return [*((name, _shown(line)) for line in first), *said, *((name, _shown(line)) for line in then)]


def _shown(line: bytes) -> str:
    text = line.rstrip(b"\r").rpartition(b"\r")[2][:_KEPT].decode(errors="replace")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… the rest of this line is only in its log"
