"""A cursor in a run's metrics.jsonl: the lines from one byte on, as they come, each with the byte where it begins.

The file is the buffer: who reads slowly is behind, and takes no memory for it. Whole lines count, and a torn one waits
for its end, or goes when the next coordinator cuts it off. What is no line (`membership/metrics.py`) is passed over and
counted. A file that has become shorter than what was read of it is not the one that was read: reading goes on at its
end, and that counts as one damaged line, for to read it again would tell everything twice.
"""

from __future__ import annotations

from pathlib import Path

from farandole.membership.metrics import Line, parse_line
from farandole.platform.files import opener

READ_BYTES = 256 * 1024  # at a time; no line of a run is a tenth as long
Placed = tuple[int, Line]


class Cursor:
    """In the file at `path`, from byte `at` on.

    Attributes:
        damaged: lines that were passed over.
    """

    def __init__(self, path: Path, at: int = 0) -> None:
        self._path = path
        self.at = at
        self.damaged = 0

    def read(self) -> list[Placed]:
        """The next lines; none, where there are none yet, or no file.

        Raises:
            NotPrivate: the file is another's.
            OSError: it can't be read.
        """
        data = self._bytes()
        if b"\n" not in data:
            if len(data) == READ_BYTES:  # nothing that a run has written
                self.damaged += 1
                self.at += len(data)
            return []
        found: list[Placed] = []
        for line in data.split(b"\n")[:-1]:
            if (parsed := parse_line(line)) is None:
                self.damaged += 1
            else:
                found.append((self.at, parsed))
            self.at += len(line) + 1
        return found

    def _bytes(self) -> bytes:
        try:
            with open(self._path, "rb", opener=opener) as file:
                size = file.seek(0, 2)
                if size < self.at:
                    self.damaged += 1
                    self.at = size
                file.seek(self.at)
                return file.read(READ_BYTES)
        except FileNotFoundError:
            return b""


def before(path: Path, at: int) -> list[Line]:
    """The newest lines that end at byte `at` or before, oldest first; as many as one reading has."""
    cursor = Cursor(path, max(0, at - READ_BYTES))
    return [line for place, line in cursor.read() if place < at]
