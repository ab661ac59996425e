"""What is trained: which data, which history of workers, which rule, which seed. Pure.

A `Case` is one training, one process and one result. A history is written as workers by samples seen, so that all rules
and batch sizes meet a change at the same place in the data; `history` turns it into steps as the run cuts its windows.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from farandole.plan.batch import BatchPolicy, GlobalBatch, PerWorkerBatch
from farandole.plan.history import History
from farandole.plan.rules import AdaScale, LinearScaling, MomentumCompensation, RateInBuffer
from farandole.plan.shards import Position, advance, window

BASE, MICRO = 32, 16  # samples in a worker's batch, and in a micro-batch

POLICIES: dict[str, Callable[[int, int], BatchPolicy]] = {
    "compensation": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=MomentumCompensation()),
    "linear": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=LinearScaling()),
    "buffer": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=RateInBuffer()),
    "adascale": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=AdaScale()),
    "unscaled": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=LinearScaling(), max_factor=1),
    "constant": lambda size, micro: GlobalBatch(size, micro=micro),
}
RULES = ("compensation", "linear", "buffer", "adascale", "unscaled")
LETTERS = "SACBMD"  # the experiments, in the order in which they are done
TASKS = ("fashion", "cifar")
RATES = (0.005, 0.01, 0.02, 0.04, 0.08)  # of the sweep
CHOSEN = {"fashion": 0.02, "cifar": 0.04}  # by the sweep, for the base batch of BASE

BySamples = tuple[tuple[int, int], ...]  # (samples seen, workers from there on)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is trained, in which base batch. `bin`: samples for which one mean of the training loss is kept;
    `probe`: samples between two looks at `probed` test samples; at the end all `tested` are looked at."""

    name: str
    samples: int
    epochs: int
    seeds: int
    static_seeds: int
    rates: int  # of the sweep
    bin: int
    probe: int
    probed: int
    tested: int
    base: int = BASE
    micro: int = MICRO

    @property
    def total(self) -> int:
        return self.samples * self.epochs

    @property
    def sizes(self) -> dict[str, int]:
        """What a single training depends on: more seeds leave the results there valid."""
        names = ("samples", "epochs", "bin", "probe", "probed", "tested", *(("base",) if self.base != BASE else ()))
        return {name: getattr(self, name) for name in names}

    def rate(self, task: str) -> float:
        """The base rate, in proportion to the base batch."""
        return CHOSEN[task] * self.base / BASE


FULL = Scale(
    name="full",
    samples=20_000,
    epochs=6,
    seeds=3,
    static_seeds=5,
    rates=5,
    bin=500,
    probe=4_000,
    probed=2_000,
    tested=10_000,
)
QUICK = Scale(
    name="quick", samples=1_000, epochs=5, seeds=1, static_seeds=2, rates=1, bin=25, probe=200, probed=200, tested=1_000
)
SMALL = replace(FULL, name="small", base=8, micro=8, static_seeds=3, rates=0)  # of experiment M
PACE = Scale(  # of experiment D, in which nothing is tested
    name="pace",
    samples=16_384,
    epochs=2,
    seeds=1,
    static_seeds=0,
    rates=0,
    bin=500,
    probe=1 << 40,
    probed=1,
    tested=250,
)
SCALES = {scale.name: scale for scale in (FULL, QUICK, SMALL, PACE)}


@dataclass(frozen=True, kw_only=True)
class Case:
    task: str
    history: str
    policy: str
    seed: int
    rate: float

    @property
    def name(self) -> str:
        """Its result's place under the scale's folder."""
        rate = "" if self.rate == CHOSEN[self.task] else f"-rate{self.rate:g}"
        return f"{self.task}/{self.history}-{self.policy}{rate}-{self.seed}"


def cases(experiment: str, scale: Scale, tasks: tuple[str, ...] = TASKS) -> list[Case]:
    """The trainings of one experiment, all but D, in the order in which they are done: by seed, so that what there
    is early compares all rules."""
    return list(dict.fromkeys(case for task in tasks for case in _cases(experiment, scale, task)))


def _cases(experiment: str, scale: Scale, task: str) -> Iterator[Case]:
    def case(history: str, policy: str, seed: int, rate: float = 0) -> Case:
        return Case(task=task, history=history, policy=policy, seed=seed, rate=rate or scale.rate(task))

    if experiment == "S":
        for rate in RATES[: scale.rates]:
            yield case("one", "compensation", 0, rate)
            yield case("jump12", "compensation", 0, rate)
        return
    if experiment == "M":
        for seed in range(scale.seeds):
            yield case("one", "compensation", seed)
            yield from (case("jump12", rule, seed) for rule in ("compensation", "linear"))
        return
    yield from (case("one", "compensation", seed) for seed in range(min(scale.seeds, scale.static_seeds)))
    histories = {"A": ("jump12", "jump4"), "B": ("random",), "C": ("updown",)}[experiment]
    for seed in range(scale.seeds):
        for history in histories:
            yield from (case(history, rule, seed) for rule in RULES if rule != "unscaled" or history == "jump12")
        if experiment == "A":
            yield from (case(history, "linear", seed) for history in ("always12", "always4"))
        if seed == 0:
            yield from (case(history, "constant", seed) for history in histories)
    yield from (case("one", "compensation", seed) for seed in range(scale.seeds, scale.static_seeds))


def by_samples(history: str, total: int, seed: int) -> BySamples:
    """The workers by samples seen, over a training of `total` samples.

    random: 1 to 12 workers, drawn again after every twentieth of the training, another draw for every seed.
    """
    fifth = total // 5
    if history == "random":
        draw = random.Random(seed)
        return tuple((total // 20 * n, draw.randint(1, 12)) for n in range(20))
    return {
        "one": ((0, 1),),
        "jump4": ((0, 1), (fifth, 4)),
        "jump12": ((0, 1), (fifth, 12)),
        "always4": ((0, 4),),
        "always12": ((0, 12),),
        "updown": ((0, 1), (fifth, 2), (2 * fifth, 4), (3 * fifth, 2), (4 * fifth, 1)),
    }[history]


def steps(changes: BySamples, policy: BatchPolicy, *, length: int, epochs: int) -> History:
    """`changes` as a history of steps: each holds from the first step that begins at or after its samples.

    How many samples a step takes is asked of the run's own arithmetic: an epoch's last window is shorter, and a change
    of batch moves every later window.
    """
    starts = [seen for seen, _ in changes]

    def walk() -> Iterator[tuple[int, int]]:
        position = Position()
        while position.epoch < epochs:
            seen = position.epoch * length + position.offset
            workers = changes[bisect_right(starts, seen) - 1][1]
            yield position.step, workers
            taken = window(position, length, policy.samples(workers), policy.micro)
            position = advance(position, taken, length)

    return History.of(walk())


def growths(changes: BySamples) -> list[tuple[int, int]]:
    """Where the batch grows, as [from, to) in samples: to the next change. Two equal draws are no change."""
    ends = [seen for seen, _ in changes[2:]] + [1 << 62]
    return [
        (seen, end)
        for ((_, before), (seen, workers)), end in zip(pairwise(changes), ends, strict=False)
        if workers > before
    ]
