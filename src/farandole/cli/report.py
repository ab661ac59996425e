"""`farandole report`: a run as one self-contained page, and its pictures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.folders import place_of
from farandole.control.run_folder import held
from farandole.errors import UsageError
from farandole.platform import files
from farandole.platform.output import tell

REPORT = "report.html"


def report(
    run: Annotated[Path | None, typer.Argument(help="The run's folder.", show_default="the newest in runs/")] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", metavar="FOLDER", help="Another run to show beside it; may be repeated."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write the page.",
            show_default="report.html in the run's folder",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FOLDER", help="Write the pictures to this folder too; needs Chromium."),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            "--prices", metavar="FILE", help="File with the prices of hosts and pools.", show_default="each run's own"
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run: pictures, events, machines and cost."""
    from farandole.cli.price_file import read
    from farandole.observe.pictures import draw
    from farandole.observe.report import report as page_of
    from farandole.observe.report import told

    settled = read(prices) if prices else None
    folders = [place_of(run), *map(place_of, against or ())]
    runs = [told(folder, time.time(), settled, live=held(folder)) for folder in folders]
    output = output or folders[0] / REPORT
    try:
        files.write(output, page_of(runs).encode())
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from None
    tell(f"report: {output.resolve()}")
    if png is not None:
        for path in draw(output.resolve(), png, runs):
            tell(f"picture: {path}")
