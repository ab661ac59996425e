"""The tables of README.md, made from the results: between `<!-- NAME -->` and `<!-- end -->` the page is written by
`plot`, and the tests check that it says what the results say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from pathlib import Path
from statistics import mean, stdev

from experiments.dynamic_sgd import shelf, throughput
from experiments.dynamic_sgd.cases import (
    ADAPTIVE,
    ADAPTIVE_CHOSEN,
    ADAPTIVE_RATES,
    CHOSEN,
    CONSTANT,
    FULL,
    LETTERS,
    PAIRS,
    RAMPS,
    RATES,
    RULES,
    SMALL,
    TASKS,
    TITLES,
    Scale,
    asked,
    by_samples,
    cases,
    growths,
)
from experiments.dynamic_sgd.measures import (
    Interval,
    Result,
    Row,
    accuracy_verdict,
    rise,
    rise_verdict,
    worst_spike,
)

PAGE = Path(__file__).resolve().parent / "README.md"
POINTS = "points, mean [95 %]"
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
    """How much of each experiment there is; what several ask for is one training, and counts once in the last line."""
    rows: list[list[str]] = []
    every: dict[Path, Result | None] = {}
    for letter in LETTERS:
        if letter == "D":
            measured = len(throughput.read(scale))
            rows.append(["D", "", f"{measured} of {len(throughput.WORKERS) * len(throughput.POLICIES)} runs", ""])
            continue
        used = SMALL if letter == "M" else scale
        for task in TASKS:
            wanted = {shelf.path(case, used): shelf.get(case, used) for case in cases(letter, used, (task,))}
            every |= wanted
            if wanted:
                rows.append([letter, task, *_amount(wanted.values())])
    return table(
        ["experiment", "data", "trainings there", "seconds of steps each"],
        [*rows, ["all", "", *_amount(every.values())]],
    )


def jumps(scale: Scale, history: str) -> str:
    """Each rule against the static runs, under one history."""
    wanted = [rule for pairs in PAIRS.values() for at, rule in pairs if at == history and rule in RULES]
    return _comparisons([([task], task, history, list(dict.fromkeys(wanted)), scale) for task in TASKS], ["data"])


def ramps(scale: Scale) -> str:
    """The jump to 12 workers with ramps of several lengths."""
    rules = ["linear", *RAMPS]
    titles = {"linear": "0, linear", "compensation": "8"} | {
        rule: rule.removeprefix("compensation") for rule in RAMPS if rule != "compensation"
    }
    parts = [([task], task, "jump12", rules, scale) for task in TASKS]
    return _comparisons(parts, ["data"], rule="steps", titles=titles)


def adaptive(scale: Scale) -> str:
    """AdamW, by the whole rule and by its half."""
    parts = [
        ([task, TITLES[history]], task, history, list(ADAPTIVE), scale)
        for task in ADAPTIVE_CHOSEN
        for history in dict.fromkeys(history for history, _ in PAIRS["R"])
    ]
    return _comparisons(parts, ["data", "workers"])


def smaller(scale: Scale) -> str:
    """The jump to 12 workers from two base batches."""
    parts = [
        ([task, f"{used.base} to {12 * used.base}"], task, "jump12", ["compensation", "linear"], used)
        for task in TASKS
        for used in (scale, SMALL)
    ]
    return _comparisons(parts, ["data", "batch"])


def starts(scale: Scale) -> str:
    """The large batch from the start: there is no change to look at, and nothing shared with the static runs but the
    seed."""
    rows: list[list[str]] = []
    for task in TASKS:
        still = [result.accuracy for result in shelf.static(task, scale).values()]
        rows.append([task, "1", "*static*", _counted(still), _by_seed(still), "", ""])
        for history, rule in PAIRS["X"]:
            row = shelf.compared(task, history, rule, scale)
            rows.append(
                [
                    task,
                    history.removeprefix("always"),
                    "at once" if rule == "linear" else "ramp",
                    _counted(row.seeds, asked(scale, history, rule)),
                    _by_seed(row.accuracies),
                    *_accuracy_more(row),
                ]
            )
    return table(["data", "workers", "rule", "seeds", "final accuracy %, by seed", f"less static, {POINTS}", ""], rows)


def ends(scale: Scale) -> str:
    """The loss across the ends of epochs after the jump to 12 workers, whose last window is short."""
    rows: list[list[str]] = []
    for task in TASKS:
        still = shelf.static(task, scale)
        found = {rule: shelf.of(task, "jump12", rule, scale) for rule in ("compensation", "whole")}
        for epoch in range(2, scale.epochs):
            at = epoch * scale.samples
            seeds = sorted(found["compensation"].keys() & found["whole"].keys() & still.keys())
            rises = [[rise(results[seed], at, scale.probe) for seed in seeds] for results in (still, *found.values())]
            more = [whole - short for short, whole in zip(rises[1], rises[2], strict=True)]
            cells = (", ".join(_signed(value) for value in values) for values in rises)
            rows.append(
                [task, f"{at:,}", _counted(seeds, asked(scale, "jump12", "whole")), *cells, _interval(more, _signed)]
            )
    titles = ["rise, static", "short window's factor", "whole factor", "whole less short, mean [95 %]"]
    return table(["data", "at", "seeds", *titles], rows)


def rates(scale: Scale, optimizer: str) -> str:
    """The sweep, seed 0: final accuracies by the base rate, of the static run and of a jump to 12 workers."""
    policy, swept, chosen = {
        "sgd": ("compensation", RATES, CHOSEN),
        "adamw": ("root", ADAPTIVE_RATES, ADAPTIVE_CHOSEN),
    }[optimizer]
    rows: list[list[str]] = []
    for task, rate in chosen.items():
        for history, title in (("one", "static"), ("jump12", "1 to 12 workers")):
            found = [shelf.of(task, history, policy, scale, each).get(0) for each in swept]
            accuracies = (f"{100 * result.accuracy:.2f}" if result else "" for result in found)
            rows.append([task, title, *accuracies, f"{rate:g}"])
    return table(["data", "", *(f"{rate:g}" for rate in swept), "chosen"], rows)


def constant(scale: Scale) -> str:
    """Whether a constant batch under each history has the static run's bits."""
    rows: list[list[str]] = []
    for task in TASKS:
        for history in CONSTANT.values():
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
    "done": done, "jumps": jumps, "ramps": ramps, "adaptive": adaptive, "smaller": smaller, "starts": starts,
    "ends": ends, "rates": rates, "constant": constant, "pace": pace
}  # fmt: skip
Part = tuple[list[str], str, str, list[str], Scale]  # the first cells of its lines, task, history, policies, scale


def _comparisons(parts: Sequence[Part], about: list[str], *, rule: str = "rule", titles: Mapping[str, str] = {}) -> str:
    """For each part a line of the static runs and one of each policy, which `titles` may call otherwise."""
    rows: list[list[str]] = []
    for cells, task, history, policies, scale in parts:
        still = shelf.static(task, scale, policies[0])
        places = [(result, by_samples(history, scale.total, seed)) for seed, result in still.items()]
        rises = [worst_spike(result, changes) for result, changes in places if growths(changes)]
        accuracies = [result.accuracy for result in still.values()]
        rows.append([*cells, "*static*", _counted(still), _signed_mean(rises), "", "", _percent(accuracies), "", ""])
        for policy in policies:
            row = shelf.compared(task, history, policy, scale)
            rises = [_signed_mean(row.rises), _interval(row.rises_more, _signed), _word(row.rises_more, rise_verdict)]
            rows.append(
                [
                    *cells,
                    titles.get(policy, policy),
                    _counted(row.seeds, asked(scale, history, policy)),
                    *rises,
                    _percent(row.accuracies),
                    *_accuracy_more(row),
                ]
            )
    figures = ["rise", "less static's, mean [95 %]", "", "final accuracy %", f"less static's, {POINTS}", ""]
    return table([*about, rule, "seeds", *figures], rows)


def _accuracy_more(row: Row) -> list[str]:
    """By how many points the accuracy is above the static runs', and the verdict."""
    points = _interval(row.accuracies_more, lambda value: f"{100 * value:+.2f}")
    return [points, _word(row.accuracies_more, accuracy_verdict)]


def _interval(differences: Sequence[float], written: Callable[[float], str]) -> str:
    if not differences:
        return ""
    found = Interval.of(differences)
    if len(differences) == 1 or not math.isfinite(found.mean):
        return written(found.mean)
    return f"{written(found.mean)} [{written(found.low)}, {written(found.high)}]"


def _word(differences: Sequence[float], verdict: Callable[[Interval], str]) -> str:
    word = verdict(Interval.of(differences)) if differences else ""
    return f"**{word}**" if word in ("loses", "spikes") else word


def _amount(results: Collection[Result | None]) -> list[str]:
    there = [result.seconds for result in results if result]
    return [f"{len(there)} of {len(results)}", f"{mean(there):.0f}" if there else ""]


def _counted(there: Sized, wanted: int = 0) -> str:
    return f"{len(there)} of {wanted}" if wanted else str(len(there))


def _by_seed(accuracies: Sequence[float]) -> str:
    return ", ".join(f"{100 * value:.1f}" for value in accuracies)


def _percent(accuracies: Sequence[float]) -> str:
    if len(accuracies) < 2:
        return "".join(f"{100 * value:.2f}" for value in accuracies)
    return f"{100 * mean(accuracies):.2f} ± {100 * stdev(accuracies):.2f}"


def _signed_mean(values: Sequence[float]) -> str:
    return _signed(mean(values)) if values else ""


def _signed(value: float) -> str:
    return "diverged" if math.isinf(value) else f"{value:+.3f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
