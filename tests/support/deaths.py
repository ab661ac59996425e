"""Deaths in a scene, as the coordinator hears of them."""

from __future__ import annotations

from farandole.protocol import messages as m
from farandole.protocol.coordinator.failures import TOGETHER_S
from farandole.protocol.view import View
from tests.support.scene import Scene

SEGV, KILL = "killed by signal 11", "killed by signal 9"
APART = TOGETHER_S + 1


def beat(scene: Scene, step: int) -> None:
    """Everyone in the view is in `step`."""
    view = scene.coordinator.view
    for worker in view.members if view else ():
        scene.say(worker, m.Heartbeat(view=view.number if view else 0, step=step))


def die(scene: Scene, worker: str, reason: str) -> None:
    """Its process ends, and its pool sees it first."""
    scene.coordinator.on_pool_message(
        "pool", f"h-{worker}", m.WorkerProcessExited(worker=worker, reason=reason), scene.now
    )
    scene.close(worker)


def pass_by(scene: Scene, seconds: float) -> None:
    scene.wait(seconds, *scene.coordinator.workers)


def stopped(scene: Scene, step: int) -> m.Stopped:
    view: View | None = scene.coordinator.view
    assert view is not None
    return m.Stopped(
        stop=scene.coordinator.stops, view=view, round=step, step=step, has_result=False, synced=True,
        lineage=scene.dealt(view, step),
    )  # fmt: skip
