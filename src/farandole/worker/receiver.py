"""State on its way: to a joiner, whose training thread waits for it or for the end of its view, from the veterans."""

from __future__ import annotations

import threading
from typing import Any

from farandole.collective.state import Snapshot
from farandole.collective.transfer import Arrival, send_state
from farandole.collective.transport import PeerLost
from farandole.errors import StateDisputed
from farandole.membership.view import View
from farandole.plan.shards import Position
from farandole.worker.participant import Participant


class Receiver:
    """Receives the state on a thread of its own: a receive from a frozen veteran can't be woken.

    Where the connections of `view` are gone, it has been given up meanwhile: then nothing ever arrives.
    """

    def __init__(self, view: View, participant: Participant, parameters: int) -> None:
        self._view = view
        self.header: tuple[int, Position, list[bool]] | None = None
        self._state: Any = None
        self._disputed: StateDisputed | None = None
        self._participant = participant
        links = participant.groups.get(view.group)
        if links is not None:
            ahead, participant.room = participant.room, None  # another one may still be written into
            arrival = Arrival(view, view.senders(participant.terms.bits), links, parameters, ahead)
            threading.Thread(target=self._receive, args=(arrival,), name="state", daemon=True).start()

    @property
    def state(self) -> Any:
        """None until it is there.

        Raises:
            StateDisputed: the veterans do not hold the same.
        """
        if self._disputed is not None:
            raise self._disputed
        return self._state

    def _receive(self, arrival: Arrival) -> None:
        try:
            self.header = arrival.header()
            self._participant.changed()
            self._state = arrival.state()
            self._participant.changed()
        except StateDisputed as error:
            self._disputed = error
            self._participant.changed()
        except PeerLost as lost:
            self._participant.lost(self._view.number, lost.peer, lost.reason)


def hand_on(participant: Participant, view: View, round_: int, position: Position, state: Any) -> None:
    """A veteran's part in `view`: send `state`, as of this round's start, in the background.

    Where the connections of `view` are gone, it has been given up meanwhile: there is nobody to send to.
    """
    links, veterans = participant.groups.get(view.group), view.senders(participant.terms.bits)
    if links is None or participant.worker not in veterans:
        return
    snapshot = Snapshot(state)

    def send() -> None:
        try:
            send_state(view, veterans, participant.worker, links, round_, position, snapshot, participant.memory)
        except PeerLost as lost:
            participant.lost(view.number, lost.peer, lost.reason)

    threading.Thread(target=send, name=f"state-{view.number}", daemon=True).start()
