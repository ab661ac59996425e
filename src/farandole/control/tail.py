"""The whole lines that a run's metrics.jsonl has got since they were last asked for."""

from __future__ import annotations

from pathlib import Path

from farandole.platform.private import opener

READ_BYTES = 8 * 1024 * 1024  # at a time: a million lines take many turns, and somebody can be told how far it is


class Tail:
    """Of the file at `path`, which may not be there yet. A file that has become shorter is read from its end on.

    Attributes:
        at: bytes that have been read, of `size`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.at = self.size = 0

    def lines(self) -> list[bytes]:
        """The next ones, with their ends; none: there are no more for now.

        Raises:
            NotPrivate: the file is another's.
            OSError: it can't be read.
        """
        try:
            with open(self._path, "rb", opener=opener) as file:
                self.size = file.seek(0, 2)
                self.at = min(self.at, self.size)
                file.seek(self.at)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self.at += whole or (len(data) if len(data) == READ_BYTES else 0)  # no line of a run is as long
        return data[:whole].splitlines(keepends=True)
