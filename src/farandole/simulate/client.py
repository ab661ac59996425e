"""A simulated worker's control connection: the shipped session, on the fake clock and network.

It does what `worker/connection.py` does for the session of a real worker: it opens and closes connections, transports
messages, and sends heartbeats when they are due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from farandole.errors import Refused
from farandole.protocol import messages as m
from farandole.protocol.worker.driver import Activity, Instructions
from farandole.protocol.worker.session import Session
from farandole.protocol.worker.state_machine import Action, WorkerStateMachine
from farandole.simulate.replica import SHARDS

if TYPE_CHECKING:
    from farandole.simulate.network import SimulatedLink
    from farandole.simulate.world import World


class SimulatedClient:
    """The part of `Process` that communicates with the coordinator."""

    world: World
    name: str
    pool: str
    reaches: str  # the store that it reaches: "" the run's, "other" a wrong one, "none"
    instructions: Instructions  # of the session
    state_machine: WorkerStateMachine
    shard_s: float
    at_step_start: bool
    after: Callable[..., None]
    changed: Callable[[], None]
    resumed: Callable[[m.Resume], None]
    perform: Callable[[Iterable[Action] | None], bool]
    die: Callable[[str, int], None]
    ask_in: Callable[[m.Ready], None]

    def start_client(self) -> None:
        hello = m.Hello(
            kind="worker", worker=self.name, host=self.world.host_of(self), pool=self.pool, session=f"s-{self.name}",
            zone=self.world.zone_of(self),
        )  # fmt: skip
        self.session = Session(hello, self.state_machine, self._activity, lambda: None, self.world.now)
        self.instructions = self.session.instructions
        self.link: SimulatedLink | None = None
        self.shut_until = 0.0  # it can't connect before this time
        self.inbox: deque[tuple[SimulatedLink, Callable[..., None], tuple[Any, ...]]] = (
            deque()
        )  # of control connections

    def take_control(self) -> None:
        """Handles the next message of a control connection, in the order in which they were sent."""
        link, function, args = self.inbox.popleft()
        if not link.dumb_down:
            function(*args)

    @property
    def connected(self) -> bool:
        return self.link is not None

    def start(self, signature: m.Signature) -> None:
        self.world.connect(self)
        ready = m.Ready(signature=signature, unreached="" if self.reaches in ("", "other") else "it is not there")
        self.after(self.world.rng.uniform(0.0, 0.3), self.ask_in, ready)
        self._watch()

    # --- connections -----------------------------------------------------------------------------------------

    def greet(self, link: SimulatedLink) -> m.Hello:
        """Uses a new connection. Returns its Hello."""
        self.link = link
        hello = self.session.on_connected(self.world.now)
        link.attempt = hello.attempt
        self._beat(hello.attempt)
        return hello

    def hung_up(self) -> None:
        """Handles that this side has closed the connection."""
        self.session.on_closed(self.session.attempt)
        self.link = None

    def broke(self, link: SimulatedLink) -> None:
        """Handles the end of a connection."""
        self.session.on_closed(link.attempt)
        if self.link is link:
            self.link = None
            self.world.connect_again(self)

    def nobody_answers(self) -> None:
        """Handles a failed attempt to connect."""
        if self.session.unreachable(self.world.now):
            self.die("no coordinator answers", 1)
        else:
            self.world.connect_again(self)

    def _beat(self, attempt: int) -> None:
        """Sends heartbeats as long as the connection lasts."""
        session, now = self.session, self.world.now
        if self.link is None or attempt != session.attempt or self.instructions.exit is not None:
            return
        if session.silent(now):
            self.world.hang_up(self)
            self.nobody_answers()
            return
        session.beat(now)
        self._speak()
        self.after(session.terms.heartbeat_s, self._beat, attempt)

    def _watch(self) -> None:
        if self.instructions.exit is None:
            self.perform(self.session.watch(self.world.now))
            self.after(self.session.terms.heartbeat_s, self._watch)

    # --- messages --------------------------------------------------------------------------------------------

    def tell(self, message: m.Message) -> None:
        self.session.tell(message, self.world.now)
        self._speak()

    def hear(self, attempt: int, message: m.Message) -> None:
        fresh = self.link is not None and attempt == self.link.attempt
        try:
            actions = self.session.on_message(attempt, message, self.world.now)
        except Refused as error:
            if self.session.met:
                raise
            self.die(str(error), 1)  # it was never admitted
            return
        self.perform(actions)
        if isinstance(message, m.Welcome):
            self.session.beat(self.world.now)
        self._speak()
        if fresh and isinstance(message, m.Resume):
            self.resumed(message)
        if not isinstance(message, m.HeartbeatAnswer | m.Saver):
            self.changed()

    def orphaned(self) -> bool:
        return self.session.lease_over(self.world.now)

    def _speak(self) -> None:
        for message in self.session.take():
            self.world.send_up(self, message)

    def _activity(self) -> Activity:
        shard_us = round(1e6 * self.shard_s * self.world.rng.uniform(0.9, 1.1))
        return Activity(shard_us=shard_us, shards=1, shards_total=SHARDS["train"], at_step_start=self.at_step_start)
