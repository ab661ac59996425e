"""The tables of `farandole bench steps` and `bench network`. Pure: figures in, tables of rich and lines out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rich.table import Table

from farandole.bench.figures import Figures
from farandole.bench.network import NetworkResult
from farandole.bench.terms import ALONE, DDP, FARANDOLE

PARTS = {
    "data": "waiting for data",
    "compute": "forward and backward",
    "folding": "adding gradients up",
    "slower": "waiting for a slower worker",
    "exposed": "exposed part of the exchange",
    "landing": "the sum becomes .grad",
    "update": "optimizer.step()",
    "rest": "the rest",
    "step": "the step",
}
OURS = ("folding", "slower", "exposed", "landing")  # unknown or absent for other contestants


def steps_table(result: Figures) -> Table:
    """Return the table of step times. The first contestant is the floor."""
    table = plain_table("", "ms a step", "min..max", "over alone", "min..max", "samples/s")
    for name, each in result.contestants.items():
        over = ("", "") if name == ALONE else (f"{statistics.median(each.over):.2f}", _spread(each.over, 2))
        rate = f"{each.samples_per_s:,.0f}"
        table.add_row(name, f"{statistics.median(each.ms):.1f}", _spread(each.ms, 1), *over, rate)
    return table


def parts_table(result: Figures) -> Table:
    """Return the table of the parts of a step's time."""
    table = plain_table("ms of a step", *result.contestants)
    for part, words in PARTS.items():
        cells = [
            "" if part in OURS and name != FARANDOLE else f"{getattr(each.parts, part):.2f}"
            for name, each in result.contestants.items()
        ]
        table.add_row(words, *cells)
    return table


def notes(result: Figures, cores: int) -> Iterator[str]:
    """Yield lines of text for the facts that the tables do not show."""
    if result.by_itself:
        yield (
            f"an exchange takes {statistics.median(result.by_itself):.1f} ms by itself "
            f"({_spread(result.by_itself, 1)}); {statistics.median(result.hidden):.0%} of it is hidden behind backward "
            f"({min(result.hidden):.0%}..{max(result.hidden):.0%})"
        )
    if result.all_reduce:
        times = [gloo / own for gloo, own in zip(result.all_reduce, result.by_itself, strict=True)]
        yield (
            f"an all-reduce of Gloo, with as many bytes, takes {statistics.median(result.all_reduce):.1f} ms "
            f"({_spread(result.all_reduce, 1)}), {statistics.median(times):.1f} times as long ({_spread(times, 1)})"
        )
    if result.left_out:
        yield f"{DDP} is left out: {result.left_out}"
    if result.terms.workers > cores:
        shared = f"{cores} cores" if cores > 1 else "1 core"
        yield f"{result.terms.workers} workers share {shared}: they slow each other down, also without farandole"


def round_line(result: Figures, round_: int) -> str:
    """Return a line about one round."""
    times = ", ".join(f"{name} {each.ms[round_]:.1f}" for name, each in result.contestants.items())
    return f"round {round_ + 1} of {result.terms.rounds}, ms a step: {times}"


def plain_table(*titles: str, left: int = 1) -> Table:
    """Return an empty table without lines. The first `left` columns are words, the others are numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number >= left else "left", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """Print a table at its whole width, also where the terminal is narrower."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, Measurement.get(console, console.options.update(width=1000), table).maximum)
    console.print(table)


def links_table(result: NetworkResult) -> Table:
    """Return the table of the links between the hosts."""
    table = plain_table("from", "to", "Mbit/s", "least round trip, ms", left=2)
    for link in result.links:
        rate = "unknown" if link.mbit_per_s is None else f"{link.mbit_per_s:,.0f}"
        table.add_row(link.source, link.target, rate, "unknown" if link.rtt_ms is None else f"{link.rtt_ms:.2f}")
    return table


def predictions_table(result: NetworkResult) -> Table:
    """Return the table of the codecs. The exchange without one is measured, the others are predicted."""
    table = plain_table("codec", "MB a host and step", "exchange, ms", "step, ms", "times faster")
    for each in result.predictions:
        table.add_row(
            each.codec, f"{each.sent_mb:.1f}", f"{each.exchange_ms:,.0f}", f"{each.step_ms:,.0f}",
            f"{each.times_faster:.2f}",
        )  # fmt: skip
    return table


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{min(values):.{digits}f}..{max(values):.{digits}f}"
