"""`farandole scale`: change how many workers a live run wants."""

from __future__ import annotations

from typing import Annotated

import typer

from farandole.cli.folders import RunOption, live
from farandole.platform.output import tell


def scale(
    workers: Annotated[int, typer.Argument(help="The target number of workers.")],
    pool: Annotated[str, typer.Option("--pool", help="Set the target of this pool.")] = "",
    run: RunOption = None,
) -> None:
    """Set the target number of workers of a live run; workers join or leave between two steps."""
    with live(run) as api:
        api.scale(workers, pool)
    tell(f"{workers} workers wanted{f' of {pool}' if pool else ''}")
