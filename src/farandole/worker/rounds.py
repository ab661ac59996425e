"""Rounds: the thread, the lock and the tensors around `membership/driver`, which has the logic.

The training thread calls `begin`, computes what `todo` names, and calls `finish` until the round has ended. Between
them the view may be stopped and resumed any number of times; `sync` and `finish` follow it, over the same partial sums,
and `todo` then names what was inherited.

The driver is resumed with the participant's lock held, which is the lock of everybody who changes what it looks at; its
work is done without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from farandole.collective.buckets import Layout
from farandole.collective.exchange import Exchange
from farandole.collective.partials import Partials
from farandole.errors import RunEnded
from farandole.membership.classes import TimeClass
from farandole.membership.driver import Driver
from farandole.membership.entering import enter
from farandole.membership.generators import Change, Script
from farandole.membership.messages import Digests, Saved
from farandole.membership.occupation import class_of
from farandole.membership.patience import Waiting
from farandole.membership.port import Task
from farandole.membership.view import Lineage, View
from farandole.plan.shards import Position
from farandole.worker.participant import Participant
from farandole.worker.port import Held, RoundsPort

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

    def __init__(self, participant: Participant, held: Callable[[], Held]) -> None:
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
        self._driver.done.add(shard)
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
                self._driver.checking.found(shard, names, digests)
            else:
                self._driver.checked(shard, names, digests)

    def sync(self) -> None:
        """Follow the member if its view has changed meanwhile."""
        self._drive(self._driver.sync())

    def hand_in(self) -> None:
        """All of this worker's shards are in the partial sums, and nothing of them has been handed over before."""
        self._driver.done.update(self.todo())
        self._port.hand_in()

    def finish(self) -> bool:
        """Wait for the round's end. True: it has ended; False: the view has changed, look at `todo` again."""
        self.meter.enter("exchange")
        ended = self._drive(self._driver.finish())
        self.meter.enter("compute")
        if ended and self._driver.trains:
            self._participant.shard_timer.step_ended(len(self._driver.done), self._driver.shards)
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
            RunEnded: others have gone on without this worker, and have used the memory of the sums again.
        """
        if self._updating is not None and not self._updating.stood:
            raise RunEnded("this worker stood still for so long that the others have gone on without it")

    def enter(
        self, load: Callable[[Any], None], first: Callable[[Position, Sequence[bool] | None], Task],
        entered: Callable[[], None], restore: Callable[[View], Position | None], parameters: int,
    ) -> None:  # fmt: skip
        """Wait for a view, and for the state if others hold it; begin the first step. See `membership/entering`."""

        def begin(view: View) -> Position | None:
            self._participant.room = None  # nobody hands anything over
            return restore(view)

        self._port.parameters = parameters
        entrance = _Entrance(load, first, entered, begin)
        self._drive(enter(self._driver, entrance))
        self._entered = True
        self.meter.enter("compute")

    def end(self) -> None:
        """The script is done."""
        self.meter.enter("end")
        self._participant.tracer.closes()

    def obey_until_goodbye(self) -> NoReturn:
        """The script is done: answer what the coordinator asks until it says goodbye."""
        self.end()
        self._drive(self._driver.obey_until_goodbye())
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
                    participant.begun, participant.waits = self._driver.begun, self._driver.waits
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
