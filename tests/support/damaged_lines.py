"""What is no line of metrics.jsonl, in every way that a test can think of."""

from __future__ import annotations

import json
from typing import Any

VIEW: dict[str, Any] = {"event": "view", "time": 1.0, "view": 1, "members": ["w1"], "step": 0, "cause": "why"}
SAVED: dict[str, Any] = {
    "event": "saved", "time": 2.0, "path": "/c/step-00000002-0123abcd.pt", "whole": True,
}  # fmt: skip
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
            {"step": 5, "loss": "\x1b]0;owned\x07"},
            {"step": 5, "loss": [0.5]},
            {"step": 5, "total": "many"},
            {"step": 5, "samples": None},
            {"step": 5, "time": "now"},
            {"step": 5, "time": 1e300},
            {"step": 5, "time": -1.0},
            {"step": 5, "workers": 0},
            {"step": 5, "epoch": []},
            {"step": 5, "other": 2**64},
            {"step": 5, "other": [[1]]},
            {"event": None, "time": 1.0},
            {"event": 5, "time": 1.0},
            {"event": "lost", "worker": "w1", "reason": "why"},  # at no time
            {"event": "log", "accuracy": 0.5},
            {"event": "log", "step": "5"},
            {**VIEW, "members": "w1"},
            {**VIEW, "members": [1]},
            {**VIEW, "members": None},
            {**VIEW, "step": "0"},
            {**SAVED, "path": 5},
            {**SAVED, "whole": "yes"},
            {"event": "saved", "time": 2.0, "worker": "w1"},
            {"event": "resumed", "time": 2.0, "path": "p"},
            {"event": "over", "time": 2.0, "code": "0", "reason": "why"},
            {"event": "not finite", "time": 2.0, "step": 5, "loss": 0.5},
            {"event": "shares", "time": 2.0, "reason": "why", "shares": {"w1": 0}},
            {"event": "stalled", "time": 2.0, "workers": [None], "reason": "why"},
        )
    ),
]
