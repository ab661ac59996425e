"""The table, the notes and the chart of `farandole bench scaling`. Pure: rows in, a rich table, text and SVG out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from rich.markup import escape as plain
from rich.table import Table

from farandole.bench.scaling import ScalingResult, ScalingRow
from farandole.bench.table import plain_table
from farandole.bench.terms import DDP
from farandole.observe.text import in_words, rate_words
from farandole.platform.extras import compresses

UNKNOWN = "unknown"
IDLE = 0.25  # other processes that take less than this part of the cores are not mentioned
VARIED = ("arguments", "codec", "transport")  # columns that the table has if their values differ

# --- table ------------------------------------------------------------------------------------------------------------


def scaling_table(rows: Sequence[ScalingRow]) -> Table:
    """Return the table of all rows."""
    varied = [name for name in VARIED if len({getattr(row.run, name) for row in rows}) > 1]
    contestants = len({row.contestant for row in rows}) > 1
    money = [*(f"dollars {plain(each)}" for each in rows[0].dollars)]
    samples = [*(f"samples/dollar {plain(each)}" for each in rows[0].dollars)]
    table = plain_table(
        "scaling", *varied, *(["by"] if contestants else []), "workers", "samples/s", "speed-up", "efficiency",
        "predicted", "start-up s", "waiting", "MB a step", "training", *map(str.strip, money), *map(str.strip, samples),
        left=1 + len(varied) + contestants,
    )  # fmt: skip
    before = rows[0]
    for row in rows:
        if row.run.workers == row.over and row is not before:
            table.add_section()
        table.add_row(
            row.run.mode, *(plain(getattr(row.run, name)) for name in varied),
            *([row.contestant] if contestants else []),
            str(row.run.workers), rate_words(row.samples_per_s), f"{row.speed_up:.2f}", f"{row.efficiency:.0%}",
            "" if row.predicted is None else f"{row.predicted:.0%}", f"{row.measured.startup_s:.1f}",
            "" if row.measured.exposed is None else f"{row.measured.exposed:.1%}",
            "" if row.measured.sent_mb is None else f"{row.measured.sent_mb:.2f}", in_words(row.training_s),
            *map(_money, row.dollars.values()), *map(_count, row.samples_per_dollar.values()),
        )  # fmt: skip
    return table


def _money(dollars: float | None) -> str:
    return UNKNOWN if dollars is None else f"{dollars:.3g}" if dollars < 100 else f"{dollars:,.0f}"


def _count(samples: float | None) -> str:
    return UNKNOWN if samples is None else f"{samples:,.0f}"


def result_line(result: ScalingResult) -> str:
    """Return a line about the measurement of one run."""
    return ", ".join(
        f"{name} {rate_words(each.samples_per_s)} samples/s ({each.step_ms:.1f} ms a step)"
        for name, each in result.contestants.items()
    )


def notes(
    rows: Sequence[ScalingRow], results: Iterable[ScalingResult], threads: int, cores: float, load: float
) -> Iterator[str]:
    """Yield lines of text for the facts that the table does not show. `load`: how many threads of other processes ran
    or waited for a core, on average, before the first run.
    """
    if (over := rows[0].over) > 1:
        yield f"speed-up and efficiency are over {over} workers; --workers 1,... compares with one"
    shared = sorted({row.run.workers for row in rows if row.run.workers * threads > cores})
    if shared:
        own = f"{cores} cores" if cores > 1 else "1 core"
        of = f" of {threads} threads each" if threads > 1 else ""
        counts = ", ".join(map(str, shared))
        yield f"{counts} workers{of} shared {own}: what that costs, workers with cores of their own do not lose"
    if load > IDLE * cores:
        own = f"{cores} cores" if cores > 1 else "core"
        yield f"other processes used this machine, too: {load:.1f} threads wanted its {own} before the first run"
    for count, shards in sorted({(row.run.workers, row.measured.shards) for row in rows}):
        if shards % count:
            busiest, fewest = -(-shards // count), shards // count
            yield f"{count} workers: {shards} micro-batches a step are {fewest} or {busiest} for each; the others wait"
    if any(compresses(row.run.codec) for row in rows):
        yield "MB a step is before compression, which applies between workers that share no memory"
    for reason in dict.fromkeys(result.left_out for result in results if result.left_out):
        yield f"{DDP} is left out: {reason}"
    if None in rows[0].dollars.values():
        yield "--price DOLLARS, of an hour of one worker, shows what the training costs"


# --- chart ------------------------------------------------------------------------------------------------------------

WIDE, HIGH = 900, 340
LEFT, RIGHT, TOP, BOTTOM = 60, 660, 20, 290
COLOURS = ("#1f6feb", "#d1570a", "#2da44e", "#8250df", "#bf3989", "#57606a")


def chart(rows: Sequence[ScalingRow]) -> str:
    """Return an SVG of the speed-up by the number of workers, one line for each series, beside the ideal one."""
    series: dict[str, list[ScalingRow]] = {}
    varied = [name for name in VARIED if len({getattr(row.run, name) for row in rows}) > 1]
    for row in rows:
        name = " ".join([row.contestant, row.run.mode, *(getattr(row.run, each) for each in varied)])
        series.setdefault(name, []).append(row)
    counts = sorted({row.run.workers for row in rows})
    most, highest = counts[-1], max([counts[-1] / rows[0].over, *(row.speed_up for row in rows)])

    def place(workers: float, speed_up: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * workers / most, BOTTOM - (BOTTOM - TOP) * speed_up / highest

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDE}" height="{HIGH}" fill="white"/>',
    ]
    for count in counts:
        (x, y), ideal = place(count, 0), count / rows[0].over
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{count}</text>')
        parts.append(_line([place(0, ideal), place(most, ideal)], "#e1e4e8"))
        parts.append(f'<text x="{LEFT - 8}" y="{place(0, ideal)[1] + 4:.1f}" text-anchor="end">{ideal:g}</text>')
    parts.append(_line([place(0, 0), place(most, 0)], "#57606a"))
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{HIGH - 12}" text-anchor="middle">workers</text>')
    parts.append(f'<text x="14" y="{(TOP + BOTTOM) / 2}" transform="rotate(-90 14 {(TOP + BOTTOM) / 2})" '
                 f'text-anchor="middle">speed-up</text>')  # fmt: skip
    parts.append(_line([place(count, count / rows[0].over) for count in counts], "#57606a", dashed=True))
    parts.append(_legend(0, "ideal", "#57606a"))
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [place(row.run.workers, row.speed_up) for row in line]
        parts.append(_line(points, colour))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        parts.append(_legend(number + 1, name, colour))
    return "\n".join([*parts, "</svg>", ""])


def _line(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'


def _legend(number: int, name: str, colour: str) -> str:
    y = TOP + 18 * number
    return (
        f'<rect x="{RIGHT + 20}" y="{y - 4}" width="14" height="4" fill="{colour}"/>'
        f'<text x="{RIGHT + 40}" y="{y + 2}">{escape(name)}</text>'
    )
