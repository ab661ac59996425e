"""The run, as a training script holds it: `farandole.join()` gives it, and a loop over `run.steps` trains.

`Run` is the face only: it says what may be called when, and whoever is behind it does it; the loop is in
`training/loop.py`. A world of one without any coordinator is the same code over a participant that agrees with itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from farandole.checkpoint.store import first_line
from farandole.collective.state_transfer import encode
from farandole.control import ticket as tickets
from farandole.control.run_folder import LEDGER
from farandole.data.ledger import Ledger
from farandole.data.loader import Loader
from farandole.data.order import derive, set_random_state
from farandole.errors import FarandoleError, NotReplicated, StepAbandoned, UsageError
from farandole.evaluation.evaluation import Evaluation, Predict
from farandole.evaluation.metrics import number
from farandole.numerics import modes
from farandole.numerics import settings as cuda
from farandole.plan.batch import BatchPolicy, GlobalBatch
from farandole.platform import cpu, output
from farandole.protocol import messages as m
from farandole.protocol.messages import (
    Checkpoints,
    Lapsed,
    LeaveRequest,
    LoaderEnded,
    RunTerms,
    UnknownOperator,
    Unrecorded,
)
from farandole.protocol.view import View
from farandole.settings import Settings, refuse_launcher
from farandole.training import loop, run_state
from farandole.training.loop import Loop
from farandole.training.progress import Length
from farandole.training.replica import Replica
from farandole.training.run_state import RunState
from farandole.training.step import Once, Step
from farandole.worker.connection import Connected
from farandole.worker.participant import Participant, SingleProcess
from farandole.worker.rounds import Rounds

_log = logging.getLogger(__name__)


class Run:
    """One worker's hold on the run. Made by `farandole.join()`.

    Attributes:
        device: where to put the model and the micro-batches.
    """

    def __init__(self, settings: Settings) -> None:
        self._participant: Participant
        if settings.ticket:
            self._participant = connected = Connected(tickets.load(settings.ticket), settings)
            folder, terms = connected.welcome.folder, connected.welcome.terms
            connected.joins = connected.welcome.lines[0] >= 0
        else:
            refuse_launcher()
            self._participant = alone = SingleProcess(settings.folder, self._end_alone, history=settings.history)
            folder = settings.folder
            checkpoints = Checkpoints(every=settings.checkpoint_every, identity=alone.identity)
            terms = RunTerms(
                seed=settings.seed, threads=settings.threads, bits=settings.bits, ledger=settings.ledger,
                checkpoints=checkpoints,
            )  # fmt: skip
        self._terms, self._seed = terms, terms.seed
        output.name(self._participant.worker)
        self._folder = Path(folder) if folder else None
        torch.set_num_threads(terms.threads)
        if terms.pin:
            _pin(settings.slot, terms.threads)
        run_state.keep_freed_memory()
        self.device = cuda.local_device()
        self._mode = modes.begin(
            terms.bits, terms.threads, self.device,
            lambda operator: self._participant.tell(UnknownOperator(operator=operator)),
        )  # fmt: skip
        self._mode.watch()
        self._ledger: Ledger | None = None
        if terms.ledger and self._folder is not None:
            path = self._folder / LEDGER / f"{self._participant.worker}.jsonl"
            self._ledger = Ledger(path, lambda reason: self._participant.tell(Unrecorded(reason=reason)))
        self._rounds = Rounds(self._participant, self._held)
        self._evaluation = Evaluation(self._rounds, self.device, self._seed, self._loader_ended)
        self._once = Once(self._rounds)
        self._replica: Replica | None = None  # until the script has said what is trained
        self._loop: Loop | None = None  # until it has asked for steps
        set_random_state(derive(self._seed, "start"))

    # --- what a script asks ----------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The view in which this worker is. Raises UsageError before `run.steps` has begun."""
        if self._entered is None:
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

    def replicate(self, *, buffers: Mapping[str, str] = MappingProxyType({}), **objects: object) -> None:
        """Say what is trained: modules, optimizers, schedulers, anything with state_dict() and load_state_dict().

        All of it is handed to joining workers and written to checkpoints.

        `buffers` says how the values that a step's micro-batches give a buffer become one: a name, or a pattern of
        names, to a kind, as in `buffers={"model.seen": "sum", "model.*.histogram": "sum"}`. By default floating point
        takes the mean, and integers and booleans must agree.

            sum       the value before the step, and what each micro-batch has added
            max       the largest, elementwise; any of booleans. With `GlobalBatch` only
            last      that of the step's last micro-batch
            gathered  each element from the micro-batch that has changed it: buffer[step.rows] = ..., shape (batch, ...)
            mean      the mean, of integers rounded

        Raises:
            UsageError: called twice, without any module that has parameters, with an object without state, or with a
                kind that does not fit a buffer.
        """
        if self._replica is not None:
            raise UsageError("run.replicate was called before; hand in everything at once")
        if not isinstance(buffers, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"run.replicate(buffers={type(buffers).__name__}): it says how buffers are reduced, "
                f"as {{'model.seen': 'sum'}}; hand in an object of that name under another one"
            )
        self._replica = Replica(objects, buffers)

    def loader(self, dataset: Any, batch: BatchPolicy, *, shuffle: bool = True, **options: Any) -> Loader:
        """A loader over a map-style dataset; `options` are torch.utils.data.DataLoader's under its own names.

        `len()` of it is the number of steps of the base batch in an epoch.

        Raises:
            UsageError: no map-style dataset, an empty one, or an option that makes no sense here.
        """
        if not isinstance(batch, BatchPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
            other = "farandole.PerWorkerBatch(size, micro=...) for a batch that follows the workers"
            raise UsageError(f"run.loader(batch={batch!r}): use farandole.GlobalBatch(size, micro=...), or {other}")
        return Loader(dataset, batch, seed=self._seed, shuffle=shuffle, on_deaths=self._loader_ended, **options)

    def _loader_ended(self, reason: str) -> None:
        self._participant.tell(LoaderEnded(reason=reason))

    def steps(self, loader: Loader, *, epochs: int | None = None, base_steps: int | None = None) -> Iterator[Step]:
        """The run's steps. A joining worker waits here for its state and goes on where the others are.

        Its length is given in `epochs`, or in `base_steps`, as `Step.base_steps` counts them: steps of the base batch,
        or under `AdaScale` the sum of its gains, the scale-invariant steps of its paper.

        Raises:
            NotReplicated: `run.replicate` has not been called.
            UsageError: none or both of the two, one below 1, a second loop, or settings that `--bits same` can't have.
            StepAbandoned: the loop body left a step's inner loop before its end.
        """
        if self._replica is None:
            raise NotReplicated("run.steps before run.replicate(model=..., optimizer=...): say first what is trained")
        length = Length.of(epochs, base_steps)
        if self._loop is not None:
            raise UsageError("run.steps was called before; a run has one loop, in which the epoch tells where it is")
        cuda.refuse_altered(self.device, self._terms.bits)
        batch = loader.batch
        shards = -(-batch.size // batch.micro) if isinstance(batch, GlobalBatch) else 0
        kinds = self._replica.buffer_kinds
        self._replica = Replica(self._replica.objects, kinds, shards=shards)  # as they are now, not at `replicate`
        encode(self._replica.state())  # an object that can't be sent shows now, not when somebody joins
        self._loop = loop.new_loop(
            self._replica, loader, length, self._participant, self._rounds, device=self.device, seed=self._seed,
            folder=self._folder, ledger=self._ledger, checkpoints=self._terms.checkpoints,
            stop_on_nan=self._terms.stop_on_nan, bits=self._terms.bits,
        )  # fmt: skip
        return self._mode.until_the_second(self._loop.steps())

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
        loop = self._between("evaluate")
        attributes = loop.state.attributes
        with loop.clock.apart("evaluation"), self._mode.first("evaluate"), attributes.forward_passes():
            return self._evaluation.result(model, dataset, metric, loop.number, predict=predict, micro=micro, **options)

    def once(self) -> AbstractContextManager[bool]:
        """For what one worker should do, such as saving pictures: `with run.once() as mine:`, then `if mine: ...`.

        One gets True and does it while the others wait. If it dies in the middle, another one does it: write files
        under a temporary name, then `os.replace` them. Random state and buffers are put back; leave parameters and
        optimizers as they are. All workers call it at the same place, after a step's inner loop or after the loop.

        Raises:
            UsageError: before `run.steps` has begun, within a step's inner loop, or within another `once`.
        """
        loop = self._between("once")
        return self._once.work(loop.replica, loop.state.attributes, loop.number, loop.clock)

    def log(self, **metrics: float) -> None:
        """Add a line to the run's metrics, after that of the step in hand. All workers call it; it is written once.

        Raises:
            UsageError: before `run.steps` has begun, within a `once`, or what can't be a line.
        """
        loop = self._looping("log")
        loop.lines.log(loop.number, {name: number(name, value) for name, value in metrics.items()}, early=loop.within)

    def fingerprint(self) -> str:
        """SHA-256 over the bits of everything replicated, as hex: equal on all workers after the same step.

        Raises:
            NotReplicated: `run.replicate` has not been called.
        """
        if self._replica is None:
            raise NotReplicated("run.fingerprint before run.replicate(model=..., optimizer=...)")
        return self._replica.fingerprint()

    # --- where the script is ---------------------------------------------------------------------------------

    @property
    def _entered(self) -> Loop | None:
        """The loop, once its first step has begun."""
        return self._loop if self._loop is not None and self._loop.phase != "entering" else None

    def _looping(self, what: str) -> Loop:
        """The loop in which all workers are that call `what`."""
        if self._entered is None:
            raise UsageError(f"run.{what} works from within the run.steps loop on, not before it")
        self._once.refuse(what)
        return self._entered

    def _between(self, what: str) -> Loop:
        """The loop, after a step's inner loop, where `what` may come."""
        loop = self._looping(what)
        if loop.within:
            raise StepAbandoned(f"run.{what} within step {loop.number}: end its inner loop first")
        return loop

    def _held(self) -> RunState:
        if self._loop is None:
            raise FarandoleError("this worker holds no state of the run yet")
        return self._loop.state

    # --- the end, for the launcher ---------------------------------------------------------------------------

    def finish(self) -> None:
        """The script has run to its end; what it has left is saved by one worker. Raises SystemExit once let go."""
        loop = self._entered
        if loop is None:
            raise UsageError("the script ended without going through run.steps(...), so this worker trained nothing")
        if loop.within:
            raise StepAbandoned(f"step {loop.number}: the loop was left before the step's inner loop had ended")
        self._participant.finish(*loop.end())
        self._rounds.obey_until_goodbye()

    def _end_alone(self) -> bool:
        """The process of a world of one ends. False: its state could not be saved, which is told."""
        loop, failed = self._entered, hasattr(sys, "last_value")  # what the interpreter leaves of an error
        if loop is None:
            if failed or self._participant.instructions.exit is not None:
                return True
            self._participant.tell(m.Saved(error="the script ended without any step of run.steps(...)"))
            return False
        try:
            if loop.phase == "over" or (loop.phase == "between" and loop.state.updated):
                if not failed:  # a loop that was left by `break` is an end too, as in a run
                    self._participant.finish(*loop.end())
            elif loop.phase == "between":
                loop.state.whole = True  # nothing was updated: it is still the state of the step's beginning
        except Exception as error:  # noqa: BLE001  whatever it is, it must not pass for a good end
            self._participant.tell(m.Saved(error=first_line(error)))
            return False
        return loop.state.end_alone()

    def fail(self, told: m.ScriptFailed | m.DataUnavailable) -> None:
        """The script raised: the run ends, with the state saved if this worker has it whole; or goes on without this
        worker, whose host can't get it the data. Raises SystemExit.
        """
        self._participant.tell(told)
        self._rounds.obey_until_goodbye()

    @property
    def dismissed(self) -> bool:
        """Whether the coordinator has told this worker to exit."""
        return self._participant.instructions.exit is not None

    def notice(self, reason: str, within_s: float | None = None) -> None:
        """This worker is to leave gracefully; `within_s`: before its machine goes. Any thread may say so."""
        self._participant.tell(LeaveRequest(reason=reason, within_s=within_s))

    def last_word(self) -> None:
        """It has been told to exit, and has done what it was to do before."""
        exit_ = self._participant.instructions.exit
        if exit_ is not None and exit_.within_s is not None:
            self._participant.tell(Lapsed())
            self._participant.close()


def _pin(slot: int | None, threads: int) -> None:
    """Bind this worker to cores of its own, or say why it is not."""
    why = "no pool has given it a slot" if slot is None else cpu.pin(slot, threads)
    if why:
        _log.warning("--pin: this worker is not bound to cores of its own: %s", why)
