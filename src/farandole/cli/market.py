"""`farandole simulate` and `farandole plan`: what a training would cost on a spot market, before anything is paid."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.options import check_file, check_plot, seconds, write_file, write_plot
from farandole.errors import UsageError
from farandole.platform.output import say, tell

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from rich.table import Table

    from farandole.market.comparison import StrategyResult
    from farandole.market.planning import PlanRow
    from farandole.market.play import PlannedJob, Price
    from farandole.market.speeds import MachineSpeeds
    from farandole.market.traces import MarketTrace


MOST_MACHINES = 4096
MOST_BEGINNINGS = 10_000
MOST_WORK_S = 1e9
GBIT = 10.0  # the default of --bandwidth

# --- options of both commands -----------------------------------------------------------------------------------------

Traces = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE...",
        help="Files of how many spot machines there were, and when; FILE,speed=0.5,spot=0.35 for machines of another "
        "type, FILE,type=NAME for --prices.",
    ),
]
Work = Annotated[
    str | None, typer.Option("--work", metavar="TIME", help="How long one machine alone would compute: 90m, 48h, 7d.")
]
Samples = Annotated[
    float | None,
    typer.Option(
        "--samples", metavar="N", help="In place of --work: the samples of all epochs, at the speeds of --speeds."
    ),
]
OnDemand = Annotated[
    float | None, typer.Option("--on-demand", metavar="DOLLARS", help="Price of an on-demand machine, per hour.")
]
Spot = Annotated[float | None, typer.Option("--spot", metavar="DOLLARS", help="Price of a spot machine, per hour.")]
Prices = Annotated[
    Path | None,
    typer.Option(
        "--prices", metavar="FILE",
        help="Prices with their dates, in place of --on-demand and --spot: the file of an EC2 pool, or spot prices as "
        "`aws ec2 describe-spot-price-history` prints them.",
    ),
]  # fmt: skip
Deadline = Annotated[
    str | None,
    typer.Option(
        "--deadline", metavar="TIME", help="The job has to be done this long after it begins.", show_default="none"
    ),
]
Budget = Annotated[
    float | None, typer.Option("--budget", metavar="DOLLARS", help="What the job may cost.", show_default="none")
]
MachinesOption = Annotated[
    int, typer.Option("--machines", metavar="N", help="The largest number of machines of the job.")
]
StartOption = Annotated[
    str, typer.Option("--start", metavar="TIME", help="Time from the request for a machine until it computes.")
]
State = Annotated[
    float | None,
    typer.Option(
        "--state", metavar="GB", show_default="no time for it",
        help="Size of the weights and the optimizer's state, in gigabytes (1e9 bytes): what a machine receives when it "
        "starts, and what a checkpoint saves.",
    ),
]  # fmt: skip
Bandwidth = Annotated[
    float | None,
    typer.Option(
        "--bandwidth", metavar="GBIT", show_default="10", help="How fast each machine receives the state, in Gbit/s."
    ),
]  # fmt: skip
Speeds = Annotated[
    Path | None,
    typer.Option(
        "--speeds",
        metavar="FILE|RUN",
        help="A file of `farandole bench scaling --json`, a run's folder, or samples a second by machines as JSON.",
        show_default="N machines are N times as fast",
    ),
]
Beginnings = Annotated[
    int, typer.Option("--beginnings", metavar="N", help="Play the job from this many points of each trace.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file, for programs.")
]


def _priced(
    traces: Sequence[str], on_demand: float | None, spot: float | None, file: Path | None, *, together: bool
) -> tuple[tuple[MarketTrace, ...], Price]:
    """Return the traces with their prices, and the prices of the others. `together`: they are one market."""
    from farandole.market.play import Price
    from farandole.market.prices import on_demand_price, read_prices, with_spot_prices
    from farandole.market.traces import read_zone

    for option, dollars in (("--on-demand", on_demand), ("--spot", spot)):
        if dollars is not None and not 0 < dollars < 1e6:
            raise UsageError(f"{option} {dollars:g}: dollars an hour, above 0 and below 1e6")
    if file is not None and on_demand is not None and spot is not None:
        raise UsageError(f"--prices {file}: it is not used if --on-demand and --spot are given; leave one of them out")
    prices = None if file is None else read_prices(file)
    zones = tuple(read_zone(words) for words in traces)
    if prices is not None:
        on_demand = on_demand_price(zones, prices) if on_demand is None else on_demand
    if prices is not None and spot is None:
        parts = [zones] if together else [(zone,) for zone in zones]
        priced = [with_spot_prices(part, prices) for part in parts]
        zones = tuple(zone for found, _ in priced for zone in found)
        for found, dates in priced:
            if dates:
                say(_dates(found, dates))
    if on_demand is None:
        raise UsageError("--on-demand: the price is unknown; give it in dollars an hour of one machine, or --prices")
    if spot is None and (unknown := next((zone.name for zone in zones if zone.spot is None), None)):
        raise UsageError(
            f"--spot: the price of {unknown} is unknown; give it in dollars an hour of one machine, or --prices"
        )
    return zones, Price(on_demand=on_demand, spot=spot)


def _dates(zones: Sequence[MarketTrace], dates: Sequence[datetime]) -> str:
    """Return which prices are used."""
    days = " to ".join(dict.fromkeys(f"{date:%Y-%m-%d}" for date in (dates[0], dates[-1])))
    if len(dates) == 1:
        return f"spot prices of {days}"
    last_h, trace_h = (dates[-1] - dates[0]).total_seconds() / 3600, max(zone.duration_s for zone in zones) / 3600
    return f"spot prices of {days}; the last change is {last_h:.0f} hours after the first, the trace has {trace_h:.0f}"


def _check_budget(budget: float | None) -> None:
    if budget is not None and not 0 < budget < math.inf:
        raise UsageError(f"--budget {budget:g}: dollars, above 0")


def _job(
    work: str | None, samples: float | None, start: str, state: float | None, bandwidth: float | None,
    deadline: str | None, machines: int, speeds: Path | None, beginnings: int, checkpoint: str | None = None,
    budget: float | None = None, mode: str = "",
) -> tuple[PlannedJob, MachineSpeeds]:  # fmt: skip
    """Return the job, and how fast its machines are."""
    from farandole.market.play import PlannedJob
    from farandole.market.speeds import speeds_of

    if not 1 <= machines <= MOST_MACHINES:
        raise UsageError(f"--machines {machines}: from 1 to {MOST_MACHINES}")
    if not 1 <= beginnings <= MOST_BEGINNINGS:
        raise UsageError(f"--beginnings {beginnings}: from 1 to {MOST_BEGINNINGS}")
    found, transfer_s = speeds_of(speeds, machines, mode), _transfer_s(state, bandwidth)
    job = PlannedJob(
        work_s=_work_s(work, samples, found), start_s=seconds("--start", start) + math.ceil(transfer_s),
        deadline_s=None if deadline is None else seconds("--deadline", deadline), budget=budget, speeds=found.relative,
        checkpoint_s=0 if checkpoint is None else seconds("--checkpoint", checkpoint), save_s=transfer_s,
    )  # fmt: skip
    if 0 < job.checkpoint_s < transfer_s:
        raise UsageError(f"--checkpoint {checkpoint}: to save the state takes {transfer_s:.0f} s; give at least that")
    if state is not None:
        saving = "" if checkpoint is None else f"; a checkpoint takes {transfer_s:.1f} s"
        say(f"the state takes {transfer_s:.1f} s: a start takes {job.start_s} s{saving}")
    return job, found


def _transfer_s(state: float | None, bandwidth: float | None) -> float:
    """Return how long the state takes."""
    if state is None:
        if bandwidth is not None:
            raise UsageError(f"--bandwidth {bandwidth:g}: it is used with --state only")
        return 0.0
    rate = GBIT if bandwidth is None else bandwidth
    if not 1e-3 <= rate < 1e6:
        raise UsageError(f"--bandwidth {rate:g}: Gbit/s, from 0.001 to 1e6")
    if not 0 < state < 1e6:
        raise UsageError(f"--state {state:g}: gigabytes, above 0 and below 1e6")
    return state * 8 / rate


def _work_s(work: str | None, samples: float | None, speeds: MachineSpeeds) -> int:
    """Return for how many seconds one machine alone computes."""
    if work is not None and samples is None:
        return seconds("--work", work)
    if work is not None or samples is None:
        raise UsageError("give --work, for how long one machine alone would compute, or --samples with --speeds")
    if speeds.samples_per_s is None:
        raise UsageError("--samples: give --speeds too, for the samples a second of a machine")
    rate = speeds.samples_per_s
    if not 1 <= samples / rate < MOST_WORK_S:
        raise UsageError(
            f"--samples {samples:g}: one machine computes {rate:,.4g} a second; give at least that, and less than "
            f"{MOST_WORK_S * rate:.3g}"
        )
    return round(samples / speeds.samples_per_s)


def _say_traces(zones: Sequence[MarketTrace]) -> None:
    for zone in zones:
        speed = "" if zone.speed == 1 else f", {zone.speed:g} times as fast as on demand"
        price = f", {_range(zone.spot)} dollars an hour" if zone.spot else ""
        most, part = max(zone.counts), zone.availability
        say(f"{zone.name}: up to {most} machines, at least one for {part:.0%} of the time{speed}{price}")


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:g}" for value in (min(values), max(values))))


# --- simulate ---------------------------------------------------------------------------------------------------------


def simulate(
    traces: Traces,
    *,
    work: Work = None,
    samples: Samples = None,
    on_demand: OnDemand = None,
    spot: Spot = None,
    prices: Prices = None,
    deadline: Deadline = None,
    budget: Budget = None,
    machines: MachinesOption = 16,
    start: StartOption = "3m",
    state: State = None,
    bandwidth: Bandwidth = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="TIME", help="Time between two checkpoints of strategies that restart.",
            show_default="no work is lost",
        ),
    ] = None,
    speeds: Speeds = None,
    drawn: Annotated[
        int | None,
        typer.Option(
            "--drawn", metavar="SEED", show_default="the traces as they are",
            help="Play on random traces, drawn with this seed from a model that is fitted to each TRACE.",
        ),
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="The traces are zones of one market; else each one is a market.")
    ] = False,
    beginnings: Beginnings = 10,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy", metavar="NAME", show_default="all",
            help="A strategy by name, as 'farandole, spot' (docs/cost.md lists them). Repeatable.",
        ),
    ] = None,
    json: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.svg|FILE.png", help="Draw the cost by strategy. Chromium draws a .png."
        ),
    ] = None,
) -> None:  # fmt: skip
    """Compare the cost of strategies on traces of a spot market.

    Starts nothing.
    """
    from farandole.market import comparison, model
    from farandole.market.strategies import BUDGET, BY_NAME, STRATEGIES
    from farandole.market.traces import SpotMarket

    _check_budget(budget)
    if drawn is not None and drawn < 0:
        raise UsageError(f"--drawn {drawn}: a seed, 0 or more")
    names = [*(strategy or (STRATEGIES if budget is None else BY_NAME))]
    for name in names:
        if name not in BY_NAME:
            raise UsageError(
                f"--strategy {name!r}: there is none of that name; there are {', '.join(map(repr, BY_NAME))}"
            )
        if name == BUDGET and budget is None:
            raise UsageError(f"--strategy {name!r}: it needs a budget; give --budget in dollars")
    check_file("--json", json)
    check_plot(plot)
    job, measured = _job(
        work, samples, start, state, bandwidth, deadline, machines, speeds, beginnings, checkpoint, budget
    )
    comparison.fixed_size(job)
    zones, price = _priced(traces, on_demand, spot, prices, together=together)
    if drawn is not None:
        zones = tuple(model.drawn(zone, drawn) for zone in zones)
    markets = [SpotMarket(zones=zones)] if together else [SpotMarket(zones=(zone,)) for zone in zones]
    places = comparison.windows(markets, job, beginnings)
    _say_traces(zones)
    say(f"{len(places)} windows")
    results = list[comparison.StrategyResult]()
    for result in comparison.compare(job, places, price, names):
        say(f"  {result.strategy}")
        results.append(result)
    _show(_table(results, job, samples), job, measured)
    if json is not None:
        import msgspec

        write_file("--json", json, msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    if plot is not None:
        from farandole.market.chart import cost_chart

        write_plot(plot, cost_chart(results))


def _show(table: Table, job: PlannedJob, known: MachineSpeeds) -> None:
    from farandole.bench.table import print_table

    tell("")
    print_table(table)
    if known.most < job.most or known.fewest > 1:
        tell("")
    if known.most < job.most:
        tell(f"the speeds of more than {known.most} machines are extrapolated")
    if known.fewest > 1:
        tell(f"one machine is taken to be 1/{known.fewest} as fast as {known.fewest}")


def _table(results: Sequence[StrategyResult], job: PlannedJob, samples: float | None) -> Table:
    from farandole.bench.table import plain_table
    from farandole.market.comparison import mean

    table = plain_table(
        "strategy", "machines", "dollars", "min..max", "over the bound", "hours", "missed", "goodput", "taken back",
        "spot, machine-hours", "on demand", *([] if samples is None else ["samples per dollar"]),
        *(["again, machine-hours"] if job.checkpoint_s else []),
        *(["save, machine-hours"] if job.checkpoint_s and job.save_s else []),
        *([] if job.budget is None else ["within budget"]),
    )  # fmt: skip
    for row in results:
        each = row.outcomes
        is_bound = all(outcome.lost is None for outcome in each)
        spread = f"{min(row.dollars):,.2f}..{max(row.dollars):,.2f}" if row.dollars else ""
        table.add_row(
            row.strategy, str(row.machines), _number(mean(row.dollars), 2), spread,
            _number(mean([outcome.over_bound for outcome in each]), 3), _number(mean([o.hours for o in each]), 1),
            "" if is_bound or (job.deadline_s is None and not row.missed) else f"{row.missed} of {len(each)}",
            "" if is_bound else f"{mean([o.goodput for o in each]) or 0:.1%}",
            _number(mean([outcome.lost for outcome in each]), 1), _number(mean([o.spot_h for o in each]), 1),
            _number(mean([o.on_demand_h for o in each]), 1),
            *([] if samples is None else [_number(samples / (mean(row.dollars) or math.inf), 0)]),
            *([_number(mean([o.again_h for o in each]), 1)] if job.checkpoint_s else []),
            *([_number(mean([o.save_h for o in each]), 1)] if job.checkpoint_s and job.save_s else []),
            *([] if job.budget is None else [_within(row, job.budget)]),
        )  # fmt: skip
    return table


def _within(row: StrategyResult, budget: float) -> str:
    if all(outcome.lost is None for outcome in row.outcomes):
        return ""
    return f"{sum(dollars <= budget for dollars in row.dollars)} of {len(row.outcomes)}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}" if math.isfinite(value) else "not possible"


# --- plan -------------------------------------------------------------------------------------------------------------


def plan(
    traces: Traces,
    *,
    work: Work = None,
    samples: Samples = None,
    on_demand: OnDemand = None,
    spot: Spot = None,
    prices: Prices = None,
    deadline: Deadline = None,
    budget: Budget = None,
    machines: MachinesOption = 16,
    start: StartOption = "3m",
    state: State = None,
    bandwidth: Bandwidth = None,
    speeds: Speeds = None,
    batches: Annotated[
        Path | None,
        typer.Option(
            "--batches", metavar="FILE", show_default="the batch is constant",
            help="A file of `farandole bench batch --json`: also plan with a batch that follows the machines.",
        ),
    ] = None,
    beginnings: Beginnings = 10,
    json: JsonFile = None,
) -> None:  # fmt: skip
    """Find the machines, zones and strategy that make a job cheapest.

    Starts nothing.
    """
    from farandole.market import planning
    from farandole.market.batches import read_batches
    from farandole.market.comparison import fixed_size
    from farandole.market.speeds import speeds_of

    _check_budget(budget)
    check_file("--json", json)
    mode = "" if batches is None else "strong"
    job, measured = _job(work, samples, start, state, bandwidth, deadline, machines, speeds, beginnings, mode=mode)
    table = None if batches is None else read_batches(batches)
    if table is None:
        fixed_size(job)
    elif speeds is None:
        raise UsageError(
            f"--batches {batches}: give --speeds FILE too, from `farandole bench scaling --json FILE`; without it N "
            "machines are N times as fast with each batch, so that a constant one is always the best"
        )
    zones, price = _priced(traces, on_demand, spot, prices, together=True)
    kinds = {zone.kind for zone in zones}
    if len(kinds) > 1:
        raise UsageError(
            f"type={', '.join(sorted(filter(None, kinds)))}: a plan has machines of one type; `farandole simulate` "
            f"plays several"
        )
    for zone in zones:
        if zone.speed != 1:
            raise UsageError(
                f"{zone.name}, speed={zone.speed:g}: `farandole run --deadline` takes all machines to be equally fast, "
                "so no plan can be made with this one; `farandole simulate` plays it"
            )
    _say_traces(zones)
    rows = list[planning.PlanRow]()
    found = (
        planning.rows(job, zones, price, beginnings, budget)
        if table is None
        else planning.rows_by_batch(
            job, speeds_of(speeds, machines, "weak").relative, table, zones, price, beginnings, budget
        )
    )
    for row in found:
        say(f"  {planning.named(row)}")
        rows.append(row)
    if not rows:
        fixed_size(job)
    rows = planning.ranked(rows)
    _show(_plan_table(rows, job, budget), job, measured)
    begins = f"{job.start_s}s" if state else start
    of_pool = None if prices is None or prices.suffix.lower() == ".json" else prices
    for line in planning.advice(rows, deadline, budget, begins, speeds, of_pool, table):
        tell(line)
    if json is not None:
        import msgspec

        write_file("--json", json, msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


SHOWN_PLANS = 12


def _plan_table(rows: Sequence[PlanRow], job: PlannedJob, budget: float | None) -> Table:
    from farandole.bench.table import plain_table

    heads = [
        "strategy",
        "zones",
        *(["batch"] if rows[0].batch else []),
        "machines",
        "dollars",
        "90th percentile",
        "hours",
        "90th percentile",
    ]
    heads += [] if job.deadline_s is None else ["in time", "certain"]
    heads += [] if budget is None else ["within budget"]
    table = plain_table(*heads, left=3 if rows[0].batch else 2)
    for row in rows[:SHOWN_PLANS]:
        cells = [
            row.strategy, row.zones, *([row.batch] if row.batch else []), str(row.machines), _number(row.dollars, 2),
            _number(row.dollars_of_9, 2), _number(row.hours, 1), _number(row.hours_of_9, 1),
        ]  # fmt: skip
        cells += [] if job.deadline_s is None else [f"{row.in_time} of {row.windows}", "yes" if row.certain else ""]
        cells += [] if budget is None else [f"{row.within_budget} of {row.windows}"]
        table.add_row(*cells)
    return table
