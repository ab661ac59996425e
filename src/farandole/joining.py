"""`farandole.join()`, and the run that this process has joined."""

from __future__ import annotations

from farandole.errors import UsageError
from farandole.platform import output
from farandole.platform.process import guarded
from farandole.run import Run
from farandole.settings import Settings, verbosity

_current: Run | None = None


def join() -> Run:
    """Take part in the run that started this process; a world of one outside any.

    Seeds Python, NumPy and torch from the run's seed, and sets torch's intra-op threads to the run's.

    Raises:
        UsageError: called twice in one process.
        CoordinatorUnreachable: the ticket's coordinator does not answer.
        Refused: the coordinator does not let this worker in.
    """
    global _current
    if _current is not None:
        raise UsageError("farandole.join() was called before in this process; keep the Run that it gave")
    output.show_by_default(verbosity())
    _current = guarded(Run(Settings.read()))
    return _current


def current() -> Run | None:
    """The run that this process has joined."""
    return _current
