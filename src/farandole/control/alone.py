"""A world of one without a coordinator: the same code over a client that agrees with itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from farandole.checkpoint.reach import listed
from farandole.control.client import Client
from farandole.control.journal import event_line, metrics_line
from farandole.control.paths import METRICS
from farandole.errors import UsageError
from farandole.membership import last_resort
from farandole.membership.messages import Checkpointed, Line, Message, Newest, Restored
from farandole.plan.history import History


class Alone(Client):
    """A world of one without a coordinator. Its metrics go to FARANDOLE_FOLDER, or nowhere.

    With a history, a file, it takes each step's batch as if that many workers had begun it: same bits as if they had.
    """

    def __init__(self, folder: str, history: str = "") -> None:
        super().__init__("alone")
        self.history = read_history(history) if history else None
        self.newest = listed(Path(folder) / METRICS) if folder else Newest()
        self._file = _open_lines(Path(folder)) if folder else None

    def tell(self, message: Message) -> None:
        if isinstance(message, Checkpointed | Restored):
            for event, fields in last_resort.events(self.worker, message):
                line = event_line(event, fields, time.time())
                if event != "checkpoint":
                    print(f"farandole: {event}: {fields}", file=sys.stderr, flush=True)
                if self._file:
                    self._file.write(msgspec.json.encode(line) + b"\n")

    def add_line(self, line: Line) -> None:
        if self._file:
            self._file.write(msgspec.json.encode(metrics_line(line)) + b"\n")


def read_history(path: str) -> History:
    """The history in a file.

    Raises:
        UsageError: there is no such file, or a line of it does not parse.
    """
    try:
        return History.parse(Path(path).read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the history {path} can't be read: {error}") from error


def _open_lines(folder: Path) -> BinaryIO:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / METRICS).open("ab", buffering=0)
