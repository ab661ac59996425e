"""The control plane of a simulated run: connections, the coordinator's process with its journal, and the pool.

A connection is a `SimulatedLink`: its messages arrive in order, late, or not at all. It ends when either side closes it
(the other side sees that after the earlier messages), when it is reset (pending messages are lost), or when one
direction or both drop all messages, which each side detects by itself. The coordinator's process can be frozen and
killed, also while it sends; the next one gets the journal in its encoded form.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from farandole.errors import ProtocolError
from farandole.protocol import events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import reconnection
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.coordinator.state import (
    EXIT_BANNED,
    EXIT_DATA_UNAVAILABLE,
    EXIT_EVICTED,
    Action,
    Close,
    Record,
    RunSettings,
    Send,
)
from farandole.simulate.client import SimulatedClient
from farandole.simulate.mistaken import Mistakes
from farandole.simulate.process import Process
from farandole.simulate.random_shares import RandomShares
from farandole.simulate.shortages import Shortages
from farandole.simulate.witness import Violation, Witness

if TYPE_CHECKING:
    from collections import Counter

OUT = (EXIT_EVICTED, EXIT_BANNED, EXIT_DATA_UNAVAILABLE)
SHOWN = (
    events.LostEvent,
    events.StateLostEvent,
    events.FailedEvent,
    events.UnfedEvent,
    events.OverEvent,
    events.OutOfReachEvent,
)  # in a trace


class SimulatedLink:
    """One control connection."""

    def __init__(self) -> None:
        self.up_at = self.down_at = 0.0  # when the newest message arrives
        self.dumb_up = self.dumb_down = False  # all messages in that direction are dropped
        self.over = False  # ended, for the coordinator's side
        self.attempt = 0  # the session's number for it


class Network(Mistakes, Shortages):
    """The part of `World` that transports messages. Subclasses have the clock."""

    now: float
    rng: random.Random
    settings: RunSettings
    workers: dict[str, Process]
    records: Counter[str]
    witness: Witness
    hosts: int
    zones: int
    coordinator: Coordinator
    at: Callable[..., None]
    say: Callable[[str, str], None]
    delay: Callable[..., float]
    spawn: Callable[..., None]
    maybe_inject_fault: Callable[[str, SimulatedClient], None]

    @property
    def drifted(self) -> bool:
        """True if a script has changed the state on one worker alone."""
        return any(worker.drifted_at is not None for worker in self.workers.values())

    def start_network(self, coordinator: type[Coordinator], share_rate: float | None) -> None:
        drawn = self.rng.choice((0.0, 0.02, 0.2))
        self._make, self._share_rate = coordinator, drawn if share_rate is None else share_rate
        self.coordinator = self._with_random_shares(coordinator(self.settings))
        self.up, self.restarts = True, 0
        self.links: dict[str, SimulatedLink] = {}
        self.journal = self._write()
        self.last_sends = -1  # messages that a coordinator still sends before it is killed; -1: no kill
        self._frozen: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None
        self._exits: list[Process] = []
        self._leavers: set[str] = set()

    def host_of(self, worker: SimulatedClient) -> str:
        return f"host-{int(worker.name[1:]) % self.hosts}"

    def zone_of(self, worker: SimulatedClient) -> str:
        return f"zone-{int(worker.name[1:]) % self.hosts % self.zones}" if self.zones > 1 else ""

    def on_one_host(self, worker: str, peer: str) -> bool:
        """Returns True if the two share memory: then a lent message is read in place (`collective/transport.py`)."""
        return self.host_of(self.workers[worker]) == self.host_of(self.workers[peer])

    # --- a worker's side ---------------------------------------------------------------------------------------------

    def connect(self, worker: SimulatedClient) -> None:
        """Connects a worker. If that fails, it tries again after a while, without a limit."""
        if worker.link is not None or worker.instructions.exit is not None:
            return
        if not self.up or worker.shut_until > self.now:
            worker.nobody_answers()
        else:
            self.send_up(worker, worker.greet(SimulatedLink()))

    def connect_again(self, worker: SimulatedClient) -> None:
        worker.after(worker.session.retry_s(self.rng.random()), self.connect, worker)

    def send_up(self, worker: SimulatedClient, message: m.Message) -> None:
        link = worker.link
        if link is None:
            return
        if self.mistaken and worker is self.mistaken.worker:
            message = self.mistaken.twist(self.rng, message)
        if type(message) is not m.Heartbeat:
            self.say(worker.name, f"-> {message}")
        if not link.dumb_up:
            self._up(link, self._arrive, worker, link, message)

    def hang_up(self, worker: SimulatedClient) -> None:
        """The worker closes its side."""
        link = worker.link
        worker.hung_up()
        if link is not None and not link.dumb_up:
            self._up(link, self._closed, worker, link)

    def exited(self, worker: Process) -> None:
        """Handles the end of a process; its pool reports it, also to every later coordinator."""
        self.hang_up(worker)
        if worker.pool:
            self._exits.append(worker)
            self.at(self.delay(0.02), self._do, self._tell_exit, worker)

    def _up(self, link: SimulatedLink, function: Callable[..., None], *args: Any) -> None:
        link.up_at = max(link.up_at, self.now + self.delay())
        self.at(link.up_at - self.now, self._do, function, *args)

    # --- the coordinator's side --------------------------------------------------------------------------------------

    def _do(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function in the coordinator's process; after a freeze if it is frozen, not at all if it is down."""
        if self._frozen is not None:
            self._frozen.append((function, args))
        elif self.up:
            function(*args)
            self.flush()

    def _arrive(self, worker: SimulatedClient, link: SimulatedLink, message: m.Message) -> None:
        if link.over or link.dumb_up:
            return
        if isinstance(message, m.Hello):
            try:
                name = self.coordinator.hello(message, self.now)
            except ProtocolError:
                link.over = True
                return
            if name != worker.name:
                raise Violation(f"{worker.name} reconnects as {name}")
            before = self.links.get(name)
            if before is not None:
                before.over = True
            self.links[name] = link
            self.say("coordinator", f"receives {name}'s Hello {message.attempt}")
        elif self.links.get(worker.name) is link:
            self.coordinator.on_message(worker.name, message, self.now)

    def _closed(self, worker: SimulatedClient, link: SimulatedLink) -> None:
        link.over = True
        if self.links.get(worker.name) is link:
            del self.links[worker.name]
            self.say("coordinator", f"{worker.name} is disconnected")
            self.coordinator.on_disconnect(worker.name, self.now)

    def _tell_exit(self, worker: Process) -> None:
        self.coordinator.on_pool_message(
            worker.pool,
            self.host_of(worker),
            m.WorkerProcessExited(worker=worker.name, reason="killed by signal 9"),
            self.now,
        )

    def flush(self) -> None:
        """Writes the journal first, then sends: a coordinator that is killed in between has sent no promise."""
        actions = self.coordinator.drain()
        if any(isinstance(action, Record) for action in actions):
            self.journal = self._write()
        elif (self.coordinator.ending is not None) != self._journaled_ending and any(
            isinstance(action, Send) and not isinstance(action.message, m.Welcome | m.HeartbeatAnswer)
            for action in actions
        ):
            raise Violation(f"the run ends ({self.coordinator.ending}), and the journal does not hold that")
        for action in actions:
            if isinstance(action, Record):
                self._recorded(action)
        for action in actions:
            if self.up:
                self._carry_out(action)

    def _write(self) -> bytes:
        self._journaled_ending = self.coordinator.ending is not None
        return msgspec.json.encode(reconnection.to_durable(self.coordinator))

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(name, message):
                if self.last_sends == 0:
                    self.kill_coordinator()
                    return
                self.last_sends -= 1
                worker, link = self.workers[name], self.links.get(name)
                if isinstance(message, m.Goodbye) and message.code in OUT:
                    worker.evicted = True
                if link is not None:
                    if not isinstance(message, m.Welcome | m.HeartbeatAnswer):
                        self.say("coordinator", f"-> {name}: {message}")
                    if not link.dumb_down:
                        self._down(worker, link, worker.hear, link.attempt, message)
                    self.maybe_inject_fault(type(message).__name__, worker)
            case Close(name):
                if link := self.links.pop(name, None):
                    link.over = True
                    if not link.dumb_down:
                        self._down(self.workers[name], link, self.workers[name].broke, link)
            case _:
                pass

    def _down(self, worker: Process, link: SimulatedLink, function: Callable[..., None], *args: Any) -> None:
        link.down_at = max(link.down_at, self.now + self.delay())
        worker.inbox.append((link, function, args))
        self.at(link.down_at - self.now, worker.event, worker.take_control)

    def _recorded(self, action: Record) -> None:
        event = action.event
        self.records[events.name_of(event)] += 1
        if isinstance(event, SHOWN):
            self.say("coordinator", f"records {event}")
        self.witness.recorded(event)

    # --- the coordinator's process -----------------------------------------------------------------------------------

    def tick(self) -> None:
        self._do(self._tick)
        self.at(0.25, self.tick)

    def _tick(self) -> None:
        self.coordinator.tick(self.now)

    def kill_coordinator(self) -> None:
        """Kills the coordinator. All connections close. Messages that it has sent may or may not arrive."""
        self.say("coordinator", "is killed")
        self.up, self._frozen, self.last_sends = False, None, -1
        for name, link in self.links.items():
            link.over = True
            if self.rng.random() < 0.5:
                link.dumb_down = True
            self.at(max(link.down_at - self.now, 0.0) + self.delay(0.05), self.workers[name].event,
                    self.workers[name].broke, link)  # fmt: skip
        self.links = {}
        self.at(self.rng.choice((0.05, 0.5, 2.5, 5.0)), self._restart)

    def _restart(self) -> None:
        durable = msgspec.json.decode(self.journal, type=reconnection.Durable)
        self.say("coordinator", "is restarted")
        self.restarts += 1
        self.up = True
        self.coordinator = self._with_random_shares(self._make(self.settings, durable, self.now))
        self.flush()
        for worker in self._exits:
            self._do(self._tell_exit, worker)

    def _with_random_shares(self, coordinator: Coordinator) -> Coordinator:
        coordinator.speeds = RandomShares(self.rng, self._share_rate)
        return coordinator

    @property
    def listens(self) -> bool:
        return self.up and self._frozen is None

    def freeze_coordinator(self, seconds: float) -> None:
        if self._frozen is None:
            self._frozen = []
            self.at(seconds, self._thaw)

    def _thaw(self) -> None:
        backlog, self._frozen = self._frozen or [], None
        for function, args in backlog:
            self._do(function, *args)

    # --- the pool ----------------------------------------------------------------------------------------------------

    def pool(self) -> None:
        """Starts missing workers, and kills evicted ones, sooner or later."""
        if self.listens:
            self._obey_roster(self.coordinator.roster())
        if not self.coordinator.over:
            self.at(0.3, self.pool)

    def _obey_roster(self, roster: m.Roster) -> None:
        for name in roster.evicted:
            worker = self.workers[name]
            if worker.alive and self.rng.random() < 0.1:
                worker.die("killed by its pool", -9)
        self._leavers.update(roster.leaving, roster.released)
        out = {*self._leavers, *roster.evicted}
        staying = [w for w in self.workers.values() if w.pool and w.alive and w.name not in out]
        for _ in range(roster.wanted - len(staying)):
            self.spawn(pool="pool")
