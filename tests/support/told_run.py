"""A small run as its lines and its coordinator tell it, and what others may have called themselves."""

from __future__ import annotations

from typing import Any

from farandole.control.status import CoordinatorStatus, Status, ViewStatus, WorkerStatus
from farandole.protocol.metrics import as_written
from tests.support.metric_lines import made

MARKUP = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&"
STEERING = "[bold]w2[/bold]\x1b[31m"
STATUS = Status(
    run="resnet", coordinator=CoordinatorStatus(pid=9, address="http://127.0.0.1:1"), view=ViewStatus(number=3, size=2),
    step=57, epoch=2, wanted=4, minimum=1, maximum=None, state="training", reason="", code=None,
    workers=(
        WorkerStatus(id="w1", host="h", pid=1, pool="", rank=0, state="member", speed=1.0, shards=5, of=8),
        WorkerStatus(id=STEERING, host="h", pid=2, pool="", rank=1, state="leaving"),
        WorkerStatus(id="w3", host="h", pid=3, pool="", rank=None, state="starting"),
    ),
    samples_per_s=1234.5, loss=0.5, total=100,
)  # fmt: skip
VIEW = {"event": "view", "members": ("w1", "w2"), "time": 101.0, "cause": "first view", "step": 0}
SPENT = {"w1": {"host": "h", "pool": "local", "step": 9, "seconds": {"compute": 6.0, "data": 2.0}}}


def step(number: int, time: float, **more: Any) -> dict[str, Any]:
    return {
        "step": number,
        "time": time,
        "total": 100,
        "loss": 1.0 / (number + 1),
        "workers": 2,
        "seconds": 1.0,
        **more,
    }


RUN: list[dict[str, Any]] = [
    {"event": "starting", "worker": "w1", "host": "h", "time": 100.0},
    {"event": "starting", "worker": "w2", "host": "h", "time": 100.0},
    VIEW,
    *(step(number, 102.0 + number) for number in range(10)),
    {"event": "log", "step": 9, "accuracy": 0.75, "note": "warm"},
    {"event": "lost", "worker": "w2", "host": "h", "time": 112.5, "reason": "killed by signal 9"},
    {**VIEW, "members": ("w1",), "time": 112.6, "view": 2, "step": 10, "cause": "w2: killed", "outcome": "redo"},
    *(step(number, 102.0 + number, workers=1) for number in range(10, 20)),
]


def written(lines: list[dict[str, Any]]) -> list[bytes]:
    return [as_written(made(line)) for line in lines]
