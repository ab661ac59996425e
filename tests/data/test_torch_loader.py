"""A DataLoader of torch in `run.loader`: what it says is taken over, or refused."""

from __future__ import annotations

from collections.abc import Iterator
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
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import farandole
from farandole.checkpoint.restore import ORDER, compare
from farandole.checkpoint.store import Manifest
from farandole.data.loader import Key, Loader
from farandole.errors import UsageError
from farandole.plan.batch import PerWorkerBatch
from farandole.plan.shards import Position
from farandole.protocol.view import Lineage
from farandole.training.progress import Length, Progress
from farandole.training.replica import Replica
from farandole.training.run_state import signature
from tests.support.mentioned import mentions

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


ORDERS: dict[str, tuple[Sampler[int], int]] = {
    "with replacement": (RandomSampler(ROWS, replacement=True), 40),
    "fewer": (RandomSampler(ROWS, num_samples=7), 7),
    "weighted": (WeightedRandomSampler([1.0] * 30 + [0.0] * 10, 90), 90),
    "own": (Backwards(), 40),
}


@pytest.mark.parametrize(("sampler", "length"), ORDERS.values(), ids=ORDERS)
def test_samplers_that_give_the_order(run: farandole.Run, sampler: Sampler[int], length: int) -> None:
    """A run of two epochs reads what the sampler gives, in batches across its length."""
    loader = run.loader(DataLoader(ROWS, batch_size=4, sampler=sampler), micro=2)
    assert (loader.epoch_samples, len(loader)) == (length, -(-length // 4))
    assert {type(value) for value in samples(run, loader, epochs=2)} == {float}


def samples(run: farandole.Run, loader: Loader, **length: int) -> list[float]:
    """Train, and return the samples in the order in which they were used: those that the order and the step name."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run.replicate(model=model, optimizer=optimizer)
    used: list[float] = []
    epochs: dict[int, list[float]] = {}
    for step in run.steps(loader, **length):
        for (rows,) in step:
            assert step.indices.tolist() == rows.tolist()
            used += rows.tolist()
            epochs[step.epoch] = [*epochs.get(step.epoch, []), *rows.tolist()]
            step.backward(model(rows[:, None]).mean())
        optimizer.step()
    for epoch, values in epochs.items():
        expected = loader.order.samples(epoch, 0, loader.samples_in(epoch)).tolist()
        assert values == expected[: len(values)]
    return used


BATCHES: dict[str, tuple[Any, list[int]]] = {
    "lists": ([[0, 1], [2], [7, 7, 7]], [2, 1, 3]),
    "torch's": (BatchSampler(SequentialSampler(ROWS), 16, drop_last=False), [16, 16, 8]),
}


@pytest.mark.parametrize(("batches", "sizes"), BATCHES.values(), ids=BATCHES)
def test_each_batch_of_a_batch_sampler_is_a_step(run: farandole.Run, batches: Any, sizes: list[int]) -> None:
    loader = run.loader(DataLoader(ROWS, batch_sampler=batches), micro=2)
    assert (len(loader), loader.batch) == (len(sizes), farandole.GlobalBatch(max(sizes), micro=2))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run.replicate(model=model, optimizer=optimizer)
    took: list[tuple[int, int, int, list[float]]] = []
    for step in run.steps(loader, epochs=2):
        used: list[float] = []
        for (rows,) in step:
            assert 1 <= len(rows) <= 2
            used += rows.tolist()
            step.backward(model(rows[:, None]).mean())
        optimizer.step()
        took.append((step.epoch, step.samples, step.base_steps, used))
    assert [samples for _, samples, *_ in took] == sizes * 2
    assert [used for *_, used in took] == [[float(sample) for sample in batch] for batch in [*batches] * 2]
    assert [epoch for epoch, *_ in took] == [0] * len(sizes) + [1] * len(sizes)
    assert {base_steps for _, _, base_steps, _ in took} == {1}


def test_a_number_of_steps_goes_on_through_the_epochs(run: farandole.Run) -> None:
    """An endless loop of so many steps: 10 of 16 samples from 40 are four epochs, the last of each of 8."""
    loader = run.loader(DataLoader(ROWS, batch_size=16, shuffle=True), micro=8)
    used = samples(run, loader, base_steps=10)
    assert len(used) == 3 * 40 + 16
    assert {sorted(used[at : at + 40]) == list(range(40)) for at in (0, 40, 80)} == {True}
    assert len({tuple(used[at : at + 16]) for at in (0, 40, 80, 120)}) == 4


def test_a_number_of_steps_with_batches_of_a_sampler(run: farandole.Run) -> None:
    used = samples(run, run.loader(DataLoader(ROWS, batch_sampler=[[0, 1], [2]]), micro=1), base_steps=5)
    assert used == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.failure(
    "Data and loader processes",
    (
        "the sampler of the DataLoader has no length, keeps state between epochs, yields no index, or yields the part "
        "of one rank"
    ),
)
@pytest.mark.parametrize(
    "given",
    [DataLoader(ROWS, batch_size=None), DataLoader(Endless(), batch_size=None)],
    ids=["map-style", "iterable"],
)
def test_loaders_without_a_batch(run: farandole.Run, given: DataLoader[Any]) -> None:
    with pytest.raises(UsageError):
        run.loader(given, micro=2)


def test_what_does_not_go_with_a_sampler(run: farandole.Run) -> None:
    weighted = DataLoader(ROWS, batch_size=4, sampler=WeightedRandomSampler([1.0] * 40, 40))
    batches = DataLoader(ROWS, batch_sampler=[[0, 1], [2]])
    for wrong in (
        lambda: run.loader(weighted, micro=2, shuffle=False),
        lambda: run.loader(batches),
        lambda: run.loader(batches, micro=3),
        lambda: run.loader(batches, farandole.GlobalBatch(2, micro=1)),
        lambda: run.loader(batches, micro=1, drop_last=True),
    ):
        with pytest.raises(UsageError):
            wrong()
    assert run.loader(weighted, PerWorkerBatch(4, micro=2)).batch == PerWorkerBatch(4, micro=2)


def test_an_evaluation_counts_each_sample_once(run: farandole.Run) -> None:
    model = torch.nn.Linear(1, 1)
    run.replicate(model=model)
    weighted = DataLoader(ROWS, batch_size=4, sampler=WeightedRandomSampler([1.0] * 40, 40))
    for step in run.steps(run.loader(weighted, micro=4), base_steps=1):
        for (rows,) in step:
            step.backward(model(rows[:, None]).mean())
        with pytest.raises(UsageError):
            run.evaluate(model, weighted, lambda out: out, predict=lambda _, batch: (batch[0],))
        mean = run.evaluate(model, ROWS, lambda out: out, predict=lambda _, batch: (batch[0],))
        assert mean == pytest.approx(19.5)


@pytest.mark.failure(
    "The training loop",
    (
        "a wrong argument: a DataLoader to `run.steps`, `batch_size=` to `run.loader`, objects without names to "
        "`run.replicate`"
    ),
)
def test_what_is_missing_or_too_much(run: farandole.Run) -> None:
    given = DataLoader(ROWS, batch_size=8)
    for wrong in (
        lambda: run.loader(given),
        lambda: run.loader(ROWS),
        lambda: run.loader(ROWS, micro=4),
        lambda: run.loader(ROWS, farandole.GlobalBatch(8, micro=4), micro=4),
        lambda: run.loader(DataLoader(ROWS, batch_size=8), farandole.GlobalBatch(8, micro=4), micro=2),
        lambda: run.prepare(DataLoader(ROWS, batch_size=8), batch=PerWorkerBatch(8, micro=4), micro=2),
        lambda: run.loader(ROWS, batch_size=8),
        lambda: run.loader(given, micro=9),
    ):
        with pytest.raises(UsageError):
            wrong()


@pytest.mark.failure(
    "Data and loader processes",
    "the sampler of one worker gives another order (its weights or lengths differ)",
    seen=(
        'the worker is refused, with "order of the samples" and both digests; so is a resumed run in the middle of an '
        "epoch"
    ),
    outcome="the run continues without it",
)
def test_workers_whose_samplers_differ_have_other_signatures(run: farandole.Run) -> None:
    """Otherwise they would train on other samples in silence; a resumed run in an epoch's middle would, too."""

    def facts(given: DataLoader[Any]) -> dict[str, str]:
        replica = Replica({"model": torch.nn.Linear(1, 1)}, {})
        loader = run.loader(given, micro=2)
        return dict(signature(torch.device("cpu"), loader, Length(epochs=1), replica).facts)

    def weighted(*weights: float) -> dict[str, str]:
        return facts(DataLoader(ROWS, batch_size=4, sampler=WeightedRandomSampler([*weights] * 20, 40)))

    one, other = weighted(1.0, 1.0), weighted(1.0, 2.0)
    assert {name for name in one if one[name] != other[name]} == {ORDER}
    assert weighted(1.0, 1.0) == one
    manifest = Manifest(
        epoch=0, offset=8, step=2, whole=True, run="run", worker="w0", seed=5, facts=tuple(one.items()), time=0.0,
        run_id="",
    )  # fmt: skip
    assert compare(manifest, tuple(one.items()), 5, "path") == []
    with pytest.raises(UsageError):
        compare(manifest, tuple(other.items()), 5, "path")
    cut = (
        facts(DataLoader(ROWS, batch_sampler=[[0, 1], [2, 3]])),
        facts(DataLoader(ROWS, batch_sampler=[[0, 1], [3, 2]])),
    )
    assert {name for name in cut[0] if cut[0][name] != cut[1][name]} == {ORDER}


@pytest.mark.failure(
    "Data and loader processes",
    "the script passes several datasets or loaders to `run.loader` or `run.steps`",
    seen="an error with the line to write",
    outcome="the script fails, exit code 1; combine the datasets",
)
def test_several_datasets_are_combined_into_one(run: farandole.Run) -> None:
    pair = StackDataset(ROWS, TensorDataset(torch.arange(40.0, 80.0)))
    (one,), (two,) = run.loader(pair, farandole.GlobalBatch(8, micro=4)).fetch(Key(0, 0, 0, 0, 4))
    assert (two - one).tolist() == [40.0] * 4
    run.replicate(model=torch.nn.Linear(1, 1))
    given = DataLoader(ROWS, batch_size=8)
    loader: Any = run.loader(given, micro=4)
    for wrong in (
        lambda: run.loader((ROWS, ROWS)),
        lambda: run.loader([ROWS, ROWS], farandole.GlobalBatch(8, micro=4)),
        lambda: run.loader((given, given), micro=4),
        lambda: run.steps((loader, loader), epochs=1),
    ):
        with pytest.raises(UsageError) as error:
            wrong()
        assert mentions(str(error.value), "StackDataset")
    assert run.loader([1.0, 2.0], farandole.GlobalBatch(2, micro=1)).length == 2, "a list of samples is a dataset"


class Varying(Sampler[list[int]]):
    """Epochs with other numbers of batches and of samples."""

    epochs = ([[0, 1, 2], [3]], [[4, 5], [6, 7, 8], [9]], [[10]])
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.epochs[self.epoch % 3])


def test_epochs_with_other_numbers_of_batches(run: farandole.Run) -> None:
    """What is prefetched for the whole run, and what each step takes, are the batches of the sampler."""
    loader = run.loader(DataLoader(ROWS, batch_sampler=Varying()), micro=2)
    progress = Progress(loader, Length(epochs=3), lambda _, members: members)
    batches = [batch for epoch in Varying.epochs for batch in epoch]
    shards = progress.enter(Position(), 1)
    upcoming: dict[int, list[int]] = {}
    for key in progress.upcoming("a", Lineage(sets=(("a",),)), tuple(range(shards))):
        read = loader.order.samples(key.epoch, key.start, key.stop).tolist()
        upcoming[key.step] = [*upcoming.get(key.step, []), *read]
    assert upcoming == dict(enumerate(batches))
    took: list[tuple[int, bool, int]] = []
    totals: list[int] = []
    position: Position | None = Position()
    while position is not None:
        progress.enter(position, 1)
        took.append((position.epoch, progress.ends_epoch, progress.whole))
        totals.append(progress.total)
        assert progress.base_steps == 1
        position = progress.following
    assert took == [(0, False, 3), (0, True, 1), (1, False, 2), (1, False, 3), (1, True, 1), (2, True, 1)]
    assert totals == [6, 6, 7, 7, 7, 6], "as if later epochs had as many as the first"
