"""A simulated worker's control connection: what `worker/connection.py` does, on the fake clock.

Connecting, and connecting again; heartbeats and silence; the lease; and what still holds, said on every new connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from farandole.membership import messages as m
from farandole.membership.instructions import Instructions
from farandole.membership.lease import Lease
from farandole.membership.member import Action, Exit, Member
from farandole.simulate.replica import SHARDS

if TYPE_CHECKING:
    from farandole.simulate.network import Link
    from farandole.simulate.world import World


class SimulatedClient:
    """The part of `Process` that talks to the coordinator."""

    world: World
    name: str
    pool: str
    reaches: str  # "" the run's store, "other": one that it takes for it, "none"
    told: Instructions
    member: Member
    shard_s: float
    whole: bool
    after: Callable[..., None]
    changed: Callable[[], None]
    resumed: Callable[[m.Resume], None]
    perform: Callable[[Iterable[Action] | None], bool]

    def start_client(self) -> None:
        self.link: Link | None = None
        self.attempt = 0
        self.welcomed = False  # on this link
        self.shut_until = 0.0  # it can't connect before
        self.standing: list[m.Message] = []  # said again on every new connection
        self.hello_at = self.heard_at = 0.0
        self.lease = Lease()
        self.inbox: deque[tuple[Link, Callable[..., None], tuple[Any, ...]]] = deque()  # of control connections

    def take_control(self) -> None:
        """The next message of a control connection, in the order in which they were sent."""
        link, function, args = self.inbox.popleft()
        if link is self.link and not link.dumb_down:
            function(*args)

    @property
    def connected(self) -> bool:
        return self.link is not None

    def start(self, signature: m.Signature) -> None:
        self.world.connect(self)
        ready = m.Ready(signature=signature, unreached="" if self.reaches in ("", "other") else "it is not there")
        self.after(self.world.rng.uniform(0.0, 0.3), self.say_standing, ready)
        self.beat()

    def greeted(self, now: float) -> None:
        """A Hello is on its way."""
        self.welcomed, self.hello_at = False, now

    def say_standing(self, message: m.Message) -> None:
        """What holds from now on: said again on every new connection."""
        self.standing.append(message)
        self.tell(message)

    def tell(self, message: m.Message) -> None:
        """Lost without a connection: whoever comes back is stopped and asked."""
        if self.welcomed:
            self.world.send_up(self, message)

    def hear(self, message: m.Message) -> None:
        self.heard_at = self.world.now
        match message:
            case m.Welcome():
                self.welcomed = True
                self.lease.welcomed(self.hello_at, self.world.settings.orphan_s)
                for standing in self.standing:
                    self.tell(standing)
            case m.Heard():
                self.lease.heard(message.beat, self.world.settings.orphan_s)
                return
            case m.Saver():
                self.told.saves, self.told.save_at_once = message.worker == self.name, message.at_once
                return
            case _:
                self.told.saves = self.told.saves and not isinstance(message, m.Demoted)
                self.perform(self.member.receive(message))
        if isinstance(message, m.Resume):
            self.resumed(message)
        self.changed()

    def orphaned(self) -> bool:
        return self.lease.over(self.world.now)

    def beat(self) -> None:
        if self.told.exit is not None:
            return
        world = self.world
        if self.orphaned():
            self.perform([Exit("no coordinator within the orphan limit", 4, save=True)])
            return
        patience = 0.6 * world.settings.heartbeat_timeout_s
        if self.link is not None and world.now - max(self.hello_at, self.heard_at) > patience:
            world.hang_up(self)
            world.connect(self)
        elif self.welcomed:
            number, view = self.lease.beat(world.now), self.member.view
            self.tell(
                m.Heartbeat(
                    number=number,
                    view=view.number if view else 0,
                    round=self.member.round,
                    step=self.member.step,
                    shard_us=round(1e6 * self.shard_s * world.rng.uniform(0.9, 1.1)),
                    shards=1,
                    of=SHARDS["train"],
                    call=self.member.call,
                    whole=self.whole,
                )
            )
        self.after(world.settings.heartbeat_s, self.beat)
