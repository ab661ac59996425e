"""`farandole scale`: change how many workers a live run wants."""

from __future__ import annotations

from typing import Annotated

import typer

from farandole.cli.folders import RunOption, live
from farandole.platform.output import tell


def scale(
    workers: Annotated[int, typer.Argument(help="Workers wanted from now on.")],
    run: RunOption = None,
) -> None:
    """Change how many workers a live run wants; its pool starts or releases the difference."""
    with live(run) as api:
        api.scale(workers)
    tell(f"{workers} workers wanted")
