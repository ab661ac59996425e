"""`farandole.join()` and `current()`, the run that this process has joined."""

from __future__ import annotations

from farandole.errors import UsageError
from farandole.platform import output
from farandole.platform.process import guarded
from farandole.run import Run
from farandole.settings import Settings, verbosity

_current: Run | None = None


def join() -> Run:
    """Join the run that started this process. Without one, train in this single process (`world_size=1`).

    Seeds Python, NumPy and torch from the run's seed, and sets torch's number of intra-op threads to the run's.

    Raises:
        UsageError: called twice in one process.
        CoordinatorUnreachable: the ticket's coordinator does not answer.
        Refused: the coordinator does not admit this worker.
    """
    global _current
    if _current is not None:
        raise UsageError("farandole.join() was called before in this process; keep the Run that it returned")
    output.show_by_default(verbosity())
    _current = guarded(Run(Settings.read()))
    return _current


def current() -> Run | None:
    """The run that this process has joined; None before `join()` returns."""
    return _current
