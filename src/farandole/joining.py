"""`farandole.join()` and `current()`, the run that this process has joined."""

from __future__ import annotations

import sys

from farandole.errors import UsageError
from farandole.platform import output
from farandole.platform.process import guarded
from farandole.run import Run
from farandole.settings import Settings, verbosity

_current: Run | None = None


def join() -> Run:
    """Join the run that started this process. Without one, train in this single process (`world_size=1`).

    Seeds Python, NumPy and torch from the run's seed, and sets torch's number of intra-op threads to the run's.

    A single process may have one run after the other: a call after the loop of a run ends that run and begins a new
    one. In an interactive session, such as a notebook, any later call does.

    Raises:
        UsageError: it was called before, and that run has not ended.
        CoordinatorUnreachable: the ticket's coordinator does not answer.
        Refused: the coordinator does not admit this worker.
    """
    global _current
    if _current is not None:
        if not _current.may_end(interactive=hasattr(sys, "ps1")):
            raise UsageError(
                "farandole.join() was called before in this process, and that run has not ended; keep the Run that it "
                "returned"
            )
        before, _current = _current, None
        before.end()
    output.show_by_default(verbosity())
    _current = guarded(Run(Settings.read()))
    return _current


def current() -> Run | None:
    """The run that this process has joined; None before `join()` returns."""
    return _current
