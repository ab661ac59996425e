"""One step, as the user's loop sees it: micro-batches to compute, then the reduced gradient.

The inner loop is where elasticity hides. Each micro-batch is a shard: before it is yielded the random state is seeded
from (run seed, step, shard) and buffers are put back to the loop's start, so what it computes does not depend on who
computes it. `backward` folds its gradients into the partial sums as they are produced (`gradients.py`). When this
worker's shards are done, the loop waits for the round's end; if a peer dies meanwhile, it yields what was inherited
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from farandole.data.ledger import Ledger
from farandole.data.loader import Key, Loader
from farandole.data.order import derive, set_random_state
from farandole.errors import LossNotScalar, StepAbandoned, UsageError
from farandole.membership.view import View
from farandole.platform.process import guarded
from farandole.training.gradients import Gradients
from farandole.training.progress import Progress
from farandole.worker.rounds import Rounds


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
