"""Plans on markets that they have not seen: `farandole plan` by half of a trace, played in the other half."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from experiments.savings.imagenet import ON_DEMAND, SPOT, START_S
from farandole.market.planning import played, ranked, rows
from farandole.market.play import PlannedJob, Price
from farandole.market.traces import MarketTrace, SpotMarket, read

DEADLINE_S, BEGINNINGS = 52 * 3600, 10
HOURS_OF_ONE = 48  # the work for each two machines that the trace has, for one machine

PATHS = (
    "skypilot/us-east-2b_v100_1.json",
    "skypilot/us-west-2a_v100_1.json",
    "skypilot/us-west-2c_v100_1.json",
    "skypilot/preemption-4-node-us-west-2c_v100_1.json",
    "skypilot/availability-1-node-us-west-2b_v100_8.json",
    "skypilot/preemption-1-node/us-east-1c_v100_1.json",
    "skypilot/preemption-1-node/us-west-2b_v100_1.json",
    "skypilot/zones-2023-02/us-east-1a_v100_1.json",
    "skypilot/zones-2023-02/us-east-1c_v100_1.json",
    "skypilot/zones-2023-02/us-east-1d_v100_1.json",
    "skypilot/zones-2023-02/us-west-2a_v100_1.json",
    "skypilot/zones-2023-02/us-west-2b_v100_1.json",
    "skypilot/zones-2023-02/us-west-2c_v100_1.json",
)


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for a trace, by its first half, and what it came to in the second half. Dollars are means of windows."""

    trace: str
    hours: float
    strategy: str
    machines: int
    planned: float
    happened: float
    in_time: int
    windows: int


def run(folder: Path) -> Iterator[HeldOut]:
    """Yield a row for each trace. The job has a deadline of 52 hours; half of the trace's machines need 48."""
    price = Price(on_demand=ON_DEMAND, spot=SPOT)
    for path in PATHS:
        trace = read(folder / path)
        most, half = max(trace.counts), len(trace.counts) // 2
        job = PlannedJob(
            work_s=3600 * HOURS_OF_ONE * max(most // 2, 1), start_s=START_S, deadline_s=DEADLINE_S,
            speeds=tuple(float(n) for n in range(1, most + 1)),
        )  # fmt: skip
        first, second = (
            MarketTrace(name=path, gap_s=trace.gap_s, counts=counts)
            for counts in (trace.counts[:half], trace.counts[half:])
        )
        plan = ranked([*rows(job, [first], price, BEGINNINGS, None)])[0]
        sized = replace(job, speeds=job.speeds[: plan.machines])
        after = played(sized, SpotMarket(zones=(second,)), price, plan.strategy, BEGINNINGS, None)
        assert plan.dollars is not None
        assert after.dollars is not None
        yield HeldOut(
            trace=Path(path).with_suffix("").as_posix(), hours=trace.duration_s / 3600, strategy=plan.strategy,
            machines=plan.machines, planned=plan.dollars, happened=after.dollars, in_time=after.in_time,
            windows=after.windows,
        )  # fmt: skip
