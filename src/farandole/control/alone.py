"""A world of one without a coordinator: the same code over a client that agrees with itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from farandole.control.client import Client
from farandole.control.journal import event_line, metrics_line
from farandole.membership import last_resort
from farandole.membership.messages import Checkpointed, Line, Message, Restored


class Alone(Client):
    """A world of one without a coordinator. Its metrics go to FARANDOLE_FOLDER, or nowhere."""

    def __init__(self, folder: str) -> None:
        super().__init__("alone")
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


def _open_lines(folder: Path) -> BinaryIO:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / "metrics.jsonl").open("ab", buffering=0)
