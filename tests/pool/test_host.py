"""A host checks itself."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.errors import UsageError
from farandole.pool.base import Host


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ({"name": ""}, "name"),
        ({"name": "a", "slots": 0}, "host a has 0 slots"),
        ({"name": "a", "slots": 2, "devices": ("cuda:0",)}, "host a has 1 devices for 2 slots"),
        ({"name": "a", "devices": ("cuda:0",)}, "host a has 1 devices for any number of slots"),
    ],
)
def test_what_is_no_host(host: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Host(**host)


def test_room() -> None:
    assert [Host(name="a", slots=2, devices=("cuda:0", "cuda:1")).room(workers) for workers in (1, 2)] == [True, False]
    assert Host(name="a").room(10_000)
