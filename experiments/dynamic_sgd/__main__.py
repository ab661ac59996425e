"""The study's commands, from the repository's root:

    python -m experiments.dynamic_sgd run A        one experiment, by its letter; without one all of them
    python -m experiments.dynamic_sgd run --quick  every path in minutes, with few samples and seeds
    python -m experiments.dynamic_sgd plot         plots, and the page's tables, from what is there

`run` does only what has no result yet, so it can be stopped at any moment and called again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments.dynamic_sgd import throughput
from experiments.dynamic_sgd.cases import FULL, LETTERS, QUICK, SMALL, TASKS, cases
from experiments.dynamic_sgd.runner import Runner

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="The study of batches that follow.")


@app.command()
def run(
    experiments: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(LETTERS)}.  [default: all, in this order]")
    ] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Few samples, few seeds.")] = False,
    only: Annotated[str, typer.Option(help="fashion or cifar.  [default: both]")] = "",
    fashion: Annotated[Path, typer.Option(help="Fashion-MNIST's folder.")] = Path("/usr/share/datasets/fashion-mnist"),
    cifar: Annotated[Path, typer.Option(help="cifar10_jpeg.npz.")] = Path("../shared/data/cifar10_jpeg.npz"),
    jobs: Annotated[int, typer.Option(help="Processes side by side.")] = 2,
    minutes: Annotated[float, typer.Option(help="Begin nothing after that.  [default: no end]")] = 0,
) -> None:
    """Train what is missing."""
    wanted = experiments or list(LETTERS)
    if unknown := [letter for letter in wanted if letter not in LETTERS]:
        raise SystemExit(f"{unknown[0]}: there is no such experiment; use some of {', '.join(LETTERS)}")
    if only and only not in TASKS:
        raise SystemExit(f"--only {only}: there is no such data; use one of {', '.join(TASKS)}")
    console, scale = Console(), QUICK if quick else FULL
    for letter in wanted:
        used = SMALL if letter == "M" and not quick else scale
        console.rule(f"{letter}, {used.name}")
        if letter == "D":
            throughput.run(scale, cifar, console)
            continue
        runner = Runner(scale=used, paths={"fashion": fashion, "cifar": cifar}, jobs=jobs, minutes=minutes)
        runner.run(cases(letter, used, (only,) if only else TASKS), console)


@app.command()
def plot(
    *, quick: Annotated[bool, typer.Option("--quick", help="Of the quick results; the page stays.")] = False
) -> None:
    """Draw the plots and write the page's tables from the results that are there."""
    from experiments.dynamic_sgd import page, plots

    plots.draw(QUICK if quick else FULL)
    if not quick:
        page.write()


if __name__ == "__main__":
    app(prog_name="python -m experiments.dynamic_sgd")
