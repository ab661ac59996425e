"""The save of a worker whose training thread hangs in the script: the connection's thread writes the stacks and saves.

The same applies to a worker on a preempted machine that has no time to wait for its training thread
(`protocol/messages.py`): the end of its lease takes the role of the answer to the stop in 1.

Why another thread may save a state that the training thread holds:

1. A save is requested only after the view is stopped and this worker has answered the stop. Its round does not end
   before it gets a Resume (`Member.end_round` refuses), and it will not get one any more.
2. Nothing writes to parameters, optimizer or kept buffers between a step's beginning and the end of its round, because
   the veterans send the state to joiners from the same memory. The update comes after `Rounds.finish` returns, and that
   waits for the round's end.
3. So while `whole` is true and the round that the training thread has begun is the member's current round, the state is
   that of the step's beginning. It stays so, even if the training thread wakes up.
4. If the round had ended before the stop, the training thread is about to do the update. This module waits for it, a
   few moments, until it handles the request itself or `whole` is false. If `whole` is false, the state is between two
   steps. The answer states that, or saves that state if no worker has a better one (see
   `protocol/coordinator/shutdown.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import threading

from farandole.protocol import messages as m
from farandole.protocol.worker.member import Exit, Save
from farandole.worker.departure import leave
from farandole.worker.participant import Participant, Training

_log = logging.getLogger(__name__)
REACT_S = 2.0  # for the training thread to handle the request itself; it does so at once if it waits for peers
STDERR = 2


def write_stacks(reason: str) -> None:
    """Writes the stacks of all threads into the worker's log."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # the log is closed
        _log.error("%s; the stacks of all threads of this worker:", reason)
        faulthandler.dump_traceback(file=STDERR, all_threads=True)


def save_aside(participant: Participant, training: Training, wanted: Save) -> None:
    """Ensures that `wanted` is answered, by another thread if the training thread hangs. Returns at once."""
    timer = threading.Timer(REACT_S, _take_up, (participant, training, wanted))
    timer.daemon = True
    timer.start()


def _take_up(participant: Participant, training: Training, wanted: Save) -> None:
    with participant.condition:
        if participant.instructions.save is not wanted:
            return  # the training thread handles it
        if participant.whole and participant.begun != participant.member.round:
            save_aside(participant, training, wanted)
            return
        participant.instructions.save = None
    if wanted.save:
        participant.tell(training.saved(wanted.between))


def leave_aside(participant: Participant, training: Training, exit_: Exit) -> None:
    """Ensures that a worker with a deadline saves and exits, by another thread if the training thread is busy.

    Returns at once.
    """
    if exit_.within_s is not None:
        timer = threading.Timer(min(REACT_S, exit_.within_s / 2), _save_and_go, (participant, training, exit_))
        timer.daemon = True
        timer.start()


def _save_and_go(participant: Participant, training: Training, exit_: Exit) -> None:
    with participant.condition:
        if participant.proven and not participant.instructions.orphaned:
            return  # the training thread handles it
        holds = participant.proven and participant.whole
        if holds and participant.begun != participant.member.round:
            leave_aside(participant, training, exit_)
            return
        participant.instructions.orphaned = False
    if holds:
        training.saved(False)
    participant.tell(m.Lapsed())
    participant.close()
    leave(exit_.code)
