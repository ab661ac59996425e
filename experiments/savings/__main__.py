"""The study's commands, from the repository's root:

    python -m experiments.savings imagenet          by simulation: the tables and the chart of README.md
    python -m experiments.savings held-out          plans by the first half of each trace, played in the second half
    python -m experiments.savings laptop            a real training under a trace played fast, and its simulation

`--traces` is the folder of the traces (README.md says where they come from).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments.savings import held_out as halves
from experiments.savings import imagenet as study
from experiments.savings import laptop as real
from experiments.savings import page
from farandole.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="What machines that come and go save.")


@app.callback()
def main() -> None: ...


@app.command()
def imagenet(
    *,
    traces: Annotated[Path, typer.Option(help="The folder of the traces.")] = Path("../shared/traces"),
    beginnings: Annotated[int, typer.Option(help="Windows of each trace.")] = 40,
) -> None:
    """ResNet-50 on ImageNet on the traces: results/imagenet.json, results/imagenet.png, and the tables of the page."""
    from experiments.savings import plots

    console, began = Console(), time.monotonic()
    rows = list[study.SavingsRow]()
    for row in study.run(traces, beginnings):
        console.print(f"{row.machine}, at most {row.most}: {row.trace}: {row.strategy}", highlight=False)
        rows.append(row)
    page.write(rows)
    plots.draw(traces)
    console.print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s: {page.RESULTS}", highlight=False)


@app.command()
def held_out(
    *, traces: Annotated[Path, typer.Option(help="The folder of the traces.")] = Path("../shared/traces")
) -> None:
    """Plan by half of each trace, and play the other half: results/held_out.json, and the table of the page."""
    results = list[halves.HeldOut]()
    for result in halves.run(traces):
        print(f"{result.trace}: planned {result.planned:.1f}, happened {result.happened:.1f}", flush=True)
        results.append(result)
    page.write_held_out(results)


@app.command()
def laptop(
    *, traces: Annotated[Path, typer.Option(help="The folder of the traces.")] = Path("../shared/traces")
) -> None:
    """Train digits under a trace, and compare with the simulation: results/laptop.json, and the table of the page."""
    console, began = Console(), time.monotonic()
    results = list[real.LaptopResult]()
    with tempfile.TemporaryDirectory() as folder:
        console.print("measuring the speeds of 1 to 6 workers, then two trainings; eight minutes in all")
        for result in real.run(Path(folder), (traces / real.TRACE).absolute()):
            console.print(f"{time.monotonic() - began:.0f} s: {result}", highlight=False)
            results.append(result)
    page.write_laptop(results)


if __name__ == "__main__":
    try:
        app()
    except UsageError as error:
        raise SystemExit(
            f"{error}\n--traces FOLDER says where the traces are; README.md says where they come from"
        ) from None
