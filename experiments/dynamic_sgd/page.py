"""The tables of README.md, made from the results: between `<!-- NAME -->` and `<!-- end -->` the page is written by
`plot`, and the tests check that it says what the results say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from experiments.dynamic_sgd import shelf, throughput
from experiments.dynamic_sgd.cases import CHOSEN, FULL, LETTERS, RATES, RULES, SMALL, TASKS, Scale, cases
from experiments.dynamic_sgd.measures import Row, Summary, spread

PAGE = Path(__file__).resolve().parent / "README.md"
HISTORIES = ("jump12", "jump4", "random", "updown")
_BLOCK = re.compile(r"<!-- ([a-z0-9 ]+) -->\n.*?\n?<!-- end -->", re.DOTALL)


def write() -> None:
    """Put the tables as they are now into the page."""
    PAGE.write_text(filled(PAGE.read_text(), FULL))


def filled(text: str, scale: Scale) -> str:
    """`text` with all tables made anew.

    Raises:
        KeyError: a table that nobody makes.
    """

    def block(found: re.Match[str]) -> str:
        name, *arguments = found[1].split()
        return f"<!-- {found[1]} -->\n{TABLES[name](scale, *arguments)}\n<!-- end -->"

    return _BLOCK.sub(block, text)


def blocks(text: str) -> list[str]:
    """The names of the page's tables, with their arguments."""
    return [found[1] for found in _BLOCK.finditer(text)]


def done(scale: Scale) -> str:
    """How much of each experiment there is."""
    rows: list[list[str]] = []
    for letter in LETTERS:
        if letter == "D":
            measured = len(throughput.read(scale))
            rows.append(["D", "", f"{measured} of {len(throughput.WORKERS) * len(throughput.POLICIES)}", ""])
            continue
        used = SMALL if letter == "M" else scale
        for task in TASKS:
            wanted = cases(letter, used, (task,))
            if not wanted:
                continue
            found = [result for case in wanted if (result := shelf.get(case, used))]
            seconds = f"{mean(result.seconds for result in found):.0f}" if found else ""
            rows.append([letter, task, f"{len(found)} of {len(wanted)}", seconds])
    return table(["experiment", "data", "trainings there", "seconds of steps each"], rows)


def jumps(scale: Scale, history: str) -> str:
    """Each rule against the static runs, under one history."""
    rows: list[list[str]] = []
    for task in TASKS:
        compared = shelf.compared(task, history, RULES, scale)
        if compared:
            rows.append([task, "*static*", *_figures(compared.static), "", ""])
            rows += [[task, rule, *_figures(row), *_verdict(compared, rule)] for rule, row in compared.rows.items()]
    return table(
        ["data", "rule", "runs", "spike, mean (lowest to highest)", "final accuracy %", "spike?", "accuracy"], rows
    )


def smaller(scale: Scale) -> str:
    """The jump to 12 workers from two base batches."""
    rows: list[list[str]] = []
    for task in TASKS:
        for used in (scale, SMALL):
            about = [task, f"{used.base} to {12 * used.base}"]
            if compared := shelf.compared(task, "jump12", ("compensation", "linear"), used):
                rows.append([*about, "*static*", *_figures(compared.static), "", ""])
                rows += [
                    [*about, rule, *_figures(row), *_verdict(compared, rule)] for rule, row in compared.rows.items()
                ]
    columns = ["rule", "runs", "spike, mean (lowest to highest)", "final accuracy %", "spike?", "accuracy"]
    return table(["data", "batch", *columns], rows)


def rates(scale: Scale) -> str:
    """The sweep, seed 0: final accuracies by the base rate, of the static run and of a jump to 12 workers."""
    rows: list[list[str]] = []
    for task in TASKS:
        for history, title in (("one", "static"), ("jump12", "1 to 12 workers, compensation")):
            found = [shelf.of(task, history, "compensation", scale, rate).get(0) for rate in RATES]
            accuracies = (f"{100 * result.accuracy:.2f}" if result else "" for result in found)
            rows.append([task, title, *accuracies, f"{CHOSEN[task]:g}"])
    return table(["data", "", *(f"{rate:g}" for rate in RATES), "chosen"], rows)


def always(scale: Scale) -> str:
    """The large batch from the start, at k times the rate."""
    rows: list[list[str]] = []
    for task in TASKS:
        rows.append([task, "*1, static*", *_accuracy([r.accuracy for r in shelf.static(task, scale).values()])])
        for history in ("always4", "always12"):
            found = shelf.of(task, history, "linear", scale)
            rows.append([task, history.removeprefix("always"), *_accuracy([r.accuracy for r in found.values()])])
    return table(["data", "workers from the start", "runs", "final accuracy %"], rows)


def constant(scale: Scale) -> str:
    """Whether a constant batch under each history has the static run's bits."""
    rows: list[list[str]] = []
    for task in TASKS:
        for history in HISTORIES:
            for seed, result in shelf.of(task, history, "constant", scale).items():
                still = shelf.static(task, scale).get(seed)
                same = still and ("same bits" if still.fingerprint == result.fingerprint else "OTHER BITS")
                rows.append([task, history, str(seed), same or "no static run yet"])
    return table(["data", "history", "seed", "constant batch against the static run"], rows)


def pace(scale: Scale) -> str:
    """Experiment D."""
    found = throughput.read(scale)
    rows: list[list[str]] = []
    for workers in throughput.WORKERS:
        here = [found.get(f"{policy}-{workers}") for policy in throughput.POLICIES]
        rows.append([str(workers), *("" if value is None else f"{value:.0f}" for value in here)])
    return table(["workers", "constant batch, samples/s", "a batch a worker, samples/s"], rows)


TABLES: dict[str, Callable[..., str]] = {
    "done": done, "jumps": jumps, "smaller": smaller,
    "rates": rates, "always": always, "constant": constant, "pace": pace
}  # fmt: skip


def _figures(row: Row) -> list[str]:
    spikes = f"{_signed(mean(row.spikes))} ({_signed(min(row.spikes))} to {_signed(max(row.spikes))})"
    return [str(len(row.accuracies)), spikes, _accuracy(row.accuracies)[1]]


def _verdict(compared: Summary, rule: str) -> list[str]:
    loses = compared.loses(rule)
    spikes = "**yes**" if compared.spikes(rule) else "no"
    return [spikes, f"**{100 * loses:.1f} below**" if loses else "within or above"]


def _accuracy(values: Sequence[float]) -> list[str]:
    if not values:
        return ["0", ""]
    deviation = spread(values)
    return [
        str(len(values)),
        f"{100 * mean(values):.2f}" + ("" if math.isnan(deviation) else f" ± {100 * deviation:.2f}"),
    ]


def _signed(value: float) -> str:
    return "diverged" if math.isinf(value) else f"{value:+.3f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
