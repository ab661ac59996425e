"""`farandole account`: what the time of a run's workers went to, what came of it, and what it has cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.folders import RunOption, place_of
from farandole.control.run_folder import METRICS
from farandole.errors import UsageError
from farandole.platform import files
from farandole.platform.output import escaped, tell

WIDE = 200  # columns, where nobody's terminal is


def account(
    prices: Annotated[
        Path | None,
        typer.Option(
            "--prices", metavar="FILE", help="File with the prices of hosts and pools.", show_default="the run's own"
        ),
    ] = None,
    workers: Annotated[bool, typer.Option("--workers", help="Add a line for each worker.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
    run: RunOption = None,
) -> None:
    """Show how a run's workers spent their time, the run's goodput, and its cost."""
    import msgspec

    from farandole.cli.price_file import read
    from farandole.membership.account import account as account_of
    from farandole.observe.report import prices_in, settings_of

    folder = place_of(run)
    settled = read(prices) if prices else prices_in(settings_of(folder))
    try:
        with open(folder / METRICS, "rb", opener=files.opener) as file:
            found = account_of(folder.resolve().name, (line for line in file if line.endswith(b"\n")), settled)
    except FileNotFoundError:
        raise UsageError(f"{folder}: it has no {METRICS} yet, so nothing is known of its workers' time") from None
    if as_json:
        tell(escaped(msgspec.json.format(msgspec.json.encode(found), indent=2).decode()))
        return
    from rich.console import Console

    from farandole.observe.account_table import account_table

    width = None if sys.stdout.isatty() else WIDE
    Console(width=width).print(account_table(found, workers=workers))
