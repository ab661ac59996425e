"""What a worker tells that becomes nothing but events: of its checkpoints, and of its loader processes."""

from __future__ import annotations

from typing import Any

from farandole.membership import messages as m

ALL = 1 << 30  # lines of one step
Events = list[tuple[str, dict[str, Any]]]


def events(worker: str, message: m.Checkpointed | m.Restored | m.LoaderEnded) -> Events:
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
                    },
                )
            ]
        case m.Checkpointed():
            return [("checkpoint failed", {"worker": worker, "step": message.step, "reason": message.error})]
        case m.LoaderEnded():
            return [("loader replaced", {"worker": worker, "reason": message.reason})]
        case m.Restored():
            passed = [("checkpoint damaged", {"worker": worker, "reason": reason}) for reason in message.damaged]
            fields = {"worker": worker, "step": message.step, "path": message.path}
            return [*passed, ("resumed", {**fields, "differences": list(message.differences)})]
