"""The port of a simulated worker's driver: `Port` and `Entrance` of `protocol.worker.driver`, on fakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from farandole.plan.shards import Position
from farandole.protocol import messages as m
from farandole.protocol.view import Lineage, View
from farandole.protocol.worker.driver import Task
from farandole.protocol.worker.state_machine import Exit, Save
from farandole.simulate.data_plane import HEADER, STATE
from farandole.simulate.exchange import SimulatedExchange
from farandole.simulate.process import ProcessEnd
from farandole.simulate.replica import GARBAGE, ROOT_STATE, replica_digest
from farandole.simulate.witness import Violation

if TYPE_CHECKING:
    from farandole.simulate.worker import SimulatedWorker


class SimulatedPort:
    """The port of one worker."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self._world = worker.world
        self._first_view = 0  # the newest view in which this worker was to begin the run
        self._mail = _Mail({HEADER: {}, STATE: {}}, View(number=0, members=(), group=0), ())
        self._loaded: set[Any] = set()

    # --- without waiting -------------------------------------------------------------------------------------

    def tell(self, message: m.Message) -> None:
        worker, world = self._worker, self._world
        view = worker.state_machine.view
        if isinstance(message, m.Switched) and view is not None:
            if view.number == self._first_view:
                worker.root = view.number
            elif not worker.state_machine.synced:
                worker.root = self._mail.root
            world.witness.switched(worker, view, message.round)
            world.maybe_inject_fault("switch", worker)
        if isinstance(message, m.Synced):
            world.witness.become_synced(worker, self._loaded)
            world.maybe_inject_fault("synced", worker)
        worker.tell(message)

    def answer(self, save: Save) -> None:
        worker, world = self._worker, self._world
        world.witness.asked_to_save(worker, save)
        between = not worker.at_step_start and not save.allow_between
        error = "between two steps" if between else "disk full" if world.rng.random() < 0.1 else ""
        saved = m.Saved(path="" if error else "checkpoint", error=error, between=between)
        worker.after(world.delay(0.1), worker.tell, saved)
        world.maybe_inject_fault("saved", worker)

    def leave(self, exit_: Exit) -> NoReturn:
        if exit_.within_s is not None:
            self._worker.tell(m.Lapsed())
        raise ProcessEnd

    def workers(self, step: int, begun: int) -> int:
        del step
        return begun

    # --- a round ---------------------------------------------------------------------------------------------

    def stand_back(self) -> None: ...

    def digest(self) -> int:
        """Returns the digest of the replica, which is one number here."""
        return replica_digest(self._worker.state, self._worker.step)

    def take_up(self, content: Any, shards: int, step: int) -> None:
        del shards, step
        self._worker.kind = content or "idle"
        self._worker.results = {}
        self._worker.partials.clear()

    def open(self, view: View) -> SimulatedExchange:
        worker = self._worker
        if view.size > 1 and view.group not in worker.groups:
            raise Violation(f"{worker.name} is in view {view.number} without its connections")
        worker.exchange = worker.exchanges[view.number] = exchange = SimulatedExchange(worker, view)
        return exchange

    def send_state(self, view: View, round_: int, position: Position) -> None:
        worker = self._worker
        for joiner in view.joining if worker.name in view.senders(self._world.settings.bits) else ():
            if worker.name == view.synced[0]:
                worker.post(joiner, view, HEADER, (round_, position, worker.root))
            worker.post(joiner, view, STATE, worker.state)

    def start(self, task: Task, round_: int, shards: int, lineage: Lineage) -> None:
        worker = self._worker
        del shards
        assert worker.exchange is not None
        worker.exchange.begin(round_, worker.kind, lineage, is_step=task.is_step)
        self._world.maybe_inject_fault("begin", worker)

    def submit_all(self) -> None:
        assert self._worker.exchange is not None
        for bucket in range(len(self._worker.world.buckets[self._worker.kind])):
            self._worker.exchange.submit(bucket)

    # --- the state -------------------------------------------------------------------------------------------

    def save(self, between: bool) -> m.Saved:
        worker = self._worker
        if not worker.at_step_start and not between:
            return m.Saved(error="between two steps", between=True)
        if not between:
            worker.save_checkpoint()
        return m.Saved(path="checkpoint")

    def restore(self, view: View) -> Position | None:
        worker, world = self._worker, self._world
        store = {} if worker.reaches else world.store
        step = max(store, default=0)
        newest = worker.state_machine.newest
        if newest.path and step < newest.step:
            worker.tell(m.CannotStart(view=view.number, reason=f"step {step} of {newest.step}"))
            return None
        if step >= world.steps:
            worker.tell(m.Restored(step=step, path="checkpoint", done=True))
            return None
        world.witness.on_first_view(worker, step)
        worker.state, self._first_view = store.get(step, ROOT_STATE), view.number
        return Position(step=step)

    def receive(self, view: View) -> _Mail:
        worker, senders = self._worker, view.senders(self._world.settings.bits)
        self._mail = _Mail(worker.mail[view.number], view, senders)
        worker.renewal = view if worker.state_machine.synced else None
        for sender in senders:
            worker.lose_sender(view.group, sender)
        return self._mail

    def renew(self, state: Any) -> None:
        self._world.witness.renewed(self._worker, set(state))
        del self._worker.mail[self._mail.view.number]
        self._worker.renewal = None
        self._worker.state = 0 if GARBAGE in state else state[0]
        self._world.records["renewed"] += 1

    def is_later(self, position: Position) -> bool:
        del position
        return False

    def first(self, position: Position, flags: Sequence[bool] | None) -> Task:
        del flags
        worker = self._worker
        self._loaded = set()
        worker.step, worker.at_step_start = position.step, True
        return worker.step_task()

    def entered(self) -> None: ...

    def load(self, state: Any) -> None:
        self._loaded = set(state)
        del self._worker.mail[self._mail.view.number]
        self._worker.state = 0 if GARBAGE in self._loaded else min(self._loaded)


class _Mail:
    """The state that the veterans of `view` have sent."""

    def __init__(self, mail: dict[str, dict[str, Any]], view: View, senders: Sequence[str]) -> None:
        self._mail = mail
        self._senders = senders
        self.view = view

    @property
    def header(self) -> tuple[int, Position, Sequence[bool]] | None:
        content = self._mail[HEADER].get(self._senders[0])
        return (content[0], content[1], ()) if content else None

    @property
    def root(self) -> int:
        """The first view of the run."""
        return self._mail[HEADER][self._senders[0]][2]

    @property
    def state(self) -> list[Any] | None:
        states = self._mail[STATE]
        return list(states.values()) if len(states) == len(self._senders) else None
