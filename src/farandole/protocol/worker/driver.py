"""The rounds of one worker, one after another, through whatever happens to the view.

`Driver.begin`, `sync`, `wait_for_round_end` and `join_view` are generators: without threads, clock or torch. `Rounds`
in `worker/rounds.py` runs one at a time, on the training thread, and holds the worker's lock whenever it resumes one.
So what stands between two yields is atomic. A generator yields what comes next without the lock:

    Change   wait until something has changed (a message, the end of an exchange), perhaps with a limit in seconds
    work     a call into the `port`, whose result it is resumed with: it may take long, and the coordinator's messages
             and the peers' commit messages come in meanwhile

So what it knows may be out of date as soon as it has yielded. That does no harm: only this driver begins rounds, and
only `WorkerStateMachine` ends them or moves them on.
The driver compares the `number` of its round and the view of its `exchange` with those of the state machine. If the
round there is later, the driver's was committed meanwhile; if only the view is another, it is redone.
Argument: docs/protocol.md, Driver 1-6.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from farandole.plan.shards import Position
from farandole.protocol.messages import Message, RunTerms, Saved
from farandole.protocol.values import NOTHING, Call, LinkUse, TimeClass
from farandole.protocol.view import Lineage, View
from farandole.protocol.worker.state_machine import CallRounds, Checking, Drift, Exit, Save, WorkerStateMachine

# --- generators -------------------------------------------------------------------------------------------------------
#
# What the generators of this module yield: what comes next without the worker's lock.

T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """Yielded to wait until something has changed, or for `at_most_s` seconds if that is given."""

    at_most_s: float | None = None


Routine = Generator["Change | Callable[[], Any]", Any, T]


def do(work: Callable[..., T], *args: Any) -> Routine[T]:
    """Call `work(*args)` without the worker's lock, and return its result."""
    return (yield partial(work, *args))


# --- instructions -----------------------------------------------------------------------------------------------------
#
# What passes between a worker's training side and its session with the coordinator: two values, one in each direction.
#
# The training side reads `Instructions` whenever it waits or begins something; each heartbeat carries its `Activity` to
# the coordinator. Neither side ever waits for the other.


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What the training side is doing; the fields are those of `Heartbeat`."""

    epoch: int = 0
    shards_computed: int = 0
    waits_for_peers: bool = False
    at_step_start: bool = False
    shard_us: int = 0
    shards: int = 0
    shards_total: int = 0
    time_us: tuple[int, ...] = ()
    links: tuple[LinkUse, ...] = ()


@dataclass(kw_only=True)
class Instructions:
    """What the coordinator requests of the training side, which resets `save` and `save_at_once` when it handles them.

    Attributes:
        exit: leave the run, None while the worker stays.
        save_before_exit: before that, save the state that this worker holds: no other worker may hold it.
        save: the request for the last checkpoint, None if there is none.
        saves: this worker writes the checkpoints while the run trains.
        save_at_once: write the first one without waiting until one is due, since another worker could not write it.
    """

    exit: Exit | None = None
    save_before_exit: bool = False
    save: Save | None = None
    saves: bool = False
    save_at_once: bool = False

    def leave(self, exit_: Exit) -> None:
        """Request the exit. The first request counts, later ones are ignored."""
        self.save_before_exit = self.save_before_exit or (exit_.save and self.exit is None)
        self.exit = self.exit or exit_


# --- port -------------------------------------------------------------------------------------------------------------
#
# What a driver asks of the worker around it. There are two ports: `RoundsPort` in `worker/rounds.py`, which is not in
# `protocol` and has threads and tensors; and that of the simulator.


@dataclass(frozen=True, kw_only=True)
class Task:
    """The purpose of a round, as the script requests it.

    Attributes:
        position: the step, and its place in the data.
        shards: returns the number of shards if the given number of workers begins the round; called without the lock.
        sizes: the sizes of the round's messages, as text.
        is_step: this is a training step: the worker switches to an agreed view where it begins.
        doing: the call of the script, if it is no training step; the same text on all workers.
        content: what the port sums up, None for nothing.
    """

    position: Position
    shards: Callable[[int], int]
    sizes: str = ""
    is_step: bool = False
    doing: str = ""
    content: Any = None


class Arriving(Protocol):
    """The state that a joiner receives. A property is None until its part has arrived."""

    @property
    def header(self) -> tuple[int, Position, Sequence[bool]] | None:
        """The round, its position, and requires_grad of each parameter at the senders, without which buckets differ."""
        ...

    @property
    def state(self) -> Any: ...


class ExchangePort(Protocol):
    """The exchange of one view, round after round."""

    @property
    def view(self) -> View: ...

    @property
    def ended(self) -> bool:
        """True if the round that was started last has ended."""
        ...

    def withhold(self) -> None:
        """Send no commit message before `release`."""
        ...

    def release(self) -> None: ...

    def on_all_submitted(self) -> None:
        """Everything of this worker is submitted."""
        ...

    def close(self) -> None:
        """The view is over, by agreement or abandoned: use its connections no more."""
        ...

    def release_peers(self) -> None:
        """Send the messages that the abandoned round still owes its peers; their contents do not matter.

        Called when the next exchange opens. By then every live worker has abandoned the old one, since the coordinator
        had all answers to its stop before it said how to go on, or this worker has left gracefully.
        """
        ...


class Port(Protocol):
    """The worker around the driver. `tell`, `answer` and `leave` are called with the lock held, and must not block."""

    def tell(self, message: Message) -> None:
        """Send `message` to the coordinator."""
        ...

    def answer(self, save: Save) -> None:
        """Save in the background, and report the result to the coordinator."""
        ...

    def leave(self, exit_: Exit) -> NoReturn:
        """End this worker: raises the exception that ends the script."""
        ...

    def stand_back(self) -> None:
        """Use little CPU from now on: this worker has left the view, and only waits for `Goodbye`."""
        ...

    def save(self, between: bool) -> Saved:
        """Write the last checkpoint. `between` also permits a state between two steps, which no run can resume."""
        ...

    def digest(self) -> int:
        """Return the digest of the replica at the start of the current step."""
        ...

    def workers(self, step: int, begun: int) -> int:
        """Return how many workers count as having begun `step`, if `begun` really have.

        `begun` is the size of the first set of the lineage. All members share that set, also one that begins the round
        late, in a smaller view.
        """
        ...

    def take_up(self, content: Any, shards: int, step: int) -> None:
        """Begin a round of `step`: take the empty partial sums of `content` over `shards` shards."""
        ...

    def open(self, view: View) -> ExchangePort:
        """Return the exchange of `view`: the one that was prepared, or a new one."""
        ...

    def send_state(self, view: View, round_: int, position: Position) -> None:
        """Send the state as it is now to the joiners of `view`; the transfer continues in the background."""
        ...

    def receive(self, view: View) -> Arriving:
        """Receive the state in the background, from the senders of `view`."""
        ...

    def renew(self, state: Any) -> None:
        """Replace the state of this worker by the received one, which is of the same step."""
        ...

    def start(self, task: Task, round_: int, shards: int, lineage: Lineage) -> None:
        """Start the round in the exchange that was opened last, over the partial sums of `take_up`."""
        ...

    def submit_all(self) -> None:
        """This worker has nothing left to compute in the round."""
        ...


# --- driver -----------------------------------------------------------------------------------------------------------

IDLE_S = 0.05  # between two idle rounds


class JoinAborted(Exception):
    """The view of this joiner was withdrawn: it waits for the next one."""


class LoopPassed(Exception):
    """The run is in a later loop of the script than this worker, which goes there and joins then.

    `view`: the view that it was proposed for. `arriving`: the state from the others; None if it begins the run.
    """

    def __init__(self, view: View, arriving: Arriving | None) -> None:
        super().__init__(view.number)
        self.view, self.arriving = view, arriving


class Driver:
    """Runs the rounds of one worker, as the module's head describes. Below `minimum` workers, rounds are idle.

    Attributes:
        minimum: steps begin with at least so many workers; equal on all workers that begin a round.
        task: the purpose of the round in progress.
        exchange: the exchange of the view that this driver works in.
        lineage: how the shards of the round are assigned.
        shards: how many shards the round has.
        number: the number of the round in progress.
        workers: how many workers have begun it, including any that failed since.
        computed_shards: the shards of the round that this worker has computed.
        begun_round: the number of the round that was begun last, set before its work starts.
        waits_for_peers: this worker has nothing to compute and waits for others.
        fully_loaded: every part of the state is known to be loaded, since this worker has begun the run, or has ended
            a round that it began with the state. A worker that was abandoned while it received the state may hold
            parts of a later one without knowing it (Joining 5): it never hears of its eviction if the coordinator dies
            before it wakes up. It may end that round, with commit messages that its veterans sent before they gave up
            the view. For the next one they send it none, since they have not ended the first one with its own.
    """

    def __init__(self, machine: WorkerStateMachine, instructions: Instructions, port: Port, terms: RunTerms) -> None:
        self.state_machine = machine
        self.task = Task(position=Position(), shards=_none)
        self.exchange: ExchangePort = _Before()
        self.lineage = Lineage(sets=())
        self.shards = self.number = self.workers = 0
        self.computed_shards: set[int] = set()
        self.begun_round = -1
        self.waits_for_peers = True
        self.fully_loaded = False
        self._began_loaded = False  # this round was begun with the whole state
        self.calls = CallRounds()
        self._instructions = instructions
        self.port = port
        self._terms = terms
        self.minimum = terms.minimum
        self.checking = Checking(machine, terms)
        machine.drift = Drift() if terms.bits == "any" else None
        self._call = NOTHING
        self._in_idle_round = False

    # --- a round ---------------------------------------------------------------------------------------------

    def begin(self, task: Task) -> Routine[None]:
        """Begin a round for `task`: after a call round if one is due, and after idle rounds below the minimum.

        Raises:
            JoinAborted: this worker is a joiner, and its view was stopped before.
        """
        first, call = self.calls.due(task.sizes, task.position.step, is_step=task.is_step, doing=task.doing)
        if first is not None:
            yield from self._begin_once(Task(position=task.position, shards=_none), first)
            while not (yield from self.wait_for_round_end()):
                pass
        yield from self._begin_once(task, call)
        if self.state_machine.synced:
            yield from self.pass_idle_rounds()

    def _begin_once(self, task: Task, call: Call) -> Routine[None]:
        machine, port = self.state_machine, self.port
        while True:
            yield from self.handle_requests()
            if machine.phase == "member":
                reports = machine.begin_round(task.position.step, may_switch=task.is_step, call=call)
                self.tell(reports or ())
                if machine.phase == "member":
                    break
                yield from do(port.stand_back)
                continue
            if machine.phase == "candidate":
                raise JoinAborted
            yield Change()
        view, lineage, synced, first = machine.view, machine.lineage, machine.synced, machine.first
        assert view is not None
        assert lineage is not None
        self.task, self._call, self._began_loaded = task, call, synced
        self.number = self.begun_round = machine.round
        self._in_idle_round = task.is_step and len(lineage.sets[0]) < self.minimum
        machine.computes_step = self.computes_step
        renewal = machine.drift.renewal(view, task.position.step) if machine.drift and self.computes_step else None
        self.workers = port.workers(task.position.step, len(lineage.sets[0]))
        if synced:
            yield from self.take_digest()
        self.shards, self.computed_shards = 0, set()
        self.checking.begin()
        if not self._in_idle_round:
            self.shards = yield from do(task.shards, self.workers)
        yield from do(port.take_up, None if self._in_idle_round else task.content, self.shards, task.position.step)
        yield from self._open(view)
        if not synced:
            self.exchange.withhold()
        elif first and view.joining:
            yield from do(port.send_state, view, self.number, task.position)
        if renewal is not None:
            yield from self._renew(view, renewal)
        yield from self._start(lineage)

    def _renew(self, view: View, renewal: View) -> Routine[None]:
        """Send the state to the members whose replicas drifted, or receive it. See `Drift` in `state_machine.py`."""
        if self.state_machine.worker in renewal.senders(self._terms.bits):
            yield from do(self.port.send_state, renewal, self.number, self.task.position)
        elif self.state_machine.worker in renewal.joining:
            arriving = yield from do(self.port.receive, renewal)
            if (yield from self.until(view, lambda: arriving.state is not None)):
                self.fully_loaded = self._began_loaded = False
                yield from do(self.port.renew, arriving.state)
                yield from self.take_digest()

    def until(self, view: View, condition: Callable[[], bool]) -> Routine[bool]:
        """Wait until `condition()` holds, and return True.

        Returns False if `view` is abandoned before, as soon as this worker is a candidate again.
        """
        while True:
            yield from self.handle_requests()
            if view not in (self.state_machine.view, self.state_machine.pending):
                return False
            if self.state_machine.phase != "stopped" and condition():
                return True
            yield Change()

    def pass_idle_rounds(self) -> Routine[None]:
        """Run rounds without work while workers are too few. A joiner's view can be agreed on in them as usual (R2)."""
        while self._in_idle_round:
            while not (yield from self.wait_for_round_end()):
                pass
            yield Change(IDLE_S)
            yield from self._begin_once(self.task, self._call)

    def checked(self, shard: int, names: Sequence[str], digests: Sequence[int]) -> None:
        """Record a check: this worker has computed `shard` of another one. After its last check it may commit."""
        self.checking.on_check(shard, names, digests)
        if self.state_machine.synced and not self.checking.checks_left():
            self.exchange.release()

    def todo(self) -> tuple[int, ...]:
        """Return the shards that are assigned to this worker and not computed yet.

        After a change of the view these are the inherited ones: what this worker has computed stays.
        """
        mine = self.lineage.assign(self.shards).get(self.state_machine.worker, ()) if self.shards else ()
        return tuple(shard for shard in mine if shard not in self.computed_shards)

    @property
    def computes_step(self) -> bool:
        """True if the round is a training step's, and not an idle one in its place."""
        return self.task.is_step and not self._in_idle_round

    @property
    def in_idle_round(self) -> bool:
        """True if the round in progress has no work, because there are fewer workers than the minimum."""
        return self._in_idle_round

    def inherited(self, shard: int) -> bool:
        """Return True if `shard` of this round was assigned to a worker that has failed since."""
        sets = self.lineage.sets
        if len(sets) < 2:
            return False
        first = Lineage(sets=sets[:1], shares=self.lineage.shares)
        return shard not in first.assign(self.shards).get(self.state_machine.worker, ())

    def sync(self) -> Routine[None]:
        """Follow a change of the view in this round: open the new exchange over the same partial sums."""
        yield from self.handle_requests()
        machine = self.state_machine
        view, lineage = machine.view, machine.lineage
        goes_on = machine.phase == "member" and machine.round == self.number
        if goes_on and view is not None and view.number != self.exchange.view.number and lineage is not None:
            yield from self._open(view)
            yield from self._start(lineage)

    def wait_for_round_end(self) -> Routine[bool]:
        """Wait for the end of the round. Returns False if the view has changed instead: then look at `todo` again."""
        machine, exchange = self.state_machine, self.exchange
        self.waits_for_peers = True
        yield from do(exchange.on_all_submitted)
        while not exchange.ended and machine.round <= self.number:
            yield from self.handle_requests()
            if machine.phase == "member" and machine.view is not None and machine.view.number != exchange.view.number:
                yield from self.sync()
                return False
            yield Change()
        self.fully_loaded = self.fully_loaded or self._began_loaded
        self.waits_for_peers = False
        return True

    def _open(self, view: View) -> Routine[None]:
        old = self.exchange
        if old.view.number == view.number:
            return
        self.exchange = yield from do(self.port.open, view)
        old.close()
        yield from do(old.release_peers)  # all workers that live have abandoned the view, or left it gracefully

    def _start(self, lineage: Lineage) -> Routine[None]:
        self.lineage, self.waits_for_peers = lineage, False
        self.checking.arrange(lineage, self.shards if self.computes_step else 0, self.task.position.step)
        if self.checking.checks_left():
            self.exchange.withhold()
        yield from do(self.port.start, self.task, self.number, self.shards, lineage)
        if not self.todo():
            yield from do(self.port.submit_all)

    # --- requests of the coordinator -------------------------------------------------------------------------

    def handle_requests(self) -> Routine[None]:
        """Handle a request for a checkpoint or for the exit, if there is one. May raise what `Port.leave` raises."""
        instructions, port = self._instructions, self.port
        if instructions.save is not None:
            request, instructions.save = instructions.save, None
            if request.save:
                port.answer(request)
        if instructions.exit is not None:
            if instructions.save_before_exit and self.fully_loaded:
                instructions.save_before_exit = False
                saved = yield from do(port.save, bool(self.state_machine.differing))
                if saved.between and instructions.exit.within_s is None:  # in an evaluation, or the script has ended
                    yield from do(port.save, True)
            port.leave(instructions.exit)

    def serve_until_dismissed(self) -> Routine[NoReturn]:
        """After the script has ended, handle requests until the coordinator dismisses this worker."""
        while True:
            yield from self.handle_requests()
            yield Change()

    # --- small things ----------------------------------------------------------------------------------------

    def take_digest(self) -> Routine[None]:
        """Take the replica's digest for the commit message of a training step; 0 elsewhere, and in a view of one."""
        view = self.state_machine.view
        compared = self.computes_step and view is not None and view.size > 1
        self.state_machine.digest = (yield from do(self.port.digest)) if compared else 0

    def tell(self, messages: Iterable[Message]) -> None:
        """Send `messages` to the coordinator, in order."""
        for message in messages:
            self.port.tell(message)


class _Before:
    """Stands for the exchange before the first round: does nothing."""

    view = View(number=0, members=(), group=0)
    ended = True

    def withhold(self) -> None: ...

    def release(self) -> None: ...

    def on_all_submitted(self) -> None: ...

    def close(self) -> None: ...

    def release_peers(self) -> None: ...


def _none(workers: int) -> int:
    del workers
    return 0


# --- entering ---------------------------------------------------------------------------------------------------------
#
# How a worker enters (`join_view`): it waits for a view, and for the state if others hold it. Invariant: a joiner sends
# its commit message only after it has loaded the state and no stop has arrived (`become_synced`); so the
# veterans' state stays that of the beginning of the round while it is transferred.
#
#     Hello, Welcome     the worker gets its id and the run's terms, and makes its model and data
#     Ready              its signature is compared with the run's: it is refused, or a candidate
#     Propose            to the joiner and all members: they open the connections in the background
#     Prepared           from then on the commit messages of the members name the view
#     Switched           when all name it in one round, the members switch at their next training step, and send the
#                        state
#     Synced             the joiner has read the header, has entered the view, and has loaded the state. From the next
#                        round it has shards
#
# Argument: docs/protocol.md, Joining 1-4.


class JoinCallbacks(Protocol):
    """What a worker does to join, called without the lock."""

    def restore(self, view: View, /) -> Position | None:
        """Load the run's state to begin `view` with it; returns its position, None if others begin or the run ends."""
        ...

    def is_later(self, position: Position, /) -> bool:
        """Return True if `position` is in a later loop of the script than the one that this worker enters."""
        ...

    def first(self, position: Position, flags: Sequence[bool] | None, /) -> Task:
        """Return the first step of this worker. `flags`: requires_grad from a header, None if it begins the run."""
        ...

    def entered(self) -> None:
        """That first step has begun."""
        ...

    def load(self, state: Any, /) -> None:
        """Load the received state, and with it the position and history of the run."""
        ...


def join_view(driver: Driver, entrance: JoinCallbacks) -> Routine[None]:
    """Join a view, and begin the first step in it.

    Raises:
        LoopPassed: the run is in a later loop of the script. Call this again at the beginning of that loop.
    """
    machine = driver.state_machine
    while True:
        driver.calls.enter()
        view = yield from _proposed(driver)
        entered = _begin_run(driver, entrance, view) if machine.worker in view.synced else _join(driver, entrance, view)
        try:
            if (yield from entered):
                return
        except JoinAborted:
            continue


def _begin_run(driver: Driver, entrance: JoinCallbacks, view: View) -> Routine[bool]:
    """Begin the run in its first view; False if that was withdrawn."""
    position = yield from do(entrance.restore, view)
    if position is None:
        yield from driver.until(view, lambda: False)
        return False
    if entrance.is_later(position):
        raise LoopPassed(view, None)
    if not _enter_view(driver, 0, position, view):
        return False
    driver.fully_loaded = True
    yield from driver.begin((yield from do(entrance.first, position, None)))
    yield from do(entrance.entered)
    return True


def _join(driver: Driver, entrance: JoinCallbacks, view: View) -> Routine[bool]:
    """Join `view` with the state of its other members; False if the view was withdrawn."""
    machine = driver.state_machine
    arriving = yield from do(driver.port.receive, view)
    if not (yield from driver.until(view, lambda: arriving.header is not None)) or arriving.header is None:
        return False
    round_, position, flags = arriving.header
    if entrance.is_later(position):
        if not (yield from driver.until(view, lambda: arriving.state is not None)):
            return False
        raise LoopPassed(view, arriving)
    if not _enter_view(driver, round_, position, view):
        return False
    yield from driver.begin((yield from do(entrance.first, position, flags)))
    yield from do(entrance.entered)
    if not (yield from driver.until(view, lambda: arriving.state is not None)):
        return False
    exchange = driver.exchange
    yield from do(entrance.load, arriving.state)
    yield from driver.take_digest()
    synced = machine.become_synced()
    if synced is None:
        return False
    driver.tell(synced)
    if not driver.checking.checks_left():
        exchange.release()
    yield from driver.pass_idle_rounds()
    return True


def _proposed(driver: Driver) -> Routine[View]:
    """Wait for a proposed view whose connections are open."""
    machine = driver.state_machine
    while True:
        if machine.phase == "candidate" and machine.pending and machine.prepared == machine.pending.number:
            return machine.pending
        yield from driver.handle_requests()
        yield Change()


def _enter_view(driver: Driver, round_: int, position: Position, view: View) -> bool:
    reports = driver.state_machine.enter_view(round_, position.step, view=view.number)
    driver.tell(reports or ())
    return reports is not None


# --- occupation -------------------------------------------------------------------------------------------------------
#
# Which class of time the training thread is in while its driver has it: waiting or working.
#
# It waits for others at one place only, in the driver's shell. The class of a wait is read from the state machine and
# the driver at that moment, and again after each change. So one wait may begin as the exchange of a step, go on as the
# pause of a stopped view, and end as an exchange again.


def class_of(driver: Driver, *, entered: bool, waits: bool, before: TimeClass) -> TimeClass:
    """Return the time class of the training thread while it `waits` or works for the driver.

    `before` is its class when it called the driver; `entered`: its first step has begun.
    """
    machine = driver.state_machine
    if before == "end" or machine.phase in ("left", "out"):
        return "end"
    if not entered:
        return "spare" if waits and machine.phase == "candidate" and machine.pending is None else "start"
    view = machine.view
    if machine.phase == "stopped" or view is None or view.number != driver.exchange.view.number:
        return "pause"
    if driver.in_idle_round:
        return "few"
    if machine.first and (view.joining or not waits):
        return "pause"
    return "exchange" if waits else before
