"""What a worker tells becomes events with all that it has said, each value in its own place."""

from __future__ import annotations

import pytest

from farandole.protocol import events, reported_events
from farandole.protocol import messages as m

WRITTEN = m.Checkpointed(step=5, path="p", bytes=9, seconds=1.25, copy_ms=3.5, finite=False)
RESUMED = m.Restored(step=5, path="p", damaged=("q", "r"), differences=("d",), finite=False, last_finite="l")
TOLD = [
    (WRITTEN, [events.CheckpointEvent(worker="w", step=5, path="p", bytes=9, seconds=1.25, copy_ms=3.5, finite=False)]),
    (m.Checkpointed(step=5, path="p", error="why"), [events.CheckpointFailedEvent(worker="w", step=5, reason="why")]),
    (m.LoaderEnded(reason="why"), [events.LoaderReplacedEvent(worker="w", reason="why")]),
    (m.Unrecorded(reason="why"), [events.LedgerIncompleteEvent(worker="w", reason="why")]),
    (m.Restored(step=5, path="p", done=True), [events.NothingLeftEvent(worker="w", step=5, path="p")]),
    (RESUMED, [
        events.CheckpointDamagedEvent(worker="w", reason="q"),
        events.CheckpointDamagedEvent(worker="w", reason="r"),
        events.ResumedEvent(worker="w", step=5, path="p", differences=("d",), finite=False, last_finite="l"),
    ]),
    (m.Restored(step=5, path="p", last_finite="l"), [events.ResumedEvent(worker="w", step=5, path="p",
    differences=())]),
]  # fmt: skip


@pytest.mark.parametrize(("message", "told"), TOLD, ids=lambda each: type(each).__name__)
def test_nothing_is_left_out_or_mixed_up(message: reported_events.WorkerReport, told: list[events.Event]) -> None:
    assert reported_events.events_of("w", message) == told
