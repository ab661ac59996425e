"""`Run`, the object of a training script: `farandole.join()` returns it, and a loop over `run.steps` trains.

`Run` is only the interface. It checks which call is allowed when, and other modules do the work; the loop is in
`training/loop.py`. A single process without a coordinator (`world_size=1`) uses the same code with a `WorkerContext`
that makes all decisions alone.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from farandole.checkpoint import content
from farandole.checkpoint.store import first_line
from farandole.collective.state_transfer import encode
from farandole.control import ticket as tickets
from farandole.control.run_folder import LEDGER
from farandole.data import torch_loader
from farandole.data.ledger import Ledger
from farandole.data.loader import Loader, refuse_several
from farandole.data.order import derive, set_random_state
from farandole.errors import FarandoleError, NotReplicated, StepAbandoned, UnknownState, UsageError
from farandole.evaluation.evaluation import Evaluation, Predict
from farandole.evaluation.metrics import number
from farandole.numerics import modes
from farandole.numerics import settings as numeric_settings
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
from farandole.training import loop, plain_state, run_state
from farandole.training.loop import Loop
from farandole.training.plain_state import PlainState
from farandole.training.progress import Length
from farandole.training.replica import Replica, names_of
from farandole.training.run_state import RunState
from farandole.training.step import Once, Step, Work
from farandole.worker.connection import Connected
from farandole.worker.context import SingleProcess, WorkerContext
from farandole.worker.rounds import Rounds

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Run:
    """A worker's interface to the run. `farandole.join()` creates it.

    Attributes:
        device: the device for the model and the micro-batches.
    """

    def __init__(self, settings: Settings) -> None:
        self._context: WorkerContext
        if settings.ticket:
            self._context = connected = Connected(tickets.load(settings.ticket), settings)
            folder, terms = connected.welcome.folder, connected.welcome.terms
            connected.joins = connected.welcome.lines[0] >= 0
            connected.is_external = not settings.pool
        else:
            refuse_launcher()
            self._context = alone = SingleProcess(settings.folder, self._end_alone, history=settings.history)
            folder = settings.folder
            checkpoints = Checkpoints(every=settings.checkpoint_every, identity=alone.identity)
            terms = RunTerms(
                seed=settings.seed, threads=settings.threads, bits=settings.bits, ledger=settings.ledger,
                codec=settings.codec, checkpoints=checkpoints,
            )  # fmt: skip
        self._terms, self._seed = terms, terms.seed
        output.name(self._context.worker)
        self._folder = Path(folder) if folder else None
        torch.set_num_threads(terms.threads)
        if terms.pin:
            _pin(settings.slot, terms.threads)
        run_state.keep_freed_memory()
        self.device = numeric_settings.local_device()
        self._mode = modes.begin(
            terms.bits, terms.threads, self.device,
            lambda operator: self._context.tell(UnknownOperator(operator=operator)),
        )  # fmt: skip
        self._mode.watch()
        self._ledger: Ledger | None = None
        if terms.ledger and self._folder is not None:
            path = self._folder / LEDGER / f"{self._context.worker}.jsonl"
            self._ledger = Ledger(path, lambda reason: self._context.tell(Unrecorded(reason=reason)))
        self._rounds = Rounds(self._context, self._require_state)
        self._evaluation = Evaluation(self._rounds, self.device, self._seed, self._loader_ended)
        self._once = Once(self._rounds)
        self._replica: Replica | None = None  # None until the script calls `replicate`
        self._state: PlainState | None = None  # None without plain values
        self._loop: Loop | None = None  # None until the script calls `steps`
        self._loops = 0  # how often it has called `steps`
        self._replayed = 0  # calls since the last loop whose results are those of the run
        self._fingerprinted = False  # since the last loop
        set_random_state(derive(self._seed, "start"))

    # --- the script's interface ------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The current view of this worker. Raises UsageError before `run.steps` has begun."""
        if self._loop is not None and self._loop.passed is not None:
            return self._loop.passed[0]
        if self._entered is None:
            raise UsageError("run.view, .rank and .is_leader are known once run.steps(...) has begun, not before")
        return self._rounds.view

    @property
    def rank(self) -> int:
        """This worker's index in the view."""
        return self.view.rank(self._context.worker)

    @property
    def is_leader(self) -> bool:
        """True if this worker has rank 0 now. Use it for printing.

        Use `once` for work that takes time or must not be lost.
        """
        return not self._passes and self.rank == 0

    def replicate(self, *unnamed: object, buffers: Mapping[str, str] = MappingProxyType({}), **objects: object) -> None:
        """Declare what is trained: modules, optimizers, schedulers, any object with state_dict() and load_state_dict().

        Joining workers receive the state of all these objects, and checkpoints contain it. A plain value (a number,
        text, None, a list or dict), as in `best=0.0`, is the first value of an attribute of `run.state`.

        `buffers` maps a buffer's name, or a pattern of names, to a kind, as in
        `buffers={"model.seen": "sum", "model.*.histogram": "sum"}`. The kind is the rule that reduces the values of a
        buffer after the micro-batches of a step to one value. By default floating-point buffers take the mean, and
        integers and booleans must be equal after all micro-batches.

            sum       the value before the step plus what each micro-batch has added
            max       the largest value, elementwise; for booleans, any. Only with `GlobalBatch`
            last      the value after the step's last micro-batch
            gathered  each element from the micro-batch that has changed it: buffer[step.rows] = ..., shape (batch, ...)
            mean      the mean, rounded for integers

        Raises:
            UsageError: it is called twice, an object has no name, no module has parameters, an object has no state, or
                a kind does not fit a buffer.
        """
        if unnamed:
            frame = inspect.currentframe()
            names = names_of(unnamed, frame.f_back.f_locals if frame and frame.f_back else {})
            raise UsageError(
                f"run.replicate takes each object by a name, which stands for it in checkpoints: write "
                f"run.replicate({', '.join(f'{name}={name}' for name in names)})"
            )
        if self._replica is not None:
            raise UsageError("run.replicate was called before; pass all objects in one call")
        if not isinstance(buffers, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"run.replicate(buffers={type(buffers).__name__}): `buffers` maps names to kinds of reduction, "
                f"as in {{'model.seen': 'sum'}}; pass an object called `buffers` under another name"
            )
        stateful, self._state = plain_state.split(objects)
        self._replica = Replica(stateful, buffers)

    def prepare(
        self, *objects: Any, micro: int | None = None, batch: BatchPolicy | None = None,
        buffers: Mapping[str, str] = MappingProxyType({}), **values: Any,
    ) -> Any:  # fmt: skip
        """Do what `replicate`, `loader` and `model.to(run.device)` do, in one call. Returns the objects in their order.

            model, optimizer, loader, schedule = run.prepare(model, optimizer, loader, schedule, micro=32)

        Modules go to the run's device and are replicated, and so are all other objects with a state. Their names in
        checkpoints are those of the caller's variables. A torch DataLoader becomes what `run.loader(dataloader, batch,
        micro=micro)` returns, and its micro-batches are on the run's device. `values` are plain values of `run.state`;
        `buffers` is as in `replicate`. With one object the result is that object, not a tuple.

        Raises:
            UsageError: as `replicate` and `loader` do.
        """
        frame = inspect.currentframe()
        names = names_of(objects, frame.f_back.f_locals if frame and frame.f_back else {})
        prepared, replicated = list[Any](), dict[str, object]()
        for name, thing in zip(names, objects, strict=True):
            if isinstance(thing, DataLoader | Loader):
                prepared.append(self.loader(thing, batch, micro=micro) if isinstance(thing, DataLoader) else thing)
                prepared[-1].device = self.device
                continue
            replicated[name] = thing.to(self.device) if isinstance(thing, torch.nn.Module) else thing
            prepared.append(thing)
        self.replicate(buffers=buffers, **replicated, **values)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    @property
    def state(self) -> PlainState:
        """The plain values that `replicate` was given, as attributes: `run.state.best = accuracy`.

        They belong to the run's state: joining workers and resumed runs get them. All workers must set the same values.

        Raises:
            UsageError: `replicate` was given none.
        """
        if self._state is None:
            raise UsageError("run.state has no values: pass their first ones to run.replicate(..., best=0.0)")
        return self._state

    def loader(
        self, dataset: Any, batch: BatchPolicy | None = None, *, micro: int | None = None, **options: Any
    ) -> Loader:
        """Return a loader over a dataset. `options` are those of torch.utils.data.DataLoader, shuffle=True.

        An iterable dataset keeps its order, and is read by every worker: see `farandole.data.stream`. Without a `len()`
        it takes `samples`, the number of samples of an epoch, or a run whose length is given in base steps.

        `dataset` may be a torch DataLoader. Then the dataset, the options and the order (shuffled or not) are its own,
        and its batch size is that of the global batch: `run.loader(dataloader, micro=32)`. `micro` is the number of
        samples of one forward pass. Pass `batch` for another batch, and options that are to differ.

        A sampler of the DataLoader gives the order, and may repeat or omit samples. It must yield the same number of
        indices in each epoch. Each batch of a batch sampler is the batch of one step. Both are seeded by the run's seed
        and the epoch, and `set_epoch(epoch)` is called if they have it: see `farandole.data.sampler_order`.

        `len(loader)` is the number of steps of the base batch in an epoch; of a batch sampler, in epoch 0.

        Raises:
            UsageError: the dataset is empty or can't be read again, an option is not supported, or the DataLoader has a
                sampler without a length, with state from one epoch to the next, or with other keys than indices.
        """
        refuse_several("run.loader", dataset)
        if "batch_size" in options:
            size = options["batch_size"]
            raise UsageError(
                f"run.loader(batch_size={size!r}): the batch of all workers together is "
                f"batch=farandole.GlobalBatch({size!r}, micro=...), in micro-batches of `micro` samples"
            )
        if batch is not None and micro is not None:
            raise UsageError(
                f"run.loader(batch={batch!r}, micro={micro}): the batch has `micro` already; leave out one of the two"
            )
        if isinstance(dataset, DataLoader):
            given = dataset
            dataset, its_options = torch_loader.options_of(given, self._seed)
            options = torch_loader.merged(its_options, options)
            batch = torch_loader.batch_of(given, batch, micro, options.get("order"))
        elif batch is None:
            raise UsageError(
                "run.loader(dataset) needs the batch: run.loader(dataset, batch=farandole.GlobalBatch(size, micro=...))"
            )
        if not isinstance(batch, BatchPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
            other = "farandole.PerWorkerBatch(size, micro=...) for a batch that grows with the number of workers"
            raise UsageError(f"run.loader(batch={batch!r}): use farandole.GlobalBatch(size, micro=...), or {other}")
        return Loader(dataset, batch, seed=self._seed, on_deaths=self._loader_ended, **options)

    def _loader_ended(self, reason: str) -> None:
        self._context.tell(LoaderEnded(reason=reason))

    def steps(self, loader: Loader, *, epochs: int | None = None, base_steps: int | None = None) -> Iterator[Step]:
        """Iterate over the run's steps. A joining worker waits here for its state and continues with the others.

        The length is `epochs`, or `base_steps`. `Step.base_steps` counts base steps: steps of the base batch, or under
        `AdaScale` the sum of its gains, which its paper calls scale-invariant steps.

        A script may have several loops, one after the other, each with its own loader and length. `step.number` and
        `step.epoch` count on. In a worker that joins in a later loop, or resumes there, the loops before it yield
        nothing. What the script does between two loops runs in that worker too, with the objects as they are before
        the state arrives: `run.evaluate` and `run.once` return there what they have returned in the run.

        Raises:
            NotReplicated: `run.replicate` has not been called.
            UsageError: none or both of the two are given, one is below 1, the loop before has not ended, parameters or
                buffers have other shapes than in it, or `--bits same` does not allow torch's settings.
            StepAbandoned: the loop body left a step's inner loop before its end.
        """
        if self._replica is None:
            raise NotReplicated("run.steps before run.replicate(model=..., optimizer=...): call run.replicate first")
        if not isinstance(loader, Loader):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse_several("run.steps", loader)
            how = "loader, micro=..." if isinstance(loader, DataLoader) else "dataset, batch=farandole.GlobalBatch(...)"
            raise UsageError(
                f"run.steps({type(loader).__name__}): it takes what run.loader returns: "
                f"run.steps(run.loader({how}), ...)"
            )
        length = Length.parse(epochs, base_steps)
        if self._loop is not None:
            self._loop.leave()
            self._check_between(self._loop)
        number, self._loops = self._loops, self._loops + 1
        self._replayed, self._fingerprinted = 0, False
        if self._loop is not None and self._loop.passed is not None and number < self._loop.passed[1]:
            return iter(())
        numeric_settings.refuse_altered(self.device, self._terms.bits)
        batch = loader.batch
        constant = isinstance(batch, GlobalBatch) and not loader.batches
        shards = -(-batch.size // batch.micro) if constant else 0
        kinds = self._replica.buffer_kinds
        self._replica = Replica(self._replica.objects, kinds, shards=shards)  # the objects' present tensors
        encode(self._replica.state())  # fails now, not at the first join, if an object can't be sent
        self._loop = loop.new_loop(
            self._replica, loader, length, self._context, self._rounds, device=self.device, seed=self._seed,
            folder=self._folder, ledger=self._ledger, checkpoints=self._terms.checkpoints,
            stop_on_nan=self._terms.stop_on_nan, bits=self._terms.bits, codec=self._terms.codec, start=number,
            before=self._loop,
        )  # fmt: skip
        return self._mode.until_the_second(self._loop.steps())

    def evaluate(
        self, model: torch.nn.Module, dataset: Any, metric: Any, *, predict: Predict | None = None,
        micro: int | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Return `metric` over all samples of `dataset`, computed by all workers together. All get the same result.

        Each sample counts once. `metric(outputs, targets)` returns one value per sample, shape (micro-batch,), or their
        mean as one number. The result is the mean over all samples, a float. If a value is a mean over tokens or other
        units, return a tuple of the values and the numbers of units: the result is the mean over all units.

        `metric` may be a `torchmetrics.Metric` or `MetricCollection`: the result is its `compute()`, and the object
        itself does not change. For a mapping of names to metrics the result maps names to results, from one pass.

        `predict(model, batch)` returns the metric's arguments as a tuple. By default a batch is `(inputs, targets)` and
        the arguments are `(model(inputs), targets)`. Examples are in `farandole.evaluation.evaluation`. Tensors of a
        batch are on the run's device. The model is in evaluation mode, without gradients. All workers call `evaluate`
        at the same place. `micro` is the number of samples in a micro-batch, by default 256; `options` are those of
        `loader`. `dataset` may be a torch DataLoader: then it has the options, and `micro` is its batch size.

        Raises:
            UsageError: `run.steps` has not begun, or the metric can't be summed over micro-batches.
        """
        if self._passes:
            return self._result_of("run.evaluate")
        loop = self._between("evaluate")
        if isinstance(dataset, DataLoader):
            micro = micro or dataset.batch_size
            dataset, its_options = torch_loader.options_of(dataset, self._seed)
            options = torch_loader.merged(torch_loader.of_evaluation(dataset, its_options), options)
        micro = 256 if micro is None else micro
        evaluation = partial(
            self._evaluation.result, model, dataset, metric, loop.number, predict=predict, micro=micro, **options
        )
        with self._mode.first("evaluate"):
            return self._keep("run.evaluate", loop.evaluate(evaluation))

    def once(self) -> AbstractContextManager[Work]:
        """Return a context manager for work of one worker, such as saving pictures.

        Write `with run.once() as mine:`, then `if mine: ...`. For one worker `mine` is true. It does the work while the
        others wait. After the block `mine.result` is on all workers what that worker has set it to: a number, text, or
        lists and dicts of these. If this worker dies, another one repeats the work: so write files under a temporary
        name, then `os.replace` them. Random state and buffers are restored; do not change parameters and optimizers.
        All workers call it at the same place, after a step's inner loop or after the loop.

        Raises:
            UsageError: before `run.steps` has begun, within a step's inner loop, or within another `once`; or the
                result has a tensor, or more than 32 KiB.
        """
        if self._passes:
            work = Work(mine=False)
            work.result = self._result_of("run.once")
            return nullcontext(work)
        return self._work(self._between("once"))

    @contextmanager
    def _work(self, loop: Loop) -> Generator[Work]:
        with loop.work(self._once) as work:
            yield work
        self._keep("run.once", work.result)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the replicated state as it is now to one file. One worker writes it while the others wait.

            if accuracy > run.state.best:
                run.state.best = accuracy
                run.save("best.pt")

        `torch.load(path, weights_only=True)["model"]` is the state_dict of what was replicated as `model`. The file is
        on the host of the worker that writes it: name a folder that all hosts share. It replaces an earlier file only
        when it is complete. If the worker dies, another one writes it. All workers call it at the same place, like
        `once`.

        Raises:
            UsageError: as `once` does, `path` is no path of a file, or its folder is not there.
            UnknownState: an object's state has a value that can't be saved.
            OSError: the file can't be written.
        """
        file = content.file_of(path)
        with self.once() as mine:
            if mine and self._replica is not None:
                content.write(self._replica.present(), file, self._context.worker)

    def log(self, **metrics: float) -> None:
        """Add a line to metrics.jsonl, after the line of the current step. All workers call it; it is written once.

        Raises:
            UsageError: before `run.steps` has begun, within a `once`, or if a value is no number or text.
        """
        if self._passes:
            return
        loop = self._looping("log")
        loop.lines.log(loop.number, {name: number(name, value) for name, value in metrics.items()})

    def fingerprint(self) -> str:
        """Return the SHA-256 of all replicated state as hex. It is equal on all workers after the same step.

        Raises:
            NotReplicated: `run.replicate` has not been called.
        """
        if self._replica is None:
            raise NotReplicated("run.fingerprint before run.replicate(model=..., optimizer=...)")
        self._fingerprinted = self._loop is not None and self._loop.left
        return self._replica.fingerprint()

    # --- checks of the script's position ---------------------------------------------------------------------

    @property
    def _entered(self) -> Loop | None:
        """The loop; None before its first step has begun."""
        return self._loop if self._loop is not None and self._loop.phase not in ("entering", "passed") else None

    def _looping(self, operation: str) -> Loop:
        """Return the loop. Raises UsageError if its first step has not begun, or within `once`."""
        if self._entered is None:
            raise UsageError(f"run.{operation} before the run.steps loop: call it within the loop or after it")
        self._once.refuse(operation)
        return self._entered

    def _between(self, operation: str) -> Loop:
        """Return the loop. Raises StepAbandoned within a step's inner loop, where `operation` is not allowed."""
        loop = self._looping(operation)
        if loop.within:
            raise StepAbandoned(f"run.{operation} within step {loop.number}: call it after the step's inner loop")
        return loop

    # --- between two loops -----------------------------------------------------------------------------------

    @property
    def _passes(self) -> bool:
        """True if the run is in a later loop, to which this worker goes."""
        return self._loop is not None and self._loop.passed is not None

    def _keep(self, call: str, result: T) -> T:
        """Return `result`. Between two loops it is kept, for workers that join in a later one."""
        if self._loop is not None and self._loop.left:
            between = self._loop.state.between
            between += [[] for _ in range(self._loops - len(between))]
            between[-1].append((call, result))
            self._reseed(len(between[-1]))
        return result

    def _reseed(self, calls: int) -> None:
        """Set the random state after a call between two loops: it does not depend on what the call has drawn."""
        set_random_state(derive(self._seed, "after loop", self._loops - 1, calls))

    def _result_of(self, call: str) -> Any:
        """Return what `call` has returned in the run, at this place between two loops."""
        assert self._loop is not None
        number, results = self._replayed, self._loop.state.between[self._loops - 1 : self._loops]
        calls = results[0] if results else []
        if number >= len(calls) or calls[number][0] != call:
            theirs = calls[number][0] if number < len(calls) else "nothing more"
            raise UsageError(
                f"{call} after loop {self._loops - 1} of the script, where the other workers have called {theirs}: "
                f"all workers call the same"
            )
        self._replayed += 1
        self._reseed(self._replayed)
        return calls[number][1]

    def _check_between(self, loop: Loop) -> None:
        """Raise UsageError if a worker that joins later can't do what the script did after `loop`."""
        if self._fingerprinted:
            raise UsageError(
                "run.fingerprint() between two loops: a worker that joins later has no state of the run there; call "
                "it in a loop, or after the last one"
            )
        try:
            encode(loop.state.between)
        except UnknownState as error:
            raise UsageError(
                f"a result of run.evaluate or run.once between two loops can't be sent to workers that join later "
                f"({error}); call it in the loop, or return numbers, texts and tensors"
            ) from error

    def _require_state(self) -> RunState:
        if self._loop is None:
            raise FarandoleError("this worker holds no state of the run yet")
        return self._loop.state

    # --- the end, for the launcher ---------------------------------------------------------------------------

    def finish(self) -> None:
        """Report that the script has ended. One worker saves the final state. Raises SystemExit when dismissed."""
        loop = self._entered
        if loop is None:
            raise UsageError("the script ended without going through run.steps(...), so this worker trained nothing")
        if loop.within:
            raise StepAbandoned(f"step {loop.number}: the loop was left before the step's inner loop had ended")
        self._context.report_script_end(*loop.end())
        self._rounds.obey_until_goodbye()

    def may_end(self, *, interactive: bool) -> bool:
        """Return True if another run may begin in this process: it is a single one, and the run's loop has ended.

        `interactive`: in an interactive session a run may end at any time.
        """
        ended = self._loop is not None and self._loop.left
        return isinstance(self._context, SingleProcess) and (ended or interactive)

    def end(self) -> None:
        """End the run of a single process: save its final state if it has a folder, and let go of its objects.

        Raises:
            FarandoleError: the state could not be saved.
        """
        assert isinstance(self._context, SingleProcess)
        try:
            if not self._context.end():
                raise FarandoleError("the state of the run before could not be saved; its log has the reason")
        finally:
            self._mode.end()
            if self._loop is not None:
                self._loop.retire()

    def _end_alone(self) -> bool:
        """Save the final state of a single process at its exit. Returns False, with a report, if that fails."""
        loop, failed = self._entered, hasattr(sys, "last_value")  # the interpreter sets it after an uncaught error
        if loop is None:
            if failed or self._context.instructions.exit is not None:
                return True
            self._context.tell(m.Saved(error="the script ended without any step of run.steps(...)"))
            return False
        try:
            if loop.phase == "over" or (loop.phase == "between" and loop.state.updated):
                if not failed:  # a loop that ends by `break` is a normal end, as in a run with a coordinator
                    self._context.report_script_end(*loop.end())
            elif loop.phase == "between":
                loop.state.at_step_start = True  # nothing was updated: it is still the state at the step's beginning
        except Exception as error:  # noqa: BLE001  no error may look like a normal end
            self._context.tell(m.Saved(error=first_line(error)))
            return False
        return loop.state.end_alone()

    def fail(self, failure: m.ScriptFailed | m.DataUnavailable) -> None:
        """Report an exception of the script, and wait to be dismissed. Raises SystemExit.

        After `ScriptFailed` the run ends; its state is saved if this worker has the state of a whole step. After
        `DataUnavailable` the run continues without this worker, whose host can't get the data.
        """
        self._context.tell(failure)
        self._rounds.obey_until_goodbye()

    @property
    def dismissed(self) -> bool:
        """True if the coordinator has requested this worker to exit."""
        return self._context.instructions.exit is not None

    def notice(self, reason: str, within_s: float | None = None) -> None:
        """Request that this worker leaves gracefully. Any thread may call it.

        `within_s`: seconds until its machine stops; None if there is no deadline.
        """
        self._context.tell(LeaveRequest(reason=reason, within_s=within_s))

    def last_word(self) -> None:
        """Report that the requested exit follows now, if the request has a deadline: all work before it is done."""
        exit_ = self._context.instructions.exit
        if exit_ is not None and exit_.within_s is not None:
            self._context.tell(Lapsed())
            self._context.close()


def _pin(slot: int | None, threads: int) -> None:
    """Bind this worker to its own CPU cores, or log the reason why not."""
    reason = "no pool has assigned a slot" if slot is None else cpu.pin(slot, threads)
    if reason:
        _log.warning("--pin: this worker is not bound to its own CPU cores: %s", reason)
