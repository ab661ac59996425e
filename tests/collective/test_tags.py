"""Tags of messages: all that may be under way at once between two workers differ, and no tag is used again too soon."""

from __future__ import annotations

import random
import re

import pytest

from farandole.collective.schedule import MOST_BUCKETS, MOST_SUMS, ROUNDS, VIEWS, of_round, place
from farandole.errors import ProtocolError
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.view import View


def view(number: int, group: int) -> View:
    return View(number=number, members=("a", "b"), group=group)


def test_tags_tell_views_rounds_kinds_buckets_and_nodes_apart() -> None:
    order = random.Random(0)
    seen: dict[int, tuple[int, ...]] = {}
    for _ in range(20_000):
        parts = tuple(order.randrange(limit) for limit in (VIEWS, ROUNDS, 4, MOST_BUCKETS, MOST_SUMS, 2))
        number, round_, kind, bucket, node, purpose = parts
        tag = of_round(view(number, number), round_, purpose) | place(kind, bucket, node)
        assert seen.setdefault(tag, parts) == parts
    assert max(seen) < 1 << 31, "Gloo's is a C int"
    for bucket, node in [(MOST_BUCKETS, 0), (0, MOST_SUMS)]:
        with pytest.raises(AssertionError, match=str(bucket or node)):
            place(0, bucket, node)


def test_a_group_s_views_have_tags_of_their_own_until_it_is_refused() -> None:
    tags = [of_round(view(number, 7), 3) for number in range(7, 7 + VIEWS)]
    assert len(set(tags)) == VIEWS
    with pytest.raises(ProtocolError) as caught:
        of_round(view(7 + VIEWS, 7), 3)
    assert {str(7 + VIEWS), "7", str(VIEWS)} <= {*re.findall(r"\d+", str(caught.value))}


def test_new_connections_are_due_long_before() -> None:
    assert RunSettings(run="r", wanted=2, minimum=1).views_per_group == VIEWS // 2
