"""The loops of `farandole check`: the run's own steps, with records of what each worker has computed.

`CheckLoop` is that of the legs `alone`, `workers` and `resume` (`records.py`). In a run all happens at fixed places:

    a joiner    is the worker whose slot is above those of the first workers. It waits before it asks to join, until
                step 0 has ended. The others require one more worker for step `JOIN`, so it enters exactly there
    a loss      rank 0 kills itself after its first micro-batch of step `LOSS`

After `STEPS` steps the loop is over. A single process then leaves the script; a worker of a run waits for its end.
The work of `run.once` is not done, since it may write over files of the script.

`MicroLoop` is that of the legs `whole` and `parts`: one step over the samples of one micro-batch, without dropout. The
gradients of its micro-batches go into files.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from farandole.check import records
from farandole.check.records import (
    JOIN,
    LOSS,
    RUN,
    STEPS,
    CheckTerms,
    ComputedShard,
    MicroBatchRecord,
    ModelFacts,
    Records,
    StateRecord,
)
from farandole.check.script_state import ScriptState
from farandole.control.run_folder import CHECKPOINTS
from farandole.data.loader import Loader
from farandole.errors import UsageError
from farandole.plan.batch import GlobalBatch
from farandole.plan.shards import Position
from farandole.protocol.messages import Checkpoints
from farandole.settings import slot
from farandole.training import digest
from farandole.training.gradients import ShardDigests
from farandole.training.loop import Loop, use
from farandole.training.progress import Length, Progress
from farandole.training.replica import Replica
from farandole.training.step import Once, Step, Work
from farandole.worker.context import WorkerContext
from farandole.worker.rounds import Rounds

STEP_0 = "step-0"  # the file that says that step 0 has ended
WAIT_S = 0.02
MOST_PARTS = 4
LEAST = 4  # samples of the step whose gradients are compared: batch normalization needs two in a micro-batch
SAMPLED = 1 << 16  # elements of a gradient that are compared


def begin(text: str) -> None:
    """Make this process use one of the loops below, by the terms in `text`."""
    terms = records.terms_of(text)
    use(partial(MicroLoop if terms.leg in ("whole", "parts") else CheckLoop, terms=terms))


# --- three steps ------------------------------------------------------------------------------------------------------


class FirstSteps(Progress):
    """The progress of a run that is over after `STEPS` steps."""

    def over(self, position: Position) -> bool:
        return position.step >= STEPS or super().over(position)


class CheckStep(Step):
    """A step that records the digests of each shard."""

    taken: Callable[[ComputedShard], None]  # takes the records
    dies: bool  # this worker is to be lost after its first micro-batch
    state_of_script: Callable[[], records.Leaves]

    def _open(self, shard: int, mine: bool, batch: Any) -> None:
        super()._open(shard, mine, batch)
        if mine and not self._rounds.examined(shard):
            self._gradients.examine(mine=True).read(batch)
        self._script = self.state_of_script()

    def _tell(self, names: Sequence[str], digests: Sequence[int]) -> None:
        self.taken(
            ComputedShard(
                worker=self._rounds.worker, step=self.number, shard=self._shard, over=self._pass, names=tuple(names),
                digests=tuple(digests), script=self._script,
            )
        )  # fmt: skip
        if not self._mine or self._rounds.examined(self._shard):
            super()._tell(names, digests)

    def _close(self) -> None:
        mine = self._mine
        super()._close()
        if mine and self.dies:
            os.kill(os.getpid(), signal.SIGKILL)


class CheckLoop(Loop):
    """The loop of one process of the check; see the docstring of the module."""

    step_class = CheckStep
    progress_class = FirstSteps

    def __init__(
        self, replica: Replica, loader: Loader, length: Length, context: WorkerContext, rounds: Rounds, *,
        terms: CheckTerms, folder: Path | None, checkpoints: Checkpoints, **options: Any,
    ) -> None:  # fmt: skip
        place = Path(terms.folder, RUN)
        if terms.leg == "alone":
            folder = place
        elif terms.leg == "resume":
            [newest] = (place / CHECKPOINTS).glob("*.pt")
            folder, checkpoints = None, Checkpoints(every="never", resume=str(newest))
        super().__init__(replica, loader, length, context, rounds, folder=folder, checkpoints=checkpoints, **options)
        self._terms, self._records = terms, Records(terms)
        self._script = ScriptState(replica.objects, loader.dataset)

    def steps(self) -> Iterator[Step]:
        """Yield the steps of this leg."""
        terms, rounds = self._terms, self._rounds
        if terms.leg == "workers" and slot() >= terms.workers:
            rounds.require(terms.workers + 1)
            while not Path(terms.folder, STEP_0).exists():
                time.sleep(WAIT_S)
        for step in super().steps():
            assert isinstance(step, CheckStep)
            step.taken, step.state_of_script = self._records.write, self._script.leaves
            first = terms.leg == "workers" and rounds.view.rank(self._context.worker) == 0
            step.dies = first and step.number == LOSS
            self._script.enter()
            self._record(step.number)
            if terms.leg == "alone" and step.number == JOIN:
                self.state.save(False)
            yield step
            if terms.leg == "workers":
                rounds.require(terms.workers + (step.number + 1 == JOIN))
                Path(terms.folder, STEP_0).touch()
        done = self.progress.after
        if done.step < STEPS:
            raise UsageError(
                f"the script's loop ended after {done.step} steps, but the check needs {STEPS}; let it train for longer"
            )
        self.state.begin(done)
        self._record(done.step)
        if terms.leg == "workers":
            rounds.obey_until_goodbye()
        raise SystemExit(0)

    def work(self, once: Once) -> AbstractContextManager[Work]:
        del once
        return nullcontext(Work(mine=False))

    def _record(self, step: int) -> None:
        leaves = dict(digest.leaves_of(self.replica)) | self.state.attributes.compared()
        digests = {name: digest.number(digest.of(value)) for name, value in leaves.items()}
        worker = self._context.worker
        self._records.write(StateRecord(worker=worker, step=step, digests=digests, script=self._script.leaves()))


# --- two sizes of micro-batch -----------------------------------------------------------------------------------------


class SampledGradients(ShardDigests):
    """The gradient of the open shard, as at most about `SAMPLED` of its elements. It makes no digests."""

    def read(self, batch: Any) -> None:
        del batch
        self.sampled: dict[int, np.ndarray[Any, Any]] = {}

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        flat = gradient.detach().reshape(-1)
        stride = max(1, flat.numel() * len(self._names) // SAMPLED)
        self.sampled[index] = flat[::stride].to(device="cpu", dtype=torch.float64).numpy()
        super().add_gradient(index, gradient)

    def close(self, lanes: torch.Tensor, loss: int, buffers: int) -> tuple[list[str], list[int]]:
        del lanes, loss, buffers
        return [], []


class MicroStep(Step):
    """A step that writes the gradient of each micro-batch, divided by its weight."""

    wrote: Callable[[MicroBatchRecord, dict[int, Any]], None]

    def _open(self, shard: int, mine: bool, batch: Any) -> None:
        super()._open(shard, mine, batch)
        self._taken = self._gradients.examine(mine=mine, digests=SampledGradients)
        self._taken.read(batch)
        self._before = _random_state()

    def _close(self) -> None:
        assert isinstance(self._taken, SampledGradients)
        units = float(self._used if self._weight is None else self._weight)
        if self._passed and units:
            scale = units / self._window.samples
            gradient = {index: each / scale for index, each in self._taken.sampled.items()}
            part = MicroBatchRecord(
                shard=self._shard, samples=self._used, weight=self._weight, loss=self._loss / units,
                draws=self._before != _random_state(),
            )  # fmt: skip
            self.wrote(part, gradient)
        super()._close()


class MicroLoop(Loop):
    """The loop of the legs `whole` and `parts`."""

    step_class = MicroStep

    def __init__(self, replica: Replica, loader: Loader, *others: Any, terms: CheckTerms, **options: Any) -> None:
        if loader.batches:
            raise UsageError("the batches are those of a batch sampler, so one can't be divided anew")
        size = min(max(loader.batch.micro, LEAST), loader.epoch_samples)
        parts = min(MOST_PARTS, size // 2)
        if parts < 2:
            raise UsageError(f"the dataset has {loader.epoch_samples} samples, too few for two micro-batches of two")
        loader.batch = GlobalBatch(size, micro=size if terms.leg == "whole" else -(-size // parts))
        replica = Replica(replica.objects, replica.buffer_kinds, shards=parts)
        super().__init__(replica, loader, *others, **options)
        self._terms, self._records = terms, Records(terms)

    def steps(self) -> Iterator[Step]:
        """Yield the first step."""
        roots = {name: thing for name, thing in self.replica.objects.items() if isinstance(thing, nn.Module)}
        modules = {n: module for root, thing in roots.items() for n, module in thing.named_modules(prefix=root)}
        _drop_nothing(modules.values())
        step = next(super().steps())
        assert isinstance(step, MicroStep)
        step.wrote = self._write
        yield step
        names = tuple(name for name, module in modules.items() if isinstance(module, _BatchNorm) and module.training)
        self._records.write(ModelFacts(batch_norms=names))
        raise SystemExit(0)

    def _write(self, part: MicroBatchRecord, gradient: dict[int, Any]) -> None:
        path = records.gradient_path(Path(self._terms.folder), self._terms.leg, part.shard)
        if not path.exists():  # else it is that of a later pass over the batch
            np.savez(path, **{str(index): each for index, each in gradient.items()})
            self._records.write(part)


def _random_state() -> tuple[Any, ...]:
    gpu = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []
    return torch.get_rng_state().numpy().tobytes(), *gpu, repr(np.random.get_state()), random.getstate()


def _drop_nothing(modules: Iterable[nn.Module]) -> None:
    """Switch dropout off in this process: in modules, by their attributes, and as a function."""

    def same(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return input

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(nn.functional, name, same)
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__)):
                setattr(module, name, 0.0)
