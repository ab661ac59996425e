"""One step of the user's loop: it yields micro-batches to compute, then sets the reduced gradient.

That is a pass over the step's batch. The script may begin others (`Step.again`), each with a gradient of its own.

The inner loop hides the changes of the workers. Each micro-batch is a shard. Before the loop yields it, the random
state is seeded from (run seed, step, shard), and buffers get their values of the loop's start. So its result does not
depend on the worker that computes it. `backward` adds its gradients to the partial sums as they are produced
(`gradients.py`). When this worker's shards are done, the loop waits for the end of the round. If a peer dies meanwhile,
the loop yields the shards that this worker inherits.

Why another pass (`Step.again`) has the same bits whoever is lost:

1. A pass is a round of the same buckets and shards as the step's own, after a call round. It is no training step, so no
   view takes effect in it. A joiner commits its first step only after it has loaded the state. So when the first pass
   has ended, all members hold the state of the step's beginning and the same sums, and run the same loop body on them.
2. If a worker is lost in a pass, the others compute its shards from the state at the pass's beginning. No worker has
   left that state, because its update comes after its round has ended, and then the results are there for all. Shards
   of earlier passes are not computed again: their sums are in `.grad` or in the weights.
3. If all workers are lost, the run resumes from a checkpoint, which is of a step's beginning.
4. Random state and buffers are a function of (seed, step, pass, shard) and of the buffers at the pass's beginning.
5. Samples, the ledger, the learning-rate rule and the step's line belong to the first pass that has a gradient. An
   audit compares the first pass only: an error in a later one shows in the digests of the next step.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from farandole.collective.buckets import Layout, Partials
from farandole.collective.state_transfer import decode, encode
from farandole.data.ledger import Ledger
from farandole.data.loader import Key, Loader
from farandole.data.order import derive, keep_random_state, set_random_state
from farandole.errors import LossNotScalar, NotReplicated, StepAbandoned, UnknownState, UsageError
from farandole.platform.process import guarded
from farandole.protocol.values import StepTime
from farandole.protocol.view import Lineage, View
from farandole.training.digest import ModuleAttributes
from farandole.training.gather import Form, Gathered, GatheredRows, partials_of
from farandole.training.gradients import Gradients, ShardTotals, StepTotals
from farandole.training.progress import Progress
from farandole.training.replica import LARGEST_LANE_BUFFER, Replica
from farandole.training.values import BatchValues, amount
from farandole.worker.rounds import WORK, Rounds, task
from farandole.worker.timing import Meter

# --- step -------------------------------------------------------------------------------------------------------------


class Step:
    """A step: an iterable over this worker's micro-batches, for one optimizer update.

    Attributes:
        number: the step's number in the run, from 0.
        epoch: the epoch's number, from 0.
        samples: number of samples in the step's global batch; `skipped` of these were left out because they were bad.
        left_out: in an epoch's last step, the number of samples that the epoch omits with `drop_last=True`; else 0.
        view: the view in which the step runs.
        ends_epoch: True if the step takes the epoch's last samples.
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
        on_begin: Callable[[Step], None],
        on_end: Callable[..., None],
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
        self._mine = True  # False: this worker computes the shard only to check another worker
        self._used = 0  # number of samples in the open shard, without bad ones
        self._bad: Sequence[int] = ()  # samples of the open shard that were left out
        self._loss = 0.0  # of the open shard: the loss of its backward passes so far, times the weight
        self._weight: float | None = None  # of the open shard, if the script has given one
        self._passes = 0  # backward passes of the open shard
        self._passed = False  # its last backward pass has been
        self._pass = -1  # number of the newest pass over the batch
        self._random_pass = 0  # the pass whose random numbers the open one draws
        self._lineage: Lineage | None = None  # of the first pass, whose computations the ledger has; None until its end
        self._again = False  # the open shard is computed only for its rows, after the pass
        self._values = BatchValues(gradients.values, gradients.replica.shards)
        self._rows = GatheredRows(gradients.rows, self.number)
        self._gathered: dict[str, torch.Tensor] = {}
        self._result: StepTotals | None = None  # of the newest pass, None until it has ended
        self._mean_loss: float | None = None  # of the newest pass with a gradient

    @property
    def view(self) -> View:
        """The view in which the step runs."""
        return self._rounds.view

    @property
    def loss(self) -> float:
        """The exact mean loss over the global batch, equal on all workers. Its weights are those of `backward`.

        It is that of the newest pass in which `backward` was called.

        Raises:
            StepAbandoned: the inner loop has not ended, or no pass has called `backward`.
        """
        if self._result is None:
            raise StepAbandoned(f"step {self.number}: its loss is known after the inner loop has ended, not within it")
        if self._mean_loss is None:
            raise StepAbandoned(f"step {self.number}: it has no loss, because no pass has called step.backward")
        return self._mean_loss

    @property
    def means(self) -> Mapping[str, float]:
        """The means over the global batch that `mean` was given, by name; equal on all workers.

        Raises:
            StepAbandoned: the inner loop has not ended.
        """
        return self._values.of("mean", self.number)

    @property
    def sums(self) -> Mapping[str, float]:
        """The sums over the global batch that `sum` was given, by name; equal on all workers.

        Raises:
            StepAbandoned: the inner loop has not ended.
        """
        return self._values.of("sum", self.number)

    @property
    def maxima(self) -> Mapping[str, float]:
        """The largest values in the global batch that `max` was given, by name; equal on all workers.

        Raises:
            StepAbandoned: the inner loop has not ended.
        """
        return self._values.of("max", self.number)

    @property
    def gathered(self) -> Mapping[str, torch.Tensor]:
        """The rows of all samples of the global batch that `gather` was given, by name; equal on all workers.

        Each has shape (samples, ...) and no gradient, and is on the model's device. `step.rows` are the rows of a
        micro-batch.

        Raises:
            StepAbandoned: the inner loop of the first pass has not ended.
        """
        if self._pass <= 0 and not self.ended:
            raise StepAbandoned(
                f"step {self.number}: step.gathered is known after the inner loop has ended, not within it"
            )
        return Gathered(self._gathered, self.number)

    @property
    def base_steps(self) -> int:
        """The number of steps of the base batch that this step counts for. 1 under `GlobalBatch`.

        Call `schedule.step()` that often, so that a schedule does not drift when the batch grows with the workers.

        Raises:
            StepAbandoned: the run's length is given in base steps, its rule counts gains, and the inner loop has not
                ended.
        """
        if self._base_steps is None:
            raise StepAbandoned(
                f"step {self.number}: step.base_steps is known after the inner loop has ended, because it is the gain "
                f"that the inner loop measures"
            )
        return self._base_steps

    @property
    def rows(self) -> slice:
        """The current micro-batch's rows in the step's global batch: in `gathered`, or a buffer of kind "gathered".

        Raises:
            UsageError: outside the inner loop.
        """
        if self._shard < 0:
            raise UsageError(f"step {self.number}: step.rows exists only for a micro-batch, within the inner loop")
        first = self._window.shard(self._shard)[0] - self._window.start
        return slice(first, first + self._used)

    @property
    def indices(self) -> torch.Tensor:
        """The samples of the current micro-batch: their indices in the dataset, shape (micro-batch,), int64.

        Raises:
            UsageError: outside the inner loop.
        """
        if self._shard < 0:
            raise UsageError(f"step {self.number}: step.indices exists only for a micro-batch, within the inner loop")
        samples = self._loader.order.samples(self.epoch, *self._window.shard(self._shard))
        bad = set(self._bad)
        return torch.tensor([sample for sample in samples.tolist() if sample not in bad], dtype=torch.int64)

    @property
    def generators(self) -> list[torch.Generator]:
        """A random generator on the CPU for each sample of the micro-batch, seeded from (run's seed, epoch, sample).

        With a sampler the place in the epoch's order stands for the sample, which may be drawn several times.

        What they draw belongs to the samples, whatever `micro` is:
        `noise = torch.stack([torch.randn(shape, generator=generator) for generator in step.generators])`.

        Raises:
            UsageError: outside the inner loop.
        """
        self._require_open("generators")
        seed = derive(self._seed, "sample", self.epoch)
        start, stop = self._window.shard(self._shard)
        samples = self._loader.order.samples(self.epoch, start, stop).tolist()
        draws, bad = self._loader.order.draws(self.epoch, start, stop).tolist(), set(self._bad)
        pairs = zip(samples, draws, strict=True)
        return [torch.Generator().manual_seed(derive(seed, draw)) for sample, draw in pairs if sample not in bad]

    @property
    def skipped(self) -> int:
        """The number of bad samples left out, with `on_bad_sample="skip"`; 0 until the inner loop has ended."""
        return self.samples - self._result.samples if self._result is not None else 0

    @property
    def ended(self) -> bool:
        """True if the inner loop has ended."""
        return self._result is not None

    def __iter__(self) -> Iterator[Any]:
        if self._pass >= 0:
            raise StepAbandoned(
                f"step {self.number}: a step can be iterated over only once; for another pass over its batch write: "
                f"for micro_batch in step.again(): ..."
            )
        yield from self._iterate(recompute=False)

    def again(self, *, recompute: bool = False) -> Iterator[Any]:
        """Iterate over this worker's micro-batches of the same batch once more, for another gradient.

            for x in step:                  # the first pass
                step.backward(critic_loss(x))
            critic_optimizer.step()
            for x in step.again():          # the second one, with the critic's new weights
                step.backward(generator_loss(x))
            generator_optimizer.step()

        Each pass has a gradient of its own: `.grad` is cleared at its beginning, and there at its end. The step counts
        once, and so do its samples. `step.loss` is the newest pass's; `means`, `sums`, `maxima` and `gathered` keep the
        values of earlier passes under other names. The step's line in metrics.jsonl has the loss of the first pass
        that has called `backward`. All workers begin the same passes. As the first pass of a step it does what
        `for x in step` does, so a closure of an optimizer can call it every time.

        A pass begins with the buffers that the pass before has left, and draws random numbers of its own.
        `recompute=True`: it begins with the same buffers and draws the same random numbers as the pass before, so a
        forward pass has the same result if the weights are the same. Its own changes of buffers are dropped.

        Raises:
            UsageError: the step is over, or `recompute=True` in the first pass.
            StepAbandoned: the pass before has not ended.
        """
        return self._iterate(recompute=recompute)

    def _iterate(self, *, recompute: bool) -> Iterator[Any]:
        self._begin_pass(recompute=recompute)
        yield from self._pass_over_shards()
        if not self._pass:
            self._lineage = self._rounds.lineage
        result = self._gradients.publish(self._rounds.reduced(), self._window.samples)
        self._values.end(result.values, result.shards, self.number)
        forms = self._rows.forms(result.rows, result.shards, self.samples) if result.shards else []
        if forms:
            yield from self._gather(forms)
        self._end_pass(result)

    def _begin_pass(self, *, recompute: bool) -> None:
        first = self._pass < 0
        if not first and not self.ended:
            raise StepAbandoned(f"step {self.number}: step.again() before the pass in hand has ended")
        if first and recompute:
            raise UsageError(
                f"step {self.number}: step.again(recompute=True) in its first pass, with nothing to repeat"
            )
        self._on_begin(self)
        gradients, rounds = self._gradients, self._rounds
        self._pass += 1
        self._random_pass = self._random_pass if recompute else self._pass
        if not first:
            what = f"pass {self._pass} over the batch of step {self.number}"
            rounds.begin(task(gradients.partials, lambda _: self._window.shards, self.number, what))
            self._loader.expect(self._keys())
            self._values = BatchValues(gradients.values, gradients.replica.shards, self._values)
            self._rows = GatheredRows(gradients.rows, self.number)
        self._result = None
        gradients.replica.begin_shards(first=first, recompute=recompute)

    def _keys(self) -> Iterator[Key]:
        """Yield the micro-batches of this worker in this pass and after it."""
        view, mine = self._rounds.view, self._rounds.todo()
        return self._progress.upcoming(self._rounds.worker, view.lineage(view.members), mine)

    def _pass_over_shards(self) -> Iterator[Any]:
        rounds = self._rounds
        while True:
            rounds.sync()
            todo, checks_left = rounds.todo(), rounds.checks_left()
            if not todo and not checks_left:
                if rounds.wait_for_round_end():
                    return
                continue
            shard, mine = (todo[0], True) if todo else (checks_left[0], False)
            start, stop = self._window.shard(shard)
            rounds.meter.enter("data")
            batch = self._loader.fetch(Key(epoch=self.epoch, step=self.number, shard=shard, start=start, stop=stop))
            rounds.computes(shard, mine=mine)
            skipped = self._loader.skipped
            if self._ledger and mine and not self._pass:
                order = self._loader.order
                samples = [s for s in order.samples(self.epoch, start, stop).tolist() if s not in skipped]
                left_out_samples = (
                    order.samples(self.epoch, stop, stop + self.left_out).tolist() if stop == self._window.stop else []
                )
                self._ledger.computed(
                    epoch=self.epoch,
                    step=self.number,
                    shard=shard,
                    samples=samples,
                    skipped=[*skipped, *left_out_samples],
                )
            self._used, self._bad = stop - start - len(skipped), skipped
            self._open(shard, mine, batch)
            if self._used == 0:
                self._gradients.fill_empty()
                self._close()
                continue
            yield batch if self._loader.device is None else on_device(batch, self._loader.device)
            if not self._passed:
                if self._passes or not self._rows.given:
                    raise UsageError(
                        f"step {self.number}: micro-batch {shard} has no backward pass; call step.backward(loss) "
                        f"once for each micro-batch (with last=False for all but the last of several): "
                        f"for step in run.steps(...): for batch in step: ... step.backward(loss)"
                    )
                self._gradients.fill(ShardTotals(loss=0.0, weight=0.0, samples=self._used, scale=0.0, backward=False))
            self._rows.close(shard)
            self._close()

    def _gather(self, forms: Sequence[Form]) -> Iterator[Any]:
        """Exchange the rows that the micro-batches of this pass have given, in a round of its own.

        A worker that holds micro-batches of a lost one yields them: the script computes their rows once more.
        """
        rounds, window, rows = self._rounds, self._window, self._rows
        partials = partials_of(forms, self.samples)
        lanes = torch.zeros(partials.layout.lanes, dtype=torch.float64)
        put_back: Callable[[], None] | None = None
        what = f"step.gather in pass {self._pass} over the batch of step {self.number}"
        rounds.begin(task(partials, lambda _: window.shards, self.number, what))
        while True:
            rounds.sync()
            todo = rounds.todo()
            if not todo:
                if rounds.wait_for_round_end():
                    break
                continue
            shard = todo[0]
            if not rows.kept(shard):
                put_back = put_back or self._gradients.replica.keep_small_buffers()
                yield from self._compute_rows(shard)
            lanes.zero_()
            rows.write(shard, window.shard(shard)[0] - window.start, forms, self.samples, lanes)
            rounds.open(shard)
            partials.close(lanes)
            rounds.close(shard)
        if put_back is not None:
            put_back()
        gathered = rows.read(forms, self.samples, rounds.reduced()[0])
        device = self._gradients.parameters[0].device
        self._gathered.update({name: tensor.to(device) for name, tensor in gathered.items()})

    def _compute_rows(self, shard: int) -> Iterator[Any]:
        """Yield micro-batch `shard` of a lost worker once more, for its rows alone: its gradient is exchanged."""
        start, stop = self._window.shard(shard)
        self._rounds.meter.enter("data")
        batch = self._loader.fetch(Key(epoch=self.epoch, step=self.number, shard=shard, start=start, stop=stop))
        self._rounds.computes(shard)
        self._used, self._again = stop - start, True
        self._begin_shard(shard)
        yield batch if self._loader.device is None else on_device(batch, self._loader.device)
        self._rows.close(shard)
        self._shard, self._again = -1, False

    def gather(self, **tensors: torch.Tensor) -> None:
        """Give rows of the micro-batch, such as `z=features`. `step.gathered` has those of the whole global batch.

        Each tensor has shape (micro-batch, ...): a row for each sample. All micro-batches give the same names, with
        rows of one shape and dtype. The gathered tensors have no gradient, and all of their bits. A pass that only
        gathers needs no `backward`. So a loss may use the whole batch, whatever `micro` is:

            for images in step:
                with torch.no_grad():
                    step.gather(z=model(images))
            for images in step.again(recompute=True):
                z = step.gathered["z"]  # all rows; this micro-batch's own ones are z[step.rows]
                ...

        At most 4 tensors a pass, and 256 MiB for all samples of the batch.

        Raises:
            UsageError: the call is outside the inner loop, a tensor has no row for each sample, there are too many or
                they are too large, micro-batches give different ones, or bad samples are skipped.
        """
        self._require_open("gather")
        if self._loader.skips:
            raise UsageError(
                f'step {self.number}: step.gather with on_bad_sample="skip": a sample that is left out has no row; use '
                f'on_bad_sample="raise"'
            )
        self._rows.add(tensors, self._used)

    def backward(
        self, loss: torch.Tensor, *, weight: float | torch.Tensor | None = None, scaler: Any = None, last: bool = True
    ) -> None:
        """Run the micro-batch's backward pass. `loss`: one number, the mean over the micro-batch.

        `.grad` becomes the gradient of the mean over the batch, and `step.loss` that mean. The micro-batch counts by
        its number of samples, or by `weight`. If the loss is a mean over tokens, pixels or boxes, `weight` is their
        number in the micro-batch: then the result is the mean over all tokens of the batch, whatever `micro` is. A
        micro-batch of weight 0 has no gradient, and its loss may be NaN. For a loss with `reduction="sum"`, pass the
        sum divided by the number that it is over, and that number as `weight`.

        `scaler`: a torch.amp.GradScaler, which scales the loss for the backward pass. `step.loss` is not scaled. If the
        script scales the loss itself, `step.loss` and the metrics have the scaled value.

        `last=False`: another backward pass over the same micro-batch follows. All of them have the same weight.

        `.grad` is valid from the inner loop's end until the next step begins: clone gradients that you keep.

        Raises:
            LossNotScalar: the loss is not one number.
            UsageError: the call is outside the inner loop, or is the second for one micro-batch; the weight is negative
                or not finite, or differs from that of the pass before.
        """
        self._require_open("backward")
        if self._again:
            return
        if self._passed:
            raise UsageError(
                f"step {self.number}: step.backward twice for one micro-batch; all but the last: last=False"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            form = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LossNotScalar(
                f"step.backward(loss): the loss has {form}; pass one number, the mean over the micro-batch "
                f"(loss.mean(), or reduction='mean')"
            )
        given = None if weight is None else self._weight_of(weight)
        if self._passes and given != self._weight:
            raise UsageError(
                f"step {self.number}: step.backward(weight={given}) after weight={self._weight} for the same "
                f"micro-batch; all of its passes have one weight"
            )
        self._weight, units = given, float(self._used if given is None else given)
        scale = units / self._window.samples
        if given is None and self._shard == 0 and self._used > 1 and _is_sum(loss):
            _warn_of_sum()
        if units:
            self._gradients.backward(loss if scaler is None else scaler.scale(loss), scale, last=last)
            self._loss += float(loss.detach()) * units
        self._passes += 1
        if last:
            self._passed = True
            self._gradients.fill(
                ShardTotals(loss=self._loss, weight=units, samples=self._used, scale=scale, weighed=given is not None)
            )

    def mean(self, *, weight: float | torch.Tensor | None = None, **values: float | torch.Tensor) -> None:
        """Give values of the micro-batch, such as `accuracy=...`. `step.means` has their means over the global batch.

        Each value is the mean over the micro-batch as one number, or one value for each sample, shape (micro-batch,).
        `weight`: the number of units that the mean is over, if these are not the samples. Micro-batches with weight 0
        don't count. Call it with the same names in each micro-batch, before or after `backward`.

        Raises:
            UsageError: the call is outside the inner loop, a name was given before, a value has another shape, the
                weight is negative or not finite, or there are more than 16 values.
        """
        self._require_open("mean")
        if self._again:
            return
        units = None if weight is None else self._weight_of(weight)
        self._values.add("mean", values, self._used, units)

    def sum(self, **values: float | torch.Tensor) -> None:
        """Give values of the micro-batch. `step.sums` has their sums over the global batch. See `mean`.

        Each value is the sum over the micro-batch as one number, or one value for each sample, shape (micro-batch,).
        """
        self._require_open("sum")
        if self._again:
            return
        self._values.add("sum", values, self._used, None)

    def max(self, **values: float | torch.Tensor) -> None:
        """Give values of the micro-batch, at most 4. `step.maxima` has the largest over the global batch. See `mean`.

        Each value is the largest of the micro-batch as one number, or one value for each sample, shape (micro-batch,).
        Only with `GlobalBatch`, of at most 256 micro-batches.
        """
        self._require_open("max")
        if self._again:
            return
        self._values.add("max", values, self._used, None)

    def _require_open(self, operation: str) -> None:
        if self._shard < 0:
            raise UsageError(f"step {self.number}: step.{operation} outside a micro-batch; call it in the inner loop")

    def _weight_of(self, weight: float | torch.Tensor) -> float:
        units = amount(f"step {self.number}: weight", weight)
        if not 0 <= units < math.inf:
            raise UsageError(
                f"step {self.number}: weight={units}: pass the number of units that the value is the mean over, 0 or "
                f"more"
            )
        return units

    def _open(self, shard: int, mine: bool, batch: Any) -> None:
        self._mine = mine
        self._loss, self._weight, self._passes, self._passed = 0.0, None, 0, False
        self._values.open(shard)
        self._gradients.clear()
        if not mine or self._rounds.examined(shard):
            self._gradients.examine(mine=mine).read(batch)
        if mine:
            self._rounds.open(shard)
        self._begin_shard(shard)

    def _begin_shard(self, shard: int) -> None:
        """Set buffers and random state, on which the result of `shard` depends."""
        self._shard = shard
        self._rows.open()
        self._gradients.replica.reset_buffers(shard, self._window.shards)
        set_random_state(derive(self._seed, "shard", self.number, shard, *self._of_pass(self._random_pass)))

    def _of_pass(self, number: int) -> tuple[int | str, ...]:
        """Return what the random state of a pass is derived from, beside that of the first pass."""
        return ("pass", number) if number else ()

    def _tell(self, names: Sequence[str], digests: Sequence[int]) -> None:
        self._rounds.found(self._shard, names, digests, mine=self._mine)

    def _close(self) -> None:
        self._gradients.close(self._tell)
        if self._mine:
            self._rounds.close(self._shard)
        self._shard = -1

    def _end_pass(self, result: StepTotals) -> None:
        self._result = result
        has_gradient = result.backward > 0 or not result.shards
        if has_gradient:
            self._mean_loss = result.loss / result.weight if result.weight else math.nan
        set_random_state(derive(self._seed, "update", self.number, *self._of_pass(self._pass)))
        self._on_end(self, self._lineage, has_gradient=has_gradient)
        if has_gradient:
            self._base_steps = self._progress.base_steps


def on_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with all of its tensors on `device`, and whatever else in it has a method `to`."""

    def moved(part: Any) -> Any:
        return part.to(device) if hasattr(part, "to") else part

    return tree_map(moved, batch)


_THROUGH = ("NegBackward0", "ToCopyBackward0", "SqueezeBackward0", "ViewBackward0")
_SUM = 2  # torch's number for reduction="sum"


def _is_sum(loss: torch.Tensor) -> bool:
    """Return True if the loss is the result of a sum: of `sum()`, or of a loss of torch with reduction="sum"."""
    node = loss.grad_fn
    while node is not None and type(node).__name__ in _THROUGH:
        node = node.next_functions[0][0]
    return type(node).__name__ == "SumBackward0" or getattr(node, "_saved_reduction", None) == _SUM


@functools.cache
def _warn_of_sum() -> None:
    """Warn once in this process, and only where the first micro-batch of a step is computed."""
    warnings.warn(
        "the loss is a sum, and step.backward takes a mean over the micro-batch: with a sum the gradient depends on "
        "micro=. Use reduction='mean'; or divide the sum by the number of samples or tokens that it is over, and pass "
        "that number: step.backward(loss / n, weight=n)",
        stacklevel=3,
    )


# --- step clock -------------------------------------------------------------------------------------------------------
#
# The wall time of a worker's steps. Each moment belongs to exactly one step.
#
# A step's time runs from the end of the previous inner loop to the end of its own. So the update, schedules, logging
# and evaluations between two inner loops belong to the step that follows them. A worker's first step begins when the
# script receives it: the time before belongs to no step (the start, and the time between two starts of a resumed run).
# So the steps' times add up to the time from the first step's beginning to the last step's end. The time after the last
# step is an interval of the same kind.
#
# Three parts of each interval are counted separately: evaluations, `run.once`, and pauses (a view is stopped or takes
# effect, or fewer workers than the minimum are present). They are disjoint: a pause within an evaluation is a pause.


class StepClock:
    """The clock of one worker's steps. Used on the script's thread. `meter` measures pauses; `clock` returns ns."""

    def __init__(self, meter: Meter, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._meter, self._clock = meter, clock
        self._began: int | None = None
        self._paused = 0  # ns of pauses before the current interval
        self._parts = {"evaluation": 0, "once": 0}  # parts of the current interval, ns

    def begin(self) -> None:
        """Start the first interval when the script receives its first step. Later calls have no effect."""
        if self._began is None:
            self._began, self._paused = self._clock(), self._meter.paused()

    @contextmanager
    def count_separately(self, part: Literal["evaluation", "once"]) -> Generator[None]:
        """Count the time within the context as `part` of the current interval, without the pauses in it."""
        began, paused = self._clock(), self._meter.paused()
        try:
            yield
        finally:
            self._parts[part] += self._clock() - began - (self._meter.paused() - paused)

    def end(self) -> StepTime:
        """End the current interval and begin the next one. Returns the ended one's times."""
        now, paused = self._clock(), self._meter.paused()
        began = now if self._began is None else self._began
        ended = StepTime(
            seconds=_s(now - began), evaluation_s=_s(self._parts["evaluation"]), once_s=_s(self._parts["once"]),
            pause_s=_s(paused - self._paused),
        )  # fmt: skip
        self._began, self._paused = now, paused
        self._parts = dict.fromkeys(self._parts, 0)
        return ended


def _s(ns: int) -> float:
    return round(max(ns, 0) / 1e9, 6)


# --- once -------------------------------------------------------------------------------------------------------------
#
# Work of one worker while the others wait: a round without samples, in which one shard represents the work.
#
#     with run.once() as mine:
#         if mine:
#             torch.save(model.state_dict(), "model.tmp")
#             os.replace("model.tmp", "model.pt")
#             mine.result = score(model)
#     print(mine.result)
#
# 1. Every worker begins a round with one shard per worker. Shard 0 is the work, so rank 0 holds it; the other shards
#    are empty.
# 2. The holder of the work enters the `with` block with True, does the work, and closes the shard when it leaves the
#    block.
# 3. The others close their empty shards and wait before they enter the block: with False when the round has ended, or
#    with True if they inherit the work because its holder is lost.
# 4. The work's result, if it has one, is in the lanes of shard 0. So all have the result of whoever did the work last.
#
# So the work is done *at least once*: if a worker dies in the middle, the work is incomplete, and another one begins it
# anew. Hence the temporary name and `os.replace` above. No worker runs the block twice: a `with` statement is enough.
#
# No worker reports the holder as stalled, however long the work takes (`Rounds.begin`, `patient`). If the holder's
# process dies or freezes, it is lost as usual. Its own state that the work may change (random state, buffers, training
# modes and other plain attributes of modules) is restored, so that it continues like the others. Parameters and
# optimizers are not restored: the work must not change them.


RESULT_BYTES = 32 * 1024  # of the work's result
_IN_A_LANE = 6  # bytes that a float64 holds exactly
_RESULT_LANES = 1 + -(-RESULT_BYTES // _IN_A_LANE)  # the first one is the number of bytes


class Work:
    """The work of one `run.once`. It is true for the worker that does it.

    Attributes:
        result: what the work has come to, the same on all workers after the `with` block. The worker that does the work
            sets it: None, a number, text, or lists and dicts of these, of at most 32 KiB.
    """

    def __init__(self, *, mine: bool) -> None:
        self._mine = mine
        self.result: Any = None

    def __bool__(self) -> bool:
        return self._mine

    def __repr__(self) -> str:
        return repr(self._mine)


class Once:
    """Runs `run.once`: work of one worker while the others wait. See the comment above."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._partials = Partials(Layout([], lanes=_RESULT_LANES))

    def refuse(self, operation: str) -> None:
        """Raise UsageError while this worker does the work, because `operation` needs all workers."""
        if self._rounds.in_once:
            raise UsageError(
                f"run.{operation} within run.once: all workers must call it; move it out of the `with` block"
            )

    @contextmanager
    def work(self, replica: Replica, attributes: ModuleAttributes, step: int, clock: StepClock) -> Generator[Work]:
        """See `Run.once`. An exception in the block is a failure of the script, which ends the run and this round."""
        with clock.count_separately("once"):
            yield from self._work(replica, attributes, step)

    def _work(self, replica: Replica, attributes: ModuleAttributes, step: int) -> Generator[Work]:
        task_name = f"run.once after step {step}"
        self._rounds.begin(task(self._partials, lambda workers: workers, step, task_name), patient=True)
        if not self._work_is_mine():
            work = Work(mine=False)
            work.result = _received(self._rounds.reduced()[0])
            yield work
            return
        put_back = _keep(replica, attributes)
        self._rounds.in_once = True
        work = Work(mine=True)
        yield work
        self._rounds.in_once = False
        put_back()
        self._close(WORK, _sent(work.result))
        is_mine_again = self._work_is_mine()
        assert not is_mine_again, "work that was done was dealt out again"
        work.result = _received(self._rounds.reduced()[0])

    def _work_is_mine(self) -> bool:
        """Go through the round. Returns False at its end, or True as soon as this worker holds the work."""
        rounds = self._rounds
        while True:
            rounds.sync()
            todo = rounds.todo()
            if WORK in todo:
                return True
            for shard in todo:
                self._close(shard)
            if rounds.wait_for_round_end():
                return False

    def _close(self, shard: int, lanes: torch.Tensor | None = None) -> None:
        self._rounds.open(shard)
        self._partials.close(torch.zeros(_RESULT_LANES, dtype=torch.float64) if lanes is None else lanes)
        self._rounds.close(shard)


def _sent(result: Any) -> torch.Tensor:
    """Return the lanes with the work's result."""
    try:
        content, tensors = encode(result)
    except UnknownState as error:
        raise UsageError(f"run.once: the result can't be handed to the other workers: {error}") from error
    if tensors or len(content) > RESULT_BYTES:
        form = "a tensor" if tensors else f"{len(content):,} bytes"
        raise UsageError(
            f"run.once: the result has {form}: hand on numbers, text, lists and dicts of at most {RESULT_BYTES:,} "
            f"bytes, and write the rest to a file"
        )
    lanes = torch.zeros(_RESULT_LANES, dtype=torch.float64)
    lanes[0] = len(content)
    for lane, at in enumerate(range(0, len(content), _IN_A_LANE), 1):
        lanes[lane] = int.from_bytes(content[at : at + _IN_A_LANE], "little")
    return lanes


def _received(lanes: torch.Tensor) -> Any:
    """Return the result in the sums of the lanes."""
    size, *numbers = lanes.tolist()
    numbers = numbers[: -(-int(size) // _IN_A_LANE)]
    content = b"".join(int(number).to_bytes(_IN_A_LANE, "little") for number in numbers)
    return decode(content[: int(size)], [])


def _keep(replica: Replica, attributes: ModuleAttributes) -> Callable[[], None]:
    """Return a function that restores the state that the work may change. Larger buffers are constants."""
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
# Refuses updates of replicated parameters that have no effect, or that differ between workers.
#
#     within a step    `.grad` is None until the inner loop has ended: an `optimizer.step()` there does nothing, or
#                      decays weights before the gradient is known
#     cleared          `zero_grad()` after the inner loop, before `optimizer.step()`: then the step does nothing
#     not replicated   joiners do not get an optimizer's rates and moments if `run.replicate` has not received it, and
#                      train on with different ones
#     none at all      a warning: no optimizer has stepped, and no parameter was changed in place
#
# torch calls the hook before any optimizer's `step`, also when a `GradScaler` or a wrapper calls it. A wrapper that
# `run.replicate` has received covers the optimizers that it holds. A scheduler holds its optimizer without its state.

DEPTH = 3  # levels of a wrapper's attributes and containers that are searched
PATIENCE = 10  # steps without an update before the warning; a GradScaler skips the first few
_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


@functools.cache
def _watch() -> None:
    """Register one permanent hook.

    A hook of each guard would be removed when the guard is collected, possibly while torch iterates over its hooks.
    """
    register_optimizer_step_pre_hook(_before)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _check(optimizer)
        return None

    def check_after_closure() -> Any:
        """Call the closure, which computes the gradients, and check the optimizer before it uses them."""
        result = closure()
        _check(optimizer)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": check_after_closure}
    return (args[0], check_after_closure, *args[2:]), kwargs


def _check(optimizer: torch.optim.Optimizer) -> None:
    for guard in tuple(_guards):
        guard.check(optimizer)


class Guard:
    """The guard of one run's loop, for the lifetime of this object.

    `entered()`: returns True if the loop's first step has begun. `within()`: returns True if the inner loop of the
    current step has not ended. `gave(parameter)`: returns True if the newest step has a gradient for it.
    """

    def __init__(
        self, replica: Replica, progress: Progress, *, entered: Callable[[], bool], within: Callable[[], bool],
        gave: Callable[[torch.Tensor], bool],
    ) -> None:  # fmt: skip
        self._replica = replica
        self._progress = progress
        self._entered = entered
        self._within = within
        self._gave = gave
        self._is_new = True  # no optimizer has used the gradients of the newest step yet
        self._steps = 0  # since the loop has begun here
        self._updated = False  # an optimizer of replicated parameters has stepped in the loop
        self._versions = 0
        _guards.add(self)
        _watch()

    def end(self) -> None:
        """End the checks: another loop begins, with a guard of its own."""
        _guards.discard(self)

    def gradients_are_there(self) -> None:
        """Record that the inner loop has ended, with new gradients."""
        self._is_new = True

    def step_ended(self) -> None:
        """Count a step. Call it when its first gradients are there."""
        if not self._steps:
            self._versions = self._count_writes()
        self._steps += 1

    def look_for_updates(self) -> None:
        """Warn if the first `PATIENCE` steps have changed no parameter. Call it when the script is done with a step."""
        if self._steps == PATIENCE and not self._updated and self._count_writes() == self._versions:
            warnings.warn(
                f"{self._steps} steps have ended, and no parameter has changed: call optimizer.step() after each inner "
                f"loop, `for micro_batch in step: ...`",
                stacklevel=4,
            )

    def _count_writes(self) -> int:
        return sum(parameter._version for parameter in self._replica.parameters.values())

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer before its `step`.

        Raises:
            UsageError: the step's inner loop has not ended, or its gradients were cleared.
            NotReplicated: `run.replicate` has not received the optimizer, or not all of its parameters.
        """
        ours = [id(p) in self._replica.ids for group in optimizer.param_groups for p in group["params"]]
        if not any(ours) or not self._entered():
            return
        kind, step = type(optimizer).__name__, self._progress.position.step
        if self._within():
            raise UsageError(
                f"step {step}: {kind}.step() before the inner loop has ended, where no parameter has its "
                f"gradient yet; call it once per step, after `for micro_batch in step: ...`"
            )
        over = self._progress.following is None  # after its loop the script may do anything
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._is_new and all(p.grad is None for p in parameters) and any(map(self._gave, parameters)):
            raise UsageError(
                f"step {step}: {kind}.step() does nothing, since its gradients were cleared after the inner loop; "
                f"leave out optimizer.zero_grad(): each step clears the gradients before it computes new ones"
            )
        self._is_new, self._updated = False, True
        if not over and not all(ours):
            raise NotReplicated(
                f"step {step}: {kind}.step() over replicated parameters and {ours.count(False)} that are in no "
                f"replicated module: they were replaced, or never passed to run.replicate; put the modules' parameters "
                f"into its param_groups"
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
