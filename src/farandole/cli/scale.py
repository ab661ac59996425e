"""`farandole scale`: change how many workers a live run wants."""

from __future__ import annotations

from typing import Annotated

import typer

from farandole.cli.folders import RunOption, live
from farandole.platform.output import tell


def scale(
    workers: Annotated[int, typer.Argument(help="Workers wanted from now on.")],
    pool: Annotated[str, typer.Option("--pool", help="Of this pool; without, of the run's own.")] = "",
    run: RunOption = None,
) -> None:
    """Change how many workers a live run wants of a pool, which starts the difference or lets it go."""
    with live(run) as api:
        api.scale(workers, pool)
    tell(f"{workers} workers wanted{f' of {pool}' if pool else ''}")
