"""`farandole simulate`: what a training would cost on a spot market, by strategy, before anything is paid for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.options import check_file, seconds, write_file
from farandole.errors import UsageError
from farandole.platform.output import say, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from farandole.market.comparison import StrategyResult
    from farandole.market.play import PlannedJob


def simulate(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Files of how many spot machines there were, and when.")
    ],
    *,
    work: Annotated[
        str, typer.Option("--work", metavar="TIME", help="How long one machine alone would compute: 90m, 48h, 7d.")
    ],
    on_demand: Annotated[
        float | None, typer.Option("--on-demand", metavar="DOLLARS", help="Price of an on-demand machine an hour.")
    ] = None,
    spot: Annotated[
        float | None, typer.Option("--spot", metavar="DOLLARS", help="Price of a spot machine an hour.")
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline", metavar="TIME", help="The job has to be done so long after its beginning.",
            show_default="none",
        ),
    ] = None,
    machines: Annotated[
        int, typer.Option("--machines", metavar="N", help="The largest number of machines of the job.")
    ] = 16,
    start: Annotated[
        str, typer.Option("--start", metavar="TIME", help="From the request for a machine until it computes.")
    ] = "3m",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="TIME", help="Time between two checkpoints of strategies that restart.",
            show_default="no work is lost",
        ),
    ] = None,
    speeds: Annotated[
        Path | None,
        typer.Option(
            "--speeds", metavar="FILE", help="A file of `farandole bench scaling --json`.",
            show_default="N machines are N times as fast",
        ),
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="The traces are zones of one market; else each one is a market.")
    ] = False,
    beginnings: Annotated[
        int, typer.Option("--beginnings", metavar="N", help="Play the job from so many beginnings in each trace.")
    ] = 10,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy", metavar="NAME", show_default="all",
            help="A strategy by name, as 'farandole, spot' (docs/cost.md lists them). Repeatable.",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file, for programs.")
    ] = None,
) -> None:  # fmt: skip
    """Play strategies on traces of a spot market, and compare their cost. Starts nothing."""
    from farandole.market import comparison
    from farandole.market.play import PlannedJob, Price
    from farandole.market.speeds import speeds_of
    from farandole.market.strategies import STRATEGIES
    from farandole.market.traces import SpotMarket, read

    for option, dollars in (("--on-demand", on_demand), ("--spot", spot)):
        if dollars is None:
            raise UsageError(f"{option}: the price is unknown; give it in dollars an hour of one machine")
        if not 0 < dollars < 1e6:
            raise UsageError(f"{option} {dollars:g}: dollars an hour, above 0")
    assert on_demand is not None
    assert spot is not None
    if not 1 <= machines <= MOST_MACHINES:
        raise UsageError(f"--machines {machines}: from 1 to {MOST_MACHINES}")
    if not 1 <= beginnings <= MOST_BEGINNINGS:
        raise UsageError(f"--beginnings {beginnings}: from 1 to {MOST_BEGINNINGS}")
    names = [*(strategy or STRATEGIES)]
    for name in names:
        if name not in STRATEGIES:
            raise UsageError(
                f"--strategy {name!r}: there is none of that name; there are {', '.join(map(repr, STRATEGIES))}"
            )
    check_file("--json", json)
    found, measured = speeds_of(speeds, machines)
    job = PlannedJob(
        work_s=seconds("--work", work), start_s=seconds("--start", start), speeds=found,
        deadline_s=None if deadline is None else seconds("--deadline", deadline),
        checkpoint_s=0 if checkpoint is None else seconds("--checkpoint", checkpoint),
    )  # fmt: skip
    price = Price(on_demand=on_demand, spot=spot)
    comparison.fixed_size(job)
    zones = tuple(read(path) for path in traces)
    markets = [SpotMarket(zones=zones)] if together else [SpotMarket(zones=(zone,)) for zone in zones]
    places = comparison.windows(markets, job, beginnings)
    for zone in zones:
        say(f"{zone.name}: up to {max(zone.counts)} machines, at least one for {zone.availability:.0%} of the time")
    say(f"{len(places)} windows")
    results = list[comparison.StrategyResult]()
    for result in comparison.compare(job, places, price, names):
        say(f"  {result.strategy}")
        results.append(result)
    _show(results, job, measured)
    if json is not None:
        import msgspec

        write_file("--json", json, msgspec.json.format(msgspec.json.encode(results)) + b"\n")


MOST_MACHINES = 4096
MOST_BEGINNINGS = 10_000


def _show(results: Sequence[StrategyResult], job: PlannedJob, measured: int) -> None:
    from rich.console import Console
    from rich.measure import Measurement

    console, table = Console(highlight=False, soft_wrap=True), _table(results, job)
    console.width = max(console.width, Measurement.get(console, console.options.update(width=1000), table).maximum)
    tell("")
    console.print(table)
    if measured < job.most:
        tell("")
        tell(f"the speeds of more than {measured} machines are extrapolated")


def _table(results: Sequence[StrategyResult], job: PlannedJob) -> Table:
    from farandole.bench.table import plain_table
    from farandole.market.comparison import mean

    table = plain_table(
        "strategy", "machines", "dollars", "min..max", "over the bound", "hours", "missed", "goodput", "taken back",
        "spot, machine-hours", "on demand",
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
        )  # fmt: skip
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}" if math.isfinite(value) else "not possible"
