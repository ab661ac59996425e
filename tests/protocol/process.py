"""A worker's process in a simulated run, training thread apart: control connection, connections to peers, exchanges.

The threads of an exchange go on after the training side has left its view, and may be handed garbage by `settle`, as
in `collective/exchange.py`. The methods that mutants replace are `may_word`, `say_word` and `has_all_words`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

from farandole.membership import messages as m
from farandole.membership.member import Action, Compare, Connect, Exit, Member, Save
from farandole.membership.values import Call
from farandole.membership.view import Lineage, View, Word
from tests.protocol.client import SimulatedClient
from tests.protocol.ledger import GARBAGE, SHARDS, Violation, replica_digest

if TYPE_CHECKING:
    from tests.protocol.world import World

PARTIAL, REDUCED, WORD, HEADER, STATE = "partial", "reduced", "word", "header", "state"

Key = tuple[int, int, str]  # view, round, purpose
Script = Generator["float | None", None, None]


class Gone(Exception):
    """The process ends."""


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


class Process(SimulatedClient):
    """A worker's process: its member, its training thread, its exchanges and its connections."""

    def __init__(self, world: World, name: str, member: Member, *, pool: str) -> None:
        self.world = world
        self.name = name
        self.member = member
        self.pool = pool
        self.reaches = "" if pool else world.disks.choice(("", "none", "none", "other"))
        self.saves = self.save_at_once = False
        self.alive = True
        self.frozen = False
        self.unreachable = False
        self.evicted = False
        self.start_client()
        self.exit: Exit | None = None
        self.shard_s = world.rng.choice((0.06, 0.06, 0.06, 0.15))
        self.save: Save | None = None
        self.whole = False  # its state is that of a whole step
        self.between_steps = False  # where its script failed
        self.finished = False
        self.code: int | None = None
        self.groups: dict[int, tuple[str, ...]] = {}
        self.broken: set[tuple[int, str]] = set()
        self.lost_views: set[int] = set()
        self.mail: dict[Key, dict[str, dict[str, Any]]] = defaultdict(
            lambda: {PARTIAL: {}, REDUCED: {}, WORD: {}, HEADER: {}, STATE: {}}
        )
        self.exchanges: dict[Key, Exchange] = {}
        self.exchange: Exchange | None = None
        self.number = -1
        self.kind = ""
        self.done: dict[int, int] = {}
        self.root = 0
        self.state = 0
        self.step = 0
        self.call = Call()
        self.fails = False
        self.strays = ""  # how its script goes another way than the others'
        self.drifts = False  # with its next update
        self.apart_in: set[int] = set()  # rounds whose words differed
        self.drifted_at: int | None = None  # the step that began with it
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
                self.world.ledger.check(self)

    def freeze(self, seconds: float) -> None:
        self.frozen = True
        self.world.at(seconds, self._thaw)

    def _thaw(self) -> None:
        """All that has arrived meanwhile is there at once, in any order but the control connection's own."""
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for function, args in backlog:
            self.after(self.world.delay(), function, *args)

    def die(self, why: str, code: int) -> None:
        if not self.alive:
            return
        self.world.say(self.name, f"is gone: {why}")
        self.alive, self.code = False, code
        self.world.exited(self)
        for group, members in self.groups.items():
            for name in members:
                peer = self.world.workers.get(name)
                if peer is not None and peer is not self:
                    peer.after(self.world.delay(0.05), peer.pair_broken, group, self.name)

    def changed(self) -> None:
        """Wake the training thread, which comes to it in its own time."""
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

    def _run(self) -> None:
        try:
            pause = next(self._thread)
        except Gone:
            assert self.exit is not None
            self.die(self.exit.reason, self.exit.code)
            return
        if pause is not None:
            self._computing = True
            self.after(pause, self._computed)

    # --- what the member asks for ------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action] | None) -> bool:
        for action in actions or ():
            match action:
                case Connect():
                    self._connect(action.view)
                case Exit():
                    self.exit = self.exit or action
                    self.after(5.0, self.die, "the grace is over", action.code)
                    self.changed()
                case Save():
                    self.save = action
                    self.changed()
                case Compare():
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
            raise Violation(f"{self.name} is to connect a group that it is not in")
        arrived = self.world.rendezvous[view.group]
        arrived.add(self.name)
        if arrived == set(view.members):
            for name in view.members:
                peer = self.world.workers[name]
                if self.world.finds_a_stranger():
                    other = next(member for member in view.members if member != name)
                    accusation = m.Unproved(view=view.number, peer=other, address="127.0.0.1 1")
                    peer.after(self.world.delay(0.05), peer.tell, accusation)
                else:
                    peer.after(self.world.delay(0.05), peer._connections_stand, view)

    def _connections_stand(self, view: View) -> None:
        if view.size > 1:
            self.groups.setdefault(view.group, view.members)
        for name in view.members:
            if name != self.name and not self.world.workers[name].alive:
                self.broken.add((view.group, name))
        self.perform(self.member.connected(view))
        self.changed()

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
                self.world.ledger.ended(self, exchange)
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
