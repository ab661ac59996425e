"""A simulated worker: the shipped driver on a fake port, and a script like a user's.

The script is a generator. It yields what the driver yields (see `protocol.worker.driver`), and the seconds of its own
computations.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, ClassVar

from farandole.plan.shards import Position
from farandole.protocol import messages as m
from farandole.protocol.worker.driver import Change, Driver, Task, join_view
from farandole.protocol.worker.state_machine import WorkerStateMachine
from farandole.simulate.port import SimulatedPort
from farandole.simulate.process import Process, Routine
from farandole.simulate.replica import SHARDS, next_state, shard_value
from farandole.simulate.witness import Violation

if TYPE_CHECKING:
    from farandole.simulate.world import World

FROZEN_STEPS = 3  # after each so many steps the script trains other parameters, so that messages have other sizes


class ScriptError(Exception):
    """An error of the user's script."""


class UnfedError(Exception):
    """The data is unavailable on the worker's host."""


class SimulatedWorker(Process):
    """A worker with its training thread. `spread`: the least and the most time of a shard, as parts of `shard_s`."""

    spread: ClassVar[tuple[float, float]] = (0.2, 1.8)

    def __init__(self, world: World, name: str, machine: WorkerStateMachine, *, pool: str) -> None:
        super().__init__(world, name, machine, pool=pool)
        self._port = SimulatedPort(self)
        self.driver = Driver(machine, self.instructions, self._port, world.settings)

    def script(self) -> Routine:
        try:
            yield from self._training()
            if self.world.rng.random() < 0.2:
                yield self.world.rng.choice((0.5, 3.0, 6.0))  # the script's code after its loop
            self.finished = self.at_step_start = True
            view = self.state_machine.view.number if self.state_machine.view else 0
            self.tell(
                m.Finished(fingerprint=str(self.state), view=view, round=self.state_machine.round, step=self.step)
            )
        except ScriptError as error:
            self.world.script_failed = True
            self.tell(m.ScriptFailed(traceback=str(error)))
        except UnfedError:
            self.tell_unfed()
        yield from self.driver.serve_until_dismissed()

    def _training(self) -> Routine:
        yield from join_view(self.driver, self._port)
        while True:
            result = yield from self._round()
            self.at_step_start = False
            if self.fails:
                raise ScriptError(f"after step {self.step}")
            exchange = self.exchange
            assert exchange is not None
            exchange.use()
            if self.world.updates_last:
                yield self.world.delay()
            if not self.sums_intact(exchange):
                self.die("the others continued without it", 3)
                yield Change()
            self.state = next_state(self.state, self.step, result)
            self._drift()
            kind = self._strayed() if self.strays else "evaluate" if self._evaluates() else ""
            if kind == "quit":
                self.step += 1
                return
            if kind:
                yield from self.driver.begin(self._task(kind))
                yield from self._round()
            self.step += 1
            if self.step >= self.world.steps:
                return
            if self.fails:
                raise ScriptError(f"before step {self.step}")
            if self.starves and self.world.drawn.random() < 0.5:  # a script may read data itself
                raise UnfedError
            self.at_step_start = True
            yield from self.driver.begin(self.step_task())
            self._checkpoint_when_due()

    def _evaluates(self) -> bool:
        every = self.world.evaluates_every
        return every > 0 and self.step % every == 1 % every

    def step_task(self) -> Task:
        """Returns the task of the current step."""
        sizes = f"those of steps like {self.step // FROZEN_STEPS}"
        position = Position(step=self.step)
        return Task(position=position, shards=lambda _: SHARDS["train"], sizes=sizes, is_step=True, content="train")

    def _task(self, kind: str) -> Task:
        doing = f"{kind} after step {self.step}"
        return Task(position=Position(step=self.step), shards=lambda _: SHARDS[kind], doing=doing, content=kind)

    def _round(self) -> Generator[Any, Any, Any]:
        """Computes and finishes the round that has begun, and returns its result."""
        driver = self.driver
        while True:
            yield from driver.sync()
            todo, checks_left = driver.todo(), driver.checking.checks_left() if self.state_machine.synced else ()
            if self.hungry and (todo or checks_left):
                raise UnfedError
            if not todo and checks_left:
                yield self.shard_s * self.world.rng.uniform(*self.spread)
                if checks_left[0] in driver.checking.checks_left():
                    driver.checked(checks_left[0], *self._finding(self._finds(checks_left[0])))
                continue
            if not todo:
                if (yield from driver.wait_for_round_end()):
                    assert self.exchange is not None
                    self.world.witness.committed(self, self.exchange)
                    return self.exchange.result
                continue
            shard = todo[0]
            yield self.shard_s * self.world.rng.uniform(*self.spread)
            self.results[shard] = value = self._finds(shard)
            if driver.checking.concerns(shard):
                driver.checking.on_digests(shard, *self._finding(value))
            driver.computed_shards.add(shard)
            if len(todo) == 1:
                exchange = self.exchange
                assert exchange is not None
                for bucket in range(len(self.world.buckets[self.kind])):
                    exchange.submit(bucket)
                    yield self.world.delay(0.002)

    def _finds(self, shard: int) -> int:
        """Returns the shard's value, or a wrong one if this machine computes wrong."""
        value = shard_value(self.state, self.kind, self.step, shard)
        return value + 1 if self.errs and self.world.disks.random() < self.errs else value

    @staticmethod
    def _finding(value: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return ("the loss",), (value & (1 << 62) - 1,)

    # --- faults of the script --------------------------------------------------------------------------------

    def _strayed(self) -> str:
        """Returns what a deviating script does in place of the others' action: another evaluation, none, or its end."""
        kind, is_turn = self.strays, self.step % 3 == 1
        if kind != "quit" and (kind == "more") == is_turn:
            return "evaluate" if is_turn else ""
        self.strays, self.world.script_failed, self.world.strayed = "", True, True
        self.world.say(self.name, f"strays: {kind}")
        return {"quit": "quit", "skip": "", "more": "evaluate", "other": "other"}[kind]

    def _drift(self) -> None:
        """Changes the state on this worker alone, if its script does so."""
        if self.drifts:
            self.drifts = False
            self.drifted_at, self.state = self.step + 1, self.state + 1
            self.world.say(self.name, f"drifts before step {self.step + 1}")

    # --- checkpoints -----------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        self.world.witness.saved(self)
        if not self.reaches:
            self.world.store[self.step] = self.state

    def _checkpoint_when_due(self) -> None:
        every, instructions = self.world.checkpoints, self.instructions
        if not (every and instructions.saves and (self.step % every == 0 or instructions.save_at_once)):
            return
        instructions.save_at_once = False
        if not self.state_machine.synced:
            raise Violation(f"{self.name} is asked to write a checkpoint, and does not hold the state")
        full = self.world.disks.random() < 0.2
        if not full:
            self.save_checkpoint()
        answer = m.Checkpointed(step=self.step, path="" if full else f"step {self.step}", error="disk full" * full)
        self.after(self.world.delay(0.1), self.tell, answer)
