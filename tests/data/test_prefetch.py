"""The request queue against a pretended pipeline: nothing hangs, nothing piles up, nothing is made in vain."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.data.workers import Key, Prefetch


class Pipeline:
    """Places as DataLoader has them: results in the order of requests, one more request for each result taken out."""

    def __init__(self, places: int) -> None:
        self.prefetch = Prefetch(limit=2 * places)
        self.made: Counter[Key] = Counter()
        self.most = 0
        self.requests: deque[Key | None] = deque()
        self.places = places

    def expect(self, upcoming: Iterable[Key]) -> None:
        self.prefetch.replace(upcoming)
        while len(self.requests) < self.places:
            self.requests.append(next(self.prefetch))
        self.trade_idle()

    def fetch(self, key: Key) -> None:
        self.prefetch.ask(key)
        for _ in range(self.places + 1):
            if key in self.prefetch.waiting:
                break
            self.pull()
        assert self.prefetch.waiting.pop(key) == ("made", key)
        self.trade_idle()

    def trade_idle(self) -> None:
        """As the loader does."""
        while self.prefetch.under_way[0] is None and self.prefetch.next_expected() is not None:
            self.pull()

    def pull(self) -> None:
        key = self.requests.popleft()
        if key is not None:
            self.made[key] += 1
        self.requests.append(next(self.prefetch))
        self.prefetch.receive(key, ("made", key))
        self.most = max(self.most, len(self.prefetch.waiting) + sum(key is not None for key in self.requests))


SHARDS = 6


def key(step: int, shard: int) -> Key:
    return Key(0, step, shard, SHARDS * step + shard, SHARDS * step + shard + 1)


# For each step: does the plan change before it, which shards are expected, which are asked for, in which order?
shares = st.lists(st.integers(0, SHARDS - 1), unique=True)
steps = st.lists(st.tuples(st.booleans(), shares, shares), min_size=1, max_size=25)


@given(places=st.integers(1, 5), history=steps)
@settings(max_examples=500, deadline=None)
def test_whatever_is_expected_whatever_is_asked_for_comes_and_memory_is_bounded(
    places: int, history: list[tuple[bool, list[int], list[int]]]
) -> None:
    pipeline = Pipeline(places)
    pipeline.expect([])
    for step, (changes, expected, asked) in enumerate(history):
        if changes:
            pipeline.expect(key(later, shard) for later in range(step, step + 30) for shard in expected)
        for shard in asked:
            pipeline.fetch(key(step, shard))
    assert pipeline.most <= 2 * places + 1


@given(places=st.integers(1, 5), share=st.lists(st.integers(0, SHARDS - 1), unique=True, min_size=1))
def test_a_plan_that_is_kept_makes_everything_once(places: int, share: list[int]) -> None:
    pipeline = Pipeline(places)
    plan = [key(step, shard) for step in range(20) for shard in share]
    pipeline.expect(iter(plan))
    for each in plan:
        pipeline.fetch(each)
    assert pipeline.made == Counter(plan)
    assert pipeline.most <= places + 1  # the one being handed over


@given(places=st.integers(1, 5), inherited=shares)
def test_inheriting_makes_nothing_twice(places: int, inherited: list[int]) -> None:
    """Shards of a lost peer in step 3, in between, with the plan unchanged or told anew."""
    for told in (False, True):
        pipeline = Pipeline(places)
        plan = [key(step, shard) for step in range(10) for shard in (0, 1)]
        extra = [key(3, shard) for shard in inherited if shard > 1]
        pipeline.expect(iter(plan))
        for each in plan[:8]:
            pipeline.fetch(each)
        if told:
            pipeline.expect([*extra, *plan[8:]])
        for each in [*extra, *plan[8:]]:
            pipeline.fetch(each)
        assert pipeline.made == Counter([*plan, *extra])


def test_a_shrinking_share_drops_and_a_growing_one_keeps() -> None:
    pipeline = Pipeline(4)
    pipeline.expect(key(step, shard) for step in range(9) for shard in (0, 1))
    pipeline.fetch(key(0, 0))  # under way: 0.1, 1.0, 1.1, 2.0
    pipeline.expect(key(step, 1) for step in range(9))
    for step in range(4):
        pipeline.fetch(key(step, 1))
    dropped = {made for made in pipeline.made if made.shard == 0}
    assert dropped == {key(0, 0), key(1, 0), key(2, 0)}
    assert not any(waiting.shard == 0 for waiting in pipeline.prefetch.waiting)
    pipeline.expect(key(step, shard) for step in range(4, 9) for shard in (0, 1))
    for step in range(4, 9):
        for shard in (0, 1):
            pipeline.fetch(key(step, shard))
    assert max(pipeline.made.values()) == 1
