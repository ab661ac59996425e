"""Rounds: the thread, the lock and the tensors around `protocol/worker/driver.py`, which has the logic.

The training thread calls `begin`, computes what `todo` names, and calls `finish` until the round has ended. Between
them the view may be stopped and resumed any number of times; `sync` and `finish` follow it, over the same partial sums,
and `todo` then names what was inherited.

The driver is resumed with the participant's lock held, which is the lock of everybody who changes what it looks at; its
work is done without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from farandole.checkpoint.store import first_line
from farandole.collective.buckets import Layout, Partials
from farandole.collective.exchange import Exchange
from farandole.collective.state_transfer import Arrival, Snapshot, send_state
from farandole.collective.transport import PeerLost
from farandole.errors import StateDisputed, WorkerSuperseded
from farandole.plan.shards import Position
from farandole.platform.output import say
from farandole.protocol.messages import Digests, Message, Saved
from farandole.protocol.values import TimeClass
from farandole.protocol.view import Lineage, View
from farandole.protocol.worker.driver import Change, Driver, Script, Task, class_of, join_view
from farandole.protocol.worker.member import Exit, Save
from farandole.protocol.worker.session import Waiting
from farandole.worker.departure import stand_back
from farandole.worker.participant import Participant

# --- receiver ---------------------------------------------------------------------------------------------------------
#
# State on its way: to a joiner, whose training thread waits for it or for the end of its view, from the veterans.


class Receiver:
    """Receives the state on a thread of its own: a receive from a frozen veteran can't be woken.

    Where the connections of `view` are gone, it has been given up meanwhile: then nothing ever arrives.
    """

    def __init__(self, view: View, participant: Participant, parameters: int) -> None:
        self._view = view
        self.header: tuple[int, Position, list[bool]] | None = None
        self._state: Any = None
        self._disputed: StateDisputed | None = None
        self._participant = participant
        links = participant.groups.get(view.group)
        if links is not None:
            ahead, participant.room = participant.room, None  # another one may still be written into
            arrival = Arrival(view, view.senders(participant.terms.bits), links, parameters, ahead)
            threading.Thread(target=self._receive, args=(arrival,), name="state", daemon=True).start()

    @property
    def state(self) -> Any:
        """None until it is there.

        Raises:
            StateDisputed: the veterans do not hold the same.
        """
        if self._disputed is not None:
            raise self._disputed
        return self._state

    def _receive(self, arrival: Arrival) -> None:
        try:
            self.header = arrival.header()
            self._participant.changed()
            self._state = arrival.state()
            self._participant.changed()
        except StateDisputed as error:
            self._disputed = error
            self._participant.changed()
        except PeerLost as lost:
            self._participant.lost(self._view.number, lost.peer, lost.reason)


def hand_on(participant: Participant, view: View, round_: int, position: Position, state: Any) -> None:
    """A veteran's part in `view`: send `state`, as of this round's start, in the background.

    Where the connections of `view` are gone, it has been given up meanwhile: there is nobody to send to.
    """
    links, veterans = participant.groups.get(view.group), view.senders(participant.terms.bits)
    if links is None or participant.worker not in veterans:
        return
    snapshot = Snapshot(state)

    def send() -> None:
        try:
            send_state(view, veterans, participant.worker, links, round_, position, snapshot, participant.memory)
        except PeerLost as lost:
            participant.lost(view.number, lost.peer, lost.reason)

    threading.Thread(target=send, name=f"state-{view.number}", daemon=True).start()


# --- port -------------------------------------------------------------------------------------------------------------
#
# What a worker's driver asks for, with threads and tensors: exchanges, partial sums, the state to joiners, saving.


class HeldState(Protocol):
    """The state that a worker holds."""

    def snapshot(self) -> Any:
        """As of the beginning of the step in hand, to be sent."""
        ...

    def renew(self, state: Any) -> None:
        """Take over another's, as of the same step."""
        ...

    def save(self, between: bool) -> Saved:
        """Write a checkpoint; says why not, if this is only a state between two steps and `between` is false."""
        ...

    def digest(self) -> int:
        """Of the replica as the step in hand began."""
        ...

    def digests(self) -> Digests:
        """Of everything in it."""
        ...


class RoundsPort:
    """See `protocol.worker.driver.Port`. `replan` is called when this worker's shards are others than expected."""

    parameters = 0  # how many of them have a flag in the state's header

    def __init__(self, participant: Participant, held: Callable[[], HeldState], replan: Callable[[], None]) -> None:
        self.exchange: Exchange | None = None
        self._participant = participant
        self._held, self._replan = held, replan
        self._made: dict[int, Exchange] = {}  # ahead, for proposed views
        self._partials = Partials(Layout([], 0))
        self._planned = Lineage(sets=())  # the lineage that `replan` was last called for

    # --- without waiting -------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        self._participant.tell(message)

    def answer(self, save: Save) -> None:
        """On a thread: this one holds the lock that the heartbeats need. Without a thread it does so all the same."""
        participant = self._participant

        def save_and_tell() -> None:
            participant.tell(self.saved(save.between))

        try:
            threading.Thread(target=save_and_tell, daemon=True).start()
        except RuntimeError:
            save_and_tell()

    def leave(self, exit_: Exit) -> NoReturn:
        say(f"farandole: {exit_.reason}")
        raise SystemExit(exit_.code)

    def workers(self, step: int, begun: int) -> int:
        return self._participant.workers_at(step, begun)

    # --- a round ---------------------------------------------------------------------------------------------

    def stand_back(self) -> None:
        stand_back()

    def take_up(self, content: Any, shards: int) -> None:
        self._partials = Partials(Layout([], 0)) if content is None else content
        self._partials.begin(shards)

    def prepare(self, view: View, layout: Layout) -> None:
        """In the background: the exchange of a proposed view, with its buffers for `layout`."""
        if self._participant.worker in view.members:
            exchange = self._make(view)
            exchange.warm(layout)
            with self._participant.condition:
                self._made[view.number] = exchange

    def open(self, view: View) -> Exchange:
        with self._participant.condition:
            new = self._made.pop(view.number, None)
            for number in [n for n in self._made if n < view.number]:
                self._made.pop(number).close()
        self.exchange = new = new or self._make(view)
        return new

    def _make(self, view: View) -> Exchange:
        participant = self._participant
        links, memory, waits = participant.groups.get(view.group), participant.memory, participant.tracer.waits
        return Exchange(view, participant.worker, links, participant, memory=memory, waits=waits)

    def send_state(self, view: View, round_: int, position: Position) -> None:
        hand_on(self._participant, view, round_, position, self._held().snapshot())

    def receive(self, view: View) -> Receiver:
        return Receiver(view, self._participant, self.parameters)

    def renew(self, state: Any) -> None:
        self._held().renew(state)

    def digest(self) -> int:
        return self._held().digest()

    def start(self, task: Task, round_: int, shards: int, lineage: Lineage) -> None:
        assert self.exchange is not None
        if task.trains and shards and lineage != self._planned:
            self._planned = lineage
            self._replan()
        self.exchange.begin(round_, self._partials, shards, lineage, training=task.trains)

    def hand_in(self) -> None:
        assert self.exchange is not None
        for bucket in range(len(self._partials.layout.buckets)):
            self.exchange.ready(bucket)

    def open_shard(self, shard: int, *, last: bool) -> None:
        """Compute `shard` into the partial sums; with the `last` one, buckets are handed over as they are filled."""
        assert self.exchange is not None
        self._partials.complete = self.exchange.ready if last else _not_yet
        self._partials.open(shard, last=last)

    def reduced(self) -> list[Any]:
        """The reduced buckets of the round that has ended."""
        assert self.exchange is not None
        return self.exchange.reduced(self._partials.layout)

    # --- the last checkpoint ---------------------------------------------------------------------------------

    def save(self, between: bool) -> Saved:
        saved = self.saved(between)
        if not saved.between:
            say(f"farandole: checkpoint: {saved.path or saved.error}")
        return saved

    def saved(self, between: bool) -> Saved:
        """Whatever happens, an answer: without one nobody else would try."""
        try:
            return self._held().save(between)
        except Exception as error:  # noqa: BLE001
            return Saved(error=first_line(error))


def _not_yet(bucket: int) -> None:
    del bucket


# --- rounds -----------------------------------------------------------------------------------------------------------

WORK = 0  # the shard that whoever has it may take its time for, in a patient round
T = TypeVar("T")


def step_task(partials: Partials, shards: Callable[[int], int], position: Position) -> Task:
    """A training step over `partials`, of `shards(workers)` shards where so many begin it."""
    return Task(position=position, shards=shards, sizes=partials.layout.sizes, trains=True, content=partials)


def task(partials: Partials, shards: Callable[[int], int], step: int, doing: str) -> Task:
    """Something else over `partials`, after `step`. `doing`: what, in words that are equal on all workers."""
    return Task(position=Position(step=step), shards=shards, sizes=partials.layout.sizes, doing=doing, content=partials)


class Rounds:
    """Drives the rounds of one worker. `held` gives the state that it holds."""

    def __init__(self, participant: Participant, held: Callable[[], HeldState]) -> None:
        self._participant = participant
        self._held = held
        self.layout = Layout([], 0)  # of training steps; a proposed view's buffers are made for it ahead
        self.replan: Callable[[], None] = _nothing  # called when this worker's shards are others than expected
        self._port = RoundsPort(participant, held, lambda: self.replan())
        self._driver = Driver(participant.member, participant.told, self._port, participant.terms)
        self.meter = participant.meter
        self._entered = False
        self._patient = False
        self._updating: Exchange | None = None  # from whose sums the update is made
        participant.attend(self)

    # --- a round ---------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        return self._driver.exchange.view

    @property
    def lineage(self) -> Lineage:
        """Among whom the shards of the round in hand were dealt."""
        return self._driver.lineage

    @property
    def workers(self) -> int:
        """How many have begun the round in hand, whatever became of them."""
        return self._driver.workers

    def begin(self, task: Task, *, patient: bool = False) -> None:
        """Begin a round for `task`; below the minimum, after idle rounds. Blocks while the view is stopped.

        In a `patient` round the holder of shard `WORK` is never reported as stalled.
        """
        self._patient = False
        if task.trains:
            self._participant.tracer.begins(task.position.step)
        self._drive(self._driver.begin(task))
        self._patient = patient

    def todo(self) -> tuple[int, ...]:
        """The shards that are this worker's and not computed yet."""
        return self._driver.todo()

    def open(self, shard: int) -> None:
        """Compute `shard` now. With the last one, buckets are handed over as the backward pass fills them."""
        self._port.open_shard(shard, last=self.todo() == (shard,))
        self._participant.shard_timer.open()

    def close(self, shard: int) -> None:
        self._driver.computed_shards.add(shard)
        self._participant.done += 1
        if self._driver.trains:  # evaluations compute before they open a shard
            self._participant.shard_timer.close()

    def computes(self, shard: int, *, mine: bool = True) -> None:
        """Its micro-batch is in hand. `mine`: not computed to check another."""
        self.meter.enter("compute" if mine and not self._driver.inherited(shard) else "again")

    def owed(self) -> tuple[int, ...]:
        """The shards of another's that this worker has yet to compute, to check it. Looked at after `todo`."""
        return self._driver.checking.owed() if self._participant.member.synced else ()

    def examined(self, shard: int) -> bool:
        """Whether somebody checks `shard`, which is this worker's: then what it comes to is to be `found`."""
        return self._driver.checking.concerns(shard)

    def found(self, shard: int, names: Sequence[str], digests: Sequence[int], *, mine: bool) -> None:
        """Of a shard that two compute; of its own, before the last of it is handed in."""
        with self._participant.condition:
            if mine:
                self._driver.checking.on_digests(shard, names, digests)
            else:
                self._driver.checked(shard, names, digests)

    def sync(self) -> None:
        """Follow the member if its view has changed meanwhile."""
        self._drive(self._driver.sync())

    def hand_in(self) -> None:
        """All of this worker's shards are in the partial sums, and nothing of them has been handed over before."""
        self._driver.computed_shards.update(self.todo())
        self._port.hand_in()

    def finish(self) -> bool:
        """Wait for the round's end. True: it has ended; False: the view has changed, look at `todo` again."""
        self.meter.enter("exchange")
        ended = self._drive(self._driver.finish())
        self.meter.enter("compute")
        if ended and self._driver.trains:
            self._participant.shard_timer.step_ended(len(self._driver.computed_shards), self._driver.shards)
            self._participant.tracer.ended()
        return ended

    def reduced(self) -> list[Any]:
        """The reduced buckets of the round that has ended."""
        if self._driver.trains:
            self._updating = self._port.exchange
        return self._port.reduced()

    def check_sums(self) -> None:
        """After an update: it was made from what all others have.

        Raises:
            WorkerSuperseded: others have gone on without this worker, and have used the memory of the sums again.
        """
        if self._updating is not None and not self._updating.stood:
            raise WorkerSuperseded("this worker stood still for so long that the others have gone on without it")

    def enter(
        self, load: Callable[[Any], None], first: Callable[[Position, Sequence[bool] | None], Task],
        entered: Callable[[], None], restore: Callable[[View], Position | None], parameters: int,
    ) -> None:  # fmt: skip
        """Wait for a view, and for the state if others hold it; begin the first step: `protocol/worker/driver.py`."""

        def begin(view: View) -> Position | None:
            self._participant.room = None  # nobody hands anything over
            return restore(view)

        self._port.parameters = parameters
        entrance = _Entrance(load, first, entered, begin)
        self._drive(join_view(self._driver, entrance))
        self._entered = True
        self.meter.enter("compute")

    def end(self) -> None:
        """The script is done."""
        self.meter.enter("end")
        self._participant.tracer.closes()

    def obey_until_goodbye(self) -> NoReturn:
        """The script is done: answer what the coordinator asks until it says goodbye."""
        self.end()
        self._drive(self._driver.serve_until_dismissed())
        raise AssertionError("a worker leaves by an exception")

    def _drive(self, script: Script[T]) -> T:
        participant, condition = self._participant, self._participant.condition
        resume, before = partial(next, script), self.meter.current
        with condition:
            while True:
                try:
                    wanted = resume()
                except StopIteration as end:
                    self.meter.enter(before)
                    return end.value
                finally:
                    participant.begun, participant.waits = self._driver.begun_round, self._driver.waits
                    participant.proven = self._driver.proven
                self.meter.enter(self._class(isinstance(wanted, Change), before))
                if isinstance(wanted, Change):
                    condition.wait(wanted.at_most_s)
                    resume = partial(script.send, None)
                    continue
                condition.release()
                try:
                    resume = partial(script.send, wanted())
                except BaseException as error:  # noqa: BLE001  the driver's caller gets it, from where it was asked for
                    resume = partial(script.throw, error)
                finally:
                    condition.acquire()

    def _class(self, waits: bool, before: TimeClass) -> TimeClass:
        return class_of(self._driver, entered=self._entered, waits=waits, before=before)

    # --- the participant asks --------------------------------------------------------------------------------

    def prepare(self, view: View) -> None:
        self._port.prepare(view, self.layout)

    def waiting_for(self) -> Waiting | None:
        exchange = self._port.exchange
        waiting = exchange.waiting_for if exchange else None
        if waiting and self._patient and WORK in self.lineage.assign(self._driver.shards).get(waiting[0], ()):
            return None
        return (exchange.view.number, *waiting) if exchange and waiting else None

    def digests(self) -> Digests:
        return self._held().digests()

    def saved(self, between: bool) -> Saved:
        return self._port.saved(between)


class _Entrance:
    """What `enter` was called with."""

    def __init__(
        self, load: Callable[[Any], None], first: Callable[[Position, Sequence[bool] | None], Task],
        entered: Callable[[], None], restore: Callable[[View], Position | None],
    ) -> None:  # fmt: skip
        self.load, self.first, self.entered, self.restore = load, first, entered, restore


def _nothing() -> None: ...
