"""Who trains, who is coming and who is going, as far as events tell it. Pure.

`story/stays.py` has everybody who ever was there; this has who is there now, and forgets the others.
"""

from __future__ import annotations

from farandole.control.status import Status
from farandole.membership import events
from farandole.membership.metrics import Line


class Presence:
    """`take` every line, oldest first.

    Attributes:
        members: of the view in force.
        known: whether anything has said who they are.
    """

    def __init__(self, status: Status | None = None) -> None:
        """`status`: where somebody looks on from the middle."""
        there = status.workers if status else ()
        ranked = sorted((worker for worker in there if worker.rank is not None), key=lambda worker: worker.rank or 0)
        self.members: tuple[str, ...] = tuple(worker.id for worker in ranked)
        self.known = status is not None
        self._coming = dict.fromkeys(worker.id for worker in there if worker.state in ("starting", "ready"))
        self._going = dict.fromkeys(worker.id for worker in there if worker.state == "leaving")
        self._without: tuple[str, ...] = ()  # members of whom there is none in the view that is proposed

    @property
    def coming(self) -> list[str]:
        return [worker for worker in self._coming if worker not in self.members]

    @property
    def going(self) -> list[str]:
        """Members only: who leaves before it was one is nobody's."""
        return [worker for worker in self.members if worker in self._going or worker in self._without]

    def take(self, line: Line) -> None:
        match line:
            case events.Starting(worker=worker) | events.Waits(worker=worker) | events.Ready(worker=worker):
                self._coming[worker] = None
            case events.Notice(worker=worker) | events.Expelled(worker=worker):
                self._going[worker] = None
            case events.Proposed(members=members):
                self._without = tuple(worker for worker in self.members if worker not in members)
            case events.View(members=members):
                self._train(members)
                for worker in members:
                    self._coming.pop(worker, None)
            case (
                events.Lost(worker=worker) | events.Left(worker=worker) | events.Exited(worker=worker)
                | events.Refused(worker=worker) | events.StartFailed(worker=worker) | events.Failed(worker=worker)
            ):  # fmt: skip
                self._coming.pop(worker, None)
                self._going.pop(worker, None)
            case events.StateLost():
                self._train(())
            case events.Over() | events.RunStarted():
                self._train(())
                self._coming.clear()
                self._going.clear()
            case _:
                pass

    def _train(self, members: tuple[str, ...]) -> None:
        self.members, self._without, self.known = members, (), True
