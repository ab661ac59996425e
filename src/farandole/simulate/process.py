"""A worker's process in a simulated run, without the training thread's script: it starts, freezes, resumes and dies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

from farandole.protocol import messages as m
from farandole.protocol.view import View
from farandole.protocol.worker.driver import Change
from farandole.protocol.worker.state_machine import Action, CompareDigests, Connect, Exit, Save, WorkerStateMachine
from farandole.simulate.data_plane import DataPlane
from farandole.simulate.replica import replica_digest
from farandole.simulate.witness import Violation

if TYPE_CHECKING:
    from farandole.simulate.world import World

Routine = Generator["Change | Callable[[], Any] | float", Any, None]
GRACE_S = 5.0
LATE = 0.15  # probability that the training thread does the driver's work with a delay


class ProcessEnd(Exception):
    """The process ends."""


class Process(DataPlane):
    """A worker's process: its member, its training thread, its exchanges and its connections."""

    def __init__(self, world: World, name: str, machine: WorkerStateMachine, *, pool: str) -> None:
        self.world = world
        self.name = name
        self.state_machine = machine
        self.pool = pool
        self.reaches = "" if pool else world.disks.choice(("", "none", "none", "other"))
        self.alive = True
        self.frozen, self.thawed_at = False, float("-inf")
        self.unreachable = False
        self.evicted = False
        self.start_client()
        self.shard_s = world.rng.choice((0.06, 0.06, 0.06, 0.15))
        self.at_step_start = False  # True if its state is that of the start of a step
        self.finished = False
        self.code: int | None = None
        self.start_data_plane()
        self.kind = ""
        self.results: dict[int, int] = {}
        self.root = 0
        self.state = 0
        self.step = 0
        self.fails = False
        self.starves = False  # True if its data is unavailable
        self.unfed = False  # True if it has reported that
        self.errs = 0.0  # probability that its result for a shard is wrong
        self.strays = ""  # how its script deviates from the others' scripts
        self.drifts = False  # True if its state drifts with its next update
        self.drifted_at: int | None = None  # the first step with the drifted state
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._thread = self.script()
        self._computing = self._waking = False

    # --- the process -----------------------------------------------------------------------------------------

    def after(self, delay: float, function: Callable[..., None], *args: Any) -> None:
        self.world.at(delay, self.event, function, *args)

    def event(self, function: Callable[..., None], *args: Any) -> None:
        if self.frozen:
            self._backlog.append((function, args))
        elif self.alive:
            function(*args)
            if self.alive:
                self.world.witness.check(self)

    def freeze(self, seconds: float) -> None:
        self.frozen = True
        self.world.at(seconds, self._thaw)

    def _thaw(self) -> None:
        """Resumes. All pending events happen at once, in any order; only the control connection keeps its order."""
        self.frozen, self.thawed_at = False, self.world.now
        backlog, self._backlog = self._backlog, []
        for function, args in backlog:
            self.after(self.world.delay(), function, *args)

    def die(self, why: str, code: int) -> None:
        if not self.alive:
            return
        self.world.say(self.name, f"exits: {why}")
        self.alive, self.code = False, code
        self.world.exited(self)
        for group, members in self.groups.items():
            for name in members:
                peer = self.world.workers.get(name)
                if peer is not None and peer is not self:
                    peer.after(self.world.delay(0.05), peer.pair_broken, group, self.name)

    def script(self) -> Routine:
        """Returns the script of its training thread."""
        raise NotImplementedError

    @property
    def hungry(self) -> bool:
        """True if the data is unavailable to it or to its host."""
        return self.starves or self.world.host_of(self) in self.world.short_of

    def tell_unfed(self) -> None:
        self.unfed = True
        self.tell(m.DataUnavailable(reason=f"no space left on {self.world.host_of(self)}"))

    def ask_in(self, ready: m.Ready) -> None:
        if self.hungry and self.world.drawn.random() < 0.5:
            self.tell_unfed()
        else:
            self.tell(ready)

    @property
    def exit(self) -> Exit | None:
        return self.instructions.exit

    def resumed(self, message: m.Resume) -> None:
        if not message.commit:
            self.apart_in.discard(self.state_machine.round)  # the round is repeated, and compared again
        self.world.witness.resumed(self, message)

    def changed(self) -> None:
        """Wakes the training thread, after a random delay."""
        if not self._waking and not self._computing:
            self._waking = True
            self.after(self.world.delay(0.005), self._wake)

    def _wake(self) -> None:
        self._waking = False
        if not self._computing:
            self._run()

    def _computed(self) -> None:
        self._computing = False
        self._run()

    def _run(self, result: Any = None) -> None:
        """Resumes the training thread, and does the driver's work, at once or with a delay."""
        world = self.world
        try:
            action = self._thread.send(result)
            while not isinstance(action, Change | float | int):
                if world.rng.random() < LATE:
                    self._computing = True
                    self.after(world.delay(0.02), self._do_late, action)
                    return
                action = self._thread.send(action())
        except ProcessEnd:
            assert self.instructions.exit is not None
            self.die(self.instructions.exit.reason, self.instructions.exit.code)
            return
        if not isinstance(action, Change):
            self._computing = True
            self.after(action, self._computed)
        elif action.at_most_s is not None:
            self.after(action.at_most_s, self.changed)

    def _do_late(self, work: Callable[[], Any]) -> None:
        self._computing = False
        self._run(work())

    def _must_go(self, code: int) -> None:
        """Ends the process after the grace period."""
        if not self._computing and self.world.now - self.thawed_at > GRACE_S:
            raise Violation(f"{self.name} was asked to exit, is idle, and does not exit")
        self.die("the grace period is over", code)

    # --- the member's actions ----------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action] | None) -> bool:
        for action in actions or ():
            match action:
                case Connect():
                    self._connect(action.view)
                case Exit():
                    self.after(GRACE_S, self._must_go, action.code)
                    self.changed()
                case Save():
                    self.changed()
                case m.Published() | m.Stacks() | m.Trace():
                    pass
                case CompareDigests():
                    name, digest = "model.weight", replica_digest(self.state, 0)
                    answer = m.Digests(step=self.step, names=(name,), digests=(digest,))
                    self.after(self.world.delay(0.05), self.tell, answer)
                case _:
                    self.tell(action)
        return actions is not None

    def _connect(self, view: View) -> None:
        if view.group in self.groups or view.size == 1:
            self.after(self.world.delay(), self._connections_stand, view)
            return
        if self.unreachable:
            return
        if self.name not in view.members:
            raise Violation(f"{self.name} is asked to connect a group that it is not in")
        arrived = self.world.rendezvous[view.group]
        arrived.add(self.name)
        if arrived == set(view.members):
            for name in view.members:
                peer = self.world.workers[name]
                if self.world.finds_a_stranger():
                    other = next(member for member in view.members if member != name)
                    accusation = m.PeerNotAuthenticated(view=view.number, peer=other, address="127.0.0.1 1")
                    peer.after(self.world.delay(0.05), peer.tell, accusation)
                else:
                    peer.after(self.world.delay(0.05), peer._connections_stand, view)

    def _connections_stand(self, view: View) -> None:
        if view.size > 1:
            self.groups.setdefault(view.group, view.members)
        for name in view.members:
            if name != self.name and not self.world.workers[name].alive:
                self.broken.add((view.group, name))
        self.perform(self.state_machine.connected(view))
        self.changed()
