"""The tables of `farandole bench steps`. Pure: figures in, rich renderables and lines of text out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rich.table import Table

from farandole.bench.figures import Figures
from farandole.bench.terms import ALONE, DDP, FARANDOLE

PARTS = {
    "data": "waiting for data",
    "compute": "forward and backward",
    "folding": "adding gradients up",
    "slower": "waiting for a slower worker",
    "exposed": "the exchange that is exposed",
    "landing": "the sum becomes .grad",
    "update": "optimizer.step()",
    "rest": "the rest",
    "step": "the step",
}
OURS = ("folding", "slower", "exposed", "landing")  # what can't be told of others, or is not there


def steps_table(found: Figures) -> Table:
    """How long a step takes; the first contestant is the floor."""
    table = _table("", "ms a step", "min..max", "over alone", "min..max", "samples/s")
    for name, each in found.contestants.items():
        over = ("", "") if name == ALONE else (f"{statistics.median(each.over):.2f}", _spread(each.over, 2))
        rate = f"{each.samples_per_s:,.0f}"
        table.add_row(name, f"{statistics.median(each.ms):.1f}", _spread(each.ms, 1), *over, rate)
    return table


def parts_table(found: Figures) -> Table:
    """Where a step's time goes."""
    table = _table("ms of a step", *found.contestants)
    for part, words in PARTS.items():
        cells = [
            "" if part in OURS and name != FARANDOLE else f"{getattr(each.parts, part):.2f}"
            for name, each in found.contestants.items()
        ]
        table.add_row(words, *cells)
    return table


def said(found: Figures, cores: int) -> Iterator[str]:
    """Returns lines of text for the facts that the tables do not show."""
    if found.by_itself:
        yield (
            f"an exchange takes {statistics.median(found.by_itself):.1f} ms by itself "
            f"({_spread(found.by_itself, 1)}); {statistics.median(found.hidden):.0%} of it are hidden behind backward "
            f"({min(found.hidden):.0%}..{max(found.hidden):.0%})"
        )
    if found.all_reduce:
        times = [theirs / ours for theirs, ours in zip(found.all_reduce, found.by_itself, strict=True)]
        yield (
            f"an all-reduce of Gloo's, of as many bytes, takes {statistics.median(found.all_reduce):.1f} ms "
            f"({_spread(found.all_reduce, 1)}), {statistics.median(times):.1f} times as long ({_spread(times, 1)})"
        )
    if found.left_out:
        yield f"{DDP} is left out: {found.left_out}"
    if found.terms.workers > cores:
        shared = f"{cores} cores" if cores > 1 else "1 core"
        yield f"{found.terms.workers} workers share {shared}: they slow each other down, also alone"


def round_said(found: Figures, round_: int) -> str:
    """A line about one round."""
    times = ", ".join(f"{name} {each.ms[round_]:.1f}" for name, each in found.contestants.items())
    return f"round {round_ + 1} of {found.terms.rounds}, ms a step: {times}"


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    return table


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{min(values):.{digits}f}..{max(values):.{digits}f}"
