"""`farandole stop`: end a live run after the step in hand, with a checkpoint."""

from __future__ import annotations

from farandole.cli.folders import RunOption, live
from farandole.platform.output import tell


def stop(run: RunOption = None) -> None:
    """Save the state of a live run and end it; all workers stop after the same step."""
    found = live(run)
    with found as api:
        api.stop("farandole stop", 0)
    tell(f"the run in {found.folder} is stopping")
