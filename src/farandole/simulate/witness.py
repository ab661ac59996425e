"""Who is told of everything that happens in a simulated run, and may say that it must not: the null one says nothing.

The schedules of the tests have theirs, which asserts the protocol's rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.protocol import messages as m
from farandole.protocol.events import Event
from farandole.protocol.view import View
from farandole.protocol.worker.member import Save

if TYPE_CHECKING:
    from farandole.simulate.data_plane import DataPlane
    from farandole.simulate.exchange import SimulatedExchange
    from farandole.simulate.process import Process


class Violation(AssertionError):
    """An invariant does not hold."""


class Witness:
    """Asserts nothing."""

    def check(self, worker: Process) -> None:
        """After every event of a worker."""

    def begun(self, worker: Process, before: View | None) -> None:
        """It has begun a round; `before`: its view until then."""

    def applied(self, worker: Process, view: View, round_: int) -> None: ...

    def resumed(self, worker: Process, message: m.Resume) -> None: ...

    def ended(self, worker: DataPlane, exchange: SimulatedExchange) -> None:
        """All words of the round are there."""

    def committed(self, worker: Process, exchange: SimulatedExchange) -> None:
        """Its training thread goes on from the round."""

    def become_synced(self, worker: Process, loaded: set[Any]) -> None:
        """`loaded`: the states that the veterans have sent it, `GARBAGE` among them where one had changed meanwhile."""

    def saved(self, worker: Process) -> None: ...

    def asked_to_save(self, worker: Process, save: Save) -> None: ...

    def begins(self, worker: Process, step: int) -> None:
        """It is about to begin a first view with the state of `step`."""

    def recorded(self, event: Event) -> None:
        """The coordinator has written an event."""
