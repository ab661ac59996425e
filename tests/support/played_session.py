"""One side of a session, played by hand."""

from __future__ import annotations

from farandole.protocol import messages as m
from farandole.protocol.messages import RunTerms
from farandole.protocol.view import View
from farandole.protocol.worker.driver import Activity
from farandole.protocol.worker.session import PeerWait, Session
from farandole.protocol.worker.state_machine import WorkerStateMachine

READY, LEAVING = m.Ready(signature=m.Signature(facts=(("torch", "2"),))), m.LeaveRequest(reason="SIGTERM")
ORPHAN_S, TIMEOUT_S, STALL_S = 60.0, 5.0, 30.0


class Worker:
    """One side of a session, played by hand."""

    def __init__(self, name: str = "") -> None:
        self.waiting: PeerWait | None = None
        self.asked = 0
        hello = m.Hello(kind="worker", worker=name, session="s")
        self.session = Session(hello, WorkerStateMachine(name), self._activity, lambda: self.waiting, 0.0)

    def _activity(self) -> Activity:
        self.asked += 1
        return Activity(epoch=3, shards_computed=7, at_step_start=True)

    def welcomed(self, now: float = 0.0, *, worker: str = "a", run: str = "r", lines: tuple[int, int] = (-1, 0)) -> int:
        """The number of a connection that is answered as soon as it stands."""
        attempt = self.session.on_connected(now).attempt
        self.session.on_message(attempt, welcome(worker=worker, run=run, lines=lines), now)
        return attempt

    def member_of(self, *members: str) -> None:
        """In the first view, with the state, and in a round."""
        s, view = self.session, View(number=1, members=members, group=1)
        s.on_message(s.attempt, m.Propose(view=view), 0.0)
        s.state_machine.connected(view)
        s.state_machine.enter_view(0, 0, view=1)
        s.state_machine.begin_round(0, may_switch=True)

    def said(self) -> list[m.Message]:
        return self.session.take()


def welcome(*, worker: str = "a", run: str = "r", lines: tuple[int, int] = (-1, 0)) -> m.Welcome:
    terms = RunTerms(heartbeat_s=0.5, heartbeat_timeout_s=TIMEOUT_S, stall_s=STALL_S, orphan_s=ORPHAN_S)
    return m.Welcome(run=run, worker=worker, folder="", terms=terms, lines=lines)
