"""What may become of workers whose host can't get them the data, in a simulated run: invariants of the schedules.

Nobody goes for it who has not said so. The run neither ends for it nor begins anew while a member that holds the newest
state could go on; and the last one that holds it is not let go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farandole.protocol import events
from farandole.protocol.coordinator.failures import LOST
from farandole.simulate.witness import Violation

if TYPE_CHECKING:
    from farandole.simulate.process import Process
    from farandole.simulate.world import World

NOBODY_FED = "can get the run's data"  # why a run has ended


class UnfedWitness:
    """Is told of the coordinator's events."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._let_go: list[str] = []  # since the newest view

    def recorded(self, event: events.Event) -> None:
        match event:
            case events.LostEvent(worker=worker, reason=reason) if reason == LOST:
                if not self._world.workers[worker].unfed:
                    raise Violation(f"{worker} has its data, and has to go for want of it")
                self._let_go.append(worker)
            case events.ViewEvent():
                self._let_go.clear()  # others have gone on; what befalls these is another matter
            case events.StateLostEvent():
                for worker in self._let_go:
                    there = self._world.workers[worker]
                    if there.alive and there.state_machine.synced and there.instructions.exit is None:
                        raise Violation(f"{worker} was the last that held the state, and was let go")
            case events.OverEvent(code=1, reason=reason) if NOBODY_FED in reason:
                self._ended()
            case _:
                pass

    def _ended(self) -> None:
        known = self._world.coordinator.workers
        holders = [worker for worker in self._world.workers.values() if worker.name in known and self._holds(worker)]
        newest = max((w.state_machine.view.number for w in holders if w.state_machine.view), default=0)
        for worker in holders:
            view = worker.state_machine.view
            if view and view.number == newest and worker.name in view.members and not worker.unfed:
                raise Violation(f"the run has ended for want of data, and {worker.name} could have gone on")

    @staticmethod
    def _holds(worker: Process) -> bool:
        return worker.alive and not worker.frozen and worker.connected and worker.state_machine.synced
