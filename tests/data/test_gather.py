"""Datasets that gather whole micro-batches: who is asked to, what it must not change, and where it fails."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from farandole.data.loader import Key, Loader
from farandole.errors import BadSample, ShardError
from farandole.plan.batch import GlobalBatch
from tests.support.drawing import same

BATCH = GlobalBatch(size=8, micro=4)
KEY = Key(0, 0, 0, 0, 4)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Squares; it counts how often it gathered."""

    def __init__(self, bad: frozenset[int] = frozenset()) -> None:
        self.bad, self.gathered = bad, 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index in self.bad:
            raise OSError("torn")
        return {"square": torch.tensor(index * index)}

    def gather(self, samples: np.ndarray) -> dict[str, torch.Tensor]:
        self.gathered += 1
        if self.bad & set(samples.tolist()):
            raise OSError("torn")
        return {"square": torch.from_numpy(samples * samples)}


def first(dataset: Any, **options: Any) -> Any:
    return Loader(dataset, BATCH, seed=0, shuffle=False, **options).fetch(KEY)


def test_it_is_asked_once_a_micro_batch() -> None:
    rows = Rows()
    assert first(rows)["square"].tolist() == [0, 1, 4, 9]
    assert rows.gathered == 1
    assert first(Subset(rows, [3, 2, 1, 19]))["square"].tolist() == [9, 4, 1, 361]
    assert rows.gathered == 2


def test_a_collate_function_of_the_user_s_own_gets_samples() -> None:
    rows = Rows()
    assert first(rows, collate_fn=len) == 4
    assert rows.gathered == 0


class Doubled(Rows):
    """It overrides how a sample is made, and inherits `gather`."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"square": 2 * super().__getitem__(index)["square"]}


class Passing(Dataset[Any]):
    """It wraps another dataset, whose attributes it has, and alters samples."""

    def __init__(self, inner: Rows) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return {"square": 2 * self.inner[index]["square"]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


class Renamed(Rows):
    """It overrides neither."""

    def __init__(self) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("dataset", "expected"), [(Doubled(), [0, 2, 8, 18]), (Passing(Rows()), [0, 2, 8, 18]), (Renamed(), [0, 1, 4, 9])]
)
def test_it_counts_only_where_it_belongs_to_the_samples(dataset: Any, expected: list[int]) -> None:
    assert first(dataset)["square"].tolist() == expected
    assert first(Subset(dataset, range(20)))["square"].tolist() == expected


def test_it_draws_nothing_and_no_random_state_is_set() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    first(Rows())
    assert random.random() == expected


def test_it_sees_one_thread() -> None:
    class Threads(Rows):
        def gather(self, samples: np.ndarray) -> Any:
            return torch.full((len(samples),), torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert first(Threads()).tolist() == [1] * 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.failure(
    "Data and loader processes",
    "the `gather` method of a dataset raises",
    seen="the error of the bad sample, if one of its samples is bad; else its own error",
    outcome='a bad sample is skipped with `on_bad_sample="skip"`',
)
def test_where_it_fails_the_bad_sample_is_named_or_left_out() -> None:
    bad = Rows(frozenset({2}))
    with pytest.raises(BadSample, match=r'\b2\b.*\bRows\b.*OSError: torn\b.*on_bad_sample="skip"'):
        first(bad)
    loader = Loader(bad, BATCH, seed=0, shuffle=False, on_bad_sample="skip")
    assert loader.fetch(KEY)["square"].tolist() == [0, 1, 9]
    assert loader.skipped == (2,)
    assert same(loader.fetch(Key(0, 0, 1, 4, 8)).values(), [torch.tensor([16, 25, 36, 49])])
    assert loader.skipped == ()


@pytest.mark.failure("Data and loader processes", "the `gather` method of a dataset raises")
def test_where_no_sample_is_bad_its_own_error_comes_out() -> None:
    class Broken(Rows):
        def gather(self, samples: np.ndarray) -> Any:  # noqa: ARG002
            raise KeyError("mine")

    for what in ("raise", "skip"):
        with pytest.raises(KeyError, match="mine"):
            first(Broken(), on_bad_sample=what)


def test_a_missing_shard_is_no_bad_sample() -> None:
    class Away(Rows):
        def gather(self, samples: np.ndarray) -> Any:  # noqa: ARG002
            raise ShardError("away")

    with pytest.raises(ShardError, match="away"):
        first(Away(), on_bad_sample="skip")
