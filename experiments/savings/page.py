"""The tables of README.md, from the results: what is between `<!-- NAME -->` and `<!-- end -->`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from experiments import tables as tables_of_page
from experiments.savings.held_out import HeldOut
from experiments.savings.imagenet import OURS, SavingsRow, Spread
from experiments.savings.laptop import LaptopResult
from farandole.market.comparison import BOUND

FOLDER = Path(__file__).resolve().parent
PAGE, RESULTS = FOLDER / "README.md", FOLDER / "results"
ALTERNATIVES = ("on demand", "greedy", "uniform progress", "elastic, restarts", "spot, restarts")


def write(rows: Sequence[SavingsRow]) -> None:
    """Write results/imagenet.json, and put its tables into the page."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "imagenet.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    fill()


def write_held_out(results: Sequence[HeldOut]) -> None:
    """Write results/held_out.json, and put its table into the page."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "held_out.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    fill()


def fill() -> None:
    """Put the tables of all results into the page."""
    PAGE.write_text(filled(PAGE.read_text()))


def write_laptop(results: Sequence[LaptopResult]) -> None:
    """Write results/laptop.json, and put its table into the page."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "laptop.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    fill()


def read_held_out() -> list[HeldOut]:
    """Return the results of results/held_out.json."""
    return msgspec.json.decode((RESULTS / "held_out.json").read_bytes(), type=list[HeldOut])


def read_laptop() -> list[LaptopResult]:
    """Return the results of results/laptop.json."""
    return msgspec.json.decode((RESULTS / "laptop.json").read_bytes(), type=list[LaptopResult])


def read_rows() -> list[SavingsRow]:
    """Return the rows of results/imagenet.json."""
    return msgspec.json.decode((RESULTS / "imagenet.json").read_bytes(), type=list[SavingsRow])


def filled(text: str) -> str:
    """Return the text of the page with the tables of all results."""
    rows = read_rows()
    tables = {
        "cost": cost_table(rows),
        "time": time_table(rows),
        "laptop": laptop_table(read_laptop()),
        "held out": held_out_table(read_held_out()),
    }
    return tables_of_page.filled(text, tables)


def cost_table(rows: Sequence[SavingsRow]) -> str:
    """Dollars, and the part of them that farandole with a deadline saves."""
    own = {"on demand, $": "on demand", "with a deadline, $": OURS, "lower bound, $": BOUND}
    return _table(rows, own, lambda row: row.dollars, lambda row: row.cost_saved)


def time_table(rows: Sequence[SavingsRow]) -> str:
    """Hours, and the part of them that farandole with a deadline saves."""
    return _table(
        rows,
        {"on demand, h": "on demand", "with a deadline, h": OURS},
        lambda row: row.hours,
        lambda row: row.time_saved,
    )


FIGURES = {
    "time_s": "time, s",
    "spot_s": "spot machines, s",
    "on_demand_s": "on-demand machines, s",
    "start_s": "of both: start, s",
    "compute_s": "of both: the rest, s",
    "dollars": "dollars",
}


def laptop_table(results: Sequence[LaptopResult]) -> str:
    """What each run came to, what the simulation says, and the run over the simulation."""
    lines = [["strategy", "figure", "run", "simulation", "run over simulation"], ["---", "---", *["---:"] * 3]]
    for result in results:
        for name, title in FIGURES.items():
            real, said = getattr(result.run, name), getattr(result.simulated, name)
            digits = 4 if name == "dollars" else 1
            ratio = f"{real / said:.3f}" if said else ""
            lines.append([result.strategy, title, f"{real:.{digits}f}", f"{said:.{digits}f}", ratio])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def held_out_table(results: Sequence[HeldOut]) -> str:
    """What was planned by the first half of each trace, and what happened in the second half."""
    lines = [
        ["trace", "hours", "plan", "planned, $", "happened, $", "happened over planned", "in time"],
        ["---", "---:", "---", *["---:"] * 4],
    ]
    for its in results:
        plan, ratio = f"{its.strategy}, at most {its.machines}", its.happened / its.planned
        costs = [f"{its.planned:,.1f}", f"{its.happened:,.1f}", f"{ratio:.2f}"]
        lines.append([its.trace, f"{its.hours:.0f}", plan, *costs, f"{its.in_time} of {its.windows}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _table(
    rows: Sequence[SavingsRow], own: dict[str, str], value: Callable[[SavingsRow], Spread | None],
    saved: Callable[[SavingsRow], Spread | None],
) -> str:  # fmt: skip
    heads = ["machines", "trace", *own, *(f"than {name}" for name in ALTERNATIVES)]
    lines = [heads, ["---", "---", *["---:"] * (len(heads) - 2)]]
    for machine, most, trace in dict.fromkeys((row.machine, row.most, row.trace) for row in rows):
        its = {row.strategy: row for row in rows if (row.machine, row.most, row.trace) == (machine, most, trace)}
        lines.append(
            [
                f"{most} x {machine}", trace, *(_plain(value(its[name])) for name in own.values()),
                *(_part(saved(its[name]), its[name].missed) for name in ALTERNATIVES),
            ]
        )  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(values: Spread | None) -> str:
    if values is None:
        return ""
    digits = 1 if values.mean >= 20 else 2
    if values.high - values.low < 10**-digits:
        return f"{values.mean:.{digits}f}"
    return f"{values.mean:.{digits}f} [{values.low:.{digits}f}..{values.high:.{digits}f}]"


def _part(values: Spread | None, missed: float) -> str:
    late = f", late in {missed:.0%}" if missed else ""
    return "never in time" if values is None else f"{values.mean:.0%} [{values.low:.0%}..{values.high:.0%}]{late}"
