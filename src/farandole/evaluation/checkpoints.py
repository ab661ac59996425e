"""A loop that evaluates checkpoints, for `farandole evaluate`: it trains nothing, and calls the script's evaluations.

The loop body runs once for each checkpoint, in a single process, as at the end of the step before the checkpoint. The
inner loop has no micro-batch, so an optimizer finds no gradient and changes nothing. Before each evaluation the
checkpoint's state is loaded again: so whatever else the body does to the state (a moving average, a schedule) has no
effect on it. An evaluation has the random state of that step, so it returns what it returned in the run.

If the script has several loops, each evaluates the checkpoints that were written in it. Between them it does what a
worker does that joins in the later one (`training/loop.py`).

The script ends with the last checkpoint: what follows its loop does not run, and neither does the work of `run.once`,
because both may write over the run's results. If the body calls no evaluation, and there is one checkpoint, the script
goes on after its loop, where others evaluate.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from farandole.checkpoint import content, restore
from farandole.checkpoint.restore import RestoredState
from farandole.checkpoint.store import CheckpointName, Store
from farandole.data.loader import Loader
from farandole.errors import FarandoleError, UsageError
from farandole.protocol.view import View
from farandole.training.gather import Gathered
from farandole.training.loop import Loop, MetricLines
from farandole.training.progress import Length
from farandole.training.replica import Replica
from farandole.training.run_state import calls_between
from farandole.training.step import Once, Step, Work
from farandole.worker.context import WorkerContext
from farandole.worker.rounds import Rounds

T = TypeVar("T")
ENDLESS = Length(base_steps=1 << 50)
METRIC = "metric"  # the name of an evaluation that returns one number which the script does not log

Value = float | int | bool | str


class Rows:
    """The results of the checkpoints. `take` gets each row when it is complete.

    A row maps names to values: `step`, `epoch`, what the script evaluates and logs, and `seconds`.
    """

    def __init__(self, take: Callable[[dict[str, Value]], None]) -> None:
        self._take = take
        self.complete: list[dict[str, Value]] = []
        self.evaluations = 0  # of the newest row
        self.all_evaluations = 0
        self._row: dict[str, Value] | None = None
        self._unnamed: list[Value] = []
        self._seconds = 0.0

    def begin(self, step: int, epoch: int) -> None:
        """Begin the row of the checkpoint that was written after `step`."""
        self._row = {"step": step, "epoch": epoch}
        self.evaluations, self._unnamed, self._seconds = 0, [], 0.0

    def evaluated(self, result: Any, seconds: float) -> None:
        """Take the result of an evaluation: a number, or a mapping of names to numbers; the rest of it is left out."""
        self.evaluations += 1
        self.all_evaluations += 1
        self._seconds += seconds
        if isinstance(result, Mapping):
            self.log({str(name): _number(value) for name, value in result.items()})  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        elif (number := _number(result)) is not None:
            self._unnamed.append(number)

    def log(self, fields: Mapping[str, Value | None]) -> None:
        """Take what the script logs. The values of a step are NaN here, and are left out."""
        if self._row is not None:
            self._row |= {n: v for n, v in fields.items() if v is not None and v == v}

    def end(self) -> None:
        """Complete the row."""
        if self._row is None:
            return
        row, self._row = self._row, None
        unnamed = [value for value in self._unnamed if value not in row.values()]
        for number, value in enumerate(unnamed, 1):
            row[METRIC if number == 1 else f"{METRIC}{number}"] = value
        row["seconds"] = round(self._seconds, 3)
        self.complete.append(row)
        self._take(row)


def _number(value: Any) -> float | int | bool | None:
    if hasattr(value, "numel") and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, bool | int | float) else None


class CollectedLines(MetricLines):
    """The metric lines of a script that is evaluated: they go into the open row, and nowhere else."""

    def __init__(self, context: WorkerContext, rows: Rows) -> None:
        super().__init__(context)
        self._rows = rows

    def log(self, step: int, fields: Mapping[str, float | int | bool | str]) -> None:
        del step
        self._rows.log(fields)

    def step_ended(self, step: int, fields: Any) -> None:
        del step, fields
        self._early = None


class EmptyStep(Step):
    """The step after which a checkpoint was written: it has no micro-batch, and its values are NaN."""

    @property
    def loss(self) -> float:
        return math.nan

    @property
    def means(self) -> Mapping[str, float]:
        return defaultdict(lambda: math.nan)

    @property
    def sums(self) -> Mapping[str, float]:
        return self.means

    @property
    def maxima(self) -> Mapping[str, float]:
        return self.means

    @property
    def gathered(self) -> Gathered:
        raise UsageError(f"step {self.number}: step.gathered has no rows while a checkpoint is evaluated")

    def _pass_over_shards(self) -> Iterator[Any]:
        while True:
            self._rounds.sync()
            todo = self._rounds.todo()
            if not todo:
                if self._rounds.wait_for_round_end():
                    return
                continue
            self._used, self._bad = 0, ()
            self._open(todo[0], True, None)
            self._gradients.fill_empty()
            self._close()
            yield from ()


class EvaluationLoop(Loop):
    """The loop of a script whose checkpoints are evaluated; see the docstring of the module.

    `store`: the checkpoints `entries` in their order are there; each loop takes its own ones from the front. `once`: do
    the work of `run.once` too.

    Raises:
        UsageError: a checkpoint belongs to another script, or no evaluation was called.
        FarandoleError: a checkpoint is damaged.
    """

    step_class = EmptyStep

    def __init__(
        self, replica: Replica, loader: Loader, length: Length, context: WorkerContext, rounds: Rounds, *,
        store: Store, entries: deque[CheckpointName], rows: Rows, once: bool, several: bool, seed: int,
        folder: Path | None, start: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        """`several`: there was more than one checkpoint."""
        del length
        super().__init__(replica, loader, ENDLESS, context, rounds, seed=seed, folder=folder, **options)
        self._store, self._entries, self._rows, self._does_once = store, entries, rows, once
        self._several, self._place = several, start
        self._checkpoint = RestoredState()
        self.lines = CollectedLines(context, rows)

    @property
    def number(self) -> int:
        return self._checkpoint.position.step - 1

    def steps(self) -> Iterator[Step]:
        """Yield a step for each checkpoint, without micro-batches."""
        steps, rows = super().steps(), self._rows
        while self._entries:
            checkpoint = self._read(self._entries[0])
            if checkpoint.position.loop.number > self._place:
                self._pass(checkpoint)
                return
            self._checkpoint = checkpoint
            self._entries.popleft()
            step = next(steps)
            epoch = checkpoint.position.epoch - (checkpoint.position.offset == 0)
            step.number, step.epoch, step.ends_epoch = self.number, max(epoch, 0), True
            rows.begin(self.number, step.epoch)
            self._load()
            yield step
            if rows.evaluations or self._several:
                rows.end()
        if rows.all_evaluations:
            raise SystemExit(0)
        if self._several:
            raise UsageError(
                f"the loop of the script has called no run.evaluate for any of {len(rows.complete)} checkpoints. Call "
                f"it in the loop where step.ends_epoch is true; or name one checkpoint, if the script evaluates after "
                f"its loop"
            )
        self.phase = "over"  # the script goes on after its loop

    def _pass(self, checkpoint: RestoredState) -> None:
        """Go on to the later loop in which `checkpoint` was written."""
        alone = View(number=1, members=(self._context.worker,), group=1)
        self.state.between = calls_between(checkpoint.state)
        self.passed = alone, checkpoint.position.loop.number
        self.phase, self.left = "passed", True

    def evaluate(self, evaluation: Callable[[], T]) -> T:
        self._load()
        began = time.monotonic()
        result = super().evaluate(evaluation)
        self._rows.evaluated(result, time.monotonic() - began)
        return result

    def work(self, once: Once) -> AbstractContextManager[Work]:
        self._load()
        return super().work(once) if self._does_once else nullcontext(Work(mine=False))

    def _read(self, entry: CheckpointName) -> RestoredState:
        manifest = self._store.manifest(entry.stem)
        restored = RestoredState(path=self._store.place(entry.stem), manifest=manifest)
        with self._store.open_verified(entry.stem, manifest) as file:
            restored.position, restored.state = content.load(file, entry.stem)
        if restored.position.step < 1:
            raise FarandoleError(f"{restored.path}: it was written before the first step: there is nothing to evaluate")
        return restored

    def _load(self) -> None:
        self.state.load(self._checkpoint)


def loads(store: Store, entries: Sequence[CheckpointName], rows: Rows, *, once: bool) -> Callable[..., Loop]:
    """Return the function that makes the loop of the script, for `farandole.training.loop.use`."""

    left, several = deque(entries), len(entries) > 1

    def make(*arguments: Any, **options: Any) -> Loop:
        return EvaluationLoop(*arguments, store=store, entries=left, rows=rows, once=once, several=several, **options)

    return make


def entries_of(place: str, run: Any = None) -> tuple[Store, list[CheckpointName]]:
    """Return the store at `place`, a folder, URL or .pt file, and its whole checkpoints, the oldest first.

    Raises:
        UsageError: there is none.
    """
    store, entries = restore.look(place, run)
    if entries is None:
        entries = [entry for entry in store.entries() if entry.whole]
    entries = sorted((entry for entry in entries if entry.step > 0), key=lambda entry: entry.step)
    if not entries:
        raise UsageError(f"{place}: there is no complete checkpoint to evaluate")
    return store, entries
