"""What is no line of metrics.jsonl, in every way that a test can think of."""

from __future__ import annotations

import json
from typing import Any

from farandole.protocol import events
from farandole.protocol.metrics import as_written
from tests.support.metric_lines import an, step_line

STEP: dict[str, Any] = json.loads(as_written(step_line(0)))
VIEW: dict[str, Any] = json.loads(as_written(an(events.ViewEvent, members=("w1",), step=0)))
SAVED: dict[str, Any] = json.loads(as_written(an(events.SavedEvent, path="/c/step-00000002-0123abcd.pt")))
DAMAGED_LINES = [
    b"",
    b"null",
    b"[]",
    b'{"step":12,"lo{"step":13,"loss":0.5}',
    b'{"step":1,"loss":"\xff"}',
    b"[" * 100_000,
    b'{"step":' + b"9" * 5000 + b"}",
    *(
        json.dumps(line).encode()
        for line in (
            {},
            {"loss": 0.5},
            {"step": "5"},
            {"step": -1},
            {"step": 2**53 + 1},
            {"step": 1.5},
            {"step": True},
            {"step": 5, "loss": 0.5},  # and nothing else
            {**STEP, "loss": "\x1b]0;owned\x07"},
            {**STEP, "loss": [0.5]},
            {**STEP, "total": "many"},
            {**STEP, "samples": None},
            {**STEP, "time": "now"},
            {**STEP, "time": 1e300},
            {**STEP, "time": -1.0},
            {**STEP, "workers": 0},
            {**STEP, "epoch": []},
            {**STEP, "other": 1},
            {**STEP, "other": [[1]]},
            {"event": None, "time": 1.0},
            {"event": 5, "time": 1.0},
            {"event": "lost", "worker": "w1", "host": "h", "reason": "why"},  # at no time
            {"event": "new in a later version", "time": 3.0, "reason": "why"},
            {"event": "log", "accuracy": 0.5},
            {"event": "log", "step": "5"},
            {"event": "log", "step": 5, "other": 2**64},
            {"event": "log", "step": 5, "other": [1]},
            {**VIEW, "other": 1},
            {**VIEW, "outcome": "undone"},
            {**VIEW, "members": "w1"},
            {**VIEW, "members": [1]},
            {**VIEW, "members": None},
            {**VIEW, "step": "0"},
            {**SAVED, "path": 5},
            {**SAVED, "whole": "yes"},
            {"event": "saved", "time": 2.0, "worker": "w1"},
            {"event": "resumed", "time": 2.0, "path": "p"},
            {"event": "over", "time": 2.0, "code": "0", "reason": "why"},
            {"event": "not finite", "time": 2.0, "worker": "w1", "step": 5, "loss": 0.5},
            {"event": "shares", "time": 2.0, "view": 1, "step": 2, "reason": "why", "shares": {"w1": 0}},
            {"event": "out of reach", "time": 2.0, "workers": [None], "reason": "why"},
        )
    ),
]
