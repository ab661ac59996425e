"""The invariant checker of a simulated run: it is called at every event, and may raise. This one checks nothing.

The schedules of the tests have a checker that asserts the protocol's rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.protocol import messages as m
from farandole.protocol.events import Event
from farandole.protocol.view import View
from farandole.protocol.worker.state_machine import Save

if TYPE_CHECKING:
    from farandole.simulate.data_plane import DataPlane
    from farandole.simulate.exchange import SimulatedExchange
    from farandole.simulate.process import Process


class Violation(AssertionError):
    """An invariant does not hold."""


class Witness:
    """The base class of invariant checkers; it asserts nothing."""

    def check(self, worker: Process) -> None:
        """Called after every event of a worker."""

    def switched(self, worker: Process, view: View, round_: int) -> None: ...

    def resumed(self, worker: Process, message: m.Resume) -> None: ...

    def ended(self, worker: DataPlane, exchange: SimulatedExchange) -> None:
        """Called when all commit messages of the round have arrived."""

    def committed(self, worker: Process, exchange: SimulatedExchange) -> None:
        """Called when the training thread continues after the round."""

    def become_synced(self, worker: Process, loaded: set[Any]) -> None:
        """Called when a joiner is synced. `loaded`: the states from the veterans; `GARBAGE` for one that changed."""

    def renewed(self, worker: Process, loaded: set[Any]) -> None:
        """Called before a worker replaces its replica by another member's. `loaded`: as for `become_synced`."""

    def saved(self, worker: Process) -> None: ...

    def asked_to_save(self, worker: Process, save: Save) -> None: ...

    def on_first_view(self, worker: Process, step: int) -> None:
        """Called before the worker begins a first view with the state of `step`."""

    def recorded(self, event: Event) -> None:
        """Called when the coordinator has written an event."""
