"""The study's commands, from the repository's root:

    python -m experiments.scale machines --workers 8,64     every message: results/machines.json
    python -m experiments.scale failures                    both levels, the same failures: results/failures.json
    python -m experiments.scale history                     both levels, one account: results/history.json
    python -m experiments.scale events                      events only: results/events.json

Each writes its tables into README.md. 512 workers take half an hour.
"""

from __future__ import annotations

from typing import Annotated

import typer

from experiments.scale import machines as by_messages
from experiments.scale import page
from experiments.scale.history import HistoryRow
from experiments.scale.history import rows as history_rows
from farandole.bench.scaling import workers_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="Many workers, by simulation.")


@app.command()
def machines(*, workers: Annotated[str, typer.Option(help="The numbers of workers.")] = "8,64") -> None:
    """Runs in which workers are killed, go silent, get a notice and join. Rows of other sizes stay."""
    for count in workers_of(workers):
        row = by_messages.changes(count)
        print(f"{count} workers: {row.steps} steps in {row.seconds:.0f} s", flush=True)
        kept = [each for each in page.read("machines", by_messages.MachinesRow) if each.workers != count]
        page.save("machines", sorted([*kept, row], key=lambda each: each.workers))
    page.write()


@app.command()
def failures(*, steps: Annotated[int, typer.Option(help="Steps of each run.")] = 150) -> None:
    """Runs of 8 and 64 workers in which workers are killed at random times, by messages and by events."""
    rows = list[page.FailuresRow]()
    for count, mean_s in ((8, 5.0), (8, 10.0), (8, 30.0), (64, 5.0), (64, 10.0), (64, 30.0)):
        rows.append(page.both_levels(count, mean_s, steps))
        print(f"{count} workers, a failure in {mean_s:g} s: {rows[-1].messages:.4f}, {rows[-1].events:.4f}", flush=True)
    page.save("failures", rows)
    page.write()


@app.command()
def history() -> None:
    """Short histories of a spot market with 2 to 8 machines, by messages and by events, class by class."""
    rows = list[HistoryRow]()
    for row in history_rows(range(1, 7), intervals=12, steps=1500):
        rows.append(row)
        print(f"history {row.seed}: {row.messages.done_s:.0f} and {row.events.done_s:.0f} s", flush=True)
    page.save("history", rows)
    page.write()


@app.command()
def events() -> None:
    """Goodput by the mean time between failures, for 4,096 and 16,384 workers."""
    page.save("events", [*page.published(), *page.curve()])
    page.write()


if __name__ == "__main__":
    app()
