"""farandole's log: what each module tells its logger, `logging.getLogger(__name__)`, as plain lines on standard error.

A library leaves logging alone: importing farandole gives the logger "farandole" a handler that does nothing, and
nothing else is touched, least of all the root logger. Who starts the process decides. Farandole's own commands call
`show`. In a script that was started by itself `show_by_default` does so, but only where nobody has set up logging: what
goes wrong is seen, and nothing is told twice.

Without `-v` there are warnings and errors, each a line `farandole: ...`. With it the way of the run is told (views,
connections, checkpoints), with a second one also each round and message; lines have their time, worker and module then.
A line is a note: what fails in making or writing one changes nothing, and what others have put into it does nothing to
a terminal (`output.py`). Nothing secret is ever handed to a logger, so nothing has to be taken out here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from farandole.platform.output import say

LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)  # by how often -v was given
_BRIEF = "farandole: %(message)s"
_LONG = "farandole: %(asctime)s.%(msecs)03d %(worker)s %(levelname)s %(name)s: %(message)s"
_ours = logging.getLogger("farandole")
_warned: set[str] = set()


class Lines(logging.Handler):
    """Gives records' lines to `write`. `worker` stands in their lines."""

    def __init__(self, verbosity: int, write: Callable[[str], object]) -> None:
        super().__init__()
        self._write = write
        self.worker = "-"
        self.setFormatter(logging.Formatter(_LONG if verbosity else _BRIEF, datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            record.worker = self.worker
            self._write(self.format(record))


def show(verbosity: int, write: Callable[[str], object] = say) -> None:
    """From here on, this process shows farandole's log, and nobody else in it does. The last call counts.

    `write` writes a line to standard error, whatever that is at the time.
    """
    worker = next((handler.worker for handler in _ours.handlers if isinstance(handler, Lines)), "-")
    hide()
    lines = Lines(verbosity, write)
    lines.worker = worker
    _ours.addHandler(lines)
    _ours.setLevel(LEVELS[min(verbosity, len(LEVELS) - 1)])
    _ours.propagate = False


def show_by_default(verbosity: int) -> None:
    """`show`, unless logging is set up already: for farandole, or for the whole process."""
    told = [handler for handler in _ours.handlers if not isinstance(handler, logging.NullHandler)]
    if not told and not logging.getLogger().handlers:
        show(verbosity)


def hide() -> None:
    """As if `show` had never been called."""
    for handler in [handler for handler in _ours.handlers if isinstance(handler, Lines)]:
        _ours.removeHandler(handler)
    _ours.setLevel(logging.NOTSET)
    _ours.propagate = True


def warn_once(logger: logging.Logger, message: str) -> None:
    """A warning that this process gives once, however often it is due."""
    if message not in _warned:
        _warned.add(message)
        logger.warning("%s", message)


def name(worker: str) -> None:
    """This process is `worker`."""
    for handler in _ours.handlers:
        if isinstance(handler, Lines):
            handler.worker = worker
