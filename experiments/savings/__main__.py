"""The study's commands, from the repository's root:

    python -m experiments.savings imagenet          by simulation: the table and the chart of README.md

`--traces` is the folder of the traces (README.md says where they come from).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments.savings import imagenet as study
from experiments.savings import page

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
    console, began = Console(), time.monotonic()
    rows = list[study.SavingsRow]()
    for row in study.run(traces, beginnings):
        console.print(f"{row.machine}, at most {row.most}: {row.trace}: {row.strategy}", highlight=False)
        rows.append(row)
    page.write(rows)
    page.draw(traces)
    console.print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s: {page.RESULTS}", highlight=False)


if __name__ == "__main__":
    app()
