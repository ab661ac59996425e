"""A simulator of the protocol: the real `Member` machines and the real `Coordinator` on a fake clock and network.

    World(seed).run()      # a random schedule of joins, leaves, crashes, freezes, broken pairs ...; raises Violation

Everything random comes from `random.Random(seed)`: the cluster, the delays, the faults and when they strike. Time
passes only between events. What is modelled is what the machines meet in real processes:

    control plane   a FIFO channel with random delays for each worker and direction; heartbeats; the pool
    data plane      partial sums, reduced slices, words and state, each tagged with view and round, each with a delay
                    of its own; broken pairs; processes that exit under their peers
    training side   a generator that follows `rounds.py` line by line (begin, todo, sync, finish, enter), so a thread
                    that looks late at what has happened is an event like any other
    exchange        a thread of its own for each view, which goes on after the training side has left the view, and
                    which `settle` may hand garbage

A shard's value is a hash of the state that it was computed from, so a round's result tells whether every shard was
counted, from the right state, and the final state is that of a world of one exactly if every step was.

Checked as it goes (`Ledger`): rules R1 and R2, view numbers, that what is reported as held is held, that all who
commit a round commit the same one with every shard counted once, that the state is not lost while someone holds it.
Checked at the end: nobody waits for ever, everyone goes, the run ends as it should, with the state of a world of one.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable
from itertools import count
from typing import Any

from farandole.errors import UsageError
from farandole.membership import messages as m
from farandole.membership.coordinator import Coordinator
from farandole.membership.member import Action, Connect, Exit, Member, Save
from farandole.membership.records import Close, Record, RunSettings, Send
from farandole.membership.view import View, Word
from farandole.plan.shards import assign

PARTIAL, REDUCED, WORD, HEADER, STATE = "partial", "reduced", "word", "header", "state"
GARBAGE = "garbage"
SIGNATURE = m.Signature(facts=(("torch", "2"),))

SHARDS = {"train": 5, "evaluate": 3, "idle": 0}
FAULTS_UNTIL = 8.0  # seconds; then the world is left alone
STOP_CODE = 7
CALM_LIMIT = 45.0  # by then the run is over, or it hangs
KINDS = (
    ("kill", 8), ("freeze", 3), ("break", 4), ("notice", 5), ("guest", 3), ("late", 1), ("release", 1), ("scale", 1),
    ("unreachable", 1), ("fail", 1), ("stop", 1),
)  # fmt: skip

Script = Generator["float | None", None, None]


class Violation(AssertionError):
    """An invariant does not hold."""


class Gone(Exception):
    """The process ends."""


class ScriptError(Exception):
    """The user's own error."""


class Exchange:
    """One round's exchange in one view, at one worker."""

    def __init__(self, view: View, round_: int, kind: str, worker: str) -> None:
        self.view = view
        self.round = round_
        self.kind = kind
        self.key = (view.number, round_)
        self.peers = [p for p in view.members if p != worker]
        self.lineage: tuple[tuple[str, ...], ...] = ()
        self.ready = self.scattered = self.ended = self.abandoned = False
        self.may_word = True
        self.total: Any = None  # what this worker has summed up
        self.result: Any = None  # held, once every peer's slice is there
        self.word: Word | None = None

    @property
    def shards(self) -> int:
        return SHARDS[self.kind]


class Worker:
    """A worker's process: its member, its training thread, its exchanges and its connections."""

    def __init__(self, world: World, name: str, member: Member, *, pool: str) -> None:
        self.world = world
        self.name = name
        self.member = member
        self.pool = pool
        self.alive = True
        self.frozen = False
        self.unreachable = False
        self.evicted = False
        self.connected = False
        self.exit: Exit | None = None
        self.save = False
        self.finished = False
        self.code: int | None = None
        self.groups: dict[int, tuple[str, ...]] = {}
        self.broken: set[tuple[int, str]] = set()
        self.lost_views: set[int] = set()
        self.mail: dict[tuple[int, int], dict[str, dict[str, Any]]] = defaultdict(
            lambda: {PARTIAL: {}, REDUCED: {}, WORD: {}, HEADER: {}, STATE: {}}
        )
        self.exchanges: dict[tuple[int, int], Exchange] = {}
        self.exchange: Exchange | None = None
        self.number = -1
        self.kind = ""
        self.done: dict[int, int] = {}
        self.lineage: tuple[tuple[str, ...], ...] = ()
        self.root = 0
        self.state = 0
        self.step = 0
        self.fails = False
        self.inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()  # of the control connection
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._thread = self._script()
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

    def take_control(self) -> None:
        """The next message of the control connection, in the order in which they were sent."""
        function, args = self.inbox.popleft()
        function(*args)

    def die(self, why: str, code: int) -> None:
        if not self.alive:
            return
        self.world.say(self.name, f"is gone: {why}")
        self.alive, self.code = False, code
        self.world.disconnect(self)
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
        except (Gone, StopIteration):
            assert self.exit is not None
            self.die(self.exit.reason, self.exit.code)
            return
        if pause is not None:
            self._computing = True
            self.after(pause, self._computed)

    # --- the control connection's thread -----------------------------------------------------------------------

    def tell(self, message: m.Message) -> None:
        self.world.up(self, message)

    def hear(self, message: m.Message) -> None:
        self.perform(self.member.receive(message))
        if isinstance(message, m.Resume):
            self.world.ledger.resumed(self, message)
        self.changed()

    def closed(self) -> None:
        if self.exit is None:
            self.perform([Exit("the connection to the coordinator is lost", 1)])

    def beat(self) -> None:
        if self.exit is None:
            view = self.member.view
            self.tell(m.Heartbeat(view=view.number if view else 0, round=self.member.round, step=self.member.step))
            self.after(self.world.settings.heartbeat_s, self.beat)

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
                    self.save = action.save
                    self.changed()
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

    def post(self, peer: str, group: int, key: tuple[int, int], kind: str, content: Any) -> None:
        if (group, peer) not in self.broken:
            other = self.world.workers[peer]
            other.after(self.world.delay(), other.arrive, self.name, group, key, kind, content)

    def arrive(self, sender: str, group: int, key: tuple[int, int], kind: str, content: Any) -> None:
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
        return assign(exchange.shards, exchange.lineage).get(worker, ()) if exchange.shards else ()

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
        number, round_ = exchange.key
        return self.member.word(view=number, round_=round_, compute_us=0, shards=0)

    def _say_word(self, exchange: Exchange) -> None:
        if exchange.word is not None or not (exchange.may_word or exchange.abandoned):
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
        words = [exchange.word, *self.mail[exchange.key][WORD].values()]
        if self.member.end_round(words):
            exchange.ended = True
            self.world.ledger.ended(self, exchange)
            self.world.tempt("end", self)
        self.changed()

    def _settle(self, exchange: Exchange) -> None:
        """Garbage for what is still owed, so that no receive of a peer's old thread hangs."""
        if exchange.ended:
            return
        for peer in exchange.peers:
            owed = [(PARTIAL, exchange.scattered), (REDUCED, exchange.total is not None), (WORD, exchange.word)]
            for kind in [kind for kind, given in owed if not given]:
                content = Word(view=-1, round=-1, prepared=-1, compute_us=0, shards=0) if kind == WORD else GARBAGE
                self.post(peer, exchange.view.group, exchange.key, kind, content)

    # --- the training thread (rounds.py) -------------------------------------------------------------------------

    def _obey(self) -> None:
        if self.save:
            self.save = False
            self.after(self.world.delay(0.1), self.tell, m.Saved(path=f"checkpoint of {self.state}"))
        if self.exit is not None:
            raise Gone

    def begin(self, kind: str, *, may_switch: bool) -> Generator[float | None, None, bool]:
        """False: no longer in a view (a joiner that was demoted)."""
        if not (yield from self._begin_once(kind, may_switch=may_switch)):
            return False
        if self.member.level:
            yield from self._pass_idle_rounds(kind)
        return True

    def _begin_once(self, kind: str, *, may_switch: bool) -> Generator[float | None, None, bool]:
        member = self.member
        while True:
            self._obey()
            if member.phase == "waiting":
                return False
            if member.phase == "member":
                old = member.view
                if self.perform(member.begin_round(self.step, may_switch=may_switch)):
                    self.world.ledger.begun(self, old)
                    if member.phase == "member":
                        break
                    continue
            yield None
        assert member.view is not None
        assert member.lineage is not None
        self.number = member.round
        self.kind = "idle" if may_switch and self.is_idle(member.view, member.lineage) else kind
        self.done = {}
        exchange = self._open(member.view)
        if not member.level:
            exchange.may_word = False
        elif member.first and member.view.joining:
            self._send_state(member.view)
        self._start(member.lineage)
        self.world.tempt("begin", self)
        return True

    def is_idle(self, view: View, lineage: tuple[tuple[str, ...], ...]) -> bool:
        """By those who were first dealt the round's shards: the same for everyone, whenever they begin it."""
        del view
        return len(lineage[0]) < self.world.settings.minimum

    def _pass_idle_rounds(self, kind: str) -> Script:
        while self.kind == "idle":
            while not (yield from self._finish()):
                pass
            yield 0.05
            yield from self._begin_once(kind, may_switch=True)

    def _open(self, view: View) -> Exchange:
        old = self.exchange
        new = Exchange(view, self.number, self.kind, self.name)
        if old is None or old.key != new.key:
            if old is not None and old.ended:
                del self.exchanges[old.key], self.mail[old.key]
            self.exchange = self.exchanges[new.key] = new
            if old is not None and old.view.number != view.number:
                old.abandoned = True
                if not old.may_word:
                    self.after(0.0, self._say_word, old)  # its thread was waiting for the state
                self._settle(old)
        assert self.exchange is not None
        return self.exchange

    def _start(self, lineage: tuple[tuple[str, ...], ...]) -> None:
        exchange = self.exchange
        assert exchange is not None
        exchange.lineage = lineage
        self._find_broken(exchange)
        if not self.todo():
            exchange.ready = True
            self.advance(exchange)

    def todo(self) -> tuple[int, ...]:
        assert self.exchange is not None
        return tuple(s for s in self._assigned(self.exchange, self.name) if s not in self.done)

    def _sync(self) -> None:
        member, exchange = self.member, self.exchange
        assert exchange is not None
        self._obey()
        view = member.view
        if member.phase == "member" and view and view.number != exchange.view.number and member.round == self.number:
            self._open(view)
            self._start(member.lineage or ())

    def _finish(self) -> Generator[float | None, None, bool]:
        exchange, member = self.exchange, self.member
        assert exchange is not None
        while not exchange.ended and member.round <= self.number:
            self._obey()
            if member.phase == "member" and member.view and member.view.number != exchange.view.number:
                self._sync()
                return False
            yield None
        self.world.ledger.committed(self, exchange)
        return True

    def _round(self) -> Generator[float | None, None, Any]:
        """Compute and finish the round that has begun. Its result."""
        while True:
            self._sync()
            todo = self.todo()
            if not todo:
                if (yield from self._finish()):
                    assert self.exchange is not None
                    return self.exchange.result
                continue
            yield self.world.rng.uniform(0.01, 0.12)
            self.done[todo[0]] = shard_value(self.state, self.kind, self.step, todo[0])
            if len(todo) == 1:
                assert self.exchange is not None
                self.exchange.ready = True
                self.advance(self.exchange)

    # --- the script (run.py) ---------------------------------------------------------------------------------------

    def _script(self) -> Script:
        try:
            yield from self._training()
            self.finished = True
            self.tell(m.Finished(fingerprint=str(self.state)))
        except ScriptError as error:
            self.world.script_failed = True
            self.tell(m.Failed(traceback=str(error)))
        while True:
            self._obey()
            yield None

    def _training(self) -> Script:
        yield from self._enter()
        while True:
            result = yield from self._round()
            if self.fails:
                raise ScriptError(f"after step {self.step}")
            self.state = next_state(self.state, self.step, result)
            if self.step % 3 == 1:
                yield from self.begin("evaluate", may_switch=False)
                yield from self._round()
            self.step += 1
            if self.step >= self.world.steps:
                return
            if self.fails:
                raise ScriptError(f"before step {self.step}")
            yield from self.begin("train", may_switch=True)

    def _enter(self) -> Script:
        member = self.member
        while True:
            while not (member.phase == "waiting" and member.pending and member.prepared == member.pending.number):
                self._obey()
                yield None
            view = member.pending
            if self.name in view.level:
                if self.perform(member.adopt(0, 0, view=view.number)):
                    self.root, self.state, self.step = view.number, ROOT_STATE, 0
                    self.world.ledger.applied(self, view, 0)
                    yield from self.begin("train", may_switch=True)
                    return
                continue
            mail = self.mail[view.number, 0]
            if not (yield from self._await(view, lambda n=mail: bool(n[HEADER]))):
                continue
            round_, step, root = mail[HEADER][view.level[0]]
            if not self.perform(member.adopt(round_, step, view=view.number)):
                continue
            self.step, self.root = step, root
            self.world.ledger.applied(self, view, round_)
            self.world.tempt("adopt", self)
            if not (yield from self.begin("train", may_switch=True)):
                continue
            if not (yield from self._await(view, lambda n=mail, v=view: len(n[STATE]) == len(v.level))):
                continue
            yield self.world.delay(0.02)
            loaded, exchange = set(mail[STATE].values()), self.exchange
            if self.perform(member.levelled()):
                assert exchange is not None
                (self.state,) = self.world.ledger.levelled(self, loaded)
                self.world.tempt("level", self)
                exchange.may_word = True
                if exchange.result is not None:
                    self._say_word(exchange)
                yield from self._pass_idle_rounds("train")
                return

    def _await(self, view: View, there: Callable[[], bool]) -> Generator[float | None, None, bool]:
        while True:
            self._obey()
            if view not in (self.member.view, self.member.pending):
                return False
            if self.member.phase != "stopped" and there():
                return True
            yield None

    def _send_state(self, view: View) -> None:
        key = (view.number, 0)
        for joiner in view.joining:
            if self.name == view.level[0]:
                self.post(joiner, view.group, key, HEADER, (self.number, self.step, self.root))
            self.post(joiner, view.group, key, STATE, self.state)


ROOT_STATE = 1


def shard_value(state: int, kind: str, step: int, shard: int) -> int:
    return hash((state, len(kind), step, shard))


def next_state(state: int, step: int, result: Any) -> int:
    return hash((state, step, result))


def alone(steps: int) -> int:
    """The state of a world of one after so many steps."""
    state = ROOT_STATE
    for step in range(steps):
        shards = range(SHARDS["train"])
        state = next_state(state, step, tuple(shard_value(state, "train", step, shard) for shard in shards))
    return state


class Ledger:
    """What has happened everywhere, and whether it may have."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._applied: dict[int, int] = {}
        self._resumed: dict[int, tuple[int, bool]] = {}
        self._committed: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._newest: Counter[str] = Counter()
        self._branches: set[int] = set()
        self._in_force = View(number=0, members=(), group=0)

    def check(self, worker: Worker) -> None:
        """After every event of a worker."""
        member, exchange = worker.member, worker.exchange
        if member.view is not None:
            if member.view.number < self._newest[worker.name]:
                raise Violation(f"{worker.name} goes back to view {member.view.number}")
            self._newest[worker.name] = member.view.number
        if (
            member.holds
            and not worker.evicted
            and (
                exchange is None
                or exchange.round != member.round
                or exchange.result is None
                or exchange.result == GARBAGE
            )
        ):
            raise Violation(f"{worker.name} counts as holding round {member.round}, which it does not")

    def begun(self, worker: Worker, before: View | None) -> None:
        view = worker.member.view
        if view is not None and view is not before:
            self.applied(worker, view, worker.member.round)

    def applied(self, worker: Worker, view: View, round_: int) -> None:
        """R2."""
        self._world.say(worker.name, f"applies view {view.number} {view.members} at round {round_}")
        self._in_force = max(self._in_force, view, key=lambda v: v.number)
        if self._applied.setdefault(view.number, round_) != round_:
            raise Violation(
                f"R2: {worker.name} applies view {view.number} at round {round_}, "
                f"others at {self._applied[view.number]}"
            )

    def resumed(self, worker: Worker, message: m.Resume) -> None:
        round_ = worker.member.round
        if worker.name not in self._in_force.members:  # a leaver takes the run up; what the lost did alone is done anew
            self._branches.add(message.view.number)
        if message.view.number in self._branches:
            worker.root = message.view.number
        self._in_force = max(self._in_force, message.view, key=lambda v: v.number)
        if self._resumed.setdefault(message.view.number, (round_, message.commit)) != (round_, message.commit):
            raise Violation(f"R2: {worker.name} resumes view {message.view.number} at round {round_}, others do not")

    def ended(self, worker: Worker, exchange: Exchange) -> None:
        """R1."""
        self._world.say(worker.name, f"ends round {exchange.round} ({exchange.kind}) in view {exchange.view.number}")
        for name in exchange.view.members:
            other = self._world.workers[name]
            machine = other.member
            if not other.alive or machine.round > exchange.round:
                continue
            if not (machine.round == exchange.round and machine.holds) and machine.phase != "out":
                raise Violation(f"R1: {worker.name} ends round {exchange.round}, which {name} does not hold")
        if worker.name in exchange.view.members and not worker.evicted:
            for other in self._world.workers.values():
                if other.alive and not other.evicted and other.member.level and other.root > worker.root:
                    raise Violation(f"{worker.name} goes on in a run that {other.name} has begun anew")

    def committed(self, worker: Worker, exchange: Exchange) -> None:
        """All who commit a round commit the same one; the sum itself was checked when it was made."""
        if exchange.result is None or exchange.result == GARBAGE:
            raise Violation(f"{worker.name} commits round {exchange.round}, whose result it does not have")
        fact = (exchange.kind, worker.step, exchange.lineage, exchange.result)
        known = self._committed.setdefault((worker.root, exchange.round), fact)
        if known != fact:
            raise Violation(f"{worker.name} commits round {exchange.round} as {fact}, others as {known}")

    def levelled(self, worker: Worker, loaded: set[Any]) -> set[Any]:
        self._world.say(worker.name, "is level")
        if worker.evicted:
            return {0}
        if len(loaded) != 1 or GARBAGE in loaded:
            raise Violation(f"{worker.name} is level with a state that is torn: {loaded}")
        return loaded

    def state_lost(self) -> None:
        for worker in self._world.workers.values():
            if worker.alive and worker.name in self._world.coordinator.workers and worker.member.level:
                raise Violation(f"the run begins anew although {worker.name} holds the state")


class World:
    """One schedule. `member`, `coordinator` and `worker` are the classes to run: mutants have their own."""

    def __init__(
        self,
        seed: int,
        *,
        member: type[Member] = Member,
        coordinator: type[Coordinator] = Coordinator,
        worker: type[Worker] = Worker,
        trace: bool = False,
    ) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.lines: list[str] | None = [] if trace else None
        self.ledger = Ledger(self)
        self.workers: dict[str, Worker] = {}
        self.rendezvous: dict[int, set[str]] = defaultdict(set)
        self.events = 0
        self.records: Counter[str] = Counter()
        self._member, self._worker = member, worker
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ids = count()
        self._names = count(1)
        self._upward: dict[str, float] = {}
        self._downward: dict[str, float] = {}
        size = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))
        self.settings = RunSettings(
            run="sim",
            wanted=size,
            minimum=rng.choice((1, 1, 2, size, rng.randint(1, size))) if size > 1 else 1,
            maximum=rng.choice((None, None, size, size + 1)),
            heartbeat_s=0.5,
            heartbeat_timeout_s=2.0,
            prepare_timeout_s=3.0,
            startup_failures=1000,
        )
        self.endless = rng.random() < 0.4  # until it is stopped
        self.steps = 1_000_000 if self.endless else rng.randint(4, 12)
        self._budget = rng.choice((0, 1, 2, 3, 3, 4, 4, 5, 6, 8))
        self._temper = rng.choice((0.02, 0.05, 0.15))
        self._slow = rng.choice((0.3, 1.0, 1.0, 4.0))
        self._once: set[str] = set()
        self._welcomed: set[str] = set()
        self.coordinator = coordinator(self.settings)
        self._stop_code: int | None = None
        self.script_failed = False

    # --- running it ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Violation."""
        for _ in range(self.settings.wanted):
            self.spawn(pool="pool")
        for _ in range(self._budget // 2):
            self.at(self.rng.uniform(0.0, 5.0), self.strike, None)
        self.at(0.0, self._tick)
        self.at(0.3, self._pool)
        self._until(FAULTS_UNTIL, lambda: self.coordinator.over is not None)
        self._budget = 0
        if not self.coordinator.over:
            self._go_on()
        self._until(self.now + CALM_LIMIT, lambda: self.coordinator.over is not None)
        if not self.coordinator.over:
            raise Violation("the run hangs")
        self._until(self.now + 20.0, lambda: not any(w.alive and not w.frozen for w in self.workers.values()))
        self._judge()

    def _until(self, time: float, over: Callable[[], bool]) -> None:
        heap = self._heap
        while heap and heap[0][0] <= time and not over():
            self.now, _, function, args = heapq.heappop(heap)
            self.events += 1
            function(*args)
        if not over():
            self.now = max(self.now, time)

    def _go_on(self) -> None:
        """No more faults: give the run what it needs to end."""
        self.say("people", "no more faults")
        for worker in list(self.workers.values()):
            worker.fails = False
        if self.coordinator.wanted < self.settings.minimum:
            self.coordinator.scale(self.settings.minimum, self.now)
            self.flush()
        if self.endless:
            if self.settings.maximum is None:
                self.spawn(pool="")
            self._until(self.now + CALM_LIMIT, self._settled)
            if not self.coordinator.over and not self._settled():
                raise Violation("planned changes do not come about")
            if not self.coordinator.over and not self.coordinator.ending:
                self._stop_code = STOP_CODE
                self.coordinator.stop("enough", STOP_CODE, self.now)
                self.flush()

    def _settled(self) -> bool:
        """Everyone who asks is in, everyone who wants to leave has left."""
        c = self.coordinator
        if c.over or c.ending or any(self.workers[w].unreachable for w in (c.view.members if c.view else ())):
            return True  # with an unreachable member, nobody can ever join
        if (
            c.view is None
            or c.proposed
            or c.stopping
            or any(not w.connected for w in self.workers.values() if w.alive and not w.evicted)
        ):
            return False
        inside = [c.workers[w] for w in c.view.members if w in c.workers]
        full = c.settings.maximum is not None and len(inside) >= c.settings.maximum
        outside = [w for w in c.workers.values() if w.id not in c.view.members]
        leaving = any(w.leaving for w in inside)
        return len(inside) >= c.settings.minimum and not leaving and (full or not outside)

    def _judge(self) -> None:
        over = self.coordinator.over
        assert over is not None
        for worker in self.workers.values():
            if worker.finished and worker.state != alone(self.steps):
                raise Violation(f"{worker.name} finished with another state than a world of one")
        stuck = [w.name for w in self.workers.values() if w.alive and not w.frozen]
        if stuck:
            raise Violation(f"the run is over, but {stuck} are still there")
        if self.script_failed:
            return
        if self._stop_code is not None:
            if over.code != self._stop_code and not any(w.finished for w in self.workers.values()):
                raise Violation(f"the run was stopped with code {self._stop_code}, and ended with {over.code}")
            if self._stop_code == STOP_CODE and not self.records["saved"] + self.records["not saved"]:
                raise Violation("the run was stopped without a checkpoint")
        elif over.code != 0 or not any(w.finished for w in self.workers.values()):
            raise Violation(f"the run ended with code {over.code}: {over.reason}")

    # --- time and network ------------------------------------------------------------------------------------------

    def at(self, delay: float, function: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._ids), function, args))

    def delay(self, scale: float = 0.01) -> float:
        x = self.rng.random()
        return self._slow * scale * (x if x < 0.95 else 20 * x)

    def say(self, who: str, what: str) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.now:8.4f} {who:>12}  {what}")

    def spawn(self, *, pool: str) -> None:
        name = f"w{next(self._names)}"
        worker = self._worker(self, name, self._member(name), pool=pool)
        self.workers[name] = worker
        self.at(self.rng.uniform(0.0, 0.3), self._hello, worker)

    def _hello(self, worker: Worker) -> None:
        if worker.alive:
            worker.connected = True
            self._welcomed.add(worker.name)
            hello = m.Hello(kind="worker", worker=worker.name, host=f"host-{worker.name}", pool=worker.pool)
            self.coordinator.hello(hello, self.now)
            self.flush()
            worker.beat()
            worker.after(self.rng.uniform(0.0, 0.3), worker.tell, m.Ready(signature=SIGNATURE))
            worker.changed()

    def up(self, worker: Worker, message: m.Message) -> None:
        if type(message) is not m.Heartbeat:
            self.say(worker.name, f"-> {message}")
        self._ordered(self._upward, worker.name, self._receive, worker, message)

    def _receive(self, worker: Worker, message: m.Message) -> None:
        if worker.connected:
            self.coordinator.receive(worker.name, message, self.now)
            self.flush()

    def disconnect(self, worker: Worker) -> None:
        if worker.connected:
            self._ordered(self._upward, worker.name, self._disconnected, worker)

    def _disconnected(self, worker: Worker) -> None:
        if worker.connected:
            worker.connected = False
            if not self.coordinator.over:
                self.say("coordinator", f"{worker.name} is disconnected")
                self.coordinator.disconnected(worker.name, self.now)
            self.flush()

    def _ordered(self, channel: dict[str, float], name: str, function: Callable[..., None], *args: Any) -> None:
        when = max(channel.get(name, 0.0), self.now + self.delay())
        channel[name] = when
        self.at(when - self.now, function, *args)

    def flush(self) -> None:
        for action in self.coordinator.drain():
            match action:
                case Send(name, message):
                    worker = self.workers[name]
                    if worker.connected:
                        if not isinstance(message, m.Welcome):
                            self.say("coordinator", f"-> {name}: {message}")
                        worker.inbox.append((worker.hear, (message,)))
                        self._ordered(self._downward, name, worker.event, worker.take_control)
                        self.tempt(type(message).__name__, worker)
                case Close(name):
                    worker = self.workers[name]
                    worker.evicted, worker.connected = True, False
                    worker.inbox.append((worker.closed, ()))
                    self._ordered(self._downward, name, worker.event, worker.take_control)
                case Record(event, fields):
                    self.records[event] += 1
                    if event in ("lost", "state lost", "failed", "over"):
                        self.say("coordinator", f"records {event} {fields}")
                    if event == "state lost":
                        self.ledger.state_lost()
                    if event == "lost" and "does not hold" in fields["reason"]:
                        raise Violation(f"R1: {fields['worker']} is behind: {fields['reason']}")
                    if event == "finished" and not fields["equal"]:
                        raise Violation("the finished workers' states differ")
                case _:
                    pass

    def _tick(self) -> None:
        self.coordinator.tick(self.now)
        self.flush()
        if not self.coordinator.over:
            self.at(0.25, self._tick)

    def _pool(self) -> None:
        """Replaces what is missing, kills what was evicted, sooner or later."""
        roster = self.coordinator.roster()
        for name in roster.evicted:
            worker = self.workers[name]
            if worker.alive and self.rng.random() < 0.1:
                worker.die("killed by its pool", -9)
        known = self.coordinator.workers
        ours = [w for w in self.workers.values() if w.pool and w.alive]
        ours = [w for w in ours if w.name in known or w.name not in self._welcomed]
        for _ in range(roster.wanted - len([w for w in ours if w.name not in roster.leaving])):
            self.spawn(pool="pool")
        if not self.coordinator.over:
            self.at(0.3, self._pool)

    # --- faults ----------------------------------------------------------------------------------------------------

    def tempt(self, what: str, worker: Worker) -> None:
        """Something worth disturbing happens."""
        likely = self._temper * (0.3 if what in ("begin", "word", "end") else 2.0)
        if self._budget > 0 and self.rng.random() < likely:
            self._budget -= 1
            target = worker if self.rng.random() < 0.5 else None
            self.at(self.delay(0.01), self.strike, target)

    def strike(self, target: Worker | None) -> None:
        alive = [w for w in self.workers.values() if w.alive and not w.frozen]
        if not alive or self.coordinator.over or self.now > FAULTS_UNTIL:
            return
        kinds, weights = zip(*KINDS, strict=True)
        kind: str = self.rng.choices(kinds, weights)[0]
        if target is None or not target.alive or target.frozen:
            target = self.rng.choice(alive)
        self.say("fate", f"{kind} {target.name}")
        getattr(self, f"_strike_{kind}")(target)

    def _strike_kill(self, target: Worker) -> None:
        target.die("killed", -9)

    def _strike_freeze(self, target: Worker) -> None:
        target.freeze(self.rng.choice((0.3, 1.0, 2.5, 4.0, 1e9)))

    def _strike_break(self, target: Worker) -> None:
        """A pair of connections breaks, both ends alive; one of them may notice far later."""
        groups = [g for g, members in target.groups.items() if len(members) > 1]
        if groups:
            group = groups[-1]
            peer = self.workers[self.rng.choice([p for p in target.groups[group] if p != target.name])]
            target.after(self.delay(0.05), target.pair_broken, group, peer.name)
            peer.after(self.delay(0.5), peer.pair_broken, group, target.name)

    def _strike_notice(self, target: Worker) -> None:
        if target.connected:
            target.tell(m.Leaving(reason="SIGTERM"))

    def _strike_guest(self, target: Worker) -> None:
        del target
        for _ in range(self.rng.choice((1, 1, 2))):
            self.spawn(pool="")

    def _strike_late(self, target: Worker) -> None:
        """The control connection is held up while the data plane goes on."""
        for channel in (self._upward, self._downward):
            channel[target.name] = max(channel.get(target.name, 0.0), self.now + self.rng.uniform(0.5, 3.5))

    def _strike_release(self, target: Worker) -> None:
        try:
            self.coordinator.release(target.name, self.now)
        except UsageError:
            return
        self.flush()

    def _strike_scale(self, target: Worker) -> None:
        del target
        s = self.settings
        self.coordinator.scale(self.rng.randint(s.minimum, s.maximum or s.wanted + 1), self.now)
        self.flush()

    def _strike_unreachable(self, target: Worker) -> None:
        del target
        self.spawn(pool="")
        list(self.workers.values())[-1].unreachable = True

    def _strike_fail(self, target: Worker) -> None:
        if "fail" not in self._once:
            self._once.add("fail")
            target.fails = True

    def _strike_stop(self, target: Worker) -> None:
        del target
        if "stop" not in self._once:
            self._once.add("stop")
            self._stop_code = 3
            self.coordinator.stop("SIGINT", 3, self.now)
            self.flush()


def simulate(seed: int, **classes: Any) -> World:
    """Run one schedule. A Violation carries the seed and the trace of a second, equal run."""
    world = World(seed, **classes)
    try:
        world.run()
    except Exception as error:
        again = World(seed, trace=True, **classes)
        try:
            again.run()
        except type(error) as second:
            lines = "\n".join((again.lines or [])[-120:])
            s = again.settings
            head = f"seed {seed}: --workers {s.wanted} --min {s.minimum} --max {s.maximum}, {again.steps} steps"
            raise Violation(f"{type(second).__name__}: {second}\n{head}\n{lines}") from second
        raise
    return world
