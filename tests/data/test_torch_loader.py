"""A DataLoader of torch in `run.loader`: what it says is taken over, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import farandole
from farandole.errors import UsageError
from farandole.plan.batch import PerWorkerBatch

ROWS = TensorDataset(torch.arange(40.0))


def doubled(rows: list[Any]) -> torch.Tensor:
    return 2 * torch.stack([row for (row,) in rows])


def first(_: int) -> None: ...


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(39, -1, -1))

    def __len__(self) -> int:
        return 40


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_a_data_loader_says_is_taken_over(run: farandole.Run, *, shuffle: bool) -> None:
    given = DataLoader(
        ROWS, batch_size=12, shuffle=shuffle, num_workers=2, collate_fn=doubled, drop_last=True, prefetch_factor=3,
        worker_init_fn=first, generator=torch.Generator(), persistent_workers=True, timeout=5,
    )  # fmt: skip
    loader = run.loader(given, micro=4)
    expected = run.loader(
        ROWS, farandole.GlobalBatch(12, micro=4), shuffle=shuffle, num_workers=2, collate_fn=doubled, drop_last=True,
        prefetch_factor=3, worker_init_fn=first, timeout=5,
    )  # fmt: skip
    for name in ("batch", "dataset", "length", "left_out", "processes", "_places"):
        assert getattr(loader, name) == getattr(expected, name)
    assert loader.order.samples(1, 0, 36).tolist() == expected.order.samples(1, 0, 36).tolist()
    assert (loader.order.samples(0, 0, 36).tolist() == list(range(36))) is not shuffle
    assert len(loader) == len(given)


def test_a_script_with_a_data_loader_trains_as_one_without(run: farandole.Run) -> None:
    model = torch.nn.Linear(1, 1)
    run.replicate(model=model)
    seen: list[float] = []
    for step in run.steps(run.loader(DataLoader(ROWS, batch_size=8, shuffle=True), micro=4), epochs=1):
        for (rows,) in step:
            seen += rows.tolist()
            step.backward(model(rows[:, None]).mean())
    assert sorted(seen) == list(range(40))


def test_options_and_batch_of_the_call_come_first(run: farandole.Run) -> None:
    batch = PerWorkerBatch(4, micro=2)
    loader = run.loader(DataLoader(ROWS, batch_size=12, shuffle=True, num_workers=2), batch, num_workers=0)
    assert (loader.batch, loader.processes, loader.order.shuffle) == (batch, 0, True)


def test_samplers_that_are_taken_over(run: farandole.Run) -> None:
    subset = run.loader(DataLoader(ROWS, batch_size=4, sampler=SubsetRandomSampler([3, 5, 7, 9])), micro=2)
    assert isinstance(subset.dataset, Subset)
    assert (list(subset.dataset.indices), subset.order.shuffle) == ([3, 5, 7, 9], True)
    distributed: DistributedSampler[Any] = DistributedSampler(ROWS, num_replicas=3, rank=1, shuffle=False)
    loader = run.loader(DataLoader(ROWS, batch_size=4, sampler=distributed), micro=2)
    assert (loader.batch.size, loader.length, loader.order.shuffle) == (12, 40, False)  # type: ignore[union-attr]


REFUSED: dict[str, Iterable[Any]] = {
    "with replacement": RandomSampler(ROWS, replacement=True),
    "fewer": RandomSampler(ROWS, num_samples=7),
    "weighted": WeightedRandomSampler([1.0] * 40, 40),
    "own": Backwards(),
}


@pytest.mark.parametrize("sampler", REFUSED.values(), ids=REFUSED)
def test_samplers_that_are_refused(run: farandole.Run, sampler: Any) -> None:
    with pytest.raises(UsageError):
        run.loader(DataLoader(ROWS, batch_size=4, sampler=sampler), micro=2)


@pytest.mark.parametrize(
    "given",
    [
        DataLoader(ROWS, batch_size=None),
        DataLoader(ROWS, batch_sampler=[[0, 1], [2]]),
        DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 4, drop_last=False)),
        DataLoader(Endless(), batch_size=4),
    ],
    ids=["no batch", "batches", "torch's batches", "iterable"],
)
def test_loaders_without_a_batch_or_samples(run: farandole.Run, given: DataLoader[Any]) -> None:
    with pytest.raises(UsageError):
        run.loader(given, micro=2)


def test_what_is_missing_or_too_much(run: farandole.Run) -> None:
    given = DataLoader(ROWS, batch_size=8)
    for wrong in (
        lambda: run.loader(given),
        lambda: run.loader(ROWS),
        lambda: run.loader(ROWS, micro=4),
        lambda: run.loader(ROWS, farandole.GlobalBatch(8, micro=4), micro=4),
        lambda: run.loader(ROWS, batch_size=8),
        lambda: run.loader(given, micro=9),
    ):
        with pytest.raises(UsageError):
            wrong()
