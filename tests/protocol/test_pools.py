"""What a pool says that is told to people."""

from __future__ import annotations

import pytest

from farandole.protocol import messages as m
from tests.support.scene import Scene


@pytest.mark.parametrize(
    ("said", "event", "fields"),
    [
        (
            m.NoCapacity(reason="no machine of 8 slots"),
            "no capacity",
            {"pool": "pool", "reason": "no machine of 8 slots"},
        ),
        (
            m.RebalanceAdvice(host="h-2", reason="a price rises"),
            "advice",
            {"pool": "pool", "host": "h-2", "reason": "a price rises"},
        ),
        (
            m.HostPriced(host="h-2", dollars=0.5, since=9.0, day="2026-11-01"),
            "priced",
            {"pool": "pool", "host": "h-2"},
        ),
        (
            m.StartFailed(worker="b", host="h-2", reason="no image"),
            "start failed",
            {"worker": "b", "host": "h-2", "reason": "no image"},
        ),
    ],
)
def test_what_concerns_no_worker_yet_is_told_and_ends_nothing(
    said: m.FromPool, event: str, fields: dict[str, str]
) -> None:
    scene = Scene()
    scene.ready("a")
    scene.forget()
    scene.coordinator.on_pool_message("pool", "h-1", said, scene.now)
    scene.look()
    assert scene.events == [event]
    told = scene.fields[event]
    assert {name: told[name] for name in fields} == fields
    assert scene.coordinator.over is None
