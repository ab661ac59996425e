"""`farandole stop`: end a live run after the step in hand, with a checkpoint."""

from __future__ import annotations

from farandole.cli.folders import RunOption, live
from farandole.platform.output import tell


def stop(run: RunOption = None) -> None:
    """End a live run: everyone leaves after the same step, and the state is saved."""
    found = live(run)
    with found as api:
        api.stop("farandole stop", 0)
    tell(f"the run in {found.folder} is stopping")
