"""`farandole pool`: list the EC2 instances of runs by their tags; print the user data of a launch template.

It needs no live run and no folder: it shows the instances that AWS lists, since these are billed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.folders import RunOption, place_of
from farandole.platform.files import decoded
from farandole.platform.output import tell

if TYPE_CHECKING:
    from farandole.pool.ec2 import ListedInstance


# --- pool -------------------------------------------------------------------------------------------------------------

app = typer.Typer(no_args_is_help=True, help="List EC2 instances of runs; make data for launch templates.")
ENDED = ("terminated",)


@app.command("user-data")
def user_data(
    python: Annotated[
        str,
        typer.Option("--python", help="Python interpreter of the image, with farandole and its extra `aws`."),
    ] = "python3",
) -> None:
    """Print user data for a launch template, so that its instances join runs."""
    from farandole.pool.ec2 import user_data as text

    tell(text(python).rstrip("\n"))


@app.command("list")
def list_(
    run: RunOption = None,
    region: Annotated[
        str, typer.Option("--region", help="AWS region.", show_default="as the AWS command line has it")
    ] = "",
    prices: Annotated[Path | None, typer.Option("--prices", help="File with prices per hour; see docs/ec2.md.")] = None,
) -> None:
    """List the instances of all runs, or of one, with their prices. Works after a crash too."""
    from farandole.pool import ec2 as price_files
    from farandole.pool.ec2 import Aws

    table = price_files.read(prices) if prices else price_files.PriceTable()
    filters = {"tag-key": [price_files.RUN]} if run is None else {f"tag:{price_files.RUN}": [_tag(place_of(run))]}
    rows = [row for row in Aws(region).instances(filters) if row.state not in ENDED]
    if not rows:
        tell("no instances")
        return
    total, unknown = 0.0, 0
    for row in sorted(rows, key=lambda row: (row.run, row.launched)):
        price = table.price(row.type, row.zone, row.market)
        running = row.state in ("pending", "running")
        total, unknown = total + (price or 0.0) * running, unknown + (price is None and running)
        tell(_line(row, price))
    day = f", prices of {table.day}" if table.day else ""
    tell(f"{len(rows)} instances, {total:.4f} dollars an hour{day}" + (f", and {unknown} unknown" if unknown else ""))


def _line(row: ListedInstance, price: float | None) -> str:
    hours = max(time.time() - row.launched, 0.0) / 3600
    paid = "price unknown" if price is None else f"{price:g} dollars an hour, {price * hours:.4f} so far"
    return (
        f"{row.id} {row.run} {row.type} {row.market} {row.zone} {row.state} {row.shown or 'not joined'} "
        f"{hours:.1f} h: {paid}"
    )


def _tag(folder: Path) -> str:
    """Returns the tag of the run in `folder`, from its settings."""
    import msgspec

    from farandole.control.run_folder import SETTINGS
    from farandole.errors import UsageError
    from farandole.platform.files import read
    from farandole.protocol.coordinator.state import RunSettings

    try:
        return decoded(read(folder / SETTINGS), RunSettings).tag
    except (OSError, msgspec.MsgspecError):
        raise UsageError(f"--run {folder}: its {SETTINGS} can't be read; leave --run out to see all runs") from None


# --- instance ---------------------------------------------------------------------------------------------------------
#
# `farandole instance`: the command in the user data of an EC2 instance (see `pool/ec2.py`).


def instance() -> None:
    """Join the run that this instance's tags name. Return when the run is over."""
    from farandole.pool.ec2 import serve

    serve()
