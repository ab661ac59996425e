"""Rounds: the thread, the lock and the tensors around `protocol/worker/driver.py`, which has the logic.

The training thread calls `begin`, computes the shards that `todo` returns, and calls `wait_for_round_end` until the
round has ended. Meanwhile the view may be stopped and resumed any number of times. `sync` and `wait_for_round_end`
follow these changes, with the same partial sums, and `todo` then returns the inherited shards too.

The driver is resumed with the context's lock held; every thread that changes the driver's inputs holds the same
lock. The work that the driver yields is done without the lock.
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
from farandole.control.run_folder import HIDDEN_LOG_PREFIX
from farandole.errors import StateDisputed, WorkerSuperseded
from farandole.plan.shards import Position
from farandole.platform.output import say
from farandole.protocol.messages import Digests, Message, Saved
from farandole.protocol.values import TimeClass
from farandole.protocol.view import Lineage, View
from farandole.protocol.worker.driver import Change, Driver, LoopPassed, Routine, Task, class_of, join_view
from farandole.protocol.worker.session import PeerWait
from farandole.protocol.worker.state_machine import Exit, Save
from farandole.settings import Settings
from farandole.worker.context import WorkerContext
from farandole.worker.process_exit import lower_priority

# --- receiver ---------------------------------------------------------------------------------------------------------
#
# The transfer of the state from the veterans to a joiner. The joiner's training thread waits for the state, or for the
# end of its view.


class Receiver:
    """Receives the state in a thread of its own, because a receive from a frozen veteran can't be woken.

    If the connections of `view` are closed, the view was given up meanwhile: then no state ever arrives.
    """

    def __init__(self, view: View, context: WorkerContext, parameters: int) -> None:
        self.view = view
        self.header: tuple[int, Position, list[bool]] | None = None
        self._state: Any = None
        self._disputed: StateDisputed | None = None
        self._context = context
        links = context.groups.get(view.group)
        if links is not None:
            ahead, context.room = context.room, None  # an earlier receiver may still write into its memory
            arrival = Arrival(view, view.senders(context.terms.bits), links, parameters, ahead)
            threading.Thread(target=self._receive, args=(arrival,), name="state", daemon=True).start()

    @property
    def state(self) -> Any:
        """The received state; None until it has arrived.

        Raises:
            StateDisputed: the veterans hold different states.
        """
        if self._disputed is not None:
            raise self._disputed
        return self._state

    def _receive(self, arrival: Arrival) -> None:
        try:
            header = arrival.header()
            self._context.stream_mark, self.header = arrival.mark, header
            self._context.changed()
            self._state = arrival.state()
            self._context.changed()
        except StateDisputed as error:
            self._disputed = error
            self._context.changed()
        except PeerLost as lost:
            self._context.lost(self.view.number, lost.peer, lost.reason)


def send_state_to_joiners(context: WorkerContext, view: View, round_: int, position: Position, state: Any) -> None:
    """Sends a veteran's part of `state`, as of this round's start, to the joiners of `view`, in the background.

    If the connections of `view` are closed, the view was given up meanwhile, and nothing is sent.
    """
    links, veterans = context.groups.get(view.group), view.senders(context.terms.bits)
    if links is None or context.worker not in veterans:
        return
    snapshot = Snapshot(state)

    def send() -> None:
        try:
            send_state(view, veterans, context.worker, links, round_, position, snapshot, context.memory)
        except PeerLost as lost:
            context.lost(view.number, lost.peer, lost.reason)

    threading.Thread(target=send, name=f"state-{view.number}", daemon=True).start()


# --- port -------------------------------------------------------------------------------------------------------------
#
# The port of a worker's driver, with threads and tensors: exchanges, partial sums, the state for joiners, saving.


class HeldState(Protocol):
    """The state that a worker holds."""

    def snapshot(self) -> Any:
        """Returns the state at the beginning of the current step, to be sent."""
        ...

    def renew(self, state: Any) -> None:
        """Replaces the state by another worker's state of the same step."""
        ...

    def save(self, between: bool) -> Saved:
        """Writes a checkpoint. Returns an error for a state between two steps if `between` is false."""
        ...

    def digest(self) -> int:
        """Returns the digest of the replica at the beginning of the current step."""
        ...

    def digests(self) -> Digests:
        """Returns the digests of everything in the replica."""
        ...


class RoundsPort:
    """The `Port` of `protocol.worker.driver`. `replan` is called when this worker's shards differ from the expected."""

    parameters = 0  # number of parameters that have a flag in the state's header

    def __init__(self, context: WorkerContext, held: Callable[[], HeldState], replan: Callable[[], None]) -> None:
        self.exchange: Exchange | None = None
        self._context = context
        self._held, self._replan = held, replan
        self._prepared: dict[int, Exchange] = {}  # for proposed views, by view
        self._partials = Partials(Layout([], 0))
        self.planned = Lineage(sets=())  # the lineage that `replan` was last called for
        self.arriving: Receiver | None = None  # the state for a worker that goes to a later loop of the script

    # --- without waiting -------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        self._context.tell(message)

    def answer(self, save: Save) -> None:
        """Saves in a thread, because the caller holds the lock that the heartbeats need.

        If no thread can be started, it saves in this one.
        """
        context = self._context

        def save_and_report() -> None:
            context.tell(self.saved(save.allow_between))

        try:
            threading.Thread(target=save_and_report, daemon=True).start()
        except RuntimeError:
            save_and_report()

    def leave(self, exit_: Exit) -> NoReturn:
        hidden = bool(Settings.read().pool)  # the command that runs the run shows why it ends, once
        say(f"{HIDDEN_LOG_PREFIX if hidden else 'farandole: '}{exit_.reason}")
        raise SystemExit(exit_.code)

    def workers(self, step: int, begun: int) -> int:
        return self._context.workers_at(step, begun)

    # --- a round ---------------------------------------------------------------------------------------------

    def stand_back(self) -> None:
        lower_priority()

    def take_up(self, content: Any, shards: int, step: int) -> None:
        self._partials = Partials(Layout([], 0)) if content is None else content
        self._partials.begin(shards, step)

    def prepare(self, view: View, layout: Layout) -> None:
        """Makes the exchange of a proposed view, with its buffers for `layout`; called in the background."""
        if self._context.worker in view.members:
            exchange = self._make(view)
            exchange.warm(layout)
            with self._context.condition:
                self._prepared[view.number] = exchange

    def open(self, view: View) -> Exchange:
        with self._context.condition:
            new = self._prepared.pop(view.number, None)
            for number in [n for n in self._prepared if n < view.number]:
                self._prepared.pop(number).close()
        self.exchange = new = new or self._make(view)
        return new

    def _make(self, view: View) -> Exchange:
        context = self._context
        links, memory, waits = context.groups.get(view.group), context.memory, context.tracer.waits
        return Exchange(view, context.worker, links, context, memory=memory, waits=waits)

    def send_state(self, view: View, round_: int, position: Position) -> None:
        send_state_to_joiners(self._context, view, round_, position, self._held().snapshot())

    def receive(self, view: View) -> Receiver:
        arriving, self.arriving = self.arriving, None
        if arriving is not None and arriving.view.number == view.number:
            return arriving
        return Receiver(view, self._context, self.parameters)

    def renew(self, state: Any) -> None:
        self._held().renew(state)

    def digest(self) -> int:
        return self._held().digest()

    def start(self, task: Task, round_: int, shards: int, lineage: Lineage) -> None:
        assert self.exchange is not None
        if task.is_step and shards and lineage != self.planned:
            self.planned = lineage
            self._replan()
        self.exchange.begin(round_, self._partials, shards, lineage, is_step=task.is_step)

    def submit_all(self) -> None:
        assert self.exchange is not None
        self.exchange.submit_all()

    def open_shard(self, shard: int, *, last: bool) -> None:
        """Begins `shard` in the partial sums; with the `last` one, buckets are submitted as they are filled."""
        assert self.exchange is not None
        self._partials.complete = self.exchange.submit if last else _not_yet
        self._partials.open(shard, last=last)

    def wait_until_quantized(self) -> None:
        self._partials.wait_until_quantized()

    @property
    def layout(self) -> Layout:
        """The buckets of the round."""
        return self._partials.layout

    def reduced(self) -> list[Any]:
        """The reduced buckets of the round that has ended.

        If the round was committed by `Resume`, `exchange` is still that of the stopped view: it holds every reduced
        bucket, and the next one is opened when the next round begins.
        """
        assert self.exchange is not None
        return self.exchange.reduced(self._partials.layout)

    # --- the last checkpoint ---------------------------------------------------------------------------------

    def save(self, between: bool) -> Saved:
        saved = self.saved(between)
        if not saved.between:
            say(f"farandole: checkpoint: {saved.path or saved.error}")
        return saved

    def saved(self, between: bool) -> Saved:
        """Saves, and always returns an answer, because without one no other worker would try to save."""
        try:
            return self._held().save(between)
        except Exception as error:  # noqa: BLE001
            return Saved(error=first_line(error))


def _not_yet(bucket: int) -> None:
    del bucket


# --- rounds -----------------------------------------------------------------------------------------------------------

WORK = 0  # the shard that may take any time in a patient round
T = TypeVar("T")


def step_task(partials: Partials, shards: Callable[[int], int], position: Position) -> Task:
    """Returns the task of a training step over `partials`, of `shards(workers)` shards if `workers` begin it."""
    return Task(position=position, shards=shards, sizes=partials.layout.sizes, is_step=True, content=partials)


def task(partials: Partials, shards: Callable[[int], int], step: int, doing: str) -> Task:
    """Returns the task of another round over `partials`, after `step`. `doing` names it, equally on all workers."""
    return Task(position=Position(step=step), shards=shards, sizes=partials.layout.sizes, doing=doing, content=partials)


class Rounds:
    """Runs the rounds of one worker. `held` returns the state that it holds. The training thread calls its methods."""

    def __init__(self, context: WorkerContext, held: Callable[[], HeldState]) -> None:
        self._context = context
        self._held = held
        self.layout = Layout([], 0)  # of training steps; the buffers of a proposed view are made for it
        self._replan: Callable[[], None] = _nothing
        self._port = RoundsPort(context, held, lambda: self._replan())
        self._driver = Driver(context.state_machine, context.instructions, self._port, context.terms)
        self.meter = context.meter
        self._entered = False
        self.in_once = False  # this worker does the work of `run.once`: it may begin no other round
        self._patient = False
        self._updating: Exchange | None = None  # the exchange whose sums the update uses
        context.set_training(self)

    def serve(self, layout: Layout, replan: Callable[[], None]) -> None:
        """Serves a loop with steps of `layout`. Calls `replan` when this worker's shards differ from the expected."""
        self.layout, self._replan, self._port.planned = layout, replan, Lineage(sets=())

    # --- a round ---------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        return self._driver.exchange.view

    @property
    def worker(self) -> str:
        """This worker's name."""
        return self._context.worker

    @property
    def lineage(self) -> Lineage:
        """The workers that the shards of the current round were assigned to, with all losses."""
        return self._driver.lineage

    @property
    def workers(self) -> int:
        """The number of workers that began the current round, including those lost since."""
        return self._driver.workers

    def begin(self, task: Task, *, patient: bool = False) -> None:
        """Begins a round for `task`. Blocks while the view is stopped.

        If there are fewer workers than the minimum, it runs idle rounds first. In a `patient` round the holder of
        shard `WORK` is never reported as stalled.
        """
        self._patient = False
        if task.is_step:
            self._context.tracer.begins(task.position.step)
        self._drive(self._driver.begin(task))
        self._patient = patient

    def require(self, workers: int) -> None:
        """Begins steps with at least `workers` workers from now on. All members call it between the same steps."""
        self._driver.minimum = workers

    def todo(self) -> tuple[int, ...]:
        """Returns this worker's shards that are not computed yet."""
        return self._driver.todo()

    def open(self, shard: int) -> None:
        """Begins `shard`. With the last one, buckets are submitted as the backward pass fills them."""
        self._port.open_shard(shard, last=self.todo() == (shard,))
        self._context.shard_timer.open()

    def close(self, shard: int) -> None:
        self._driver.computed_shards.add(shard)
        self._context.done += 1
        if self._driver.computes_step:  # evaluations compute before they open a shard
            self._context.shard_timer.close()

    def computes(self, shard: int, *, mine: bool = True) -> None:
        """Records that the micro-batch of `shard` is loaded. `mine` is False if it is computed to check a peer."""
        self.meter.enter("compute" if mine and not self._driver.inherited(shard) else "again")

    def checks_left(self) -> tuple[int, ...]:
        """Returns the shards of another worker that this one has yet to compute, to check it. Call it after `todo`."""
        return self._driver.checking.checks_left() if self._context.state_machine.synced else ()

    def examined(self, shard: int) -> bool:
        """Returns True if another worker checks this worker's `shard`: then call `found` with its digests."""
        return self._driver.checking.concerns(shard)

    def found(self, shard: int, names: Sequence[str], digests: Sequence[int], *, mine: bool) -> None:
        """Records the digests of a shard that two workers compute; for its own shard, before all of it is submitted."""
        with self._context.condition:
            if mine:
                self._driver.checking.on_digests(shard, names, digests)
            else:
                self._driver.checked(shard, names, digests)

    def sync(self) -> None:
        """Follows the member if its view has changed."""
        self._drive(self._driver.sync())

    def submit_all(self) -> None:
        """Submits all buckets. All of this worker's shards are in them, and none was submitted before."""
        self._driver.computed_shards.update(self.todo())
        self._port.submit_all()

    def wait_for_round_end(self) -> bool:
        """Waits for the round's end. Returns True if it has ended, and False if the view changed: call `todo` again."""
        self._port.wait_until_quantized()  # until then the peers wait for this worker, and not it for them
        self.meter.enter("exchange")
        ended = self._drive(self._driver.wait_for_round_end())
        self.meter.enter("compute")
        if ended and self._driver.computes_step:
            self._context.shard_timer.step_ended(len(self._driver.computed_shards), self._driver.shards)
            self._context.tracer.ended()
        return ended

    def reduced(self) -> list[Any]:
        """Returns the reduced buckets of the round that has ended."""
        if self._driver.computes_step or self._port.layout is self.layout:
            self._updating = self._port.exchange
        return self._port.reduced()

    def check_sums(self) -> None:
        """Verifies, after an update, that it used the same sums as on all other workers.

        Raises:
            WorkerSuperseded: others have gone on without this worker, and have used the memory of the sums again.
        """
        if self._updating is not None and not self._updating.sums_intact:
            raise WorkerSuperseded("this worker stood still for so long that the others have gone on without it")

    def enter(
        self, load: Callable[[Any], None], first: Callable[[Position, Sequence[bool] | None], Task],
        entered: Callable[[], None], restore: Callable[[View], Position | None], parameters: int,
        is_later: Callable[[Position], bool] | None = None,
    ) -> None:  # fmt: skip
        """Waits for a view, and for the state if other workers hold it, and begins the first step.

        The arguments are the callbacks of `join_view` in `protocol/worker/driver.py`.

        Raises:
            LoopPassed: the run is in a later loop of the script. Call this again at the beginning of that loop.
        """

        def begin(view: View) -> Position | None:
            self._context.room = None  # no worker sends a state
            return restore(view)

        self._port.parameters = parameters
        entrance = _Entrance(load, first, entered, begin, is_later or _is_not)
        try:
            self._drive(join_view(self._driver, entrance))
        except LoopPassed as passed:
            self._port.arriving = passed.arriving if isinstance(passed.arriving, Receiver) else None
            raise
        self._entered = True
        self.meter.enter("compute")

    def end(self) -> None:
        """Records that the script has ended."""
        self.meter.enter("end")
        self._context.tracer.closes()

    def obey_until_goodbye(self) -> NoReturn:
        """Handles the coordinator's requests after the script has ended, until it sends Goodbye."""
        self.end()
        self._drive(self._driver.serve_until_dismissed())
        raise AssertionError("a worker leaves by an exception")

    def _drive(self, script: Routine[T]) -> T:
        context, condition = self._context, self._context.condition
        resume, before = partial(next, script), self.meter.current
        with condition:
            while True:
                try:
                    wanted = resume()
                except StopIteration as end:
                    self.meter.enter(before)
                    return end.value
                finally:
                    context.begun, context.waits_for_peers = (
                        self._driver.begun_round,
                        self._driver.waits_for_peers,
                    )
                    context.fully_loaded = self._driver.fully_loaded
                self.meter.enter(self._class(isinstance(wanted, Change), before))
                if isinstance(wanted, Change):
                    condition.wait(wanted.at_most_s)
                    resume = partial(script.send, None)
                    continue
                condition.release()
                try:
                    resume = partial(script.send, wanted())
                except BaseException as error:  # noqa: BLE001  raised in the driver, where the work was yielded
                    resume = partial(script.throw, error)
                finally:
                    condition.acquire()

    def _class(self, waits: bool, before: TimeClass) -> TimeClass:
        return class_of(self._driver, entered=self._entered, waits=waits, before=before)

    # --- requests of the coordinator ---------------------------------------------------------------------

    def prepare(self, view: View) -> None:
        self._port.prepare(view, self.layout)

    def waiting_for(self) -> PeerWait | None:
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
    """The callbacks of `enter`."""

    def __init__(
        self, load: Callable[[Any], None], first: Callable[[Position, Sequence[bool] | None], Task],
        entered: Callable[[], None], restore: Callable[[View], Position | None], is_later: Callable[[Position], bool],
    ) -> None:  # fmt: skip
        self.load, self.first, self.entered, self.restore, self.is_later = load, first, entered, restore, is_later


def _nothing() -> None: ...


def _is_not(position: Position) -> bool:
    del position
    return False
