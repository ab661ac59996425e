"""The end of a run: its script has ended, it was stopped, or it failed.

After any of these nobody trains, and the best placed worker writes the last checkpoint; if it dies or can't, the next
one does. Replicas that differ are compared first. A run that was to be saved and was not does not exit with 0.
Argument: docs/protocol.md, Saving and shutdown.

    on_all_scripts_ended   all live members have finished and hold the same: the first saves, then the run is over.
                           What they hold includes what the script did after its loop.
                           During a stop this waits: the answers may name a newer view, with more members. A worker may
                           have reported its switch to it on a connection that broke, or to a coordinator that was
                           killed. It does not repeat `Switched`, but its return stops the view. It does repeat
                           `Finished`, and the journal says whether all had finished or the state is saved
    set_deadline           the user ends the run, and some have finished: no view can be agreed on any more. One of
                           those saves at once; the others get `end_s` to end as well
    expire                 they have not: they are named, and not waited for
"""

from __future__ import annotations

from collections.abc import Sequence

from farandole.errors import ProtocolError
from farandole.protocol import events, reported_events
from farandole.protocol import messages as m
from farandole.protocol.coordinator import accounting, disputes, metric_lines
from farandole.protocol.coordinator.state import CoordinatorState, Ending, Worker
from farandole.protocol.difference import outliers
from farandole.protocol.values import FAILURES

# --- saving -----------------------------------------------------------------------------------------------------------
#
# Which worker writes the run's checkpoints, and which may begin a first view. Invariants: one member writes while the
# run trains, the first in rank order that is synced and reaches the store; a first view begins with the newest known
# checkpoint, or a newer one.
# Argument: docs/protocol.md, Saving and shutdown 1-5.
#
#     appoint_saver     the view has changed: which member writes from now on
#     on_checkpoint     a checkpoint was written, or failed, or was resumed from
#     best_saver        which worker is to write the last one
#     helper            which candidate has to join before the run ends, so that somebody can write
#     founders          the members of a first view
#     no_way_to_save    why there can't be any
#     on_cannot_start   a worker that was to begin it finds too little


def appoint_saver(state: CoordinatorState) -> None:
    """Choose the member that writes checkpoints. Call it when the view changes or a joiner gets the state.

    It keeps the task until it leaves or fails. Only it and its predecessor are told. A message is lost only with its
    connection, and a return or a loss causes a view, for which it is sent again.
    See docs/protocol.md, Saving and shutdown 1.
    """
    able = _able(state)
    if state.saver not in able:
        state.saver = able[0] if able else ""
    _tell(state, at_once=False)


def on_checkpoint(state: CoordinatorState, worker: Worker, message: m.Checkpointed | m.Restored) -> None:
    """Handle the report that a checkpoint was written, failed or was restored.

    A written one counts as known if its step has been reached, or if its worker may write: it was told to at some time,
    perhaps by a coordinator that was killed. It may have written before it heard of its successor, and its heartbeats
    of that step may be lost with the connection.
    See docs/protocol.md, Saving and shutdown 2 and 4.
    """
    for event in reported_events.events_of(worker.id, message):
        state.record(event)
    if not state.has_trained(worker.id):
        return  # its reports do not count yet
    if isinstance(message, m.Restored):
        if worker.id != state.first_founder:
            return
        state.newest = m.Newest(step=message.step, path=message.path)
        metric_lines.on_restored(state, message.step)
    elif not message.late:
        state.tries += 1
        if message.error:
            _failed(state, worker.id)
            return
        state.succeeded = state.tries
        likely = worker.may_write or message.step <= state.reached
        if worker.reaches and likely and message.step >= state.newest.step:
            state.newest = m.Newest(step=message.step, path=message.path)


def _failed(state: CoordinatorState, worker: str) -> None:
    """Let another member try after `worker` failed to write a checkpoint (no descriptors, no space).

    The next one that has not failed since the newest success tries at once. If all have failed, the one with the oldest
    failure tries when a checkpoint is next due. So a full store costs one try a period, and one worker's trouble costs
    no checkpoint.
    """
    state.failed[worker] = state.tries
    able = _able(state)
    if worker != state.saver or not able:
        return
    state.saver = min(able, key=lambda w: _failure(state, w))
    fresh = _failure(state, state.saver) == 0
    if state.saver != worker:
        state.record(events.SaverEvent(worker=state.saver, before=worker, at_once=fresh))
    _tell(state, at_once=fresh)


def best_saver(state: CoordinatorState, savers: Sequence[str]) -> str:
    """Return the worker that writes the last checkpoint. `savers` hold the state, the best first.

    See docs/protocol.md, Saving and shutdown 3.
    """
    return min(savers, key=lambda w: (not state.workers[w].reaches, _failure(state, w)))


def helper(state: CoordinatorState) -> str:
    """Return a ready worker that must join so that the run can save; "" if none is needed or none can.

    See docs/protocol.md, Saving and shutdown 3.
    """
    assert state.view is not None
    if any(state.workers[w].reaches for w in state.view.members if w in state.workers):
        return ""
    ready = [w for w in state.workers.values() if w.state == "ready" and w.connected and not w.leaving]
    return next((w.id for w in ready if w.reaches), "")


def founders(state: CoordinatorState, ready: Sequence[str]) -> tuple[str, ...]:
    """Return the founders: the members of a first view, first the one that begins the run; () if none may begin.

    See docs/protocol.md, Saving and shutdown 4.
    """
    first = next((worker for worker in ready if state.workers[worker].reaches), None)
    if first is None:
        why = state.workers[ready[0]].unreached
        reason = f"no ready worker reaches {_place(state)}; waiting for one that does ({why})"
        _once(state, events.NoLeaderEvent(reason=reason))
        return ()
    state.reported_once.discard(events.NoLeaderEvent)
    return (first, *(worker for worker in ready if worker != first))


def no_way_to_save(state: CoordinatorState) -> str:
    """Return why the run can never begin, "" while it can. See docs/protocol.md, Saving and shutdown 5."""
    if any(w.reaches for w in state.workers.values()):  # this includes workers that are still starting
        return ""
    pool_workers = [w for w in state.workers.values() if w.pool]
    if not pool_workers:
        return ""
    first = pool_workers[0]
    return (
        f"{first.id} cannot reach {_place(state)}: {first.unreached}; check that it exists and is writable, "
        f"and start the run again on its folder, or begin again with another --folder"
    )


def on_cannot_start(state: CoordinatorState, worker: Worker, message: m.CannotStart) -> bool:
    """Handle a worker that lacks the newest checkpoint. Returns True if it was to begin the first view.

    The proposal names that checkpoint, and the worker looks for it before it enters the view. The view is then given up
    as by a loss. A checkpoint that is there but damaged counts as found: it is passed over and reported.
    See docs/protocol.md, Saving and shutdown 4.
    """
    view = state.proposed
    if state.view or state.stopping or view is None or view.number != message.view or worker.id not in view.synced:
        return False
    worker.unreached = message.reason
    state.record(events.ShortEvent(worker=worker.id, host=worker.host, reason=message.reason))
    return True


def _able(state: CoordinatorState) -> list[str]:
    """Return the members that can write checkpoints, in rank order."""
    members = state.view.members if state.view else ()
    holders = [w for w in members if w in state.workers and w not in state.unsynced]
    able = [w for w in holders if state.workers[w].reaches]
    if holders and not able:
        why = state.workers[holders[0]].unreached
        _once(state, events.NoSaverEvent(reason=f"none of the workers reaches {_place(state)} ({why})"))
    elif able:
        state.reported_once.discard(events.NoSaverEvent)
    return able


def _failure(state: CoordinatorState, worker: str) -> int:
    """Return the number of the newest failed try of `worker` since the newest success, 0 for none."""
    number = state.failed.get(worker, 0)
    return number if number > state.succeeded else 0


def _tell(state: CoordinatorState, *, at_once: bool) -> None:
    """Send the saver to the members whose role has changed."""
    message = m.Saver(worker=state.saver, at_once=at_once)
    for name in state.view.members if state.view else ():
        worker = state.workers.get(name)
        if worker is None or not worker.connected:
            continue
        saves = name == state.saver
        if worker.saves is not saves or (saves and at_once):
            worker.saves = saves
            worker.may_write = worker.may_write or saves
            state.send(name, message)


def _place(state: CoordinatorState) -> str:
    """Return the store of checkpoints in words, with the newest checkpoint."""
    where = state.settings.checkpoints.url or "the run's checkpoint folder"
    newest = state.newest
    return f"{where} (the newest is {newest.path})" if newest.path else where


def _once(state: CoordinatorState, event: events.Event) -> None:
    """Record `event` unless one of its type is already recorded."""
    if type(event) not in state.reported_once:
        state.reported_once.add(type(event))
        state.record(event)


# --- ending -----------------------------------------------------------------------------------------------------------


def advance(state: CoordinatorState, now: float) -> bool:
    """Take the next step towards the end of the run if one is due. Returns False if none is."""
    may_end = state.ending is not None and not state.stopping
    if state.ending is not None:
        accounting.end_trace(state)
    if state.everyone_finished() and not state.stopping and not (state.savers and state.deadline is None):
        on_all_scripts_ended(state)
    elif state.deadline is not None:
        if now >= state.deadline:
            expire(state)
    elif may_end and not state.view and not state.proposed and not state.savers:
        end(state)  # no worker holds a state
    elif may_end and not state.savers and not state.proposed and _some_finished(state):
        set_deadline(state, now)
    else:
        return False
    return True


def fail_before_view(state: CoordinatorState, reason: str, code: int = 1) -> None:
    """Fail the run, which has no view in force. It is over, unless a stop is outstanding: then the answers decide.

    Such a stop comes from a restart: the workers may have been in the first view, and hold a state, before its
    predecessor could know.
    """
    state.ending = Ending(code=code, reason=reason, failed=True)
    if state.stopping is None:
        end(state)
    else:
        state.record(events.StoppingEvent(reason=reason))


def is_between_steps(state: CoordinatorState) -> bool:
    """Return True if the run must end without waiting for the current step.

    That is so after a failure, and after a requested end of the run if some members have finished: they do
    not switch to the empty view.
    """
    if state.ending is None or state.stopping or state.savers or state.deadline is not None:
        return False
    return state.ending.failed or (state.proposed is not None and _some_finished(state))


def _some_finished(state: CoordinatorState) -> bool:
    """Return True if the script of a member has ended."""
    return any(state.workers[w].state == "finished" for w in state.members())


def ask_to_save(state: CoordinatorState) -> None:
    """Ask the best of `savers` to save, unless one is already asked. Without any saver, the run is over."""
    assert state.ending is not None
    if state.ending.replicas_differ and not disputes.compare_when_complete(state):
        return
    if not state.savers and state.between:
        state.savers = [worker for worker in state.between if worker in state.workers]
        state.between, state.ending.saver, state.ending.between = [], "", True
    if not state.savers:
        if state.deadline is not None and state.view is not None:
            return  # a worker that has not finished yet may still save
        _lose(state)
    elif state.ending.saver not in state.savers:
        state.ending.saver = best_saver(state, state.savers)
        ask_next_saver(state)


def on_return(state: CoordinatorState, worker: str) -> None:
    """Repeat the request to a saver that has reconnected: it may not have received it."""
    assert state.ending is not None
    if state.ending.replicas_differ and not state.ending.compared:
        disputes.ask_for_digests(state, worker)
    elif state.ending.saver == worker:
        ask_next_saver(state)


def ask_next_saver(state: CoordinatorState) -> None:
    """Ask the chosen saver to save.

    If the state is saved already, the run is over, unless some have a deadline to finish. This happens when the worker
    that saved for the previous coordinator has been lost since.
    """
    assert state.ending is not None
    if not state.ending.stored:
        state.send(state.ending.saver, m.End(save=True, reason=state.ending.reason, allow_between=state.ending.between))
    elif state.deadline is None:
        end(state)


def on_answer(state: CoordinatorState, worker: str, message: m.Saved | m.Digests) -> None:
    """Handle the answer of a saver: the checkpoint, or the digests of its replica."""
    if isinstance(message, m.Saved):
        on_saved(state, worker, message)
    elif worker in state.savers and worker in state.digests_wanted:
        state.digests[worker] = message
        ask_to_save(state)


def on_saved(state: CoordinatorState, worker: str, message: m.Saved) -> None:
    """Handle the result of the last checkpoint. After a failure the next saver tries."""
    if not state.ending or state.ending.stored or state.ending.saver != worker or worker not in state.savers:
        return
    if message.error:
        state.savers.remove(worker)
        state.ending.saver = ""  # it is asked again if it becomes a saver again when others have finished
        if message.between:
            state.between.append(worker)
        else:
            state.record(events.NotSavedEvent(worker=worker, reason=message.error))
        ask_to_save(state)
    else:
        path, whole, finite = message.path, not state.ending.between, message.finite
        duration = {"seconds": message.seconds} if message.seconds else {}
        host = state.workers[worker].host
        if state.workers[worker].reaches:
            state.record(events.SavedEvent(worker=worker, path=path, whole=whole, finite=finite, **duration))
        else:
            state.record(
                events.SavedElsewhereEvent(worker=worker, host=host, path=path, whole=whole, finite=finite, **duration)
            )
            state.ending.code = state.ending.code or 1
            state.ending.reason += f"; its last checkpoint is NOT in the run's store, but on {host}: {message.path}"
        state.ending.stored = True
        if state.deadline is None:
            end(state)


def on_all_scripts_ended(state: CoordinatorState) -> None:
    """Compare the final states and ask for the last checkpoint: the scripts of all members have ended."""
    prints = {w.id: w.fingerprint for w in state.workers.values() if w.state == "finished"}
    after = state.workers[next(iter(state.members()))].after.written()
    equal = len(set(prints.values())) == 1
    if not (state.ending and state.ending.finished):  # not if the previous coordinator did this
        state.record(events.FinishedEvent(fingerprint=" != ".join(sorted(set(prints.values()))), equal=equal, **after))
    if not equal and state.settings.bits != "any":
        disputes.on_replicas_differ(state, outliers(disputes.by_standing(state, prints)), "after the last step")
    state.ending = state.ending or Ending(code=0, reason="the script has run to its end", failed=False)
    state.ending.finished, state.deadline = True, None
    state.stopping = state.proposed = state.previous = None
    if state.ending.stored:
        end(state)
    else:
        state.savers = list(dict.fromkeys((*state.savers, *state.members())))
        ask_to_save(state)


def set_deadline(state: CoordinatorState, now: float) -> None:
    """Start the time limit for members that have not finished: the user ends the run, and others have finished."""
    assert state.ending is not None
    state.deadline = now + state.settings.end_s
    state.proposed = state.previous = None
    state.savers = [worker for worker in state.members() if state.workers[worker].state == "finished"]
    ask_to_save(state)


def expire(state: CoordinatorState) -> None:
    """End the run without the members that have not finished in time."""
    hung = [worker for worker in state.members() if state.workers[worker].state != "finished"]
    for worker in hung:
        reason = f"its script did not end within {state.settings.end_s:g} s of the stop, but others' scripts did"
        state.record(events.HungEvent(worker=worker, host=state.workers[worker].host, reason=reason))
    give_up(state, f"{', '.join(hung)} hung after the last step")


def give_up(state: CoordinatorState, why: str, code: int | None = None) -> None:
    """End the run once the final state is saved, without the members that have not finished."""
    assert state.ending is not None
    state.deadline = None
    state.ending.reason = f"{state.ending.reason}; {why}"
    state.ending.code = state.ending.code if code is None else code
    if state.ending.stored:
        end(state)
    elif not state.savers:
        _lose(state)


def _lose(state: CoordinatorState) -> None:
    """End the run without a last checkpoint. Its exit code is not 0."""
    assert state.ending is not None
    state.record(events.NotSavedEvent(reason="no worker remains that holds the state of a whole step"))
    if state.ending.code == 0:
        state.ending.code, state.ending.reason = 1, f"{state.ending.reason}, but its state could not be saved"
    end(state)


def end(state: CoordinatorState) -> None:
    """Make the run over: write what is pending, and tell all workers to exit."""
    assert state.ending is not None
    state.over = state.ending
    state.savers = []
    state.stopping = None
    metric_lines.close(state)
    accounting.close(state)
    state.record(events.OverEvent(code=state.over.code, reason=state.over.reason))
    code = 1 if state.over.code in FAILURES else state.over.code  # a script's own code may be one of `EXIT_...`
    for worker in state.workers:
        state.send(worker, m.Goodbye(reason=state.over.reason, code=code))


def on_nothing_left(state: CoordinatorState, worker: Worker, message: m.Restored) -> None:
    """End the run because its checkpoint already contains all the steps that the script asks for.

    Raises:
        ProtocolError: there is a view already, or the worker is not ready.
    """
    if state.view is not None or worker.state != "ready":
        raise ProtocolError("Restored(done) from a worker that cannot begin a first view")
    reason = f"nothing remains to train: {message.path} already has all the steps that the script asks for"
    state.ending = state.ending or Ending(code=0, reason=reason, failed=False)
    end(state)
