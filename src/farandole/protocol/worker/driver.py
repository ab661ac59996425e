"""The rounds of one worker, one exchange after another, through whatever happens to the view.

What the script calls (`begin`, `sync`, `finish`; `entering` for a joiner) are generators: without threads, clock or
torch. Their owner runs one at a time, the script's own, and holds the worker's lock whenever it resumes one. So what
stands between two yields is atomic. A generator yields what comes next without the lock:

    Change   wait until something has changed (a message, the end of an exchange), perhaps with a limit in seconds
    work     a call into the `port`, whose result it is resumed with: it may take long, and the coordinator's messages
             and the peers' commit messages come in meanwhile

So what it knows may be out of date as soon as it has yielded. That does no harm: only this driver begins rounds, and
only `Member` ends them or moves them on.
Argument: docs/protocol.md, Driver 1-6.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from farandole.plan.shards import Position
from farandole.protocol.messages import Message, RunTerms, Saved
from farandole.protocol.values import NOTHING, Call, TimeClass
from farandole.protocol.view import Lineage, View
from farandole.protocol.worker.member import CallRounds, Checking, Drift, Exit, Member, Save

# --- generators -------------------------------------------------------------------------------------------------------
#
# What the generators of this module yield: what comes next without the worker's lock.

T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """Wait until something has changed, `at_most_s` seconds if that is given."""

    at_most_s: float | None = None


Script = Generator["Change | Callable[[], Any]", Any, T]


def do(work: Callable[..., T], *args: Any) -> Script[T]:
    """Have `work` done without the lock."""
    return (yield partial(work, *args))


# --- instructions -----------------------------------------------------------------------------------------------------
#
# What passes between a worker's training side and its session with the coordinator: two values, one in each direction.
#
# The training side reads `Instructions` whenever it waits or begins something; each heartbeat carries its `Activity` to
# the coordinator. Neither side ever waits for the other.


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What the training side is doing, as `Heartbeat` says it."""

    epoch: int = 0
    shards_computed: int = 0
    idle: bool = False
    state_complete: bool = False
    shard_us: int = 0
    shards: int = 0
    shards_total: int = 0
    time_us: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Instructions:
    """What the coordinator has told the training side, which takes up `save` and `save_at_once` by putting them back.

    Attributes:
        exit: it is to go; with `orphaned`, once it has saved the state that it holds, which nobody else may hold.
        save: the last checkpoint is asked for.
        saves: this worker writes the checkpoints while the run trains; with `save_at_once`, the first one without
            waiting until one is due, since another worker could not write it.
    """

    exit: Exit | None = None
    orphaned: bool = False
    save: Save | None = None
    saves: bool = False
    save_at_once: bool = False

    def leave(self, exit_: Exit) -> None:
        """The first reason counts."""
        self.orphaned = self.orphaned or (exit_.save and self.exit is None)
        self.exit = self.exit or exit_


# --- port -------------------------------------------------------------------------------------------------------------
#
# What a driver asks of the worker around it. `worker/rounds.py` (threads) and the simulator have one each.


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the script wants a round for.

    Attributes:
        shards: how many there are if so many workers begin it; worked out without the lock.
        sizes: of the round's messages, in words.
        trains: it is a training step's: a view that is agreed on takes effect where it begins.
        doing: what else was called, in words that are equal on all workers.
        content: what the port sums up; None: nothing.
    """

    position: Position
    shards: Callable[[int], int]
    sizes: str = ""
    trains: bool = False
    doing: str = ""
    content: Any = None


class Arriving(Protocol):
    """The state on its way; None is what is not there yet."""

    @property
    def header(self) -> tuple[int, Position, Sequence[bool]] | None:
        """The round, its position, and the veterans' requires_grad, without which the buckets would differ."""
        ...

    @property
    def state(self) -> Any: ...


class ExchangePort(Protocol):
    """Of one view, round after round."""

    @property
    def view(self) -> View: ...

    @property
    def ended(self) -> bool:
        """Whether the round has ended that was started last."""
        ...

    def withhold(self) -> None:
        """Give no word before `release`."""
        ...

    def release(self) -> None: ...

    def finish(self) -> None:
        """All is handed in."""
        ...

    def close(self) -> None:
        """The view is over, in order or not."""
        ...

    def settle(self) -> None:
        """Send what the abandoned round still owes, contents aside."""
        ...


class Port(Protocol):
    """The worker around the driver. The first three are called with the lock held, and must not wait."""

    def tell(self, message: Message) -> None:
        """Tell the coordinator."""
        ...

    def answer(self, save: Save) -> None:
        """Save in the background, and tell the coordinator how that went."""
        ...

    def leave(self, exit_: Exit) -> NoReturn:
        """This worker is done. Raises what ends the script."""
        ...

    def stand_back(self) -> None:
        """This worker has left the view, and only waits for its Goodbye."""
        ...

    def save(self, between: bool) -> Saved:
        """Write the last checkpoint; with `between` even a state between two steps, which is none to go on from."""
        ...

    def digest(self) -> int:
        """Of the replica, as the step in hand begins."""
        ...

    def workers(self, step: int, begun: int) -> int:
        """How many workers count as having begun `step`, when `begun` really have."""
        ...

    def take_up(self, content: Any, shards: int) -> None:
        """A round begins: partial sums of so many shards of `content`, none of them computed."""
        ...

    def open(self, view: View) -> ExchangePort:
        """The exchange of `view`: the one made ahead, or a new one."""
        ...

    def send_state(self, view: View, round_: int, position: Position) -> None:
        """To the joiners of `view`, as it is now; the sending goes on in the background."""
        ...

    def receive(self, view: View) -> Arriving:
        """Receive the state in the background, from those of `view` who send it."""
        ...

    def renew(self, state: Any) -> None:
        """Take over what has arrived, in place of what this worker holds as of the same step."""
        ...

    def start(self, task: Task, round_: int, shards: int, lineage: Lineage) -> None:
        """Start the round in the exchange that was opened last, over the partial sums that were taken up."""
        ...

    def hand_in(self) -> None:
        """Nothing is left to be computed here."""
        ...


# --- driver -----------------------------------------------------------------------------------------------------------

IDLE_S = 0.05  # between two idle rounds


class ViewWithdrawn(Exception):
    """This joiner's view is no more: it waits for the next one."""


class Driver:
    """See the module's head. With fewer than `minimum` workers, rounds are idle.

    Attributes:
        number: of the round in hand.
        workers: that have begun it, whatever became of them.
        begun: the round that was begun last, as soon as that is so.
        waits: this worker has nothing to compute and waits for others.
        proven: it has ended a round, or begun the run; a joiner that is given up before may hold a torn state without
            knowing it.
    """

    def __init__(self, member: Member, told: Instructions, port: Port, terms: RunTerms) -> None:
        self.member = member
        self.task = Task(position=Position(), shards=_none)
        self.exchange: ExchangePort = _Before()
        self.lineage = Lineage(sets=())
        self.shards = self.number = self.workers = 0
        self.computed_shards: set[int] = set()
        self.begun_round = -1
        self.waits = True
        self.proven = False
        self.calls = CallRounds()
        self._instructions = told
        self.port = port
        self._terms = terms
        self.checking = Checking(member, terms)
        member.drift = Drift() if terms.bits == "any" else None
        self._call = NOTHING
        self._idle = False

    # --- a round ---------------------------------------------------------------------------------------------

    def begin(self, task: Task) -> Script[None]:
        """Begin a round for `task`, after a call round where one is due; below the minimum, after idle rounds.

        Raises:
            Demoted: this worker is a joiner, and its view was stopped before.
        """
        first, call = self.calls.due(task.sizes, task.position.step, trains=task.trains, doing=task.doing)
        if first is not None:
            yield from self._begin_once(Task(position=task.position, shards=_none), first)
            while not (yield from self.finish()):
                pass
        yield from self._begin_once(task, call)
        if self.member.synced:
            yield from self.pass_idle_rounds()

    def _begin_once(self, task: Task, call: Call) -> Script[None]:
        member, port = self.member, self.port
        while True:
            yield from self.handle_requests()
            if member.phase == "member":
                told = member.begin_round(task.position.step, may_switch=task.trains, call=call)
                self.tell(told or ())
                if member.phase == "member":
                    break
                yield from do(port.stand_back)
                continue
            if member.phase == "waiting":
                raise ViewWithdrawn
            yield Change()
        view, lineage, synced, first = member.view, member.lineage, member.synced, member.first
        assert view is not None
        assert lineage is not None
        self.task, self._call = task, call
        self.number = self.begun_round = member.round
        self._idle = task.trains and len(lineage.sets[0]) < self._terms.minimum
        member.trains = self.trains
        renewal = member.drift.renewal(view, task.position.step) if member.drift and self.trains else None
        self.workers = port.workers(task.position.step, len(lineage.sets[0]))
        if synced:
            yield from self.take_digest()
        self.shards, self.computed_shards = 0, set()
        self.checking.begin()
        if not self._idle:
            self.shards = yield from do(task.shards, self.workers)
        yield from do(port.take_up, None if self._idle else task.content, self.shards)
        yield from self._open(view)
        if not synced:
            self.exchange.withhold()
        elif first and view.joining:
            yield from do(port.send_state, view, self.number, task.position)
        if renewal is not None:
            yield from self._renew(view, renewal)
        yield from self._start(lineage)

    def _renew(self, view: View, renewal: View) -> Script[None]:
        """Replicas have drifted apart, and some are given the state again. See `drift`."""
        if self.member.worker in renewal.senders(self._terms.bits):
            yield from do(self.port.send_state, renewal, self.number, self.task.position)
        elif self.member.worker in renewal.joining:
            arriving = yield from do(self.port.receive, renewal)
            if (yield from self.until(view, lambda: arriving.state is not None)):
                yield from do(self.port.renew, arriving.state)
                yield from self.take_digest()

    def until(self, view: View, there: Callable[[], bool]) -> Script[bool]:
        """Wait until `there()`; False if `view` is given up before (then: until this worker is a candidate again)."""
        while True:
            yield from self.handle_requests()
            if view not in (self.member.view, self.member.pending):
                return False
            if self.member.phase != "stopped" and there():
                return True
            yield Change()

    def pass_idle_rounds(self) -> Script[None]:
        """Too few workers: rounds without work, in which a joiner's view can be agreed on (R2) like in any other."""
        while self._idle:
            while not (yield from self.finish()):
                pass
            yield Change(IDLE_S)
            yield from self._begin_once(self.task, self._call)

    def checked(self, shard: int, names: Sequence[str], digests: Sequence[int]) -> None:
        """This worker has computed `shard`, another's, too. With the last that it owes its word may be given."""
        self.checking.on_check(shard, names, digests)
        if self.member.synced and not self.checking.owed():
            self.exchange.release()

    def todo(self) -> tuple[int, ...]:
        """The shards that are this worker's and not computed yet."""
        mine = self.lineage.assign(self.shards).get(self.member.worker, ()) if self.shards else ()
        return tuple(shard for shard in mine if shard not in self.computed_shards)

    @property
    def trains(self) -> bool:
        """Whether the round is a training step's, and not an idle one in its place."""
        return self.task.trains and not self._idle

    @property
    def idle(self) -> bool:
        """Whether the round in hand is one without work, for want of workers."""
        return self._idle

    def inherited(self, shard: int) -> bool:
        """Whether `shard` of this round was another's, who is gone."""
        sets = self.lineage.sets
        if len(sets) < 2:
            return False
        first = Lineage(sets=sets[:1], shares=self.lineage.shares)
        return shard not in first.assign(self.shards).get(self.member.worker, ())

    def sync(self) -> Script[None]:
        """Follow the member if its view has changed meanwhile: open its exchange, over the same partial sums."""
        yield from self.handle_requests()
        member = self.member
        view, lineage = member.view, member.lineage
        goes_on = member.phase == "member" and member.round == self.number
        if goes_on and view is not None and view.number != self.exchange.view.number and lineage is not None:
            yield from self._open(view)
            yield from self._start(lineage)

    def finish(self) -> Script[bool]:
        """Wait for the round's end. True: it has ended; False: the view has changed, look at `todo` again."""
        member, exchange = self.member, self.exchange
        self.waits = True
        yield from do(exchange.finish)
        while not exchange.ended and member.round <= self.number:
            yield from self.handle_requests()
            if member.phase == "member" and member.view is not None and member.view.number != exchange.view.number:
                yield from self.sync()
                return False
            yield Change()
        self.proven, self.waits = True, False
        return True

    def _open(self, view: View) -> Script[None]:
        old = self.exchange
        if old.view.number == view.number:
            return
        self.exchange = yield from do(self.port.open, view)
        old.close()
        yield from do(old.settle)  # everyone who lives has abandoned it, or has left it in order

    def _start(self, lineage: Lineage) -> Script[None]:
        self.lineage, self.waits = lineage, False
        self.checking.arrange(lineage, self.shards if self.trains else 0, self.task.position.step)
        if self.checking.owed():
            self.exchange.withhold()
        yield from do(self.port.start, self.task, self.number, self.shards, lineage)
        if not self.todo():
            yield from do(self.port.hand_in)

    # --- what the coordinator asks for -----------------------------------------------------------------------

    def handle_requests(self) -> Script[None]:
        """It may have asked for a checkpoint, or said goodbye."""
        told, port = self._instructions, self.port
        if told.save is not None:
            wanted, told.save = told.save, None
            if wanted.save:
                port.answer(wanted)
        if told.exit is not None:
            if told.orphaned and self.proven:
                told.orphaned = False
                saved = yield from do(port.save, bool(self.member.apart))
                if saved.between and told.exit.within_s is None:  # in an evaluation, or the script has ended
                    yield from do(port.save, True)
            port.leave(told.exit)

    def serve_until_dismissed(self) -> Script[NoReturn]:
        """The script is done: answer what the coordinator asks until it says goodbye."""
        while True:
            yield from self.handle_requests()
            yield Change()

    # --- small things ----------------------------------------------------------------------------------------

    def take_digest(self) -> Script[None]:
        """Of the replica as a training step begins, for the word; elsewhere, or alone, there is nothing to compare."""
        view = self.member.view
        compared = self.trains and view is not None and view.size > 1
        self.member.digest = (yield from do(self.port.digest)) if compared else 0

    def tell(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.port.tell(message)


class _Before:
    """Before the first round."""

    view = View(number=0, members=(), group=0)
    ended = True

    def withhold(self) -> None: ...

    def release(self) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def settle(self) -> None: ...


def _none(workers: int) -> int:
    del workers
    return 0


# --- entering ---------------------------------------------------------------------------------------------------------
#
# How a worker enters: it waits for a view, and for the state if others hold it. Invariant: a joiner sends its commit
# message only after it has loaded the state and the member has agreed that the view still stands; so the veterans'
# state stays that of the beginning of the round while it is transferred.
# Argument: docs/protocol.md, Joining 1-4.


class JoinCallbacks(Protocol):
    """What a worker does as it comes in; all of it without the lock."""

    def restore(self, view: View, /) -> Position | None:
        """Take the run's state up to begin `view` with it; None: others begin, or the run ends."""
        ...

    def first(self, position: Position, flags: Sequence[bool] | None, /) -> Task:
        """The step that this worker enters with. `flags`: of a header; None: it begins the run."""
        ...

    def entered(self) -> None:
        """That step has begun."""
        ...

    def load(self, state: Any, /) -> None:
        """Take over what has arrived, and with it the run that it is of."""
        ...


def join_view(driver: Driver, entrance: JoinCallbacks) -> Script[None]:
    """Come in, and begin the first step."""
    member = driver.member
    while True:
        driver.calls.enter()
        view = yield from _proposed(driver)
        entered = _begin_run(driver, entrance, view) if member.worker in view.synced else _join(driver, entrance, view)
        try:
            if (yield from entered):
                return
        except ViewWithdrawn:
            continue


def _begin_run(driver: Driver, entrance: JoinCallbacks, view: View) -> Script[bool]:
    position = yield from do(entrance.restore, view)
    if position is None:
        yield from driver.until(view, lambda: False)
        return False
    if not _adopt(driver, 0, position, view):
        return False
    driver.proven = True
    yield from driver.begin((yield from do(entrance.first, position, None)))
    yield from do(entrance.entered)
    return True


def _join(driver: Driver, entrance: JoinCallbacks, view: View) -> Script[bool]:
    member = driver.member
    arriving = yield from do(driver.port.receive, view)
    if not (yield from driver.until(view, lambda: arriving.header is not None)) or arriving.header is None:
        return False
    round_, position, flags = arriving.header
    if not _adopt(driver, round_, position, view):
        return False
    yield from driver.begin((yield from do(entrance.first, position, flags)))
    yield from do(entrance.entered)
    if not (yield from driver.until(view, lambda: arriving.state is not None)):
        return False
    exchange = driver.exchange
    yield from do(entrance.load, arriving.state)
    yield from driver.take_digest()
    synced = member.become_synced()
    if synced is None:
        return False
    driver.tell(synced)
    if not driver.checking.owed():
        exchange.release()
    yield from driver.pass_idle_rounds()
    return True


def _proposed(driver: Driver) -> Script[View]:
    """Wait for a proposed view whose connections stand."""
    member = driver.member
    while True:
        if member.phase == "waiting" and member.pending and member.prepared == member.pending.number:
            return member.pending
        yield from driver.handle_requests()
        yield Change()


def _adopt(driver: Driver, round_: int, position: Position, view: View) -> bool:
    adopted = driver.member.adopt(round_, position.step, view=view.number)
    driver.tell(adopted or ())
    return adopted is not None


# --- occupation -------------------------------------------------------------------------------------------------------
#
# Which class of time the training thread is in while its driver has it: waiting or working.
#
# It waits for others at one place only, in the driver's shell. The class of a wait is read from the member and the
# driver at that moment, and again after each change. So one wait may begin as the exchange of a step, go on as the
# pause of a stopped view, and end as an exchange again.


def class_of(driver: Driver, *, entered: bool, waits: bool, before: TimeClass) -> TimeClass:
    """What the training thread is in, while it `waits` or works for the driver. `before`: what it was in when it came;
    `entered`: its first step has begun.
    """
    member = driver.member
    if before == "end" or member.phase in ("left", "out"):
        return "end"
    if not entered:
        return "spare" if waits and member.phase == "waiting" and member.pending is None else "start"
    view = member.view
    if member.phase == "stopped" or view is None or view.number != driver.exchange.view.number:
        return "pause"
    if driver.idle:
        return "few"
    if member.first and (view.joining or not waits):
        return "pause"
    return "exchange" if waits else before
