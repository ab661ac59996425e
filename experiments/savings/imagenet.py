"""ResNet-50 on ImageNet, 90 epochs, on V100 GPUs: what it costs and how long it takes, by strategy and trace.

A cluster of eight GPUs on demand is the reference. The deadline is its time and a tenth. Two kinds of machines:

    p3.2xlarge    one GPU, at most 16 machines (32 where the trace has more); the reference has eight
    p3.16xlarge   eight GPUs, at most 12 machines; the reference has one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from farandole.market.comparison import BOUND, CHEAPEST, StrategyResult, compare, fixed_size, windows
from farandole.market.play import Machines, Moment, PlannedJob, Price, Strategy, play
from farandole.market.strategies import STRATEGIES
from farandole.market.traces import MarketTrace, SpotMarket, read
from farandole.plan.deadline import speeds_from

IMAGES = 90 * 1_281_167
IMAGES_PER_S = {4: 3_012.0, 8: 5_874.0, 32: 19_500.0, 256: 143_000.0}  # published, by GPUs
ON_DEMAND, SPOT = 3.06, 0.97  # dollars an hour of one GPU
START_S = 180
REFERENCE_GPUS = 8
ROOM = 1.1  # the deadline: so many times the time of the reference
OURS = "farandole, deadline"


@dataclass(frozen=True, kw_only=True)
class MachineType:
    """`gpus`: of one machine. `most`: the largest number of machines of the job. `traces`: on which it is played."""

    name: str
    gpus: int
    most: int
    traces: tuple[str, ...]


SINGLE = MachineType(
    name="p3.2xlarge", gpus=1, most=16,
    traces=("skypilot/us-east-2b_v100_1.json", "skypilot/us-west-2a_v100_1.json", "skypilot/us-west-2c_v100_1.json"),
)  # fmt: skip
MANY = MachineType(name="p3.2xlarge", gpus=1, most=32, traces=("bamboo/p3-trace.csv",))
EIGHT = MachineType(
    name="p3.16xlarge", gpus=8, most=12,
    traces=("skypilot/us-east-2b_v100_1.json", "skypilot/us-west-2a_v100_1.json", "skypilot/us-west-2c_v100_1.json"),
)  # fmt: skip
TYPES = (SINGLE, MANY, EIGHT)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The mean, and the 10th and the 90th percentile, of the values of all windows."""

    mean: float
    low: float
    high: float


class SavingsRow(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy on one trace.

    `dollars`, `hours`: of the windows in which it is done in time; None: there are none, or it is a bound.
    `cost_saved`, `time_saved`: the part of its dollars and hours that `OURS` saves, in the same windows. `missed`: the
    part of the windows in which it is not done in time.
    """

    machine: str
    most: int
    trace: str
    strategy: str
    machines: int
    dollars: Spread | None
    hours: Spread | None
    cost_saved: Spread | None
    time_saved: Spread | None
    missed: float


def job_of(kind: MachineType) -> PlannedJob:
    """Return the job on these machines. Between published numbers of GPUs the throughput is interpolated linearly.

    One GPU has a quarter of what four have.
    """
    gpus = speeds_from(IMAGES_PER_S, kind.gpus * kind.most)
    images_per_s = gpus[kind.gpus - 1 :: kind.gpus]
    reference = gpus[REFERENCE_GPUS - 1]
    return PlannedJob(
        work_s=round(IMAGES / images_per_s[0]), start_s=START_S,
        deadline_s=round(ROOM * (START_S + IMAGES / reference)),
        speeds=tuple(each / images_per_s[0] for each in images_per_s),
    )  # fmt: skip


def price_of(kind: MachineType) -> Price:
    return Price(on_demand=ON_DEMAND * kind.gpus, spot=SPOT * kind.gpus)


def played(kind: MachineType, trace: MarketTrace, beginnings: int) -> list[StrategyResult]:
    """Return what all strategies come to on a trace."""
    job = job_of(kind)
    places = windows([SpotMarket(zones=(trace,))], job, beginnings)
    return [*compare(job, places, price_of(kind), [*STRATEGIES])]


def rows(kind: MachineType, trace: MarketTrace, results: Sequence[StrategyResult]) -> Iterator[SavingsRow]:
    """Yield a row for each strategy and bound."""
    ours = next(result for result in results if result.strategy == OURS).outcomes
    for result in results:
        is_bound = result.strategy in (BOUND, CHEAPEST)
        pairs = [pair for pair in zip(result.outcomes, ours, strict=True) if is_bound or pair[0].hours is not None]
        timed = [(its.hours, our.hours) for its, our in pairs if its.hours is not None and our.hours is not None]
        yield SavingsRow(
            machine=kind.name, most=kind.most, trace=trace.name, strategy=result.strategy, machines=result.machines,
            dollars=spread([its.dollars for its, _ in pairs]), hours=spread([its for its, _ in timed]),
            cost_saved=spread([1 - our.dollars / its.dollars for its, our in pairs]),
            time_saved=spread([1 - our / its for its, our in timed]), missed=1 - len(pairs) / len(ours),
        )  # fmt: skip


def spread(values: Sequence[float]) -> Spread | None:
    """Return the mean, the 10th and the 90th percentile; None without a value."""
    if not values:
        return None
    low, high = np.quantile(values, (0.1, 0.9))
    return Spread(mean=float(np.mean(values)), low=float(low), high=float(high))


def run(folder: Path, beginnings: int) -> Iterator[SavingsRow]:
    """Yield the rows of all machine types on all their traces in a folder."""
    for kind in TYPES:
        for path in kind.traces:
            trace = read(folder / path)
            yield from rows(kind, trace, played(kind, trace, beginnings))


# --- the course of one window -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a strategy had and did in a window, by hour: items at the beginnings of intervals.

    `progress`: the part of the work that is done. `available`: spot machines that there were.
    """

    hours: list[float]
    spot: list[int]
    on_demand: list[int]
    available: list[int]
    progress: list[float]


def course(kind: MachineType, trace: MarketTrace, begins_h: float, strategy: str) -> Course:
    """Play a strategy in the window that begins after `begins_h` hours of the trace, and return its course."""
    job = job_of(kind)
    assert job.deadline_s is not None
    first, count = round(begins_h * 3600 / trace.gap_s), job.deadline_s // trace.gap_s
    part = SpotMarket(zones=(trace,)).window(first, count)
    if not STRATEGIES[strategy].any_number:
        job = replace(job, speeds=job.speeds[: fixed_size(replace(job, deadline_s=part.duration_s))])
    result = Course(hours=[], spot=[], on_demand=[], available=[], progress=[])

    class Recorded(Strategy):
        restarts = STRATEGIES[strategy].restarts

        def __init__(self, job: PlannedJob) -> None:
            super().__init__(job)
            self._inner = STRATEGIES[strategy](job)

        def decide(self, now: Moment) -> Machines:
            chosen = self._inner.decide(now)
            result.hours.append(now.time_s / 3600)
            result.spot.append(sum(chosen.spot))
            result.on_demand.append(chosen.on_demand)
            result.available.append(sum(now.available))
            result.progress.append(1 - now.left_s / job.work_s)
            return chosen

    end = play(replace(job, deadline_s=part.duration_s), part, price_of(kind), Recorded)
    if end.done_s is not None:
        result.hours.append(end.done_s / 3600)
        for values, last in ((result.spot, 0), (result.on_demand, 0), (result.available, result.available[-1])):
            values.append(last)
        result.progress.append(1.0)
    return result
