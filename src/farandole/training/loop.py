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

**Several loops.** A script may call `run.steps` again. A position has the loop's number and a digest of its data, batch
and length (`LoopStart`). Steps and epochs are numbered through all loops, so random state, history, ledger, lines of
metrics and names of checkpoints are unique. A loop's length is counted from its beginning.

A member that has ended a loop makes a `Loop` over the same objects. Buckets, lanes and the rule are new; the origin,
the history, the settings and the writer of checkpoints go on. It agrees with the others on the next loop in a round
without shards, whose call has the digest (`_agree_on`), and continues without another admission. If the loops differ,
or one script has ended, the run ends with an error. The round is no training step, so no view takes effect in it.

A worker that joins, or resumes, asks in at the script's first loop, and learns the run's loop from the position in the
state's header. If that is a later loop:

(a) It waits for the whole state and loads nothing. It is still a candidate: it has begun no round, and the others wait
    for its commit message.
(b) The loops before the run's yield nothing. The code between them runs. `run.evaluate` and `run.once` return what they
    have returned in the run, which is part of the state, and `run.log` does nothing. The random state after a loop is a
    function of (seed, loop).
(c) In the run's loop it compares the digests. If they differ, it leaves as a worker without data (`DataUnavailable`),
    and the run goes on. Otherwise it enters the view and loads the state.

If its view is withdrawn meanwhile, it waits for the next one in the run's loop. If the others have begun another loop,
the next header says so. If it takes longer than the stall limit, its peers report it and it is replaced. If the run
goes back to a checkpoint of an earlier loop, a worker beyond that loop can't go back: it ends as superseded. If all
workers die between two loops, the newest checkpoint is of the loop before, and what follows it is done again.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch

from farandole.collective.buckets import Layout, Partials
from farandole.collective.codec import CODECS
from farandole.data.ledger import Ledger
from farandole.data.loader import Loader
from farandole.data.order import derive, set_random_state
from farandole.errors import ShardError, StepAbandoned, UsageError
from farandole.plan.shards import LoopStart, Position
from farandole.platform.output import say
from farandole.platform.process import guarded
from farandole.protocol.messages import Checkpoints, Line, Metrics, SettingChanged, StepTime
from farandole.protocol.values import throughput
from farandole.protocol.view import Lineage, View
from farandole.protocol.worker.driver import LoopPassed, Task
from farandole.training import run_state
from farandole.training.gradients import Gradients
from farandole.training.learning_rate import learning_rate_of
from farandole.training.progress import Length, Progress
from farandole.training.replica import Replica
from farandole.training.run_state import RunState, behind, calls_between, facts_of_loop, signature
from farandole.training.step import Guard, Once, Step, StepClock, Work
from farandole.worker.context import WorkerContext
from farandole.worker.rounds import Rounds, step_task, task

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
Phase = Literal["entering", "within", "between", "over", "passed"]


class Loop:
    """The training loop of one worker.

    Attributes:
        phase: `entering` until the first step has begun; `within` a step's inner loop; `between` the inner loop's end
            and the next step's beginning; `over` after the last step; `passed` if the run is in a later loop.
        entered: True if this worker is in the run's view.
        left: True if the script has left the loop.
        passed: the view that this worker is proposed for, and the number of the run's loop, if that is a later one.
        replica: the trained objects.
        state: this worker's copy of the run's state.
        progress: the run's position.
        learning_rate, gradients: those of the current step.
        lines: the metric lines.
        clock: the time of the steps.
        step_class, progress_class: the classes of the steps and of the progress.
    """

    step_class: type[Step] = Step
    progress_class: type[Progress] = Progress

    def __init__(
        self, replica: Replica, loader: Loader, length: Length, context: WorkerContext, rounds: Rounds, *,
        device: torch.device, seed: int, folder: Path | None, ledger: Ledger | None, checkpoints: Checkpoints,
        stop_on_nan: bool, bits: str, codec: str, gradients: Callable[..., Gradients] = Gradients, start: int = 0,
        before: Loop | None = None,
    ) -> None:  # fmt: skip
        """`start`: the loop's number in the script; `before`: the loop before it, which the script has left."""
        guarded(self)
        self.replica = replica
        self._loader, self._context, self._rounds = loader, context, rounds
        self._seed, self._ledger = seed, ledger
        self.phase: Phase = "entering"
        self.entered = before is not None and before.entered
        self.left = False
        self.passed: tuple[View, int] | None = None
        if before is not None:
            before.hand_over(replica, loader)
        self._before = before
        self._forms = _forms(replica)
        self._has_asked = before is not None and before._has_asked
        self._run_loop = 0
        self._start = LoopStart(number=start, facts=digest_of(loader, length) if start else 0)
        self._length = length
        self._current: Step | None = None
        self.lines = MetricLines(context)
        self.clock = before.clock if before else StepClock(context.meter)
        self.learning_rate = learning = learning_rate_of(
            loader.batch, replica.objects, before.learning_rate if before else None
        )
        self.gradients = gradients(
            replica, memory=context.memory, measures_noise=learning.measures_noise, codec=CODECS[codec]
        )
        gains = (lambda: (learning.gains_before, learning.gains)) if learning.counts_gains else None
        self.progress = self.progress_class(loader, length, context.workers_at, gains)
        self._guard = Guard(
            replica, self.progress, entered=lambda: self.phase != "entering", within=lambda: self.within,
            gave=self.gradients.gave,
        )  # fmt: skip
        replica.keep_buffers()
        self._signature = signature(device, loader, length, replica)
        self.state = RunState(
            replica, context, checkpoints, folder=folder, seed=seed, signature=self._signature,
            over=self.progress.over, ledger=ledger, learning_rate=learning, stream=loader.stream,
            stop_on_nan=stop_on_nan, bits=bits, loop=self._start, before=before.state if before else None,
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
        """Join the view, or go on in it, and yield the steps. See `Run.steps`."""
        seed, number = self._seed, self._start.number  # in a forked child, what is asked of this loop is refused
        try:
            if self.entered:
                self._go_on()
            elif not self._join():
                return
            yield from self._steps()
        finally:
            self.left = True
            if not sys.is_finalizing():
                set_random_state(derive(seed, "after loop", number))

    def _join(self) -> bool:
        """Join the view. Returns False if the run is in a later loop of the script."""
        rounds, context, state = self._rounds, self._context, self.state
        rounds.serve(self.gradients.layout, self._expect)
        self.gradients.partials.warm()
        if not self._has_asked:
            self._has_asked = True
            run_state.touch(self.replica.moment_bytes + sum(p.nbytes for p in self.gradients.parameters))
            context.make_room(self.replica.most_bytes)
            self._loader.warm(WARM_S if context.joins else 0.0)
            context.ask_in(self._signature, state.unreached())
        parameters = len(self.gradients.parameters)
        try:
            rounds.enter(state.take, self._first, state.checkpoint, state.restore, parameters, self._is_later)
        except LoopPassed as passed:
            held = passed.arriving.state if passed.arriving else state.restored
            state.between = calls_between(held)
            self.phase = "passed"
            self.passed = passed.view, self._run_loop
            return False
        self.entered = True
        epoch, view = self.progress.position.epoch, rounds.view
        _log.info("begins with step %d of epoch %d, in view %d", self.number, epoch, view.number)
        if context.is_external:
            say(f"farandole: joined as {context.worker}, one of {len(view.members)} workers, at step {self.number}")
        return True

    def _is_later(self, position: Position) -> bool:
        """Return True if the run is in a later loop.

        Raises:
            WorkerSuperseded: the run is in an earlier loop.
            ShardError: this loop has other data, or another batch or length, than that of the others. The run goes on
                without this worker.
        """
        run, own = position.loop, self._start
        if run.number < own.number:
            raise behind()
        if run.number == own.number and run.facts != own.facts:
            raise ShardError(
                f"run.steps, loop {own.number} of the script: the run has other data, or another batch or length in "
                f"it than {_shown(self._loader, self._length)}; use the data and the arguments of the other workers"
            )
        self._run_loop = run.number
        return run.number > own.number

    def _go_on(self) -> None:
        """Begin the first step in the view that the last loop has ended in."""
        assert self._before is not None
        position = self._before.progress.after.next_loop(self._start.facts)
        self._rounds.check_sums()
        self._agree_on(position)
        self._rounds.serve(self.gradients.layout, self._expect)
        self.gradients.partials.warm()
        self._begin(position)

    def _agree_on(self, position: Position) -> None:
        """Agree with the other workers that this loop comes next: a round whose call they all compare."""
        what = f"run.steps, loop {self._start.number} of the script, of {_shown(self._loader, self._length)}"
        rounds = self._rounds
        rounds.begin(task(Partials(Layout([], 0)), lambda _: 0, position.step, f"{what} ({self._start.facts})"))
        while not rounds.wait_for_round_end():
            pass

    def leave(self) -> None:
        """Check that the script has left this loop, between two steps.

        Raises:
            StepAbandoned: it was left within a step.
            UsageError: the script is still in it, or has not begun it.
        """
        if not self.left:
            raise UsageError(
                "run.steps in the loop over run.steps, or before it: call it when the loop before has ended; if that "
                "was left by `break` and its iterator is kept in a variable, close it: steps.close()"
            )
        if self.within:
            raise StepAbandoned(
                f"step {self.number}: the loop was left before the step's inner loop had ended; leave it by `break` "
                f"after the inner loop"
            )

    def hand_over(self, replica: Replica, loader: Loader) -> None:
        """End all that acts on the objects of this loop, before another one begins with `replica` and `loader`.

        Raises:
            UsageError: tensors were added, removed or given other shapes.
        """
        then, now = self._forms, _forms(replica)
        for name in {**then, **now}:
            if then.get(name) != now.get(name):
                raise UsageError(
                    f"run.steps: {name} was {then.get(name, 'not there')} in the loop before, and is "
                    f"{now.get(name, 'not there')} now: all loops have the same tensors; make them before "
                    f"run.replicate, and freeze those that a loop does not train by requires_grad_(False)"
                )
        self.retire(loader)

    def retire(self, loader: Loader | None = None) -> None:
        """Let go of the script's objects. `loader`: what goes on to read, if it is this loop's."""
        self.gradients.unhook()
        self._guard.end()
        self.learning_rate.end()
        if loader is not self._loader:
            self._loader.close()

    def _steps(self) -> Iterator[Step]:
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
            if self._loader.stream is not None:
                self._loader.stream.learn([self._context.stream_mark])
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


def digest_of(loader: Loader, length: Length) -> int:
    """Return a digest of what must be equal in a loop on all workers: 53 bits, never 0."""
    text = "\n".join(f"{name}: {value}" for name, value in facts_of_loop(loader, length))
    return (int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "big") >> 11) or 1


def _shown(loader: Loader, length: Length) -> str:
    long = f"epochs={length.epochs}" if length.epochs else f"base_steps={length.base_steps}"
    return f"{loader.length:,} samples, batch={loader.batch!r}, {long}"


def _forms(replica: Replica) -> dict[str, str]:
    """Return the shapes and dtypes of all parameters and buffers, by name."""
    return {name: form for name, form in replica.facts() if name.startswith(("parameter ", "buffer "))}


_new_loop: Callable[..., Loop] = Loop


def use(factory: Callable[..., Loop]) -> None:
    """Set the `factory` that creates the loops of this process from now on. It takes the arguments of `Loop`."""
    global _new_loop
    _new_loop = factory


def new_loop(*arguments: Any, **options: Any) -> Loop:
    """Create the loop of this process: a `Loop`, or an object of the factory that `use` has set."""
    return _new_loop(*arguments, **options)
