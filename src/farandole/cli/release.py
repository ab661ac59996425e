"""`farandole release`: let a worker or a whole host go, gracefully."""

from __future__ import annotations

from typing import Annotated

import typer

from farandole.cli.folders import RunOption, live
from farandole.platform.output import tell


def release(
    name: Annotated[str, typer.Argument(help="A worker's id or a host's name, from `farandole status`.")],
    run: RunOption = None,
) -> None:
    """Remove a worker or a host between two steps, and lower the target worker count."""
    with live(run) as api:
        released = api.release(name)
    tell(f"{', '.join(released)} asked to leave")
