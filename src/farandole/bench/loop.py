"""The loop of a bench: times the run's own steps, and steps of other contestants with the same micro-batches.

    get ready   a few steps of the run, and one step *aside*, which finds out if DistributedDataParallel can be used
    a round     exchanges that overlap with no computation; then a block of steps for each contestant
        farandole   the run's own next steps, as they are without a bench
        others      the script computes the micro-batches of these steps *aside*: with plain accumulation, alone or
                    under DistributedDataParallel (`plain_step.py`, `ddp.py`), and its own update
    the end     the measurements are in the worker's log; the worker waits until `farandole bench` ends it

All workers run the same contestant's block at the same time, since they synchronize before each block. Within a block
workers only wait as the contestant itself does. The clock runs from the script's request for a step to its next
request. Not counted: the first steps of each block, and steps of the run that end an epoch, since they may be short and
an evaluation may follow.

Invariant: steps aside leave no trace in the run. State, random state and hooks are restored, so the digests stay equal
and the weights are those of a run without a bench. State that the script itself keeps is not restored.

`farandole bench scaling` measures with `ScaledBench`: the same loop, whose batch follows the number of workers.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, cast

import torch

from farandole.bench import terms as bench
from farandole.bench.ddp import Ddp, Trial, connect
from farandole.bench.plain_step import Ahead, Plain, PlainStep, Way
from farandole.bench.scaling import batch_in, samples_of
from farandole.bench.stopwatch import Stopwatch, TimedGradients, clock
from farandole.bench.terms import DDP, FARANDOLE, BenchFinished, BenchTerms, Block, Exchanges, Record, RunFacts, Unfit
from farandole.collective.buckets import Layout, Partials
from farandole.collective.schedule import COMMIT, order
from farandole.control.run_folder import BENCH
from farandole.data.loader import Key, Loader
from farandole.data.order import keep_random_state
from farandole.errors import FarandoleError, UsageError
from farandole.plan.shards import advance, window
from farandole.platform import files
from farandole.protocol.values import StepTime
from farandole.training.loop import Loop, use
from farandole.training.progress import Length
from farandole.training.replica import Replica
from farandole.training.step import Step
from farandole.worker.context import WorkerContext
from farandole.worker.rounds import Rounds, task

GROUP = "group"  # the file through which DistributedDataParallel's workers find each other
EXCHANGES = 8  # exchanges in a round that overlap with no computation; the first ones are not counted


def begin(text: str) -> None:
    """Make this process measure with one of the loops below, by the terms in `text`."""
    terms = bench.terms_of(text)
    use(partial(ScaledBench if terms.mode else Bench, terms=terms))


class Bench(Loop):
    """The bench of one worker."""

    def __init__(
        self, replica: Replica, loader: Loader, length: Length, context: WorkerContext, rounds: Rounds, *,
        terms: BenchTerms, folder: Path | None, device: torch.device, **other: Any,
    ) -> None:  # fmt: skip
        if loader.batches:
            raise UsageError(
                f"farandole bench: the loader has a batch sampler with {loader.batches} batches, and steps of several "
                f"sizes can't be compared; give the script a batch of constant size, farandole.GlobalBatch"
            )
        self._watch = watch = Stopwatch(loader, replica.objects.values())
        super().__init__(
            replica, loader, length, context, rounds, folder=folder, device=device,
            gradients=partial(TimedGradients, watch=watch), **other,
        )  # fmt: skip
        context.shard_timer = watch
        self._terms, self._folder, self._device = terms, folder, device
        self._members: tuple[str, ...] = ()
        self._meeting = Partials(Layout([], lanes=1))
        self._contestants: tuple[str, ...] = terms.contestants
        self._model: torch.nn.Module | None = None  # the model that runs under DistributedDataParallel
        self._group: Any = None
        self._last: Step  # the newest step of the run

    def steps(self) -> Iterator[Step]:
        """Yield the run's steps, and between them those of the other contestants, until all is measured."""
        terms, steps = self._terms, super().steps()
        yield from self._get_ready(steps)
        for round_ in range(terms.rounds):
            ahead = self._ahead(terms.warmup + terms.steps)
            if len(self._members) > 1:
                exchanges = [self._exchange() for _ in range(EXCHANGES)]
                all_reduces = [self._all_reduce() for _ in range(EXCHANGES if self._group else 0)]
                self._write(
                    Exchanges(
                        round=round_, seconds=tuple(exchanges[terms.warmup :]),
                        all_reduces=tuple(all_reduces[terms.warmup :]),
                    )
                )  # fmt: skip
            for contestant in terms.order(self._contestants, round_):
                if contestant == FARANDOLE:
                    yield from self._block(contestant, round_, self._own(steps))
                elif contestant in self._contestants:
                    yield from self._run_contestant(contestant, round_, ahead)
        self._write(BenchFinished())
        self._rounds.obey_until_goodbye()

    def end(self) -> tuple[str, StepTime]:
        raise UsageError(
            f"the script's loop ended after {self.progress.after.step} steps, before all was measured; let it train "
            f"for longer (by its own arguments), or {self._remedy}"
        )

    @property
    def _remedy(self) -> str:
        """What to do about a loop that is too short."""
        return f"reduce --steps {self._terms.steps} or --rounds {self._terms.rounds}"

    # --- measurements ---------------------------------------------------------------------------------------

    def _get_ready(self, steps: Iterator[Step]) -> Iterator[Step]:
        own = self._own(steps)
        for _ in range(self._terms.warmup):
            yield next(own)
        if DDP not in self._contestants:
            return
        trial = Trial(self.replica.objects)
        [ahead] = self._ahead(1)
        with self._put_aside([ahead]), trial.around():
            yield self._plain(ahead, trial)
        if self._fit(trial.reason):
            [self._model] = trial.models.values()
            rank, size = self._rounds.view.rank(self._context.worker), len(self._members)
            assert self._folder is not None, "all workers are on the host of the run's folder"
            files.make(self._folder / BENCH)
            try:
                self._group = connect(self._folder / BENCH / GROUP, rank, size, self._device)
            except RuntimeError as error:
                trial.reason = f"its workers can't connect: {error}"
            self._fit(trial.reason)

    def _run_contestant(self, contestant: str, round_: int, ahead: list[Ahead]) -> Iterator[Step]:
        with self._put_aside(ahead):
            way = Ddp(self._model, self._group) if contestant == DDP and self._model else Plain()
            with way.around():
                yield from self._block(contestant, round_, (self._plain(each, way) for each in ahead))
        self._fit(way.reason)

    def _block(self, contestant: str, round_: int, steps: Iterator[Step]) -> Iterator[Step]:
        """Yield as many of `steps` as the block takes, and measure them."""
        self._meet()
        spent: list[bench.StepSeconds] = []
        samples = 0
        for number in count():
            self._watch.begin()
            step = next(steps)
            counts = not step.ends_epoch or step.samples == self._loader.epoch_samples
            yield step
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            if number >= self._terms.warmup and counts:
                spent.append(self._watch.end())
                samples = step.samples
            if len(spent) == self._terms.steps:
                break
        self._write(Block(round=round_, contestant=contestant, samples=samples, spent=tuple(spent)))

    def _exchange(self) -> float:
        """Return the seconds of an exchange of zeros without any computation, from this worker's last sum on."""
        rounds, partials = self._rounds, self.gradients.partials
        rounds.begin(task(partials, lambda workers: workers, self.number, "an exchange of a bench"))
        partials.complete = _keep
        for shard in rounds.todo():
            partials.open(shard, last=True)
            partials.close(torch.zeros(partials.layout.lanes, dtype=torch.float64))
        partials.wait_until_quantized()
        began = clock()
        rounds.submit_all()
        self._finish()
        return clock() - began

    def _all_reduce(self) -> float:
        """Return the seconds of an all-reduce of Gloo, with as many bytes."""
        layout = self.gradients.layout
        flats = [torch.zeros(b.numel, dtype=b.dtype, device=b.device) for b in layout.buckets]
        self._meet()
        began = clock()
        for work in [self._group.allreduce([flat]) for flat in flats]:
            work.wait()
        return clock() - began

    # --- steps -----------------------------------------------------------------------------------------------

    def _own(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Yield the run's steps, one after the other."""
        for step in steps:
            self._enter(step)
            self._last = step
            yield step
        self.end()

    def _enter(self, step: Step) -> None:
        if not self._members:
            self._members = self._rounds.view.members if step.number == 0 else ()
            if self.progress.total < self._terms.least:
                raise UsageError(
                    f"the script's loop has {self.progress.total} steps, but the bench needs {self._terms.least}: let "
                    f"it train for longer (by its own arguments), or {self._remedy}"
                )
        self._look_round()

    def _plain(self, ahead: Ahead, way: Way) -> Step:
        parameters, loader, watch = self.gradients.parameters, self._loader, self._watch
        return cast("Step", PlainStep(self._last, ahead, way, loader=loader, parameters=parameters, watch=watch))

    def _ahead(self, steps: int) -> list[Ahead]:
        """Return the micro-batches of the run's next `steps` whole steps."""
        progress, loader, view = self.progress, self._loader, self._rounds.view
        lineage, position, result = view.lineage(view.members), progress.after, list[Ahead]()
        while len(result) < steps:
            batch_window = window(position, loader.epoch_samples, progress.whole, loader.batch.micro)
            own = lineage.assign(batch_window.shards).get(self._context.worker, ())
            keys = [
                Key(epoch=position.epoch, step=position.step, shard=shard, start=start, stop=stop)
                for shard, (start, stop) in ((shard, batch_window.shard(shard)) for shard in own)
            ]
            if batch_window.samples == progress.whole:
                result.append(Ahead(keys=tuple(keys), samples=batch_window.samples))
            position = advance(position, batch_window, loader.epoch_samples)
        return result

    @contextmanager
    def _put_aside(self, ahead: list[Ahead]) -> Generator[None]:
        """Restore the run's state at the end of the context, so that the steps in it leave no trace in the run."""
        self.replica.keep_buffers()
        state, rates = deepcopy(self.replica.state()), deepcopy(self.learning_rate.state())
        random_state, attributes = keep_random_state(), self.state.attributes.put_back()
        self.gradients.unhook()
        self._loader.expect(chain.from_iterable(each.keys for each in ahead))
        try:
            yield
        finally:
            self.gradients.clear()
            self.gradients.hook()
            self.replica.load(state)
            self.learning_rate.load(rates)
            attributes()
            random_state()
            self._expect()

    # --- with the others -------------------------------------------------------------------------------------

    def _fit(self, reason: str) -> bool:
        """Return True if DistributedDataParallel can be used: no worker has given a `reason` against it."""
        if reason:
            self._write(Unfit(reason=reason))
        if self._meet(float(bool(reason))):
            self._contestants = tuple(name for name in self._contestants if name != DDP)
        return DDP in self._contestants

    def _meet(self, value: float = 0.0) -> float:
        """Wait until all workers have called this. Returns the sum of their values."""
        rounds, partials = self._rounds, self._meeting
        rounds.begin(task(partials, lambda workers: workers, self.number, "a block of a bench"))
        for shard in rounds.todo():
            rounds.open(shard)
            partials.close(torch.tensor([value], dtype=torch.float64))
            rounds.close(shard)
        self._finish()
        return float(rounds.reduced()[0][0])

    def _finish(self) -> None:
        while not self._rounds.wait_for_round_end():
            self._look_round()
        self._look_round()

    def _look_round(self) -> None:
        """Raise FarandoleError if the workers are no longer those at the start of the bench."""
        now = self._rounds.view.members
        if now != self._members or len(now) != self._terms.workers:
            raise FarandoleError(
                "a worker was lost during the measurement, so the figures can't be compared; run the bench again"
            )

    def _write(self, record: Record) -> None:
        bench.write(record)


class ScaledBench(Bench):
    """The bench of one worker of `farandole bench scaling`: its batch follows the number of workers by `terms.mode`.

    Raises:
        UsageError: the dataset has fewer samples than a step needs.
    """

    def __init__(
        self, replica: Replica, loader: Loader, length: Length, *others: Any, terms: BenchTerms, **options: Any
    ) -> None:  # fmt: skip
        assert terms.mode is not None
        self._samples = samples_of(
            epochs=length.epochs, base_steps=length.base_steps, epoch_samples=loader.epoch_samples,
            base=loader.batch.base,
        )  # fmt: skip
        if not loader.batches:  # `Bench` refuses those of a batch sampler
            loader.batch = batch_in(terms.mode, loader.batch, terms.workers)
        batch = loader.batch
        if terms.mode == "weak" and batch.samples(terms.workers) > loader.epoch_samples:
            raise UsageError(
                f"--mode weak: {terms.workers} workers take {batch.samples(terms.workers)} samples a step, but the "
                f"dataset has {loader.epoch_samples}; use a larger dataset, fewer --workers, or --mode strong"
            )
        super().__init__(replica, loader, length, *others, terms=terms, **options)

    @property
    def _remedy(self) -> str:
        larger = f", or leave out {self._terms.workers} --workers" if self._terms.mode == "weak" else ""
        return f"reduce --steps {self._terms.steps}{larger}"

    def _get_ready(self, steps: Iterator[Step]) -> Iterator[Step]:
        ready = super()._get_ready(steps)
        first = next(ready)
        began = time.time()
        yield first
        yield from ready
        shards = -(-self.progress.whole // self._loader.batch.micro)
        self._write(
            RunFacts(began=began, shards=shards, samples=self._samples, sent_bytes=self._sent_bytes(shards))
        )  # fmt: skip

    def _sent_bytes(self, shards: int) -> int:
        """Return the bytes of sums that this worker sends in a step of `shards` micro-batches."""
        view, buckets = self._rounds.view, self.gradients.layout.buckets
        if view.size == 1:
            return 0
        messages = order(view, self._context.worker, buckets, shards, view.lineage(view.members))
        sent = messages.unsent([False] * len(buckets), 0)
        return sum((m.stop - m.start) * buckets[m.bucket].dtype.itemsize for m in sent if m.kind != COMMIT)


def _keep(bucket: int) -> None:
    """Do nothing with a full bucket: it is submitted later."""
    del bucket
