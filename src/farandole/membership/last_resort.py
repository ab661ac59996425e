"""Checkpoints in a run's events: what was written, what could not be, and from what the run went on."""

from __future__ import annotations

from typing import Any

from farandole.membership import messages as m

ALL = 1 << 30  # lines of one step
TOLD = ("checkpoint", "saved", "resumed")  # events that tell of a checkpoint in the run's store
Events = list[tuple[str, dict[str, Any]]]


def events(worker: str, message: m.Checkpointed | m.Restored) -> Events:
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
