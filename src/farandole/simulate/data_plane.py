"""The data plane of a simulated worker: its links, and what the exchanges of its views ask for.

The methods that mutants replace are `may_word` and `say_word`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from farandole.membership import messages as m
from farandole.membership.view import View, Word
from farandole.simulate.client import SimulatedClient
from farandole.simulate.exchange import Exchange
from farandole.simulate.links import Landing, LostError, Memory, Parcel, Way
from farandole.simulate.replica import GARBAGE
from farandole.simulate.witness import Violation

HEADER, STATE = "header", "state"


class DataPlane(SimulatedClient):
    """The part of `Process` that talks to its peers."""

    alive: bool
    frozen: bool
    thawed_at: float
    state: int
    step: int
    done: dict[int, int]
    root: int
    evicted: bool

    def start_data_plane(self) -> None:
        self.groups: dict[int, tuple[str, ...]] = {}
        self.broken: set[tuple[int, str]] = set()
        self.under_way: dict[Way, deque[Parcel]] = defaultdict(deque)  # under way
        self._parcels: dict[Way, deque[Parcel]] = defaultdict(deque)  # here, and nobody has asked for them
        self._landings: dict[Way, deque[Landing]] = defaultdict(deque)
        self.partials: Memory = {}  # of the round in hand, as they have been scattered
        self.exchanges: dict[int, Exchange] = {}  # by view, those whose thread may go on
        self.exchange: Exchange | None = None
        self.apart_in: set[int] = set()  # rounds whose words differed
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
        """The next one on this way: those of one tag are not mixed up."""
        parcel = self.under_way[way].popleft()
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

    def pair_broken(self, group: int, peer: str) -> None:
        if (group, peer) in self.broken:
            return
        self.broken.add((group, peer))
        for way in [way for way in self._parcels if way[:2] == (group, peer)]:
            del self._parcels[way]
        self._go_on()
        view = self.member.pending  # a joiner's thread that waits for the state
        if self.member.phase == "waiting" and view is not None and view.group == group and peer in view.synced:
            self.perform(self.member.lost(view.number, peer, "connection reset"))

    def _go_on(self) -> None:
        for exchange in list(self.exchanges.values()):
            exchange.go_on()

    # --- the state, on its way to joiners ----------------------------------------------------------------------

    def post(self, peer: str, view: View, kind: str, content: Any) -> None:
        if (view.group, peer) not in self.broken:
            other = self.world.workers[peer]
            other.after(self.world.delay(), other.get, self.name, view, kind, content)

    def get(self, sender: str, view: View, kind: str, content: Any) -> None:
        if (view.group, sender) in self.broken:
            return
        if kind == STATE:  # read out of the veteran's memory only now: it must not have changed meanwhile
            content = self.world.workers[sender].state if content == self.world.workers[sender].state else GARBAGE
        self.mail[view.number][kind].setdefault(sender, content)
        self.changed()

    # --- what an exchange asks for -----------------------------------------------------------------------------

    def _assigned(self, exchange: Exchange, worker: str) -> tuple[int, ...]:
        return exchange.lineage.assign(exchange.shards).get(worker, ()) if exchange.shards else ()

    def check_shards(self, exchange: Exchange) -> None:
        if not_mine := self.done.keys() - set(self._assigned(exchange, self.name)):  # a sum can't be taken apart
            raise Violation(f"{self.name} has computed shards {sorted(not_mine)}, which are somebody else's")

    def say_word(self, exchange: Exchange) -> Word | None:
        view, now = exchange.view.number, self.world.now
        return self.session.word(now, view=view, round_=exchange.round, compute_us=0, shards=0)

    def may_word(self, exchange: Exchange) -> bool:
        """A joiner's thread waits for the state here; abandoning the view wakes it."""
        return exchange.may_word or exchange.abandoned

    def end_round(self, words: Sequence[Word]) -> bool:
        ended = self.session.end_round(self.world.now, words)
        self._report()
        return ended

    def lost_in(self, view: View, peer: str) -> None:
        self.world.say(self.name, f"finds {peer} lost in view {view.number}")
        self.perform(self.member.lost(view.number, peer, "connection reset"))
        self.changed()

    def _report(self) -> None:
        for message in self.member.report():
            self.world.tempt("differs", self)
            if isinstance(message, m.Differs):
                self.apart_in.add(self.member.round)
            assert isinstance(message, m.Differs | m.Unlike | m.Drifts)
            self.tell(message)
