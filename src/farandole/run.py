"""The run, as a training script holds it: `farandole.join()`, then the loop of the design's section 3.

A world of one without any coordinator is the same code over a `Participant` that agrees with itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from farandole.collective.state import encode
from farandole.control import ticket as tickets
from farandole.control.run_folder import LEDGER
from farandole.data.ledger import Ledger
from farandole.data.loader import Loader
from farandole.data.seeding import derive, set_random_state
from farandole.errors import FarandoleError, NotReplicated, StepAbandoned, UsageError
from farandole.evaluation.evaluation import Evaluation, Predict
from farandole.evaluation.metric import number
from farandole.membership.messages import Checkpoints, Failed, Leaving, Line, LoaderEnded, Metrics, Unrecorded
from farandole.membership.view import View
from farandole.plan.batch import BatchPolicy
from farandole.plan.shards import Position
from farandole.settings import Settings
from farandole.training import memory
from farandole.training import signature as signatures
from farandole.training.guard import Guard
from farandole.training.learning_rate import LearningRate, learning_rate_of
from farandole.training.once import Once
from farandole.training.progress import Length, Progress
from farandole.training.replica import Replica
from farandole.training.run_state import RunState
from farandole.training.step import Gradients, Step
from farandole.worker.alone import Alone
from farandole.worker.connection import Connected
from farandole.worker.participant import Participant
from farandole.worker.rounds import Rounds


class Run:
    """One worker's hold on the run. Made by `farandole.join()`.

    Attributes:
        device: where to put the model and the micro-batches.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        folder, threads, self._seed, ledger = settings.folder, settings.threads, settings.seed, settings.ledger
        self._participant: Participant
        self._stop_on_nan = False
        if settings.ticket:
            self._participant = connected = Connected(tickets.load(settings.ticket), settings)
            welcome = connected.welcome
            folder, threads, self._seed, ledger = welcome.folder, welcome.threads, welcome.seed, welcome.ledger
            self._checkpoints, self._stop_on_nan = welcome.checkpoints, welcome.stop_on_nan
        else:
            self._participant = Alone(folder, self._end_alone, history=settings.history)
            self._checkpoints = Checkpoints(every=settings.checkpoint_every)
        self._folder = Path(folder) if folder else None
        torch.set_num_threads(threads)
        memory.keep_freed_memory()
        Loader.tell = lambda reason: self._participant.tell(LoaderEnded(reason=reason))
        self.device = signatures.device()
        self._ledger: Ledger | None = None
        if ledger and self._folder is not None:
            path = self._folder / LEDGER / f"{self._participant.worker}.jsonl"
            self._ledger = Ledger(path, lambda reason: self._participant.tell(Unrecorded(reason=reason)))
        self._rounds = Rounds(
            self._participant, snapshot=lambda: self._held().snapshot(), save=lambda b: self._held().save(b)
        )
        self._replica: Replica | None = None
        self._state: RunState | None = None
        self._gradients: Gradients | None = None
        self._step: Step | None = None
        self._progress: Progress | None = None
        self._learning_rate: LearningRate | None = None
        self._began = self._looped = self._looped_out = False
        self._began_at, self._logs = 0.0, 0
        self._evaluation = Evaluation(self._rounds, self.device, self._seed)
        self._once = Once(self._rounds)
        set_random_state(derive(self._seed, "start"))

    # --- what a script asks ----------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The view in which this worker is. Raises UsageError before `run.steps` has begun."""
        if not self._began:
            raise UsageError("run.view, .rank and .is_leader are known once run.steps(...) has begun, not before")
        return self._rounds.view

    @property
    def rank(self) -> int:
        """This worker's index in the view."""
        return self.view.rank(self._participant.worker)

    @property
    def is_leader(self) -> bool:
        """Whether this worker has rank 0 now: for printing. What takes time, or must not be lost, goes into `once`."""
        return self.rank == 0

    def replicate(self, **objects: object) -> None:
        """Say what is trained: modules, optimizers, schedulers, anything with state_dict() and load_state_dict().

        All of it is handed to joining workers and written to checkpoints.

        Raises:
            UsageError: called twice, without any module that has parameters, or with an object without state.
        """
        if self._replica is not None:
            raise UsageError("run.replicate was called before; hand in everything at once")
        self._replica = Replica(objects)

    def loader(self, dataset: Any, batch: BatchPolicy, *, shuffle: bool = True, **options: Any) -> Loader:
        """A loader over a map-style dataset; `options` are torch.utils.data.DataLoader's under its own names.

        `len()` of it is the number of steps of the base batch in an epoch.

        Raises:
            UsageError: no map-style dataset, an empty one, or an option that makes no sense here.
        """
        if not isinstance(batch, BatchPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
            other = "farandole.PerWorkerBatch(size, micro=...) for a batch that follows the workers"
            raise UsageError(f"run.loader(batch={batch!r}): use farandole.GlobalBatch(size, micro=...), or {other}")
        return Loader(dataset, batch, seed=self._seed, shuffle=shuffle, **options)

    def steps(self, loader: Loader, *, epochs: int | None = None, base_steps: int | None = None) -> Iterator[Step]:
        """The run's steps. A joining worker waits here for its state and goes on where the others are.

        Its length is given in `epochs`, or in `base_steps`, as `Step.base_steps` counts them: steps of the base batch,
        or under `AdaScale` the sum of its gains, the scale-invariant steps of its paper.

        Raises:
            NotReplicated: `run.replicate` has not been called.
            UsageError: none or both of the two, one below 1, or a second loop.
            StepAbandoned: the loop body left a step's inner loop before its end.
        """
        if self._replica is None:
            raise NotReplicated("run.steps before run.replicate(model=..., optimizer=...): say first what is trained")
        length = Length.of(epochs, base_steps)
        if self._looped:
            raise UsageError("run.steps was called before; a run has one loop, in which the epoch tells where it is")
        self._looped = True
        encode(self._replica.state())  # an object that can't be sent shows now, not when somebody joins
        return self._steps(loader, length, self._replica)

    def evaluate(
        self, model: torch.nn.Module, dataset: Any, metric: Any, *, predict: Predict | None = None, micro: int = 256,
        **options: Any,
    ) -> Any:  # fmt: skip
        """`metric` over every sample of `dataset`, each counted once, shared out over the workers; the same on all.

        `metric(outputs, targets)` gives one value a sample, shape (micro-batch,), or their mean, one number: the result
        is their mean over all samples, a float. It may be a `torchmetrics.Metric` or `MetricCollection`, left as it is:
        the result is its `compute()`. A mapping of names to metrics gives one of names to results, from one pass.

        `predict(model, batch)` gives the metric's arguments as a tuple; by default a batch is `(inputs, targets)` and
        they are `(model(inputs), targets)`. Examples are in `farandole.evaluation.evaluation`. Tensors of a batch are
        on the run's device; the model is in evaluation mode, without gradients. All workers call it at the same place.

        Raises:
            UsageError: before `run.steps` has begun, or a metric that can't be summed over micro-batches.
        """
        step = self._between("evaluate")
        return self._evaluation.result(model, dataset, metric, step, predict=predict, micro=micro, **options)

    def once(self) -> AbstractContextManager[bool]:
        """For what one worker should do, such as saving pictures: `with run.once() as mine:`, then `if mine: ...`.

        One gets True and does it while the others wait. If it dies in the middle, another one does it: write files
        under a temporary name, then `os.replace` them. Random state and buffers are put back; leave parameters and
        optimizers as they are. All workers call it at the same place, after a step's inner loop or after the loop.

        Raises:
            UsageError: before `run.steps` has begun, within a step's inner loop, or within another `once`.
        """
        step = self._between("once")
        assert self._replica is not None
        return self._once.work(self._replica, step)

    def _between(self, what: str) -> int:
        """The number of the step in hand, after whose inner loop `what` may come."""
        if not self._began:
            raise UsageError(f"run.{what} works from within the run.steps loop on, not before it")
        if self._step and not self._step.ended:
            raise StepAbandoned(f"run.{what} within step {self._step.number}: end its inner loop first")
        self._once.refuse(what)
        return self._step.number if self._step else 0

    def log(self, **metrics: float) -> None:
        """Add a line to the run's metrics. All workers call it; it is written once."""
        self._once.refuse("log")
        self._logs += 1
        step = self._step.number if self._step else 0
        fields = {name: number(name, value) for name, value in metrics.items()}
        self._participant.add_line(Line(step=step, index=self._logs, fields=fields))

    def fingerprint(self) -> str:
        """SHA-256 over the bits of everything replicated, as hex: equal on all workers after the same step.

        Raises:
            NotReplicated: `run.replicate` has not been called.
        """
        if self._replica is None:
            raise NotReplicated("run.fingerprint before run.replicate(model=..., optimizer=...)")
        return self._replica.fingerprint()

    # --- the loop --------------------------------------------------------------------------------------------

    def _steps(self, loader: Loader, length: Length, replica: Replica) -> Iterator[Step]:
        learning = self._learning_rate = learning_rate_of(loader.batch, replica.objects)
        gradients = self._gradients = Gradients(replica, measures_noise=learning.measures_noise)
        rounds, participant = self._rounds, self._participant
        gains = (lambda: (learning.gains_before, learning.gains)) if learning.counts_gains else None
        progress = self._progress = Progress(loader, length, participant.workers_at, gains)
        self._guard = Guard(replica, progress, lambda: self._step)
        rounds.layout = gradients.layout
        rounds.replan = lambda: loader.expect(
            progress.upcoming(participant.worker, rounds.view.lineage(rounds.view.members), rounds.todo())
        )
        replica.keep_buffers()
        signature = signatures.signature(self.device, loader, length, replica)
        self._state = state = RunState(
            replica, self._participant, self._checkpoints, folder=self._folder, seed=self._seed, signature=signature,
            over=progress.over, ledger=self._ledger, learning_rate=learning, stop_on_nan=self._stop_on_nan,
        )  # fmt: skip
        participant.digest, participant.digests = state.digest, state.digests
        memory.touch(4 * sum(p.numel() * p.element_size() for p in gradients.parameters))
        self._participant.ask_in(signature, state.unreached())
        rounds.enter(
            state.take, lambda position, flags: self._begin(position, progress, gradients, flags, first=flags is None),
            state.restore, len(gradients.parameters),
        )  # fmt: skip
        self._began = True
        while True:
            step = self._step = self._new_step(progress, gradients, loader)
            yield step
            if not step.ended:
                raise StepAbandoned(
                    f"step {step.number}: its inner loop was left before its end, so its gradients are incomplete; "
                    f"iterate over all of the step's micro-batches"
                )
            if progress.following is None:
                self._looped_out = True
                return
            self._begin(progress.following, progress, gradients)

    def _begin(
        self, position: Position, progress: Progress, gradients: Gradients, flags: Sequence[bool] | None = None, *,
        first: bool = False,
    ) -> None:  # fmt: skip
        """Begin the step at `position`. `flags`: the others' requires_grad, for a joiner. `first`: in a first view."""
        if first:
            self._held().begin_run(position)
        if flags is not None:
            for parameter, flag in zip(gradients.parameters, flags, strict=True):
                parameter.requires_grad_(flag)
        if gradients.refresh():
            self._rounds.layout = gradients.layout
        gradients.clear()
        self._held().begin(position)
        self._participant.epoch = position.epoch
        self._rounds.begin(
            gradients.partials, lambda workers: progress.enter(position, workers), position, may_switch=True
        )
        self._held().checkpoint()

    def _new_step(self, progress: Progress, gradients: Gradients, loader: Loader) -> Step:
        """The step that has begun: only after any idle rounds is it known which samples it takes."""
        self._began_at = time.monotonic()
        self._held().began(self._rounds.workers)
        return Step(
            progress=progress, gradients=gradients, rounds=self._rounds, loader=loader, seed=self._seed,
            ledger=self._ledger, on_end=self._step_ended,
        )  # fmt: skip

    def _step_ended(self, step: Step) -> None:
        assert self._progress is not None
        assert self._learning_rate is not None
        assert self._gradients is not None
        if step.skipped < step.samples and not self._held().judge(step.number, step.loss):
            self._rounds.obey_until_goodbye()
        self._held().whole, self._logs = False, 0
        self._learning_rate.step_ended(step.samples, self._progress.whole, self._gradients.noise)
        if self._ledger:
            held = self._rounds.lineage.assign(self._progress.window.shards)
            shards = {shard: worker for worker, mine in held.items() for shard in mine}
            self._ledger.committed(epoch=step.epoch, step=step.number, shards=shards)
        seconds = time.monotonic() - self._began_at
        fields = Metrics(
            epoch=step.epoch, samples=step.samples, loss=step.loss, seconds=round(seconds, 6),
            samples_per_s=round(step.samples / seconds, 1), view=step.view.number, workers=self._rounds.workers,
            time=time.time(), total=self._progress.total, skipped=step.skipped, left_out=step.left_out,
            learning_rate=self._learning_rate.learning_rate, factor=round(self._learning_rate.factor, 6),
        )  # fmt: skip
        self._participant.add_line(Line(step=step.number, index=0, fields=fields))

    def _held(self) -> RunState:
        if self._state is None:
            raise FarandoleError("this worker holds no state of the run yet")
        return self._state

    # --- the end, for the launcher ---------------------------------------------------------------------------

    def finish(self) -> None:
        """The script has run to its end; what it has left is saved by one worker. Raises SystemExit once let go."""
        if not self._began:
            raise UsageError("the script ended without going through run.steps(...), so this worker trained nothing")
        if self._step is not None and not self._step.ended:
            raise StepAbandoned(f"step {self._step.number}: the loop was left before the step's inner loop had ended")
        self._participant.finish(self._final())
        self._rounds.obey_until_goodbye()

    def _end_alone(self) -> bool:
        """The process of a world of one ends. False: its state could not be saved."""
        if self._looped_out and not hasattr(sys, "last_value"):  # what the interpreter leaves of an error
            self._participant.finish(self._final())
        return self._state is None or self._step is None or self._state.end_alone()

    def _final(self) -> str:
        """The state is that after the step in hand, whole; its fingerprint."""
        if self._state and self._progress and self._step:
            self._state.begin(self._progress.after)
        return self.fingerprint() if self._replica else ""

    def fail(self, traceback: str) -> None:
        """The script raised: the run ends, with the state saved if this worker has it whole. Raises SystemExit."""
        self._participant.tell(Failed(traceback=traceback))
        self._rounds.obey_until_goodbye()

    @property
    def dismissed(self) -> bool:
        """Whether the coordinator has told this worker to exit."""
        return self._participant.exit is not None

    def notice(self, reason: str) -> None:
        """This worker is to leave gracefully."""
        self._participant.tell(Leaving(reason=reason))
