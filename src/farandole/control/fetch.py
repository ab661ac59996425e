"""The run's code on a host that has nothing of it: asked of the coordinator, and unpacked once for all its runs."""

from __future__ import annotations

from pathlib import Path

from farandole.code.pack import provide
from farandole.control.api import Api
from farandole.control.ticket import Ticket

PATIENCE_S = 60.0


def unpacked(ticket: Ticket, pack: str) -> Path:
    """The folder in which that pack is.

    Raises:
        CoordinatorUnreachable: nobody answers.
        FarandoleError: it is damaged, or there is no room for it.
        UsageError: the run has no such pack.
    """
    return provide(pack, Api(ticket, timeout_s=PATIENCE_S).code)
