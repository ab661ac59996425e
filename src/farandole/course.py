"""The run's way through its data: the window of the step in hand, and which micro-batches come after it.

All of it follows from the position and from how many workers have begun the step, so it is the same on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from farandole.data.loader import Key, Loader
from farandole.membership.view import Lineage
from farandole.plan.shards import Position, Window, advance, window


class Course:
    """`workers_at(step, members)`: how many workers count as having begun `step`, if the view has so many members.

    Attributes:
        position: the step in hand, or the one that is about to begin.
        window: the samples that it takes.
    """

    def __init__(self, loader: Loader, epochs: int, workers_at: Callable[[int, int], int]) -> None:
        self._loader = loader
        self._epochs = epochs
        self._workers_at = workers_at
        self.position = Position()
        self.window = Window(start=0, stop=0, micro=1)
        self._size = loader.batch.base

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
    def following(self) -> Position | None:
        """The position after the step in hand; None at the run's end."""
        return self.after if self.after.epoch < self._epochs else None

    @property
    def after(self) -> Position:
        """The position after the step in hand, the end of the last epoch included."""
        return advance(self.position, self.window, self._loader.epoch_samples)

    @property
    def base_steps(self) -> int:
        """How many windows of the base batch end within this one, counted from the epoch's beginning."""
        base, done = self._loader.batch.base, self.window.start
        return -(-self.window.stop // base) + (-done // base)

    @property
    def total(self) -> int:
        """The run's steps, if the batch stays what it is."""
        length, size = self._loader.epoch_samples, self._size
        epochs_left = self._epochs - 1 - self.position.epoch
        return self.position.step + 1 + -(-(length - self.window.stop) // size) + epochs_left * -(-length // size)

    def upcoming(self, worker: str, later: Lineage, mine: tuple[int, ...]) -> Iterator[Key]:
        """The micro-batches of `worker`: `mine` of the step in hand, then by `later`, as long as the view stays."""
        position, taken = self.position, self.window
        while position.epoch < self._epochs:
            for shard in mine:
                start, stop = taken.shard(shard)
                yield Key(epoch=position.epoch, step=position.step, shard=shard, start=start, stop=stop)
            position = advance(position, taken, self._loader.epoch_samples)
            taken = self._window(position, self._workers_at(position.step, len(later.sets[0])))
            mine = later.assign(taken.shards).get(worker, ())

    def _window(self, position: Position, workers: int) -> Window:
        batch = self._loader.batch
        return window(position, self._loader.epoch_samples, batch.samples(workers), batch.micro)
