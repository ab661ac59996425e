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

from experiments.dynamic_sgd.rules import RootOfRate, WholeWindow
from farandole.plan.batch import BatchPolicy, GlobalBatch, PerWorkerBatch
from farandole.plan.rules import AdaScale, LinearScaling, MomentumCompensation, RateInBuffer, SquareRoot
from farandole.plan.shards import History, Position, advance, window

BASE, MICRO = 32, 16  # samples in a worker's batch, and in a micro-batch

POLICIES: dict[str, Callable[[int, int], BatchPolicy]] = {
    "compensation": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=MomentumCompensation()),
    "linear": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=LinearScaling()),
    "buffer": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=RateInBuffer()),
    "adascale": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=AdaScale()),
    "unscaled": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=LinearScaling(), max_factor=1),
    "compensation4": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=MomentumCompensation(steps=4)),
    "compensation16": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=MomentumCompensation(steps=16)),
    "whole": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=WholeWindow()),
    "root": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=SquareRoot()),
    "halfroot": lambda size, micro: PerWorkerBatch(size, micro=micro, rule=RootOfRate()),
    "constant": lambda size, micro: GlobalBatch(size, micro=micro),
}
RULES = ("compensation", "linear", "buffer", "adascale", "unscaled")
RAMPS = ("compensation4", "compensation", "compensation16")
ADAPTIVE = ("root", "halfroot")  # trained with AdamW; all others with SGD
TASKS = ("fashion", "cifar")
RATES = (0.005, 0.01, 0.02, 0.04, 0.08)  # of the sweep
ADAPTIVE_RATES = (0.001, 0.002, 0.004, 0.008)
CHOSEN = {"fashion": 0.02, "cifar": 0.04}  # by the sweep, for the base batch of BASE
ADAPTIVE_CHOSEN = {"fashion": 0.004}  # the tasks that AdamW is tried on

# What each experiment compares, as (history, policy), the most important experiment first: in this order they are done.
# S (rates) and D (throughput) are of another kind.
PAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    "A": tuple(("jump12", rule) for rule in RULES),
    "T": tuple(("jump12", rule) for rule in RAMPS),
    "X": tuple((history, rule) for history in ("always12", "always4") for rule in ("linear", "compensation")),
    "W": (("jump12", "compensation"), ("jump12", "whole")),
    "R": tuple((history, rule) for history in ("jump12", "updown") for rule in ADAPTIVE),
    "B": tuple(("random", rule) for rule in RULES if rule != "unscaled"),
    "M": (("jump12", "compensation"), ("jump12", "linear")),
    "F": tuple(("jump4", rule) for rule in RULES if rule != "unscaled"),
    "C": tuple(("updown", rule) for rule in RULES if rule != "unscaled"),
}
LETTERS = (*PAIRS, "S", "D")
TITLES = {"jump12": "1 to 12", "jump4": "1 to 4", "random": "1 to 12 at random", "updown": "1, 2, 4, 2, 1"}
CONSTANT = {"A": "jump12", "B": "random", "F": "jump4", "C": "updown"}  # a constant batch under it, seed 0

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

    def seeds_of(self, experiment: str) -> int:
        """A is what the study is about, and three seeds leave much open: it has as many as there are static runs."""
        return max(self.seeds, self.static_seeds) if experiment == "A" else self.seeds

    def rate(self, task: str, policy: str) -> float:
        """The base rate, in proportion to the base batch."""
        return chosen(task, policy) * self.base / BASE


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


def chosen(task: str, policy: str) -> float:
    """The base rate for a batch of BASE with the policy's optimizer."""
    return (ADAPTIVE_CHOSEN if policy in ADAPTIVE else CHOSEN)[task]


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
        rate = "" if self.rate == chosen(self.task, self.policy) else f"-rate{self.rate:g}"
        return f"{self.task}/{self.history}-{self.policy}{rate}-{self.seed}"


def cases(experiment: str, scale: Scale, tasks: tuple[str, ...] = TASKS) -> list[Case]:
    """The trainings of one experiment, all but D, in the order in which they are done: by seed, so that what there
    is early compares all rules."""
    return list(dict.fromkeys(case for task in tasks for case in _cases(experiment, scale, task)))


def _cases(experiment: str, scale: Scale, task: str) -> Iterator[Case]:
    def case(history: str, policy: str, seed: int, rate: float = 0) -> Case:
        return Case(task=task, history=history, policy=policy, seed=seed, rate=rate or scale.rate(task, policy))

    if experiment == "S":
        for rate in RATES[: scale.rates]:
            yield from (case(history, "compensation", 0, rate) for history in ("one", "jump12"))
        for rate in ADAPTIVE_RATES[: scale.rates] if task in ADAPTIVE_CHOSEN else ():
            yield from (case(history, "root", 0, rate) for history in ("one", "jump12"))
        return
    if experiment == "R" and task not in ADAPTIVE_CHOSEN:
        return
    still = "root" if experiment == "R" else "compensation"
    yield from (case("one", still, seed) for seed in range(min(scale.seeds, scale.static_seeds)))
    for seed in range(scale.seeds_of(experiment)):
        yield from (case(history, policy, seed) for history, policy in PAIRS[experiment])
        if seed == 0 and experiment in CONSTANT:
            yield case(CONSTANT[experiment], "constant", seed)
    yield from (case("one", still, seed) for seed in range(scale.seeds, scale.static_seeds))


def asked(scale: Scale, history: str, policy: str) -> int:
    """Of how many seeds there are to be trainings at the chosen rate."""
    return max(scale.seeds_of(experiment) for experiment, pairs in PAIRS.items() if (history, policy) in pairs)


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

    return History.from_steps(walk())


def growths(changes: BySamples) -> list[tuple[int, int]]:
    """Where the batch grows, as [from, to) in samples: to the next change. Two equal draws are no change."""
    ends = [seen for seen, _ in changes[2:]] + [1 << 62]
    return [
        (seen, end)
        for ((_, before), (seen, workers)), end in zip(pairwise(changes), ends, strict=False)
        if workers > before
    ]
