"""Random schedules of a simulated run, and what must be true at the end of each.

    simulate(seed)      # a random schedule of joins, leaves, crashes, freezes, broken pairs ...; raises Violation

Checked as it goes (`Ledger`): rules R1 and R2, view numbers, that what is reported as held is held, that all who
commit a round commit the same one with every shard counted once, that no two views make progress, that the state is
not given up while someone holds it. Checked at the end: nobody waits for ever, everyone goes, the run ends as it
should, with the state of a world of one.
"""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Sequence
from typing import Any

from farandole.protocol.coordinator.failures import FATAL
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.worker.session import FIRST_S
from farandole.simulate.faults import FAULTS_UNTIL
from farandole.simulate.replica import alone
from farandole.simulate.witness import Violation
from farandole.simulate.world import Scenario, World
from tests.protocol.ledger import Ledger
from tests.protocol.unfed import NOBODY_FED

STOP_CODE = 7
NO_FURTHER = "never got further"
REFUSED = re.compile(r"joiners in a row .*refused")
SAVED = ("saved", "not saved", "saved elsewhere")
CALM_LIMIT = 60.0  # by then the run is over, or it hangs; on a slow network, unless rounds go on ending
GONE_LIMIT = FIRST_S + 20.0  # then everybody has gone, also who has never been answered


class Schedule(World):
    """One schedule. `classes`: of member, coordinator or worker, for mutants. `drift`: one worker's replica becomes
    another than the others'. `errs`: one machine computes wrong, and every shard is audited. `bits`: "any"
    lets replicas drift. `starves`: hosts can't get their workers the data. `zones`: the hosts are in two zones.
    `pieces`: there are several hosts, which send slices in pieces. `focus`: kinds of faults that are to strike most.
    """

    def __init__(
        self,
        seed: int,
        *,
        focus: Sequence[str] = (),
        drift: bool = False,
        errs: bool = False,
        bits: str = "same",
        starves: bool = False,
        zones: bool = False,
        pieces: bool = False,
        trace: bool = False,
        **classes: Any,
    ) -> None:
        rng = random.Random(seed)
        self._drifts = drift
        audit = 1.0 if errs else (0.0, 0.4)[seed % 4 == 1 and bits != "any"]
        checkpoints, settings = rng.choice((0, 0, 2, 5)), _settings(rng, seed, audit, bits)
        self.endless = rng.random() < 0.4  # until it is stopped
        scenario = Scenario(
            seed=seed,
            settings=settings,
            hosts=3 + seed // 8 % 2 if zones else 2 + seed // 8 % 3 if pieces else 1 + seed // 2 % 4,
            zones=2 if zones else 1,
            pieces=2 + seed // 8 % 2 if pieces else 1,
            steps=1_000_000 if self.endless else rng.randint(4, 12),
            buckets=1 if seed % 3 else 3,  # most of what goes wrong does so with one, at half the price
            checkpoints=checkpoints,
            budget=rng.choice((0, 1, 2, 3, 3, 4, 4, 5, 6, 8)),
            fault_rate=rng.choice((0.02, 0.05, 0.15)),
            slow=rng.choice((0.3, 1.0, 1.0, 4.0)),
            focus=focus,
            shortages=1 + seed % 5 if starves else 0,
        )
        self._born_wrong = seed // 8 % 6 if errs else 0  # of those that are started, the one of this number; 0: in time
        self._errs, self.starves = errs, scenario.shortages
        super().__init__(scenario, rng, witness=Ledger, trace=trace, **classes)

    def run(self) -> None:
        """Raises Violation."""
        if self.disks.random() < 0.1:
            self.spawn(pool="")
        for _ in range(self.settings.wanted):
            self.spawn(pool="pool")
        for _ in range(self.budget // 2):
            self.at(self.rng.uniform(0.0, 5.0), self.inject_fault, None)
        if self._errs and not self._born_wrong:
            self.at(self.rng.uniform(0.5, 4.0), self._let_err)
        if self._drifts:
            self.at(self.rng.uniform(0.3, 3.0), self._let_drift)
        for _ in range((self.starves + 1) // 2):
            self.at(self.drawn.uniform(0.0, 5.0), self.run_short, None)
        self.at(0.0, self.tick)
        self.at(0.3, self.pool)
        self.until(FAULTS_UNTIL, lambda: self.coordinator.over is not None)
        self.budget = 0
        if not self.coordinator.over:
            self._go_on()
        for _ in range(max(1, round(self._slow))):
            before = self._newest_round()
            self.until(self.now + CALM_LIMIT, lambda: self.coordinator.over is not None)
            if self._newest_round() == before:
                break
        if not self.coordinator.over and not self._nobody_can_join():
            raise Violation("the run hangs")
        self.until(self.now + GONE_LIMIT, lambda: not any(w.alive and not w.frozen for w in self.workers.values()))
        self._judge()

    def _newest_round(self) -> int:
        return max((worker.state_machine.round for worker in self.workers.values()), default=0)

    def _go_on(self) -> None:
        """No more faults: give the run what it needs to end."""
        self.say("people", "no more faults")
        self.last_sends = -1
        self.feed_all()
        for worker in list(self.workers.values()):
            worker.fails = False
            if worker.frozen and not (worker.connected and worker.name in self.coordinator.workers):
                worker.die("killed by its people", -9)  # nobody else knows of it
        self.until(self.now + CALM_LIMIT, lambda: self.listens)
        if self.coordinator.over:
            return
        if self.stop_code is not None and not self.coordinator.ending:
            raise Violation("a stop was asked for and forgotten")
        if self.coordinator.wanted < self.settings.minimum and not self.coordinator.ending:
            self.coordinator.scale(self.settings.minimum, self.now)
            self.flush()
        if self.endless:
            if self.settings.maximum is None:
                self.spawn(pool="")
            self.until(self.now + CALM_LIMIT, self._settled)
            if not self.coordinator.over and not self._settled():
                raise Violation("planned changes do not come about")
            self.until(self.now + CALM_LIMIT, lambda: self.listens)
            if not self.coordinator.over and not self.coordinator.ending:
                self.stop_code = STOP_CODE
                self.coordinator.request_end("enough", STOP_CODE, self.now)
                self.flush()

    def _settled(self) -> bool:
        """Everyone who asks is in, everyone who wants to leave has left."""
        c = self.coordinator
        members = [self.workers[w] for w in (c.view.members if c.view else ())]
        if c.over or c.ending or any(w.unreachable for w in members) or self._nobody_can_join():
            return True  # with an unreachable member, nobody can ever join
        if (
            c.view is None
            or c.proposed
            or c.stopping
            or any(not w.connected for w in self.workers.values() if w.alive and not w.frozen and not w.evicted)
        ):
            return False
        inside = [c.workers[w] for w in c.view.members if w in c.workers]
        full = c.settings.maximum is not None and len(inside) >= c.settings.maximum
        outside = [w for w in c.workers.values() if w.id not in c.view.members]
        leaving = any(w.leaving for w in inside)
        return len(inside) >= c.settings.minimum and not leaving and (full or not outside)

    def _nobody_can_join(self) -> bool:
        """The longest-standing member computes wrong: whoever is right is refused, or nobody can tell."""
        view = self.coordinator.view
        return any(self.workers[w].errs for w in (view.members[:1] if view else ()))

    def _judge(self) -> None:
        over = self.coordinator.over
        assert over is not None
        for worker in self.workers.values():
            excused = self.strayed or self.drifted or self.witness.erred
            if worker.finished and not excused and worker.state != alone(self.steps):
                raise Violation(f"{worker.name} finished with another state than a world of one")
        stuck = [w.name for w in self.workers.values() if w.alive and not w.frozen]
        if stuck:
            raise Violation(f"the run is over, but {stuck} are still there")
        if self.script_failed or self._ended_by_a_mistake(over.reason):
            return
        if over.code == 1 and NOBODY_FED in over.reason and self.starves:
            return
        if over.code == 1 and NO_FURTHER in over.reason and self.records["state lost"] >= FATAL:
            return  # fate has killed all who held the state so often
        if over.code == 1 and REFUSED.search(over.reason) and self.records["refused"]:
            return  # one that computes wrong stands longest; the witness looks at each refusal
        if "cannot reach" in over.reason and self.witness.nowhere:
            return
        if self.drifted and self.records["replicas differ"]:
            if over.code != 1 or "differ" not in over.reason:
                raise Violation(f"the replicas differ, and the run ended with code {over.code}: {over.reason}")
            return
        if self.stop_code is not None:
            if over.code != self.stop_code and not any(w.finished for w in self.workers.values()):
                raise Violation(f"the run was stopped with code {self.stop_code}, and ended with {over.code}")
            if self.stop_code == STOP_CODE and not any(self.records[how] for how in SAVED):
                raise Violation("the run was stopped without a checkpoint")
        elif self.records["nothing left"]:
            if over.code != 0 or max(self.store) != self.steps:
                raise Violation(f"the run ended with code {over.code}, and nothing was left to train")
        elif not any(w.finished for w in self.workers.values()):
            raise Violation(f"the run ended with code {over.code}: {over.reason}")
        elif (over.code == 0) != (self.records["saved"] == 1) or self.records["finished"] != 1:
            raise Violation(f"the run ended with code {over.code} and {self.records['saved']} final checkpoints")

    def _ended_by_a_mistake(self, reason: str) -> bool:
        """Whose script seems to go another way than the others' ends the run by design, and one of two may say that
        replicas differ: it is named then.
        """
        bad = self.mistaken.name if self.mistaken else ""
        return bool(bad) and self.records["calls differ"] + self.records["replicas differ"] > 0 and bad in reason

    def spawn(self, *, pool: str) -> None:
        super().spawn(pool=pool)
        if self._born_wrong == len(self.workers):
            list(self.workers.values())[-1].errs = 1.0

    def _let_err(self) -> None:
        alive = [w for w in self.workers.values() if w.alive and not w.frozen]
        if alive:
            self.rng.choice(alive).errs = self.rng.choice((0.1, 0.5, 0.9))

    def _let_drift(self) -> None:
        alive = [w for w in self.workers.values() if w.alive and not w.frozen]
        if alive:
            self.rng.choice(alive).drifts = True


def _settings(rng: random.Random, seed: int, audit: float, bits: str) -> RunSettings:
    size = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))
    return RunSettings(
        run="sim",
        audit=audit,
        bits=bits,
        wanted=size,
        minimum=rng.choice((1, 1, 2, size, rng.randint(1, size))) if size > 1 else 1,
        maximum=rng.choice((None, None, size, size + 1)),
        heartbeat_s=0.5,
        heartbeat_timeout_s=2.5,
        orphan_s=6.0,
        prepare_timeout_s=3.0,
        startup_failures=1000,
        end_s=2.0,
        standstill_s=2.0,
        stop_s=(30.0, 0.3)[seed % 2],
        views_per_group=rng.choice((5, 12, 256)),
    )


def simulate(seed: int, **options: Any) -> Schedule:
    """Run one schedule. A Violation carries the seed and the trace of a second, equal run."""
    schedule = Schedule(seed, **options)
    gc.disable()  # a third of the time otherwise, and a schedule's objects are few
    try:
        schedule.run()
    except Exception:
        again = Schedule(seed, trace=True, **options)
        try:
            again.run()
        except Exception as error:
            s = again.settings
            head = f"seed {seed}: --workers {s.wanted} --min {s.minimum} --max {s.maximum}, {again.steps} steps"
            raise Violation("\n".join([f"{type(error).__name__}: {error}", head, *_shortened(again.lines)])) from error
        raise
    finally:
        gc.enable()
    return schedule


def _shortened(lines: list[str]) -> list[str]:
    """The trace's last lines; of undisturbed rounds only the last few."""
    kept = [line for line in lines[:-20] if " ends round " not in line] + lines[-20:]
    return kept[-150:]
