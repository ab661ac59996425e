"""The run's way through its data: the window of the step in hand, which micro-batches come after it, and where it ends.

All of it follows from the position and from how many workers have begun the step, so it is the same on every worker.
Only where the clock is a sum of gains the end of the run is known no sooner than the gain: when the exchange is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from farandole.data.loader import Key, Loader
from farandole.errors import UsageError
from farandole.plan.shards import Position, Window, advance, window
from farandole.platform.bounds import whole
from farandole.protocol.view import Lineage

_MOST = "a run counts no more than 2**53 steps; ask for fewer, and end the run with `farandole stop`"


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run is: so many epochs, or, where they are 0, so many base steps.

    Raises:
        UsageError: neither is given, or both are, or one that is no length.
    """

    epochs: int = 0
    base_steps: int = 0

    @staticmethod
    def of(epochs: int | None, base_steps: int | None) -> Length:
        if (epochs is None) == (base_steps is None):
            raise UsageError(
                f"run.steps(epochs={epochs}, base_steps={base_steps}): a run's length is given in epochs or in base "
                f"steps, in one of the two"
            )
        if epochs is not None:
            return Length(epochs=whole("run.steps(epochs={})", epochs, 1, why=_MOST))
        return Length(base_steps=whole("run.steps(base_steps={})", base_steps, 1, why=_MOST))


class Progress:
    """`workers_at(step, members)`: how many workers count as having begun `step`, if the view has so many members.

    `gains`: the sum of the gains of all steps whose exchange is over, without and with the newest, where that is the
    rule's clock. It counts for a run whose length is given in base steps; otherwise samples do.

    Attributes:
        position: the step in hand, or the one that is about to begin.
        window: the samples that it takes.
        foreseen: whether a step's base steps are known when it begins.
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
        steps = length.epochs * len(loader)
        whole(f"run.steps(epochs={length.epochs}) of {len(loader)} steps each, {{}} steps", steps, why=_MOST)

    def enter(self, position: Position, workers: int) -> int:
        """Begin the step at `position` with so many workers; how many shards it has."""
        self.position = position
        self._size = self._loader.batch.samples(workers)
        self.window = self._window(position, workers)
        return self.window.shards

    @property
    def ends_epoch(self) -> bool:
        return self.window.stop >= self._loader.epoch_samples

    @property
    def whole(self) -> int:
        """The samples that the step's window would have if no epoch ended in it."""
        return min(self._size, self._loader.epoch_samples)

    @property
    def following(self) -> Position | None:
        """The position after the step in hand; None at the run's end. Where gains count: once its exchange is over."""
        return None if self.over(self.after) else self.after

    def over(self, position: Position) -> bool:
        """Whether the run is at its end at `position`; where gains count, by those that there are."""
        if self._length.epochs:
            return position.epoch >= self._length.epochs
        return self._clock(position) >= self._length.base_steps

    def _clock(self, position: Position) -> int:
        """Base steps done at `position`."""
        if self._gains:
            return int(self._gains()[1])
        return position.epoch * len(self._loader) + -(-position.offset // self._loader.batch.base)

    @property
    def after(self) -> Position:
        """The position after the step in hand, the end of the last epoch included."""
        return advance(self.position, self.window, self._loader.epoch_samples)

    @property
    def base_steps(self) -> int:
        """How many base steps end with this one: windows of the base batch, counted from the epoch's beginning, or the
        whole part of the sum of gains, once the exchange is over. Those beyond the run's end don't count.
        """
        before, after = int(self._gains()[0]) if self._gains else self._clock(self.position), self._clock(self.after)
        return min(after, self._length.base_steps or after) - before

    @property
    def total(self) -> int:
        """The run's steps, if the batch stays what it is."""
        length, size = self._loader.epoch_samples, self._size
        if self._length.base_steps:
            done = self._clock(self.after)
            before, after = self._gains() if self._gains else (0.0, size / self._loader.batch.base)
            left = max(self._length.base_steps - done, 0)
            return self.position.step + 1 + (math.ceil(left / (after - before)) if after > before else left)
        epochs_left = self._length.epochs - 1 - self.position.epoch
        return self.position.step + 1 + -(-(length - self.window.stop) // size) + epochs_left * -(-length // size)

    def upcoming(self, worker: str, later: Lineage, mine: tuple[int, ...]) -> Iterator[Key]:
        """The micro-batches of `worker`: `mine` of the step in hand, then by `later`, as long as the view stays.

        Where gains count they may be of steps beyond the run's end, and end themselves where gains of 1 would.
        """
        position, taken = self.position, self.window
        furthest = math.inf if self.foreseen else position.step + self._length.base_steps - self._clock(position)
        while not self.over(position) and position.step < furthest:
            for shard in mine:
                start, stop = taken.shard(shard)
                yield Key(epoch=position.epoch, step=position.step, shard=shard, start=start, stop=stop)
            position = advance(position, taken, self._loader.epoch_samples)
            taken = self._window(position, self._workers_at(position.step, len(later.sets[0])))
            mine = later.assign(taken.shards).get(worker, ())

    def _window(self, position: Position, workers: int) -> Window:
        batch = self._loader.batch
        return window(position, self._loader.epoch_samples, batch.samples(workers), batch.micro)
