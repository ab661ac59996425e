"""Turns reports of a worker into events: about its checkpoints, its loader processes, its ledger."""

from __future__ import annotations

from farandole.protocol import events
from farandole.protocol import messages as m

ALL = 1 << 30  # lines of one step
CHECKPOINT_EVENTS = (
    events.CheckpointEvent,
    events.SavedEvent,
    events.ResumedEvent,
)  # events about a checkpoint in the run's store
WorkerReport = m.Checkpointed | m.Restored | m.LoaderEnded | m.Unrecorded


def events_of(worker: str, message: WorkerReport) -> list[events.Event]:
    """Return the events that a message of `worker` stands for, in order."""
    match message:
        case m.Checkpointed(error=""):
            return [
                events.CheckpointEvent(
                    worker=worker,
                    step=message.step,
                    path=message.path,
                    bytes=message.bytes,
                    seconds=message.seconds,
                    copy_ms=message.copy_ms,
                    finite=message.finite,
                )
            ]
        case m.Checkpointed():
            return [events.CheckpointFailedEvent(worker=worker, step=message.step, reason=message.error)]
        case m.LoaderEnded():
            return [events.LoaderReplacedEvent(worker=worker, reason=message.reason)]
        case m.Unrecorded():
            return [events.LedgerIncompleteEvent(worker=worker, reason=message.reason)]
        case m.Restored(done=True):
            return [events.NothingLeftEvent(worker=worker, step=message.step, path=message.path)]
        case m.Restored():
            resumed = events.ResumedEvent(
                worker=worker,
                step=message.step,
                path=message.path,
                differences=message.differences,
                finite=message.finite,
                last_finite="" if message.finite else message.last_finite,
            )
            return [
                *(events.CheckpointDamagedEvent(worker=worker, reason=reason) for reason in message.damaged),
                resumed,
            ]
