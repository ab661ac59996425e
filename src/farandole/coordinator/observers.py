"""Who watches a run: observers get the newest lines of metrics.jsonl, and then every line that comes.

They only watch: what can't be told to them costs them an answer, and nobody else anything. One within this process
(`control/run_folder.py`) that raises is told of once, and gets no more lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from farandole.control.run_folder import Observer
from farandole.coordinator.connection import Connection
from farandole.coordinator.listener import UnauthenticatedPeers
from farandole.coordinator.rest import untold
from farandole.protocol.messages import Note, encode
from farandole.protocol.metrics import Line, as_written

RECENT_LINES = 200  # what an observer gets at connect


class Observers:
    """Attributes: recent: the newest lines; here: the observers within this process."""

    def __init__(self, lines: Iterable[Line], record: UnauthenticatedPeers) -> None:
        self.here: list[Observer] = []
        self.recent = deque(lines, maxlen=RECENT_LINES)
        self._record = record
        self._connections: set[Connection] = set()

    async def serve(self, connection: Connection) -> None:
        """To its end."""
        for line in self.recent:
            self._send(line, (connection,))
        self._connections.add(connection)
        try:
            while await connection.receive() is not None:
                pass  # observers have nothing to say
        finally:
            self._connections.discard(connection)

    def tell(self, line: Line) -> None:
        self.recent.append(line)
        for observer in tuple(self.here):
            try:
                observer.take(line)
            except Exception as error:  # noqa: BLE001  whatever a library raises
                self.here.remove(observer)
                untold(f"a line to {observer.name}, which gets no more,", error, self._record)
        self._send(line, self._connections)

    def _send(self, line: Line, connections: Iterable[Connection]) -> None:
        try:
            note = encode(Note(line=as_written(line)))
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            untold("a line to observers", error, self._record)
            return
        for connection in connections:
            connection.send(note)
