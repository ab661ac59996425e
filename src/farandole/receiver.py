"""State on its way: to a joiner, whose training thread waits for it or for the end of its view, from the veterans."""

from __future__ import annotations

import threading
from typing import Any

from farandole.collective.group import PeerLost
from farandole.collective.state import Arrival, Snapshot, send_state
from farandole.control.client import Client
from farandole.errors import StateDisputed
from farandole.membership.view import View
from farandole.plan.shards import Position


class Receiver:
    """Receives the state on a thread of its own: a receive from a frozen veteran can't be woken."""

    def __init__(self, arrival: Arrival, view: View, client: Client) -> None:
        self._view = view
        self.header: tuple[int, Position, list[bool]] | None = None
        self._state: Any = None
        self._disputed: StateDisputed | None = None
        self._arrival = arrival
        self._client = client
        threading.Thread(target=self._receive, name="state", daemon=True).start()

    @property
    def state(self) -> Any:
        """None until it is there.

        Raises:
            StateDisputed: the veterans do not hold the same.
        """
        if self._disputed is not None:
            raise self._disputed
        return self._state

    def _receive(self) -> None:
        try:
            self.header = self._arrival.header()
            self._client.changed()
            self._state = self._arrival.state()
            self._client.changed()
        except StateDisputed as error:
            self._disputed = error
            self._client.changed()
        except PeerLost as lost:
            self._client.lost(self._view.number, lost.peer, lost.reason)


def hand_on(client: Client, view: View, round_: int, position: Position, state: Any) -> None:
    """A veteran's part in `view`: send `state`, as of this round's start, in the background."""
    group = client.groups[view.group]
    snapshot = Snapshot(state)

    def send() -> None:
        try:
            send_state(view, client.worker, group, round_, position, snapshot)
        except PeerLost as lost:
            client.lost(view.number, lost.peer, lost.reason)

    threading.Thread(target=send, name=f"state-{view.number}", daemon=True).start()
