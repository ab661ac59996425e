"""A worker whose training thread hangs in the script: its connection's thread writes the stacks, and sees to the save.

The same goes for one whose machine goes, and that has no time to wait for its training thread
(`protocol/messages.py`): what the stop's answer is in 1, the end of its lease is there.

Why another thread may save a state that the training thread holds:

1. Saving is asked for only once the view is stopped and this worker has answered that. Until it is told how to go on,
   which it will not be any more, its round does not end (`Member.end_round` refuses).
2. Nothing writes to parameters, optimizer or kept buffers between a step's beginning and the end of its round: the
   veterans send joiners the state out of the same memory meanwhile. The update follows after `Rounds.finish` has
   returned, and that waits for the round's end.
3. So while `whole` is true and the round that the training thread has begun is the one that the member is in, the
   state is that of the step's beginning and stays so, whatever the training thread does when it wakes up.
4. If the round had ended before the stop, the training thread is on its way to the update: it is waited for, a
   matter of moments, until it takes the wish up itself or `whole` is false. If that is false, the state is between
   two steps, and the answer is that, or what the script has left there if nobody has better (see
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
REACT_S = 2.0  # for the training thread to take the wish up itself: if it waits for peers it does at once
STDERR = 2


def write_stacks(reason: str) -> None:
    """The stacks of all threads, into the worker's log."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed: nobody wants to know
        _log.error("%s; the stacks of all threads of this worker:", reason)
        faulthandler.dump_traceback(file=STDERR, all_threads=True)


def save_aside(participant: Participant, training: Training, wanted: Save) -> None:
    """See that `wanted` is answered, by another thread if the training thread hangs. Returns at once."""
    timer = threading.Timer(REACT_S, _take_up, (participant, training, wanted))
    timer.daemon = True
    timer.start()


def _take_up(participant: Participant, training: Training, wanted: Save) -> None:
    with participant.condition:
        if participant.told.save is not wanted:
            return  # the training thread has
        if participant.whole and participant.begun != participant.member.round:
            save_aside(participant, training, wanted)
            return
        participant.told.save = None
    if wanted.save:
        participant.tell(training.saved(wanted.between))


def leave_aside(participant: Participant, training: Training, exit_: Exit) -> None:
    """See that who has a deadline saves and goes, by another thread if the training thread is busy. Returns at once."""
    if exit_.within_s is not None:
        timer = threading.Timer(min(REACT_S, exit_.within_s / 2), _save_and_go, (participant, training, exit_))
        timer.daemon = True
        timer.start()


def _save_and_go(participant: Participant, training: Training, exit_: Exit) -> None:
    with participant.condition:
        if participant.proven and not participant.told.orphaned:
            return  # the training thread is at it
        holds = participant.proven and participant.whole
        if holds and participant.begun != participant.member.round:
            leave_aside(participant, training, exit_)
            return
        participant.told.orphaned = False
    if holds:
        training.saved(False)
    participant.tell(m.Lapsed())
    participant.close()
    leave(exit_.code)
