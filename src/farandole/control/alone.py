"""A world of one without a coordinator: the same code over a client that agrees with itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from farandole.control.client import Client
from farandole.control.journal import event_line, metrics_line
from farandole.errors import UsageError
from farandole.membership import last_resort
from farandole.membership.messages import Checkpointed, Line, LoaderEnded, Message, Restored
from farandole.plan.history import History


class Alone(Client):
    """A world of one without a coordinator. Its metrics go to FARANDOLE_FOLDER, or nowhere.

    With a history, a file, it takes each step's batch as if that many workers had begun it: same bits as if they had.
    """

    def __init__(self, folder: str, history: str = "") -> None:
        super().__init__("alone")
        self.history = read_history(history) if history else None
        self._file = _open_lines(Path(folder)) if folder else None

    def tell(self, message: Message) -> None:
        if isinstance(message, Checkpointed | Restored | LoaderEnded):
            for event, fields in last_resort.events(self.worker, message):
                line = event_line(event, fields, time.time())
                if event not in ("checkpoint", "loader replaced"):  # the loader has said so itself
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
    return (folder / "metrics.jsonl").open("ab", buffering=0)
