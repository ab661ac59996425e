"""The loop behind `run.steps`: what happens at the beginning and the end of each step, in which order.

    1. A worker's first step is begun by `Rounds.enter`, with the state that others hold, or as the first of the run.
    2. *Begin* a step: frozen parameters lose their buckets, gradients are cleared, and buffers are kept, so that the
       state is that of the step's beginning from here on. Only then the round begins, in which an agreed view takes
       effect and the state may go to joiners; with it the window of samples is known. Then a checkpoint is copied, if
       one is due: what it holds is what a joiner of this step is handed.
    3. The loop body begins with random state from (seed, step): a joiner and a resumed run, which begin with this step,
       draw there what everybody draws. Then the script computes, in the step's inner loop (`step.py`). As it begins,
       torch's settings are looked at: what the script has altered is told. With its end the gradient is there.
    4. *End* the step: a loss that is not finite may end the run, before any update; then the state is whole no more,
       for the update comes next; then the rule gets this step's factor, before `optimizer.step()` asks for it; then the
       ledger and the metrics have their lines.
    5. Whatever the script does next changes the state, until the next step begins, or the run is over.

All of it is built whole before the worker asks to be let in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from farandole.data.ledger import Ledger
from farandole.data.loader import Loader
from farandole.data.order import derive, set_random_state
from farandole.errors import StepAbandoned
from farandole.plan.shards import Position
from farandole.platform.process import guarded
from farandole.protocol.messages import Checkpoints, Line, Metrics, SettingChanged, StepTime
from farandole.protocol.values import throughput
from farandole.protocol.worker.driver import Task
from farandole.training import run_state
from farandole.training.gradients import Gradients
from farandole.training.learning_rate import learning_rate_of
from farandole.training.progress import Length, Progress
from farandole.training.replica import Replica
from farandole.training.run_state import RunState, signature
from farandole.training.step import Guard, Step, StepClock
from farandole.worker.participant import Participant
from farandole.worker.rounds import Rounds, step_task

# --- lines ------------------------------------------------------------------------------------------------------------
#
# The lines of metrics that a worker writes: in which order they stand, and by what the copies of one are known.
#
# Every worker makes every line, and one of them is heard. Lines stand in the order of (step, index), and the
# coordinator leaves out what is not beyond the newest that it has. So a step's own line, index 0, goes before
# whatever is logged between the step's beginning and the next one's: what is logged before the exchange is over waits
# for it here.


class MetricLines:
    """Of one worker, on the thread of its script."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._logged = 0  # since the step in hand began
        self._early: list[Line] = []

    def begin(self) -> None:
        """A step begins."""
        self._logged = 0
        self._early.clear()

    def log(self, step: int, fields: Mapping[str, float | int | bool | str], *, early: bool) -> None:
        """`early`: the step's exchange is not over yet.

        Raises:
            UsageError: what can't be a line of metrics.
        """
        line = Line(step=step, index=self._logged + 1, fields=fields)
        self._logged += 1
        if early:
            self._early.append(line)
        else:
            self._participant.add_line(line)

    def step_ended(self, step: int, fields: Metrics) -> None:
        for line in (Line(step=step, index=0, fields=fields), *self._early):
            self._participant.add_line(line)
        self._early.clear()


# --- loop -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
WARM_S = 20.0  # that a joiner waits at most for data to be near, while the others go on without it
Phase = Literal["entering", "within", "between", "over"]


class Loop:
    """Of one worker.

    Attributes:
        phase: `entering` until the first step has begun; `within` a step's inner loop; `between` its end and the next
            one's beginning; `over` when there is no next one.
        replica: what is trained.
        state: the run's state, as this worker holds it.
        progress: where the run is.
        learning_rate, gradients: of the step in hand.
        lines: of metrics.
        clock: of the steps' time.
    """

    def __init__(
        self, replica: Replica, loader: Loader, length: Length, participant: Participant, rounds: Rounds, *,
        device: torch.device, seed: int, folder: Path | None, ledger: Ledger | None, checkpoints: Checkpoints,
        stop_on_nan: bool, bits: str, gradients: Callable[..., Gradients] = Gradients,
    ) -> None:  # fmt: skip
        guarded(self)
        self.replica = replica
        self._loader, self._participant, self._rounds = loader, participant, rounds
        self._seed, self._ledger = seed, ledger
        self.phase: Phase = "entering"
        self.lines = MetricLines(participant)
        self.clock = StepClock(participant.meter)
        self.learning_rate = learning = learning_rate_of(loader.batch, replica.objects)
        self.gradients = gradients(replica, memory=participant.memory, measures_noise=learning.measures_noise)
        gains = (lambda: (learning.gains_before, learning.gains)) if learning.counts_gains else None
        self.progress = Progress(loader, length, participant.workers_at, gains)
        self._guard = Guard(
            replica, self.progress, entered=lambda: self.phase != "entering", within=lambda: self.within
        )
        replica.keep_buffers()
        self._signature = signature(device, loader, length, replica)
        self.state = RunState(
            replica, participant, checkpoints, folder=folder, seed=seed, signature=self._signature,
            over=self.progress.over, ledger=ledger, learning_rate=learning, stop_on_nan=stop_on_nan,
            bits=bits,
        )  # fmt: skip

    @property
    def number(self) -> int:
        """Of the step in hand, from 0."""
        return self.progress.position.step

    @property
    def within(self) -> bool:
        """Whether the inner loop of the step in hand has not ended."""
        return self.phase == "within"

    def steps(self) -> Iterator[Step]:
        """Be let in, and give one step after the other. See `Run.steps`."""
        rounds, participant, state = self._rounds, self._participant, self.state
        rounds.layout, rounds.replan = self.gradients.layout, self._expect
        run_state.touch(self.replica.moment_bytes + sum(p.nbytes for p in self.gradients.parameters))
        self.gradients.partials.warm()
        participant.make_room(self.replica.most_bytes)
        self._loader.warm(WARM_S if participant.joins else 0.0)
        participant.ask_in(self._signature, state.unreached())
        rounds.enter(state.take, self._first, state.checkpoint, state.restore, len(self.gradients.parameters))
        _log.info(
            "begins with step %d of epoch %d, in view %d", self.number, self.progress.position.epoch, rounds.view.number
        )
        while True:
            self._loader.enter(self.progress.position.epoch)
            step = self._step()
            set_random_state(derive(self._seed, "step", step.number))  # nothing draws between here and the body
            yield step
            if not step.ended:
                raise StepAbandoned(
                    f"step {step.number}: its inner loop was left before its end, so its gradients are incomplete; "
                    f"iterate over all of the step's micro-batches"
                )
            if self.progress.following is None:
                self._look()
                self.replica.check_forms()
                self.phase = "over"
                return
            self._begin(self.progress.following)

    def _expect(self) -> None:
        """The shards of this worker are others than before: the loader fetches those."""
        mine, view = self._rounds.todo(), self._rounds.view
        self._loader.expect(self.progress.upcoming(self._participant.worker, view.lineage(view.members), mine))

    # --- at a step's beginning and end -----------------------------------------------------------------------

    def _first(self, position: Position, flags: Sequence[bool] | None) -> Task:
        """The step in which this worker enters. `flags`: the others' requires_grad; None: it begins the run."""
        if flags is None:
            self.state.begin_run(position)
        else:
            for parameter, flag in zip(self.gradients.parameters, flags, strict=True):
                parameter.requires_grad_(flag)
        return self._task(position)

    def _begin(self, position: Position) -> None:
        self._rounds.begin(self._task(position))
        self._rounds.meter.enter("save")
        self.state.checkpoint()
        self._rounds.meter.enter("compute")

    def _task(self, position: Position) -> Task:
        """The step at `position`, which is about to begin."""
        self._rounds.check_sums()
        self._look()
        if self.gradients.refresh():
            self._rounds.layout = self.gradients.layout
        self.gradients.clear()
        self.state.begin(position)
        self._participant.epoch = position.epoch
        return step_task(self.gradients.partials, lambda workers: self.progress.enter(position, workers), position)

    def _look(self, *, whole: bool = True) -> None:
        """Follow what the script has replaced since the last look. See `Replica.look`."""
        if self.replica.look(whole=whole):
            self.gradients.follow()

    def _step(self) -> Step:
        """The step that has begun: only after any idle rounds is it known which samples it takes."""
        self.state.began(self._rounds.workers)
        self.lines.begin()
        self.clock.begin()
        self.phase = "within"
        return Step(
            progress=self.progress, gradients=self.gradients, rounds=self._rounds, loader=self._loader, seed=self._seed,
            ledger=self._ledger, on_begin=self._inner_loop_begins, on_end=self._end,
        )  # fmt: skip

    def _inner_loop_begins(self) -> None:
        self.state.attributes.shards_begin()
        self._look(whole=False)
        for name, before, now in self.state.settings.look():
            self._participant.tell(SettingChanged(step=self.number, setting=name, before=before, now=now))

    def _end(self, step: Step) -> None:
        self.replica.stays()
        self.phase = "between"
        self.state.attributes.shards_end()
        if step.skipped < step.samples and not self.state.judge(step.number, step.loss):
            self._rounds.obey_until_goodbye()
        self.state.whole = False
        self.state.parts.updated(self._rounds.view, self.gradients.layout, step.number)
        self.learning_rate.step_ended(step.samples, self.progress.whole, self.gradients.noise)
        if self._ledger:
            held = self._rounds.lineage.assign(self.progress.window.shards)
            shards = {shard: worker for worker, mine in held.items() for shard in mine}
            self._ledger.committed(epoch=step.epoch, step=step.number, shards=shards)
        self.lines.step_ended(step.number, self._metrics(step))
        _log.debug("step %d of %d samples has ended, loss %g", step.number, step.samples, step.loss)

    def _metrics(self, step: Step) -> Metrics:
        took = self.clock.end()
        return Metrics(
            epoch=step.epoch, samples=step.samples, loss=step.loss,
            samples_per_s=throughput(step.samples, took.seconds), view=step.view.number, workers=self._rounds.workers,
            time=time.time(), total=self.progress.total, skipped=step.skipped, left_out=step.left_out,
            learning_rate=self.learning_rate.learning_rate, factor=round(self.learning_rate.factor, 6),
            **msgspec.structs.asdict(took),
        )  # fmt: skip

    # --- the end ---------------------------------------------------------------------------------------------

    def end(self) -> tuple[str, StepTime]:
        """The script has ended: the state is that after the step in hand, whole. Gives its fingerprint, and the time
        since that step.
        """
        after = self.clock.end()
        self._look()
        self.replica.check_forms()
        self._rounds.end()
        self._rounds.check_sums()
        self.state.begin(self.progress.after)
        return self.replica.fingerprint(), after


_new_loop: Callable[..., Loop] = Loop


def use(factory: Callable[..., Loop]) -> None:
    """Have `factory` make the loops of this process from now on. It takes the arguments of `Loop`."""
    global _new_loop
    _new_loop = factory


def new_loop(*arguments: Any, **options: Any) -> Loop:
    """The loop of this process: a `Loop`, or what `use` has named."""
    return _new_loop(*arguments, **options)
