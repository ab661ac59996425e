"""`farandole release`: let a worker or a whole host go, gracefully."""

from __future__ import annotations

from typing import Annotated

import typer

from farandole.cli.folders import RunOption, live
from farandole.platform.output import tell


def release(
    name: Annotated[str, typer.Argument(help="A worker's id or a host's name; see `farandole status`.")],
    run: RunOption = None,
) -> None:
    """Let a worker or a host go between two steps; the run wants as many fewer from now on."""
    with live(run) as api:
        released = api.release(name)
    tell(f"{', '.join(released)} asked to leave")
