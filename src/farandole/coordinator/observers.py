"""The observers of a run: each gets the newest lines of metrics.jsonl, and then every new line.

Observers only watch: a line that can't be sent costs them that line, and nobody else anything. If an observer in this
process (`control/run_folder.py`) raises, this is reported once, and it gets no more lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from farandole.control.run_folder import Observer
from farandole.coordinator.connection import Connection
from farandole.coordinator.listener import UnauthenticatedPeers
from farandole.coordinator.rest import internal_error
from farandole.protocol.messages import Note, encode
from farandole.protocol.metrics import Line, as_written

RECENT_LINES = 200  # sent to an observer when it connects


class Observers:
    """Attributes: recent: the newest lines; local: the observers in this process."""

    def __init__(self, lines: Iterable[Line], record: UnauthenticatedPeers) -> None:
        self.local: list[Observer] = []
        self.recent = deque(lines, maxlen=RECENT_LINES)
        self._record = record
        self._connections: set[Connection] = set()

    async def serve(self, connection: Connection) -> None:
        """Serve an observer's connection until its end."""
        for line in self.recent:
            self._send(line, (connection,))
        self._connections.add(connection)
        try:
            while await connection.receive() is not None:
                pass  # observers send nothing
        finally:
            self._connections.discard(connection)

    def send(self, line: Line) -> None:
        self.recent.append(line)
        for observer in tuple(self.local):
            try:
                observer.take(line)
            except Exception as error:  # noqa: BLE001  any error of a library
                self.local.remove(observer)
                internal_error(f"a line to {observer.name}, which gets no more,", error, self._record)
        self._send(line, self._connections)

    def _send(self, line: Line, connections: Iterable[Connection]) -> None:
        try:
            note = encode(Note(line=as_written(line)))
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            internal_error("a line to observers", error, self._record)
            return
        for connection in connections:
            connection.send(note)
