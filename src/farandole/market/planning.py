"""Plans: which strategy, at most how many machines, and which zones make a job cheapest.

Every plan is one that `farandole run` can carry out. It is played in the windows of the traces, and its cost is the
mean of them. With a deadline only plans are recommended that meet it whatever the spot market does.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from farandole.errors import UsageError
from farandole.market.batches import BatchTable, following_speeds
from farandole.market.comparison import fixed_size, in_window, windows
from farandole.market.play import PlannedJob, Price, play
from farandole.market.strategies import STRATEGIES
from farandole.market.traces import MarketTrace, SpotMarket, zone_of

CONSTANT, FOLLOWS = "constant", "follows"  # the batch of a plan
CERTAIN = ("on demand", "farandole, deadline")  # in time whatever the spot market does
RUNNABLE = ("on demand", "farandole, spot", "farandole, core", "farandole, deadline")


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and what it came to in all windows.

    `dollars`, `hours`: the means of the windows in which the job was done; None: there were none. `dollars_of_9`,
    `hours_of_9`: what nine in ten of these windows did not exceed. `in_time`, `within_budget`: in how many windows the
    job was done in time, and cost at most the budget. `certain`: it is in time whatever the market does. `batch`:
    "constant", or "follows" if it follows the machines; "": it was not weighed. `largest_batch`: of a batch that
    follows, in samples.
    """

    strategy: str
    zones: str
    machines: int
    windows: int
    dollars: float | None
    dollars_of_9: float | None
    hours: float | None
    hours_of_9: float | None
    in_time: int
    within_budget: int
    certain: bool
    batch: str = ""
    largest_batch: int | None = None


def sizes(most: int) -> list[int]:
    """Return the largest numbers of machines that are tried: powers of two, and `most`."""
    return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})


def markets_of(zones: Sequence[MarketTrace]) -> list[SpotMarket]:
    """Return each zone alone, and the zones of each region together if their intervals are equal.

    The region is in the name, as in us-west-2a_v100_1. Traces without one are taken to be of one region.
    """
    together = dict[tuple[str, int], list[MarketTrace]]()
    for zone in zones:
        together.setdefault((zone_of(zone.name)[:-1], zone.gap_s), []).append(zone)
    several = [SpotMarket(zones=tuple(each)) for each in together.values() if len(each) > 1]
    return [*(SpotMarket(zones=(zone,)) for zone in zones), *several]


def rows_by_batch(
    job: PlannedJob, following: tuple[float, ...], table: BatchTable, zones: Sequence[MarketTrace], price: Price,
    beginnings: int, budget: float | None,
) -> Iterator[PlanRow]:  # fmt: skip
    """Yield each plan with the constant batch, then with one that follows the machines. See `market/batches.py`.

    `following`: how many times more samples a second several machines compute than one, each with the batch of one.
    """
    for row in rows(job, zones, price, beginnings, budget):
        yield msgspec.structs.replace(row, batch=CONSTANT)
    speeds, largest = following_speeds(following, table)
    for row in rows(replace(job, speeds=speeds), zones, price, beginnings, budget):
        yield msgspec.structs.replace(row, batch=FOLLOWS, largest_batch=min(largest, table.base * row.machines))


def rows(
    job: PlannedJob, zones: Sequence[MarketTrace], price: Price, beginnings: int, budget: float | None
) -> Iterator[PlanRow]:
    """Yield each plan, as it is played: all sizes, each zone alone, and all zones of a region together.

    Raises:
        UsageError: a trace is shorter than the deadline.
    """
    markets = markets_of(zones)
    for size in sizes(job.most):
        sized = replace(job, speeds=job.speeds[:size])
        try:
            fixed_size(sized)
        except UsageError:
            continue  # so many machines on demand are too late, and spot machines only may be
        for market in markets:
            for strategy in RUNNABLE:
                if strategy == "farandole, deadline" and job.deadline_s is None:
                    continue
                if strategy == "on demand" and market is not markets[0]:
                    continue  # spot machines do not matter
                yield played(sized, market, price, strategy, beginnings, budget)


def played(
    job: PlannedJob, market: SpotMarket, price: Price, strategy: str, beginnings: int, budget: float | None
) -> PlanRow:
    """Return what a plan comes to in `beginnings` windows of a market."""
    places = windows([market], job, beginnings)
    found = [play(in_window(job, place), place.market, price, STRATEGIES[strategy]) for place in places]
    done = [each for each in found if each.done_s is not None]
    dollars = [each.dollars for each in done]
    hours = [(each.done_s or 0.0) / 3600 for each in done]
    return PlanRow(
        strategy=strategy, zones="" if strategy == "on demand" else market.name, machines=job.most,
        windows=len(places), dollars=_mean(dollars), dollars_of_9=_of_9(dollars), hours=_mean(hours),
        hours_of_9=_of_9(hours), in_time=len(done), within_budget=sum(each <= (budget or 0.0) for each in dollars),
        certain=job.deadline_s is not None and strategy in CERTAIN,
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _of_9(values: Sequence[float]) -> float | None:
    return float(np.quantile(values, 0.9)) if values else None


def ranked(found: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the plans, best first.

    Those come first that are certain to be in time, then those that are most often in time, then most often within the
    budget, then the cheapest.
    """

    def key(row: PlanRow) -> tuple[bool, int, int, float]:
        dollars = row.dollars if row.dollars is not None else float("inf")
        return not row.certain, -row.in_time, -row.within_budget, dollars

    return sorted(found, key=key)


def advice(
    found: Sequence[PlanRow], deadline: str | None, budget: float | None, start: str, speeds: Path | None,
    prices: Path | None = None, table: BatchTable | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yield the lines that recommend a plan: which one, why, how sure it is, and the command that carries it out.

    `found`: plans in the order of `ranked`. `deadline`, `start`: as the user gave them. `prices`: a file of prices
    that an EC2 pool reads. `table`: if batches were weighed.
    """
    best = found[0]
    if best.dollars is None or best.dollars_of_9 is None:
        yield f"no plan was done in any of {best.windows} windows: the traces end before the job"
        return
    yield f"recommended: {named(best)}"
    sure = "certain to be in time" if best.certain else f"done in {best.in_time} of {best.windows} windows"
    costs = f"{best.dollars:,.2f} dollars in the mean, {best.dollars_of_9:,.2f} at the 90th percentile of windows"
    yield f"  {sure}; {costs}"
    fixed = next((row for row in found if row.strategy == "on demand" and row.dollars is not None), None)
    if fixed is not None and fixed is not best and fixed.dollars:
        yield f"  on demand only: {fixed.dollars:,.2f} dollars; this saves {1 - best.dollars / fixed.dollars:.0%}"
    if table is not None:
        yield from _about_batch(best, found, table)
    cheaper = [row for row in found if row.dollars is not None and row.dollars < 0.99 * best.dollars]
    for row in sorted(cheaper, key=lambda row: (-row.in_time, row.dollars or 0.0))[:1]:
        yield (
            f"  not certain, and {1 - (row.dollars or 0.0) / best.dollars:.0%} cheaper: {named(row)}; in time in "
            f"{row.in_time} of {row.windows} windows"
        )
    if budget is not None:
        ends = (
            ""
            if best.within_budget == best.windows
            else "; in the others --max-cost ends the run before the job is done"
        )
        yield f"  within {budget:g} dollars in {best.within_budget} of {best.windows} windows{ends}"
        if not best.within_budget:
            yield f"  the budget would have to be at least {best.dollars:,.2f} dollars, or the deadline later"
    yield "the windows overlap, and a market may be another one tomorrow"
    yield ""
    yield command(best, deadline, budget, start, speeds, prices)


BATCH_WORDS = {"": "", CONSTANT: ", with a constant batch", FOLLOWS: ", with a batch that follows them"}


def named(row: PlanRow) -> str:
    """Return the plan in words."""
    where = f" in {row.zones}" if row.zones else ""
    return f"{row.strategy}, at most {row.machines} machines{where}{BATCH_WORDS[row.batch]}"


def _about_batch(best: PlanRow, found: Sequence[PlanRow], table: BatchTable) -> Iterator[str]:
    """Yield the lines that weigh the two kinds of batch."""
    measured = f"measured by `farandole bench batch`, {table.target}" if table.target else "as given"
    yield f"  samples by the size of the batch: {measured}"
    other = next((row for row in found if row.batch != best.batch and row.certain == best.certain), None)
    if other is not None and other.dollars is not None:
        yield f"  instead: {named(other)}: {other.dollars:,.2f} dollars, {other.hours:.1f} hours in the mean"
    if best.largest_batch is not None:
        ratio = table.needed(best.largest_batch) / table.needed(table.base)
        yield (
            f"  in the script: PerWorkerBatch({table.base}, micro=..., max_batch={best.largest_batch}); the largest "
            f"batch needs {ratio:.2f} times as many samples as a batch of {table.base}"
        )
        if best.largest_batch > table.largest:
            yield f"  the samples of a batch of more than {table.largest} are extrapolated"


def command(
    row: PlanRow, deadline: str | None, budget: float | None, start: str, speeds: Path | None,
    prices: Path | None = None,
) -> str:  # fmt: skip
    """Return the command that carries out a plan, with EC2 as the provider; TEMPLATE and SCRIPT are the user's."""
    priced = "" if budget is None and prices is None else f",prices={prices or 'prices.csv'}"
    zones = "+".join(filter(None, map(zone_of, row.zones.split(" + "))))
    at = f",zones={zones}" if zones else ""
    on_demand = f"ec2,name=reserve,template=TEMPLATE,market=on-demand,size={{}}{priced}"
    spot = f"ec2,name=spot,template=TEMPLATE,size={{}}{at}{priced}"
    core = -(-row.machines // 8)
    pools = {
        "on demand": [on_demand.format(row.machines)],
        "farandole, spot": [spot.format(row.machines)],
        "farandole, core": [on_demand.format(core), spot.format(row.machines - core)],
        "farandole, deadline": [spot.format(row.machines), on_demand.format(row.machines)],
    }[row.strategy]
    words = ["farandole run --listen 0.0.0.0", *(f"--pool {shlex.quote(pool)}" for pool in pools)]
    if row.strategy == "farandole, deadline":
        words += [
            f"--deadline {deadline} --start {start}",
            *([] if speeds is None or row.batch == FOLLOWS else [f"--speeds {shlex.quote(str(speeds))}"]),
        ]
    words += [] if budget is None else [f"--max-cost {budget:g}"]
    return " \\\n    ".join([*words, "SCRIPT"])
