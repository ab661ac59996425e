"""The data plane of a simulated worker: exchanges, and what is under way between peers.

The threads of an exchange go on after the training side has left its view, and may be handed garbage by `settle`, as
in `collective/exchange.py`. The methods that mutants replace are `may_word`, `say_word` and `has_all_words`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from farandole.membership import messages as m
from farandole.membership.view import Lineage, View, Word
from farandole.simulate.client import SimulatedClient
from farandole.simulate.replica import GARBAGE, SHARDS
from farandole.simulate.witness import Violation

PARTIAL, REDUCED, WORD, HEADER, STATE = "partial", "reduced", "word", "header", "state"

Key = tuple[int, int, str]  # view, round, purpose


class Exchange:
    """One round's exchange in one view, at one worker."""

    def __init__(self, view: View, round_: int, kind: str, worker: str) -> None:
        self.view = view
        self.round = round_
        self.kind = kind
        self.key = (
            view.number,
            round_,
            "step" if kind in ("train", "idle") else "other",
        )  # in the tag of every message
        self.peers = [p for p in view.members if p != worker]
        self.lineage = Lineage(sets=())
        self.ready = self.scattered = self.ended = self.abandoned = False
        self.may_word = True
        self.total: Any = None  # what this worker has summed up
        self.result: Any = None  # held, once every peer's slice is there
        self.word: Word | None = None

    @property
    def shards(self) -> int:
        return SHARDS[self.kind]


class DataPlane(SimulatedClient):
    """The part of `Process` that talks to its peers."""

    alive: bool
    state: int
    step: int
    done: dict[int, int]
    root: int
    evicted: bool

    def start_data_plane(self) -> None:
        self.groups: dict[int, tuple[str, ...]] = {}
        self.broken: set[tuple[int, str]] = set()
        self.lost_views: set[int] = set()
        self.mail: dict[Key, dict[str, dict[str, Any]]] = defaultdict(
            lambda: {PARTIAL: {}, REDUCED: {}, WORD: {}, HEADER: {}, STATE: {}}
        )
        self.exchanges: dict[Key, Exchange] = {}
        self.exchange: Exchange | None = None
        self.apart_in: set[int] = set()  # rounds whose words differed

    # --- the exchange's threads ----------------------------------------------------------------------------------

    def post(self, peer: str, group: int, key: Key, kind: str, content: Any) -> None:
        if (group, peer) not in self.broken:
            other = self.world.workers[peer]
            other.after(self.world.delay(), other.arrive, self.name, group, key, kind, content)

    def arrive(self, sender: str, group: int, key: Key, kind: str, content: Any) -> None:
        if (group, sender) in self.broken:
            return
        if kind == STATE:  # read out of the veteran's memory only now: it must not have changed meanwhile
            content = self.world.workers[sender].state if content == self.world.workers[sender].state else GARBAGE
        self.mail[key][kind].setdefault(sender, content)
        if kind in (HEADER, STATE):
            self.changed()
        elif key in self.exchanges:
            self.advance(self.exchanges[key])

    def pair_broken(self, group: int, peer: str) -> None:
        if (group, peer) in self.broken:
            return
        self.broken.add((group, peer))
        for exchange in list(self.exchanges.values()):
            self._find_broken(exchange)
        view = self.member.pending  # a joiner's thread that waits for the state
        if self.member.phase == "waiting" and view is not None and view.group == group and peer in view.synced:
            self.perform(self.member.lost(view.number, peer, "connection reset"))

    def _find_broken(self, exchange: Exchange) -> None:
        if exchange.ended or exchange.abandoned or exchange.view.number in self.lost_views:
            return
        words = self.mail[exchange.key][WORD]
        for peer in exchange.peers:
            if (exchange.view.group, peer) in self.broken and (peer not in words or exchange.word is None):
                self.lost_views.add(exchange.view.number)
                self.world.say(self.name, f"finds {peer} lost in view {exchange.view.number}")
                self.perform(self.member.lost(exchange.view.number, peer, "connection reset"))
                self.changed()
                return

    def advance(self, exchange: Exchange) -> None:
        """As far as it goes: scatter, sum, gather, word, end."""
        if exchange.ended or not exchange.ready or exchange.view.number in self.lost_views:
            return
        view, key, peers, mail = exchange.view, exchange.key, exchange.peers, self.mail[exchange.key]
        if not exchange.scattered:
            if exchange.abandoned:
                return
            exchange.scattered = True
            if not_mine := self.done.keys() - set(self._assigned(exchange, self.name)):  # a sum can't be taken apart
                raise Violation(f"{self.name} has computed shards {sorted(not_mine)}, which are somebody else's")
            mine = {shard: self.done[shard] for shard in self._assigned(exchange, self.name)}
            mail[PARTIAL][self.name] = mine
            for peer in peers:
                self.post(peer, view.group, key, PARTIAL, mine)
        if exchange.total is None and len(mail[PARTIAL]) == len(peers) + 1:
            exchange.total = self._sum(exchange, mail[PARTIAL])
            for peer in peers:
                self.post(peer, view.group, key, REDUCED, exchange.total)
        if exchange.total is not None and exchange.result is None and len(mail[REDUCED]) == len(peers):
            totals = {exchange.total, *mail[REDUCED].values()}
            if len(totals) > 1 and GARBAGE not in totals:
                raise Violation(f"{self.name}: the slices of round {exchange.round} in view {view.number} do not agree")
            exchange.result = GARBAGE if GARBAGE in totals else exchange.total
            self.after(self.world.delay(0.002), self._say_word, exchange)
        if exchange.word is not None and self.has_all_words(exchange):
            self.after(self.world.delay(0.002), self._end, exchange)

    def _assigned(self, exchange: Exchange, worker: str) -> tuple[int, ...]:
        return exchange.lineage.assign(exchange.shards).get(worker, ()) if exchange.shards else ()

    def _sum(self, exchange: Exchange, partials: dict[str, Any]) -> Any:
        counted: Counter[int] = Counter()
        values: dict[int, int] = {}
        for worker, part in partials.items():
            if part == GARBAGE:
                return GARBAGE
            if tuple(part) != self._assigned(exchange, worker):
                raise Violation(
                    f"{self.name} expects shards {self._assigned(exchange, worker)} of {exchange.kind} round "
                    f"{exchange.round} in view {exchange.view.number} from {worker}, which sends {tuple(part)}"
                )
            counted.update(part.keys())
            values.update(part)
        if counted != Counter(range(exchange.shards)):
            raise Violation(f"{self.name}: round {exchange.round} counts shards {sorted(counted.elements())}")
        return tuple(values[shard] for shard in sorted(values))

    def say_word(self, exchange: Exchange) -> Word | None:
        if self.orphaned():
            return None
        number, round_, _ = exchange.key
        return self.member.word(view=number, round_=round_, compute_us=0, shards=0)

    def may_word(self, exchange: Exchange) -> bool:
        """A joiner's thread waits for the state here; abandoning the view wakes it."""
        return exchange.may_word or exchange.abandoned

    def _say_word(self, exchange: Exchange) -> None:
        if exchange.word is not None or not self.may_word(exchange):
            return
        word = self.say_word(exchange)
        if word is None or exchange.abandoned:
            return
        exchange.word = word
        self.world.tempt("word", self)
        for peer in exchange.peers:
            self.post(peer, exchange.view.group, exchange.key, WORD, word)
        self.advance(exchange)

    def has_all_words(self, exchange: Exchange) -> bool:
        return len(self.mail[exchange.key][WORD]) == len(exchange.peers)

    def _end(self, exchange: Exchange) -> None:
        if exchange.ended:
            return
        assert exchange.word is not None
        mail = self.mail[exchange.key][WORD]
        words = [exchange.word, *(mail[peer] for peer in exchange.peers if peer in mail)]
        if not self.orphaned():
            if self.member.end_round(words):
                exchange.ended = True
                self.world.witness.ended(self, exchange)
                self.world.tempt("end", self)
            else:
                self._report()
        self.changed()

    def _report(self) -> None:
        for message in self.member.report():
            assert isinstance(message, m.Differs)
            self.world.tempt("differs", self)
            self.apart_in.add(self.member.round)
            if message not in self.standing:
                self.say_standing(message)

    def _settle(self, exchange: Exchange) -> None:
        """Garbage for what is still owed, so that no receive of a peer's old thread hangs."""
        if exchange.ended:
            return
        for peer in exchange.peers:
            owed = [(PARTIAL, exchange.scattered), (REDUCED, exchange.total is not None), (WORD, exchange.word)]
            for kind in [kind for kind, given in owed if not given]:
                content = Word(view=-1, round=-1, prepared=-1, compute_us=0, shards=0) if kind == WORD else GARBAGE
                self.post(peer, exchange.view.group, exchange.key, kind, content)
