"""A worker whose training thread hangs in the script: its connection's thread writes the stacks, and starts the save.

The same goes for a worker whose machine goes, if it has no time to wait for its training thread. Invariant: what is
saved is the state of the beginning of a step, or is named as the state between two steps.
Argument: docs/protocol.md, Saving from another thread 1-4.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import threading

from farandole.protocol import messages as m
from farandole.protocol.worker.state_machine import Exit, Save
from farandole.worker.context import Training, WorkerContext
from farandole.worker.process_exit import leave

_log = logging.getLogger(__name__)
REACT_S = 2.0  # for the training thread to handle the request itself; it does so at once if it waits for peers
STDERR = 2


def write_stacks(reason: str) -> None:
    """Writes the stacks of all threads into the worker's log."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # the log is closed
        _log.error("%s; the stacks of all threads of this worker:", reason)
        faulthandler.dump_traceback(file=STDERR, all_threads=True)


def save_aside(context: WorkerContext, training: Training, wanted: Save) -> None:
    """Ensures that `wanted` is answered, by another thread if the training thread hangs. Returns at once."""
    timer = threading.Timer(REACT_S, _take_up, (context, training, wanted))
    timer.daemon = True
    timer.start()


def _take_up(context: WorkerContext, training: Training, wanted: Save) -> None:
    """Save in this thread, unless the training thread handles `wanted`.

    If the round ended before the stop, its update comes in moments. It is waited for until the training thread takes
    the request up, or is between two steps.
    """
    with context.condition:
        if context.instructions.save is not wanted:
            return  # the training thread handles it
        if context.at_step_start and context.begun != context.state_machine.round:
            save_aside(context, training, wanted)
            return
        context.instructions.save = None
    if wanted.save:
        context.tell(training.saved(wanted.allow_between))


def leave_aside(context: WorkerContext, training: Training, exit_: Exit) -> None:
    """Ensures that a worker with a deadline saves and exits, by another thread if the training thread is busy.

    Returns at once.
    """
    if exit_.within_s is not None:
        timer = threading.Timer(min(REACT_S, exit_.within_s / 2), _save_and_go, (context, training, exit_))
        timer.daemon = True
        timer.start()


def _save_and_go(context: WorkerContext, training: Training, exit_: Exit) -> None:
    with context.condition:
        if context.fully_loaded and not context.instructions.save_before_exit:
            return  # the training thread handles it
        holds = context.fully_loaded and context.at_step_start
        if holds and context.begun != context.state_machine.round:
            leave_aside(context, training, exit_)
            return
        context.instructions.save_before_exit = False
    if holds:
        training.saved(False)
    context.tell(m.Lapsed())
    context.close()
    leave(exit_.code)
