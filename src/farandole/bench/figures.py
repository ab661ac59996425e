"""The figures of a bench. Pure: it takes the workers' reports and returns values.

time of a round       the median step time of a contestant in a round, over its steps and all workers
over the floor        this time divided by the time of the script alone in the same round
where the time goes   means over the workers and over the middle half of a contestant's steps, sorted by their time
exposed               the least wait of a step for the sum, over the workers. Even the worker whose backward pass ends
                      last waits this long. Further waiting of the other workers is waiting for the slower worker.
by itself             the time of an exchange of as many bytes that overlaps with no computation, also from the last
                      worker's sum on
hidden                1 - exposed / by itself, at least 0
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from farandole.bench.terms import (
    ALONE,
    CONTESTANTS,
    DDP,
    FARANDOLE,
    BenchTerms,
    Block,
    Exchanges,
    Record,
    StepSeconds,
    Unfit,
)

Joint = tuple[StepSeconds, ...]  # one step, of all workers


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a step's time, in milliseconds."""

    step: float
    data: float
    compute: float
    folding: float
    slower: float
    exposed: float
    landing: float
    update: float
    rest: float


class Contestant(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a contestant. `ms`: milliseconds of a step, for each round. `over`: `ms` over the floor of the
    same round. `samples_per_s`: of all workers together.
    """

    ms: tuple[float, ...]
    over: tuple[float, ...]
    samples_per_s: float
    parts: Parts


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of all contestants and of the exchange.

    Milliseconds for each round: `by_itself`, an exchange by itself; `exposed`, the exposed part of an exchange;
    `all_reduce`, an all-reduce of Gloo. `hidden`: the hidden part of an exchange, from 0 to 1. Empty with one worker,
    and `all_reduce` also if there was none. `left_out`: why DistributedDataParallel is left out, "" if it is not.
    """

    terms: BenchTerms
    contestants: dict[str, Contestant]
    by_itself: tuple[float, ...]
    exposed: tuple[float, ...]
    all_reduce: tuple[float, ...]
    hidden: tuple[float, ...]
    left_out: str


def figures(reports: Mapping[str, Sequence[Record]], terms: BenchTerms, rounds: int) -> Figures:
    """Return the figures of the first `rounds` rounds, which all workers have reported."""
    records, each_round = [*reports.values()], range(rounds)
    left_out = next((r.reason for each in records for r in each if isinstance(r, Unfit)), "")
    names = [name for name in CONTESTANTS if name != DDP or not left_out]
    blocks = {name: [joint_steps(records, name, round_) for round_ in each_round] for name in names}
    floor = [median_ms(block) for block in blocks[ALONE]]
    samples = {r.contestant: r.samples for r in records[0] if isinstance(r, Block)}
    contestants: dict[str, Contestant] = {}
    for name in names:
        ms = [median_ms(block) for block in blocks[name]]
        contestants[name] = Contestant(
            ms=tuple(ms),
            over=tuple(own / alone for own, alone in zip(ms, floor, strict=True)),
            samples_per_s=1e3 * samples[name] / statistics.median(ms),
            parts=mean_parts([step for block in blocks[name] for step in block]),
        )
    together = each_round if terms.workers > 1 else range(0)
    exchanges = [[r for each in records for r in each if isinstance(r, Exchanges) and r.round == n] for n in together]
    by_itself = [quickest([r.seconds for r in of_round]) for of_round in exchanges]
    all_reduce = [quickest([r.all_reduces for r in of_round]) for of_round in exchanges if of_round[0].all_reduces]
    exposed = [1e3 * statistics.median(map(exposed_s, blocks[FARANDOLE][round_])) for round_ in together]
    hidden = [max(0.0, 1 - part / whole) for part, whole in zip(exposed, by_itself, strict=True)]
    return Figures(
        terms=terms, contestants=contestants, by_itself=tuple(by_itself), exposed=tuple(exposed),
        all_reduce=tuple(all_reduce), hidden=tuple(hidden), left_out=left_out,
    )  # fmt: skip


def joint_steps(records: Sequence[Sequence[Record]], name: str, round_: int) -> list[Joint]:
    """Return the steps of the block of a contestant in a round."""
    blocks = [
        next(r.spent for r in each if isinstance(r, Block) and (r.contestant, r.round) == (name, round_))
        for each in records
    ]
    return [*zip(*blocks, strict=True)]


def median_ms(block: Sequence[Joint]) -> float:
    """Return the median time of a step in milliseconds, over the steps of a block and all workers."""
    return 1e3 * statistics.median(spent.step for step in block for spent in step)


def exposed_s(step: Joint) -> float:
    """Return the exposed part of a step's exchange, in seconds."""
    return min(spent.waiting for spent in step)


def mean_parts(steps: Sequence[Joint]) -> Parts:
    """Return the means over the workers and over the middle half of the steps, sorted by their time."""
    by_time = sorted(steps, key=lambda step: sum(spent.step for spent in step))
    cut = len(by_time) // 4
    middle = by_time[cut : len(by_time) - cut]
    every = [spent for step in middle for spent in step]

    def mean(values: Sequence[float]) -> float:
        return 1e3 * statistics.fmean(values)

    exposed = mean([exposed_s(step) for step in middle])
    return Parts(
        step=mean([s.step for s in every]), data=mean([s.data for s in every]),
        compute=mean([s.compute for s in every]), folding=mean([s.folding for s in every]),
        slower=mean([s.waiting for s in every]) - exposed, exposed=exposed, landing=mean([s.landing for s in every]),
        update=mean([s.update for s in every]), rest=mean([s.rest for s in every]),
    )  # fmt: skip


def quickest(seconds: Sequence[Sequence[float]]) -> float:
    """Return the median time in milliseconds, each from the worker that was the last to begin, so the least one.

    `seconds`: the times of each worker.
    """
    return 1e3 * statistics.median(map(min, zip(*seconds, strict=True)))
