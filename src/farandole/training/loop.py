"""The loop of `run.steps`: the order of actions at the beginning and at the end of each step.

    1. `Rounds.enter` begins a worker's first step, with the state of the other workers, or as the first of the run.
    2. *Begin* a step: frozen parameters lose their buckets, gradients are cleared, and copies of buffers are taken, so
       that from here on the state is the state at the step's beginning. Only then the round begins. In it an agreed
       view takes effect, and joiners may receive the state; from then on the window of samples is known. Then a
       checkpoint is copied, if one is due: it contains the state that a joiner of this step receives.
    3. The loop body begins with random state from (seed, step). So a joiner and a resumed run, which begin with this
       step, draw the same random numbers in it as all others. Then the script computes, in the step's inner loop
       (`step.py`). When the inner loop begins, torch's settings are checked, and changes by the script are reported.
       When it ends, the gradient is available.
    4. *End* the pass: a loss that is not finite may end the run, before any update. Then the state is no longer that of
       a whole step, because the update comes next. Then the rule computes this step's factor, which `optimizer.step()`
       uses. Then the ledger and the metrics get their lines. The script may begin another pass over the same batch
       (`Step.again`): a round of its own, with a gradient of its own. The factor and the lines are those of the first
       pass with a gradient.
    5. The script's next actions change the state, until the next step begins or the run ends.

All objects are complete before the worker requests admission.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch

from farandole.collective.codec import CODECS
from farandole.data.ledger import Ledger
from farandole.data.loader import Loader
from farandole.data.order import derive, set_random_state
from farandole.errors import StepAbandoned, UsageError
from farandole.plan.shards import Position
from farandole.platform.process import guarded
from farandole.protocol.messages import Checkpoints, Line, Metrics, SettingChanged, StepTime
from farandole.protocol.values import throughput
from farandole.protocol.view import Lineage
from farandole.protocol.worker.driver import Task
from farandole.training import run_state
from farandole.training.gradients import Gradients
from farandole.training.learning_rate import learning_rate_of
from farandole.training.progress import Length, Progress
from farandole.training.replica import Replica
from farandole.training.run_state import RunState, signature
from farandole.training.step import Guard, Once, Step, StepClock, Work
from farandole.worker.context import WorkerContext
from farandole.worker.rounds import Rounds, step_task

# --- lines ------------------------------------------------------------------------------------------------------------
#
# The lines of metrics that a worker sends: their order, and how the coordinator recognises copies.
#
# Every worker produces every line, and the coordinator writes one copy. Lines are ordered by (step, index), and the
# coordinator drops a line that is not after the newest line that it has. A step's own line has index 0, so it goes
# before all lines that the script logs between this step's beginning and the next one's. Lines that the script logs
# before the gradient of the step's first pass is there wait here for it.


class MetricLines:
    """The metric lines of one worker. Used on the script's thread."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._logged = 0  # lines since the current step began
        self._early: list[Line] | None = None  # lines that wait for the step's own; None if that is sent

    def begin(self) -> None:
        """Reset for a step that begins."""
        self._logged = 0
        self._early = []

    @property
    def step_is_written(self) -> bool:
        """True if the current step's own line is sent."""
        return self._early is None

    def log(self, step: int, fields: Mapping[str, float | int | bool | str]) -> None:
        """Send a line of the script. It waits for the step's own line if that is not sent yet.

        Raises:
            UsageError: the fields can't be a line of metrics.
        """
        line = Line(step=step, index=self._logged + 1, fields=fields)
        self._logged += 1
        if self._early is not None:
            self._early.append(line)
        else:
            self._context.add_line(line)

    def step_ended(self, step: int, fields: Metrics) -> None:
        """Send the step's own line, then the lines that waited for it."""
        for line in (Line(step=step, index=0, fields=fields), *(self._early or ())):
            self._context.add_line(line)
        self._early = None


# --- loop -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
WARM_S = 20.0  # seconds that a joiner waits at most for its first data, while the others train on
T = TypeVar("T")
Phase = Literal["entering", "within", "between", "over"]


class Loop:
    """The training loop of one worker.

    Attributes:
        phase: `entering` until the first step has begun; `within` a step's inner loop; `between` the inner loop's end
            and the next step's beginning; `over` after the last step.
        replica: the trained objects.
        state: this worker's copy of the run's state.
        progress: the run's position.
        learning_rate, gradients: those of the current step.
        lines: the metric lines.
        clock: the time of the steps.
        step_class: the class of the steps.
    """

    step_class: type[Step] = Step

    def __init__(
        self, replica: Replica, loader: Loader, length: Length, context: WorkerContext, rounds: Rounds, *,
        device: torch.device, seed: int, folder: Path | None, ledger: Ledger | None, checkpoints: Checkpoints,
        stop_on_nan: bool, bits: str, codec: str, gradients: Callable[..., Gradients] = Gradients,
    ) -> None:  # fmt: skip
        guarded(self)
        self.replica = replica
        self._loader, self._context, self._rounds = loader, context, rounds
        self._seed, self._ledger = seed, ledger
        self.phase: Phase = "entering"
        self._current: Step | None = None
        self.lines = MetricLines(context)
        self.clock = StepClock(context.meter)
        self.learning_rate = learning = learning_rate_of(loader.batch, replica.objects)
        self.gradients = gradients(
            replica, memory=context.memory, measures_noise=learning.measures_noise, codec=CODECS[codec]
        )
        gains = (lambda: (learning.gains_before, learning.gains)) if learning.counts_gains else None
        self.progress = Progress(loader, length, context.workers_at, gains)
        self._guard = Guard(
            replica, self.progress, entered=lambda: self.phase != "entering", within=lambda: self.within,
            gave=self.gradients.gave,
        )  # fmt: skip
        replica.keep_buffers()
        self._signature = signature(device, loader, length, replica)
        self.state = RunState(
            replica, context, checkpoints, folder=folder, seed=seed, signature=self._signature,
            over=self.progress.over, ledger=ledger, learning_rate=learning, stop_on_nan=stop_on_nan,
            bits=bits,
        )  # fmt: skip

    @property
    def number(self) -> int:
        """The current step's number, from 0."""
        return self.progress.position.step

    @property
    def within(self) -> bool:
        """True until the inner loop of the current step has ended."""
        return self.phase == "within"

    def steps(self) -> Iterator[Step]:
        """Join the view, and yield the steps. See `Run.steps`."""
        rounds, context, state = self._rounds, self._context, self.state
        rounds.layout, rounds.replan = self.gradients.layout, self._expect
        run_state.touch(self.replica.moment_bytes + sum(p.nbytes for p in self.gradients.parameters))
        self.gradients.partials.warm()
        context.make_room(self.replica.most_bytes)
        self._loader.warm(WARM_S if context.joins else 0.0)
        context.ask_in(self._signature, state.unreached())
        rounds.enter(state.take, self._first, state.checkpoint, state.restore, len(self.gradients.parameters))
        _log.info(
            "begins with step %d of epoch %d, in view %d", self.number, self.progress.position.epoch, rounds.view.number
        )
        while True:
            self._loader.enter(self.progress.position.epoch)
            step = self._step()
            set_random_state(derive(self._seed, "step", step.number))  # no random draw happens before the loop body
            yield step
            if step.ended and not self.lines.step_is_written:
                raise UsageError(
                    f"step {step.number}: none of its passes has a gradient; call step.backward(loss) once for each "
                    f"micro-batch in one of them"
                )
            if not step.ended:
                raise StepAbandoned(
                    f"step {step.number}: its inner loop was left before its end, so its gradients are incomplete; "
                    f"iterate over all of the step's micro-batches"
                )
            self._guard.look_for_updates()
            if self.progress.following is None:
                self._find_replaced_tensors()
                self.replica.check_forms()
                self.phase = "over"
                return
            self._begin(self.progress.following)

    def _expect(self) -> None:
        """Have the loader fetch this worker's shards, after these have changed."""
        mine, view = self._rounds.todo(), self._rounds.view
        self._loader.expect(self.progress.upcoming(self._context.worker, view.lineage(view.members), mine))

    # --- at a step's beginning and end -----------------------------------------------------------------------

    def _first(self, position: Position, flags: Sequence[bool] | None) -> Task:
        """Return the task of this worker's first step.

        `flags`: the requires_grad of the others' parameters; None if this worker begins the run.
        """
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
        """Prepare the step at `position`, which begins next, and return its task."""
        self._rounds.check_sums()
        self._find_replaced_tensors()
        if self.gradients.refresh():
            self._rounds.layout = self.gradients.layout
        self.gradients.clear()
        self.state.begin(position)
        self._context.epoch = position.epoch
        return step_task(self.gradients.partials, lambda workers: self.progress.enter(position, workers), position)

    def _find_replaced_tensors(self, *, whole: bool = True) -> None:
        """Find and adopt tensors that the script has replaced since the last check. See `Replica.look`."""
        if self.replica.look(whole=whole):
            self.gradients.follow()

    def _step(self) -> Step:
        """Return the step that has begun. Its samples are known only after all idle rounds."""
        self.state.began(self._rounds.workers)
        self.lines.begin()
        self.clock.begin()
        self.phase = "within"
        self._current = step = self.step_class(
            progress=self.progress, gradients=self.gradients, rounds=self._rounds, loader=self._loader, seed=self._seed,
            ledger=self._ledger, on_begin=self._inner_loop_begins, on_end=self._inner_loop_ends,
        )  # fmt: skip
        return step

    def _inner_loop_begins(self, step: Step) -> None:
        if step is not self._current or self.phase == "over":
            raise UsageError(
                f"step {step.number}: step.again() after the step is over; call it in the body of the run.steps loop, "
                f"for the step in hand"
            )
        if self._rounds.in_once:
            raise UsageError("step.again within run.once: all workers must call it; move it out of the `with` block")
        if self.phase == "between":  # another pass
            self._rounds.check_sums()
            self.phase = "within"
        self.state.attributes.shards_begin()
        self._find_replaced_tensors(whole=False)
        for name, before, now in self.state.settings.look():
            self._context.tell(SettingChanged(step=self.number, setting=name, before=before, now=now))

    def _inner_loop_ends(self, step: Step, lineage: Lineage, *, has_gradient: bool) -> None:
        self.replica.stays()
        self.phase = "between"
        self.state.attributes.shards_end()
        if not has_gradient:
            return
        self._guard.gradients_are_there()
        if step.skipped < step.samples and not self.state.judge(step.number, step.loss):
            self._rounds.obey_until_goodbye()
        self.state.at_step_start = False
        self.state.parts.updated(self._rounds.view, self.gradients.layout, step.number)
        if not self.lines.step_is_written:
            self._count(step, lineage)

    def _count(self, step: Step, lineage: Lineage) -> None:
        """Count the step, after its first pass with a gradient: in the rule, in the ledger and in the metrics.

        `lineage`: that of the first pass. Rounds after it deal the shards otherwise if a worker has joined or was lost.
        """
        self._guard.step_ended()
        self.learning_rate.step_ended(step.samples, self.progress.whole, self.gradients.noise)
        if self._ledger:
            assignment = lineage.assign(self.progress.window.shards)
            shards = {shard: worker for worker, mine in assignment.items() for shard in mine}
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

    # --- between two steps -----------------------------------------------------------------------------------

    def evaluate(self, evaluation: Callable[[], T]) -> T:
        """Return the result of `evaluation`, which runs forward passes."""
        with self.clock.count_separately("evaluation"), self.state.attributes.forward_passes():
            return evaluation()

    def work(self, once: Once) -> AbstractContextManager[Work]:
        """Return the context manager of `Run.once`."""
        return once.work(self.replica, self.state.attributes, self.number, self.clock)

    # --- the end ---------------------------------------------------------------------------------------------

    def end(self) -> tuple[str, StepTime]:
        """Finish after the script's end: the state is the whole state after the current step.

        Returns its fingerprint, and the time since that step.
        """
        after = self.clock.end()
        self._find_replaced_tensors()
        self.replica.check_forms()
        self._rounds.end()
        self._rounds.check_sums()
        self.state.begin(self.progress.after)
        return self.replica.fingerprint(), after


_new_loop: Callable[..., Loop] = Loop


def use(factory: Callable[..., Loop]) -> None:
    """Set the `factory` that creates the loops of this process from now on. It takes the arguments of `Loop`."""
    global _new_loop
    _new_loop = factory


def new_loop(*arguments: Any, **options: Any) -> Loop:
    """Create the loop of this process: a `Loop`, or an object of the factory that `use` has set."""
    return _new_loop(*arguments, **options)
