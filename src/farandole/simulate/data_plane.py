"""The data plane of a simulated worker: its links, and the operations of the exchanges of its views.

The methods that mutants replace are `may_commit` and `make_commit_message`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from farandole.protocol import messages as m
from farandole.protocol.view import CommitMessage, View
from farandole.simulate.client import SimulatedClient
from farandole.simulate.exchange import SimulatedExchange
from farandole.simulate.links import Landing, LostError, Memory, Parcel, Way
from farandole.simulate.replica import GARBAGE
from farandole.simulate.witness import Violation

HEADER, STATE = "header", "state"
ARRIVED_S = 5.0  # after this time all pending messages between two running workers have arrived


class DataPlane(SimulatedClient):
    """The part of `Process` that communicates with its peers."""

    alive: bool
    frozen: bool
    thawed_at: float
    state: int
    step: int
    results: dict[int, int]
    root: int
    evicted: bool

    def start_data_plane(self) -> None:
        self.groups: dict[int, tuple[str, ...]] = {}
        self.broken: set[tuple[int, str]] = set()
        self.under_way: dict[Way, deque[Parcel]] = defaultdict(deque)  # under way
        self._parcels: dict[Way, deque[Parcel]] = defaultdict(deque)  # arrived, without a receive
        self._landings: dict[Way, deque[Landing]] = defaultdict(deque)
        self.partials: Memory = {}  # the scattered partial sums of the current round
        self.exchanges: dict[int, SimulatedExchange] = {}  # those whose thread may continue, by view
        self.exchange: SimulatedExchange | None = None
        self.resting: list[SimulatedExchange] = []  # of views that it left, with sums that peers may use
        self.apart_in: set[int] = set()  # rounds whose commit messages differed
        self.renewal: View | None = None  # in which its thread waits for another member's replica
        self.mail: dict[int, dict[str, dict[str, Any]]] = defaultdict(lambda: {HEADER: {}, STATE: {}})

    # --- links -----------------------------------------------------------------------------------------------

    def send(self, group: int, peer: str, tag: int, parcel: Parcel) -> None:
        if (group, peer) in self.broken:
            raise LostError(peer)
        other, way = self.world.workers[peer], (group, self.name, tag)
        other.under_way[way].append(parcel)
        other.after(self.world.delay(), other.arrive, way)

    def receive(self, group: int, peer: str, tag: int, landing: Landing) -> None:
        if (group, peer) in self.broken:
            raise LostError(peer)
        self._landings[group, peer, tag].append(landing)
        self._take((group, peer, tag))

    def arrive(self, way: Way) -> None:
        """Delivers the next message on this way; messages of one tag keep their order."""
        parcel = self.under_way[way].popleft()
        if not self.under_way[way]:
            del self.under_way[way]
        if way[:2] not in self.broken:
            self._parcels[way].append(parcel)
            self._take(way)
            self._go_on()

    def _take(self, way: Way) -> None:
        parcels, landings = self._parcels[way], self._landings[way]
        while parcels and landings:
            parcel, landing = parcels.popleft(), landings.popleft()
            if parcel.size != landing.size:
                raise Violation(f"{way[1]} sends {parcel.size} elements and {self.name} expects {landing.size}")
            landing.take(parcel)
        for queues in (self._parcels, self._landings):
            if not queues[way]:
                del queues[way]  # tags are new in each round, so there would be ever more of them

    def pair_broken(self, group: int, peer: str) -> None:
        if (group, peer) in self.broken:
            return
        self.broken.add((group, peer))
        for way in [way for way in self._parcels if way[:2] == (group, peer)]:
            del self._parcels[way]
        self._go_on()
        view = self._joining()
        if view is not None and view.group == group and peer in view.synced and self._lacks(peer, view):
            self.perform(self.state_machine.on_peer_lost(view.number, peer, "connection reset"))
        self.lose_sender(group, peer)

    def lose_sender(self, group: int, peer: str) -> None:
        """Reports a member as lost whose replica it waits for, if their pair is broken."""
        view = self.renewal
        if view is None or view.group != group or peer not in view.senders(self.world.settings.bits):
            return
        if (group, peer) in self.broken and self._lacks(peer, view):
            self.lost_in(view, peer)

    def _joining(self) -> View | None:
        """Returns the view in which a thread waits for the state from the others; None if there is none."""
        machine = self.state_machine
        if machine.phase == "candidate":
            return machine.pending
        return machine.view if machine.phase == "member" and not machine.synced else None

    def _lacks(self, sender: str, view: View) -> bool:
        """Returns True if something of the state has not come from `sender`: its part, or the first one's header."""
        wanted = (HEADER, STATE) if sender == view.synced[0] else (STATE,)
        return view.number not in self.mail or any(sender not in self.mail[view.number][kind] for kind in wanted)

    def _go_on(self) -> None:
        for exchange in list(self.exchanges.values()):
            exchange.go_on()

    # --- the transfer of the state to joiners ------------------------------------------------------------------

    def post(self, peer: str, view: View, kind: str, content: Any) -> None:
        if (view.group, peer) not in self.broken:
            other = self.world.workers[peer]
            other.after(self.world.delay(), other.get, self.name, view, kind, content)

    def get(self, sender: str, view: View, kind: str, content: Any) -> None:
        if (view.group, sender) in self.broken:
            return
        if kind == STATE:  # read from the veteran's memory only now: it must not have changed
            content = self.world.workers[sender].state if content == self.world.workers[sender].state else GARBAGE
        self.mail[view.number][kind].setdefault(sender, content)
        self.changed()

    # --- memory of views that it has left --------------------------------------------------------------------

    def wake(self, kind: str) -> None:
        """Handles the end of a round. After a training step's round, no worker of its view uses older sums."""
        resting, self.resting = (self.resting, []) if kind == "train" else ([], self.resting)
        for exchange in resting:
            exchange.give_back()

    def sums_intact(self, exchange: SimulatedExchange) -> bool:
        """Returns True if the sums that the last update used are not overwritten."""
        for peer, parcel in exchange.in_use:
            if parcel.given_back or parcel.read() == GARBAGE:
                owner = self.world.workers[peer]
                if owner.exchange is not None and self.name in owner.exchange.view.members:
                    raise Violation(f"{peer} has overwritten a sum that {self.name}, a member of its view, uses")
                return False
        return True

    def leaves(self, view: View, round_: int, kind: str) -> None:
        self.world.at(ARRIVED_S, self._judge, view, round_, kind)

    def _judge(self, view: View, round_: int, kind: str) -> None:
        """Verifies that no peer waits for this worker any more: it has left the view and released its peers."""
        world, group = self.world, view.group
        for peer in view.members:
            other = world.workers[peer]
            waiting = other.exchanges.get(view.number)
            stands = not {(group, peer)} & self.broken and not {(group, self.name)} & other.broken
            awake = all(w.alive and not w.frozen and world.now - w.thawed_at > ARRIVED_S for w in (self, other))
            if waiting is None or waiting.round != round_ or waiting.kind != kind or not (stands and awake):
                continue
            if waiting.waits_for() == self.name:
                raise Violation(f"{peer} waits forever for {self.name} in view {view.number}, which that has left")

    # --- the operations of an exchange -------------------------------------------------------------------------

    def _assigned(self, exchange: SimulatedExchange, worker: str) -> tuple[int, ...]:
        return exchange.lineage.assign(exchange.shards).get(worker, ()) if exchange.shards else ()

    def check_shards(self, exchange: SimulatedExchange) -> None:
        if not_mine := self.results.keys() - set(self._assigned(exchange, self.name)):  # a sum can't be split
            raise Violation(f"{self.name} has computed shards {sorted(not_mine)} of another worker")

    def make_commit_message(self, exchange: SimulatedExchange) -> CommitMessage | None:
        view, now = exchange.view.number, self.world.now
        return self.session.commit_message(now, view=view, round_=exchange.round, compute_us=0, shards=0)

    def may_commit(self, exchange: SimulatedExchange) -> bool:
        """Returns False while a joiner's thread waits for the state; abandoning the view wakes it."""
        return exchange.may_commit or exchange.abandoned

    def end_round(self, commits: Sequence[CommitMessage]) -> bool:
        ended = self.session.end_round(self.world.now, commits)
        self._report()
        return ended

    def lost_in(self, view: View, peer: str) -> None:
        self.world.say(self.name, f"finds {peer} lost in view {view.number}")
        self.perform(self.state_machine.on_peer_lost(view.number, peer, "connection reset"))
        self.changed()

    def _report(self) -> None:
        for message in self.state_machine.report():
            self.world.maybe_inject_fault("differs", self)
            if isinstance(message, m.Differs):
                self.apart_in.add(self.state_machine.round)
            assert isinstance(message, m.Differs | m.ShardsDiffer | m.Drifts)
            self.tell(message)
