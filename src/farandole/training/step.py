"""One step, as the user's loop sees it: micro-batches to compute, then the reduced gradient.

The inner loop is where elasticity hides. Each micro-batch is a shard: before it is yielded the random state is seeded
from (run seed, step, shard) and buffers are put back to the loop's start, so what it computes does not depend on who
computes it. `backward` folds its gradients into the partial sums as they are produced (`gradients.py`). When this
worker's shards are done, the loop waits for the round's end; if a peer dies meanwhile, it yields what was inherited
instead.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole.collective.buckets import Layout, Partials
from farandole.data.ledger import Ledger
from farandole.data.loader import Key, Loader
from farandole.data.order import derive, keep_random_state, set_random_state
from farandole.errors import LossNotScalar, NotReplicated, StepAbandoned, UsageError
from farandole.platform.process import guarded
from farandole.protocol.values import StepTime
from farandole.protocol.view import View
from farandole.training.digest import ModuleAttributes
from farandole.training.gradients import Gradients
from farandole.training.progress import Progress
from farandole.training.replica import LARGEST_LANE_BUFFER, Replica
from farandole.worker.rounds import WORK, Rounds, task
from farandole.worker.timing import Meter

# --- step -------------------------------------------------------------------------------------------------------------


class Step:
    """One optimizer update in the making.

    Attributes:
        number: the step's number in the run, from 0.
        epoch: the epoch's number, from 0.
        samples: samples in the step's global batch; of these, `skipped` were left out because they were bad.
        left_out: samples that the epoch ends without, in its last step, with `drop_last=True`.
        view: the view in which the step runs.
        ends_epoch: whether it takes the epoch's last samples.
    """

    def __init__(
        self,
        *,
        progress: Progress,
        gradients: Gradients,
        rounds: Rounds,
        loader: Loader,
        seed: int,
        ledger: Ledger | None,
        on_begin: Callable[[], None],
        on_end: Callable[[Step], None],
    ) -> None:
        guarded(self)
        self.number = progress.position.step
        self.epoch = progress.position.epoch
        self.samples = progress.window.samples
        self.ends_epoch = progress.ends_epoch
        self.left_out = loader.left_out if self.ends_epoch else 0
        self._base_steps = progress.base_steps if progress.foreseen else None
        self._progress = progress
        self._window = progress.window
        self._gradients = gradients
        self._rounds = rounds
        self._loader = loader
        self._seed = seed
        self._ledger = ledger
        self._on_begin, self._on_end = on_begin, on_end
        self._shard = -1
        self._mine = True  # else it is computed to check another worker
        self._used = 0  # of the open shard's samples
        self._loss_sum = torch.zeros((), dtype=torch.float64)
        self._result: tuple[float, int] | None = None

    @property
    def view(self) -> View:
        return self._rounds.view

    @property
    def loss(self) -> float:
        """The exact mean loss over the global batch, equal on all workers.

        Raises:
            StepAbandoned: asked for before the inner loop has ended.
        """
        if self._result is None:
            raise StepAbandoned(f"step {self.number}: its loss is known after the inner loop has ended, not within it")
        loss, samples = self._result
        return loss / samples if samples else math.nan

    @property
    def base_steps(self) -> int:
        """For how many steps of the base batch it counts, so that a schedule does not drift when the batch follows the
        workers: call `schedule.step()` that often. 1 under `GlobalBatch`.

        Raises:
            StepAbandoned: the run's length is given in base steps, its rule counts gains, and the inner loop has not
                ended.
        """
        if self._base_steps is None:
            raise StepAbandoned(
                f"step {self.number}: how many base steps it counts for is known after the inner loop has ended, since "
                f"it is the gain that is measured in it"
            )
        return self._base_steps

    @property
    def rows(self) -> slice:
        """The rows of the step's global batch that the micro-batch in hand has: for a buffer of kind "gathered".

        Raises:
            UsageError: outside the inner loop.
        """
        if self._shard < 0:
            raise UsageError(f"step {self.number}: step.rows are those of a micro-batch, within the inner loop")
        first = self._window.shard(self._shard)[0] - self._window.start
        return slice(first, first + self._used)

    @property
    def skipped(self) -> int:
        """Samples that were left out, with `on_bad_sample="skip"`; known after the inner loop."""
        return self.samples - self._result[1] if self._result is not None else 0

    @property
    def ended(self) -> bool:
        return self._result is not None

    def __iter__(self) -> Iterator[Any]:
        if self._shard >= 0 or self.ended:
            raise StepAbandoned(f"step {self.number}: its micro-batches can be iterated over once")
        rounds = self._rounds
        self._on_begin()
        self._gradients.replica.begin_shards()
        while True:
            rounds.sync()
            todo, owed = rounds.todo(), rounds.owed()
            if not todo and not owed:
                if rounds.finish():
                    break
                continue
            shard, mine = (todo[0], True) if todo else (owed[0], False)
            start, stop = self._window.shard(shard)
            rounds.meter.enter("data")
            batch = self._loader.fetch(Key(epoch=self.epoch, step=self.number, shard=shard, start=start, stop=stop))
            rounds.computes(shard, mine=mine)
            skipped = self._loader.skipped
            if self._ledger and mine:
                order = self._loader.order
                samples = [s for s in order.samples(self.epoch, start, stop).tolist() if s not in skipped]
                rest = (
                    order.samples(self.epoch, stop, stop + self.left_out).tolist() if stop == self._window.stop else []
                )
                self._ledger.computed(
                    epoch=self.epoch, step=self.number, shard=shard, samples=samples, skipped=[*skipped, *rest]
                )
            self._used = stop - start - len(skipped)
            self._open(shard, mine, batch)
            if self._used == 0:
                self._gradients.close_empty(self._tell)
                self._close()
                continue
            yield batch
            if self._shard >= 0:
                raise UsageError(
                    f"step {self.number}: micro-batch {shard} was taken but not finished; call step.backward(loss) "
                    f"once for each micro-batch (with last=False for all but the last of several)"
                )
        self._end()

    def backward(self, loss: torch.Tensor, *, last: bool = True) -> None:
        """The micro-batch's backward pass. `loss`: one number, the mean over the micro-batch.

        It is weighted by the micro-batch's part of the batch's samples, so that `.grad` is the gradient of the mean
        over the batch. Nobody sees in a number whether it is a mean: with `reduction="sum"` the gradient is larger by
        the micro-batch's samples, and so depends on `micro`. A loss that is scaled, by a constant or a GradScaler, is
        scaled in `step.loss` and in the metrics too.

        `last=False`: another backward pass over the same micro-batch follows.

        The `.grad` that the inner loop leaves is good until the next step begins: clone what is to be kept.

        Raises:
            LossNotScalar: the loss is not one number.
            UsageError: outside the inner loop, or twice for one micro-batch.
        """
        if self._shard < 0:
            raise UsageError(f"step {self.number}: step.backward outside a micro-batch, or once too often for it")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LossNotScalar(
                f"step.backward(loss): the loss has {found}; hand in one number, the mean over the micro-batch "
                f"(loss.mean(), or reduction='mean')"
            )
        samples = self._used
        weight = samples / self._window.samples
        self._gradients.backward(loss, weight, last=last)
        self._loss_sum += loss.detach().to("cpu", torch.float64).reshape(()) * samples
        if last:
            self._gradients.close(self._loss_sum, samples, weight, self._tell)
            self._close()

    def _open(self, shard: int, mine: bool, batch: Any) -> None:
        self._shard, self._mine = shard, mine
        self._loss_sum.zero_()
        self._gradients.clear()
        self._gradients.replica.reset_buffers(shard, self._window.shards)
        if not mine or self._rounds.examined(shard):
            self._gradients.examine(mine=mine).read(batch)
        if mine:
            self._rounds.open(shard)
        set_random_state(derive(self._seed, "shard", self.number, shard))

    def _tell(self, names: Sequence[str], digests: Sequence[int]) -> None:
        self._rounds.found(self._shard, names, digests, mine=self._mine)

    def _close(self) -> None:
        if self._mine:
            self._rounds.close(self._shard)
        self._shard = -1

    def _end(self) -> None:
        self._result = self._gradients.publish(self._rounds.reduced(), self._window.samples)
        set_random_state(derive(self._seed, "update", self.number))
        self._on_end(self)
        self._base_steps = self._progress.base_steps


# --- step clock -------------------------------------------------------------------------------------------------------
#
# The wall time of a worker's steps, of which no part is in two steps and none in none.
#
# A step's time runs from the end of the inner loop before to the end of its own, so the update, schedules, logging and
# evaluations between two inner loops belong to the step that follows them. A worker's first step begins when the script
# is handed it: what came before is no step's (the start, the time between two starts of a continued run). So the steps'
# times add up to the time from the first step's beginning to the last one's end. What follows the last step is an
# interval of the same kind.
#
# Three parts of each are told apart: evaluations, `run.once`, and pauses (a view is stopped or takes effect, or fewer
# workers are there than the minimum). They are disjoint: a pause within an evaluation is a pause.


class StepClock:
    """Of one worker, on the thread of its script. `meter` says how long it has been in pauses."""

    def __init__(self, meter: Meter, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._meter, self._clock = meter, clock
        self._began: int | None = None
        self._paused = 0  # as the interval in hand began
        self._apart = {"evaluation": 0, "once": 0}  # of it, ns

    def begin(self) -> None:
        """A step is handed to the script. Only the first one begins here."""
        if self._began is None:
            self._began, self._paused = self._clock(), self._meter.paused()

    @contextmanager
    def apart(self, part: Literal["evaluation", "once"]) -> Generator[None]:
        """What is done within is that part of the interval in hand, but for the pauses in it."""
        began, paused = self._clock(), self._meter.paused()
        try:
            yield
        finally:
            self._apart[part] += self._clock() - began - (self._meter.paused() - paused)

    def end(self) -> StepTime:
        """The interval in hand ends now, and the next one begins."""
        now, paused = self._clock(), self._meter.paused()
        began = now if self._began is None else self._began
        ended = StepTime(
            seconds=_s(now - began), evaluation_s=_s(self._apart["evaluation"]), once_s=_s(self._apart["once"]),
            pause_s=_s(paused - self._paused),
        )  # fmt: skip
        self._began, self._paused = now, paused
        self._apart = dict.fromkeys(self._apart, 0)
        return ended


def _s(ns: int) -> float:
    return round(max(ns, 0) / 1e9, 6)


# --- once -------------------------------------------------------------------------------------------------------------
#
# Work that one worker does while the others wait: a round without samples, in which one shard is the work.
#
#     with run.once() as mine:
#         if mine:
#             torch.save(model.state_dict(), "model.tmp")
#             os.replace("model.tmp", "model.pt")
#
# 1. Every worker begins a round of as many shards as workers. Shard 0 is the work, and so that of rank 0; the others
#    are empty.
# 2. Whoever holds the work enters the `with` with True, does it, and closes its shard when it leaves it.
# 3. The others close their empty shards and wait before they enter: until the round has ended, False, or until the work
#    falls to them because its holder is gone, True.
#
# So it is done *at least once*: a worker that dies in the middle leaves half of it, and another one begins it anew.
# Hence the temporary name and `os.replace` above. Nobody's body runs twice: a `with` is enough.
#
# Nobody reports the holder as stalled, however long it takes (`Rounds.begin`, `patient`). If its process dies or
# freezes, it is lost as always. What it changes of its own (random state, buffers, training modes and other plain
# attributes of modules) is put back: it goes on as the others do. Left out: parameters and optimizers, which the work
# must leave as they are.


class Once:
    """See the module's head."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._partials = Partials(Layout([], lanes=1))
        self._working = False

    def refuse(self, what: str) -> None:
        """Raises UsageError while this worker is at the work: `what` needs all of them."""
        if self._working:
            raise UsageError(f"run.{what} within run.once: all workers must call it, and only one is here; move it out")

    @contextmanager
    def work(self, replica: Replica, attributes: ModuleAttributes, step: int, clock: StepClock) -> Generator[bool]:
        """See `Run.once`. An exception from within is the script's failure, which ends the run and this round."""
        with clock.apart("once"):
            yield from self._work(replica, attributes, step)

    def _work(self, replica: Replica, attributes: ModuleAttributes, step: int) -> Generator[bool]:
        what = f"run.once after step {step}"
        self._rounds.begin(task(self._partials, lambda workers: workers, step, what), patient=True)
        if not self._work_is_mine():
            yield False
            return
        put_back = _keep(replica, attributes)
        self._working = True
        yield True
        self._working = False
        put_back()
        self._close(WORK)
        again = self._work_is_mine()
        assert not again, "work that was done was dealt out again"

    def _work_is_mine(self) -> bool:
        """Go through the round: to its end, False, or to where the work is this worker's, True."""
        rounds = self._rounds
        while True:
            rounds.sync()
            todo = rounds.todo()
            if WORK in todo:
                return True
            for shard in todo:
                self._close(shard)
            if rounds.finish():
                return False

    def _close(self, shard: int) -> None:
        self._rounds.open(shard)
        self._partials.close(torch.zeros(1, dtype=torch.float64))
        self._rounds.close(shard)


def _keep(replica: Replica, attributes: ModuleAttributes) -> Callable[[], None]:
    """What puts back whatever the work may change of this worker's own. Larger buffers are constants."""
    random_state = keep_random_state()
    small = [buffer for buffer in replica.buffers.values() if buffer.numel() <= LARGEST_LANE_BUFFER]
    values = [buffer.detach().clone() for buffer in small]
    plain_attributes = attributes.put_back()

    def put_back() -> None:
        random_state()
        replica.look(whole=False)
        with torch.no_grad():
            for buffer, value in zip(small, values, strict=True):
                buffer.copy_(value)
        plain_attributes()

    return put_back


# --- guard ------------------------------------------------------------------------------------------------------------
#
# Refuses updates of replicated parameters that would be no update, or each worker's own.
#
#     within a step    `.grad` is None until the inner loop has ended: an `optimizer.step()` there does nothing at
#                      all, or decays weights before the gradient is known
#     not replicated   joiners do not get an optimizer's rates and moments if it was not handed to `run.replicate`,
#                      and go on with others
#
# torch calls the hook before any optimizer's `step`, also when a `GradScaler` or a wrapper does it. A wrapper that was
# handed to `run.replicate` answers for the optimizers that it holds. A scheduler holds its optimizer without its state.

DEPTH = 3  # of attributes and containers of a wrapper
_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


@functools.cache
def _watch() -> None:
    """One hook, for good: a guard's own would be removed when the guard is collected, and that may be while torch goes
    through its hooks.
    """
    register_optimizer_step_pre_hook(_before)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    for guard in tuple(_guards):
        guard.check(optimizer)


class Guard:
    """Of one run's loop, for as long as it is kept.

    `entered()`: its first step has begun; `within()`: the inner loop of the step in hand has not ended.
    """

    def __init__(
        self, replica: Replica, progress: Progress, *, entered: Callable[[], bool], within: Callable[[], bool]
    ) -> None:
        self._replica = replica
        self._progress = progress
        self._entered = entered
        self._within = within
        _guards.add(self)
        _watch()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Before its `step`.

        Raises:
            UsageError: the step's inner loop has not ended.
            NotReplicated: the optimizer was not handed to `run.replicate`, or not all of its parameters.
        """
        ours = [id(p) in self._replica.ids for group in optimizer.param_groups for p in group["params"]]
        if not any(ours) or not self._entered():
            return
        kind, step = type(optimizer).__name__, self._progress.position.step
        if self._within():
            raise UsageError(
                f"step {step}: {kind}.step() before its inner loop has ended, where no parameter has its "
                f"gradient yet; call it once a step, after `for micro_batch in step: ...`"
            )
        over = self._progress.following is None  # what the script does after its loop is its own business
        if not over and not all(ours):
            raise NotReplicated(
                f"step {step}: {kind}.step() over replicated parameters and {ours.count(False)} that are in none of "
                f"the replicated modules: they were replaced, or never handed in; put those of the modules into its "
                f"param_groups"
            )
        if not over and not any(_holds(thing, optimizer, DEPTH) for thing in self._replica.objects.values()):
            raise NotReplicated(
                f"step {step}: {kind}.step() over replicated parameters by an optimizer that is not replicated: "
                f"joining workers would not get its state; call run.replicate(..., optimizer=optimizer)"
            )


def _holds(thing: Any, optimizer: torch.optim.Optimizer, depth: int) -> bool:
    if thing is optimizer or getattr(thing, "param_groups", None) is optimizer.param_groups:
        return True
    if depth == 0 or isinstance(thing, torch.nn.Module | LRScheduler | torch.Tensor | str | bytes | int | float):
        return False
    inner: Iterable[Any]
    if isinstance(thing, list | tuple):
        inner = thing  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(thing, dict):
        inner = thing.values()  # pyright: ignore[reportUnknownVariableType]
    else:
        inner = getattr(thing, "__dict__", {}).values()
    return any(_holds(value, optimizer, depth - 1) for value in inner)  # pyright: ignore[reportUnknownVariableType]
