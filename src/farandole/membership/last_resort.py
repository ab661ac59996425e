"""What a worker tells that becomes events: of its checkpoints, its loader processes, its ledger."""

from __future__ import annotations

from typing import Any

from farandole.membership import messages as m

ALL = 1 << 30  # lines of one step
TOLD = ("checkpoint", "saved", "resumed")  # events that tell of a checkpoint in the run's store
Events = list[tuple[str, dict[str, Any]]]
Told = m.Checkpointed | m.Restored | m.LoaderEnded | m.Unrecorded


def events(worker: str, message: Told) -> Events:
    """Names and fields of the events that a worker's message amounts to, in order."""
    match message:
        case m.Checkpointed(error=""):
            return [
                (
                    "checkpoint",
                    {
                        "worker": worker,
                        "step": message.step,
                        "path": message.path,
                        "bytes": message.bytes,
                        "seconds": message.seconds,
                        "copy_ms": message.copy_ms,
                        **_finite(message),
                    },
                )
            ]
        case m.Checkpointed():
            return [("checkpoint failed", {"worker": worker, "step": message.step, "reason": message.error})]
        case m.LoaderEnded():
            return [("loader replaced", {"worker": worker, "reason": message.reason})]
        case m.Unrecorded():
            return [("ledger incomplete", {"worker": worker, "reason": message.reason})]
        case m.Restored(done=True):
            return [("nothing left", {"worker": worker, "step": message.step, "path": message.path})]
        case m.Restored():
            passed = [("checkpoint damaged", {"worker": worker, "reason": reason}) for reason in message.damaged]
            fields = {"worker": worker, "step": message.step, "path": message.path, **_finite(message)}
            fields |= {} if message.finite else {"last_finite": message.last_finite}
            return [*passed, ("resumed", {**fields, "differences": list(message.differences)})]


def _finite(message: m.Checkpointed | m.Restored) -> dict[str, bool]:
    """Said where it is not so."""
    return {} if message.finite else {"finite": False}
