"""The progress of a loop through its data: the current step's window, the micro-batches after it, and the loop's end.

All of it follows from the position and from the number of workers that have begun the step, so it is equal on every
worker. If the clock is a sum of gains, the end of the run is known only with the gain: when the exchange is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from farandole.data.loader import Key, Loader
from farandole.errors import UsageError
from farandole.plan.shards import Position, Window, advance
from farandole.platform.bounds import whole
from farandole.protocol.view import Lineage

_MOST = "a run counts at most 2**53 steps; use a smaller number, and end the run with `farandole stop`"


@dataclass(frozen=True, kw_only=True)
class Length:
    """The length of a run: a number of epochs, or, if `epochs` is 0, a number of base steps.

    Raises:
        UsageError: neither is given, or both are, or the number is not valid.
    """

    epochs: int = 0
    base_steps: int = 0

    @staticmethod
    def parse(epochs: int | None, base_steps: int | None) -> Length:
        if (epochs is None) == (base_steps is None):
            raise UsageError(
                f"run.steps(epochs={epochs}, base_steps={base_steps}): give the run's length either in epochs or in "
                f"base steps"
            )
        if epochs is not None:
            return Length(epochs=whole("run.steps(epochs={})", epochs, 1, why=_MOST))
        return Length(base_steps=whole("run.steps(base_steps={})", base_steps, 1, why=_MOST))


class Progress:
    """The run's position and what follows from it.

    `workers_at(step, members)`: returns how many workers count as having begun `step`, in a view of `members` members.

    `gains`: returns the sum of the gains of all steps whose exchange is over, without and with the newest, if this is
    the rule's clock. It is used for a run whose length is given in base steps; otherwise samples are counted.

    Attributes:
        position: the current step, or the one that begins next.
        window: the samples of this step.
        foreseen: True if a step's base steps are known when it begins.
    """

    def __init__(
        self,
        loader: Loader,
        length: Length,
        workers_at: Callable[[int, int], int],
        gains: Callable[[], tuple[float, float]] | None = None,
    ) -> None:
        self._loader = loader
        self._length = length
        self._workers_at = workers_at
        self._gains = gains if length.base_steps else None
        self.foreseen = self._gains is None
        self.position = Position()
        self.window = Window(start=0, stop=0, micro=1)
        self._size = loader.batch.base
        if length.epochs:
            steps = length.epochs * len(loader)
            whole(f"run.steps(epochs={length.epochs}) of {len(loader)} steps each, {{}} steps", steps, why=_MOST)

    def enter(self, position: Position, workers: int) -> int:
        """Begin the step at `position` with `workers` workers. Returns the number of its shards."""
        self.position = position
        self.window = self._loader.window(position, workers)
        self._size = self.window.samples if self._loader.batches else self._loader.batch.samples(workers)
        return self.window.shards

    @property
    def ends_epoch(self) -> bool:
        """True if the step takes the epoch's last samples."""
        return self.window.stop >= self._loader.samples_in(self.position.epoch)

    @property
    def whole(self) -> int:
        """The number of samples that the step's window would have if no epoch ended in it."""
        return min(self._size, self._loader.samples_in(self.position.epoch))

    @property
    def following(self) -> Position | None:
        """The position after the current step; None at the run's end.

        If gains are counted, it is valid only when the step's exchange is over.
        """
        return None if self.over(self.after) else self.after

    def over(self, position: Position) -> bool:
        """Return True if the run is at its end at `position`. If gains are counted, those measured so far decide."""
        if self._length.epochs:
            return position.epoch - position.loop.epoch >= self._length.epochs
        return self._clock(position) >= self._length.base_steps

    def _clock(self, position: Position) -> int:
        """Return the number of base steps of this loop done at `position`."""
        if self._gains:
            return int(self._gains()[1])
        if self._loader.batches:  # epochs may have other numbers of batches, but each step is one
            return position.step - position.loop.step
        epochs = position.epoch - position.loop.epoch  # an endless stream has no length, and no second epoch
        return (epochs * len(self._loader) if epochs else 0) + -(-position.offset // self._loader.batch.base)

    @property
    def after(self) -> Position:
        """The position after the current step; it may be the end of the last epoch."""
        return advance(self.position, self.window, self._loader.samples_in(self.position.epoch))

    @property
    def base_steps(self) -> int:
        """The number of base steps that end within this step. Those after the run's end don't count.

        Base steps are windows of the base batch, counted from the epoch's beginning; or the whole part of the sum of
        gains, valid when the exchange is over.
        """
        before, after = int(self._gains()[0]) if self._gains else self._clock(self.position), self._clock(self.after)
        return min(after, self._length.base_steps or after) - before

    @property
    def total(self) -> int:
        """The run's number of steps, if the batch size does not change any more.

        With a batch sampler: if later epochs have as many batches as epoch 0.
        """
        length, size = self._loader.epoch_samples, self._size
        if self._length.base_steps:
            base_steps_done = self._clock(self.after)
            pace = 1.0 if self._loader.batches else size / self._loader.batch.base
            before, after = self._gains() if self._gains else (0.0, pace)
            remaining = max(self._length.base_steps - base_steps_done, 0)
            return self.position.step + 1 + (math.ceil(remaining / (after - before)) if after > before else remaining)
        epochs_left = self._length.epochs - 1 - (self.position.epoch - self.position.loop.epoch)
        if self._loader.batches:
            return self.position.step + self._loader.steps_left(self.position) + epochs_left * len(self._loader)
        return self.position.step + 1 + -(-(length - self.window.stop) // size) + epochs_left * -(-length // size)

    def upcoming(self, worker: str, later: Lineage, mine: tuple[int, ...]) -> Iterator[Key]:
        """Yield the micro-batches of `worker`: the shards `mine` of the current step, then those that `later` assigns.

        They are right as long as the view does not change. If gains are counted, some may be of steps after the run's
        end; they stop where gains of 1 would end the run.
        """
        position, current_window = self.position, self.window
        furthest = math.inf if self.foreseen else position.step + self._length.base_steps - self._clock(position)
        while not self.over(position) and position.step < furthest:
            for shard in mine:
                start, stop = current_window.shard(shard)
                yield Key(epoch=position.epoch, step=position.step, shard=shard, start=start, stop=stop)
            position = advance(position, current_window, self._loader.samples_in(position.epoch))
            current_window = self._loader.window(position, self._workers_at(position.step, len(later.sets[0])))
            mine = later.assign(current_window.shards).get(worker, ())
