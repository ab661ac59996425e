"""Iterable datasets: the same bits from any place, in any process, with a state and without; and what is refused."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset

import farandole
from farandole.checkpoint.restore import ORDER
from farandole.data.loader import Key, Loader
from farandole.data.stream import CHECKED, PROOF, Stream
from farandole.errors import BadSample, UsageError
from farandole.plan.batch import BatchPolicy, GlobalBatch, PerWorkerBatch
from farandole.training.progress import Length
from farandole.training.replica import Replica
from farandole.training.run_state import signature
from tests.support.streams import Forgetful, Noisy, Numbers, OwnIterator, Resumable, Sized

LENGTH, MICRO, EVERY = 1000, 4, 256
BATCH = GlobalBatch(16, micro=MICRO)
SEED = 3
WITHOUT_STATE, WITH_STATE = (Sized, Noisy), (Resumable, OwnIterator)


def key(start: int, epoch: int = 0) -> Key:
    return Key(epoch, start // BATCH.size, start % BATCH.size // MICRO, start, start + MICRO)


KEYS = [key(start, epoch) for epoch in (0, 1) for start in range(0, LENGTH, MICRO)]
Batches = dict[Key, torch.Tensor]


@pytest.fixture(scope="module")
def read() -> Callable[[type[Numbers]], Batches]:
    """The micro-batches of two epochs, read from the beginning to the end."""
    known: dict[type[Numbers], Batches] = {}

    def all_of(kind: type[Numbers]) -> Batches:
        if kind not in known:
            loader = Loader(kind(LENGTH), BATCH, seed=SEED)
            known[kind] = {each: loader.fetch(each) for each in KEYS}
        return known[kind]

    return all_of


def fresh(kind: type[Numbers], **options: Any) -> tuple[Loader, Any]:
    dataset = kind(LENGTH)
    loader = Loader(dataset, BATCH, **{"seed": SEED, **options})
    dataset._read.clear()
    return loader, dataset


def test_the_samples_and_their_order_are_those_of_the_dataset(read: Any) -> None:
    assert [batch.tolist() for batch in read(Sized).values()] == [[*map(float, range(k.start, k.stop))] for k in KEYS]
    for kind in (Noisy, *WITH_STATE):
        first, second = (
            [sample for each, batch in read(kind).items() if each.epoch == epoch for sample in batch.tolist()]
            for epoch in (0, 1)
        )
        assert sorted(map(int, first)) == sorted(map(int, second)) == list(range(LENGTH))
        assert [*map(int, first)] == Noisy(LENGTH).order()
        assert [*map(int, first)] != [*map(int, second)]


@pytest.mark.parametrize("kind", [*WITHOUT_STATE, *WITH_STATE, Forgetful])
def test_a_worker_that_begins_anywhere_has_the_same_bits(kind: type[Numbers], read: Any) -> None:
    """Within an epoch, in an earlier one, and earlier than what it holds."""
    loader, _ = fresh(kind)
    for each in (key(600, 1), key(604, 1), key(8, 0), key(900, 0), key(4, 0), key(996, 1)):
        assert torch.equal(loader.fetch(each), read(kind)[each])


@pytest.mark.processes
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", [Sized, Resumable])
def test_a_loader_process_has_the_same_bits(kind: type[Numbers], start: str, make: Any, read: Any) -> None:
    """It is ahead, also across the border of an epoch, and goes back for the micro-batches of a lost worker."""
    loader = make(kind(LENGTH), BATCH, seed=SEED, num_workers=1, multiprocessing_context=start)
    mine = [each for each in KEYS if each.shard < 2]
    loader.expect(mine)
    for number, each in enumerate(mine):
        assert torch.equal(loader.fetch(each), read(kind)[each])
        if number in (100, 249, 252):
            for other in (each._replace(shard=3, start=each.start + 8, stop=each.start + 12), key(0, each.epoch)):
                assert torch.equal(loader.fetch(other), read(kind)[KEYS[KEYS.index(key(other.start, other.epoch))]])
            loader.expect(mine[number + 1 :])


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_mark_saves_what_lies_before_it(kind: type[Numbers], read: Any) -> None:
    veteran, _ = fresh(kind)
    for each in KEYS[250:400]:
        veteran.fetch(each)
    assert veteran.stream is not None
    assert veteran.stream.mark(1, EVERY - 1) == b""
    assert veteran.stream.mark(0, 600) == b"", "of another epoch"
    joiner, dataset = fresh(kind)
    assert joiner.stream is not None
    joiner.stream.learn([veteran.stream.mark(1, 600)])
    assert torch.equal(joiner.fetch(key(600, 1)), read(kind)[key(600, 1)])
    assert dataset.reads == 604 - 2 * EVERY
    assert torch.equal(joiner.fetch(key(0, 1)), read(kind)[key(0, 1)])


@pytest.mark.processes
def test_a_mark_reaches_the_loader_process_and_comes_from_it(make: Any, read: Any) -> None:
    veteran = make(Resumable(LENGTH), BATCH, seed=SEED, num_workers=1)
    veteran.expect(KEYS)
    for each in KEYS[:160]:
        veteran.fetch(each)
    mark = veteran.stream.mark(0, 600)
    assert mark
    joiner = make(Unread(LENGTH), BATCH, seed=SEED, num_workers=1)
    joiner.warm(0.0)
    joiner.stream.learn([mark])
    joiner.expect([key(600)])
    assert torch.equal(joiner.fetch(key(600)), read(Resumable)[key(600)])
    with pytest.raises(BadSample):
        joiner.fetch(key(40))


class Unread(Resumable):
    """It can't be read between its first samples and 500."""

    def noise(self) -> float:
        if CHECKED < self.place <= 500:
            raise ValueError(self.place)
        return super().noise()


@pytest.mark.failure(
    "Data and loader processes",
    (
        "the state of an iterable dataset leads to other samples, as for a shuffle buffer whose content is not in the "
        "state"
    ),
    seen="one warning",
    outcome="the state is not used: joiners read the stream from its beginning, with the same bits",
)
def test_a_state_that_leads_to_other_samples_is_not_used(read: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Lossy(Forgetful): ...  # a class of its own: what is told once in a process

    loader, dataset = fresh(Lossy)
    for each in KEYS[:150]:
        loader.fetch(each)
    dataset._read.clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(loader.fetch(key(300)), read(Forgetful)[key(300)])
    assert dataset.reads == PROOF + 304
    assert any("Lossy" in record.getMessage() for record in caplog.records)
    assert loader.stream is not None
    assert loader.stream.mark(0, 600) == b""


@pytest.mark.parametrize("packed", [b"x", b"\0" * 8, (1 << 40).to_bytes(8, "little"), b"\5" + b"\0" * 7 + b"hello"])
def test_bytes_that_are_no_mark_are_left_out(packed: bytes, read: Any) -> None:
    loader, _ = fresh(Resumable)
    assert loader.stream is not None
    loader.stream.learn([packed, b""])
    assert torch.equal(loader.fetch(key(300)), read(Resumable)[key(300)])


def test_the_batch_in_hand_is_held(read: Any) -> None:
    """For the micro-batches of a lost worker and for other passes, also where a collate function changes samples."""
    dataset = Sized(LENGTH)
    loader = Loader(dataset, BATCH, seed=SEED, collate_fn=lambda rows: torch.stack([row.mul_(2) for row in rows]))
    for start in (108, 96, 100, 104, 108):
        assert torch.equal(loader.fetch(key(start)), 2 * read(Sized)[key(start)])
    assert dataset.reads == 2 * CHECKED + 112


def test_samples_that_can_not_be_copied_are_read_again() -> None:
    class Uncopied(Sized):
        def __iter__(self) -> Iterator[Any]:
            for number in range(self.length):
                self._read.append(1)
                yield number, iter([])

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError

    dataset = Uncopied(64)
    loader = Loader(dataset, BATCH, seed=SEED, collate_fn=lambda rows: [(n, next(lock, None)) for n, lock in rows])
    assert loader.fetch(key(16)) == loader.fetch(key(16)) == [(n, None) for n in range(16, 20)]


def test_two_loaders_of_one_dataset_do_not_disturb_each_other(read: Any) -> None:
    """`Resumable` keeps its place in itself: an evaluation of the training data moves it."""
    dataset = Resumable(LENGTH)
    one, two = (Loader(dataset, BATCH, seed=SEED) for _ in range(2))
    for each, other in zip(KEYS[:20], KEYS[10:30], strict=True):
        assert torch.equal(one.fetch(each), read(Resumable)[each])
        assert torch.equal(two.fetch(other), read(Resumable)[other])


def test_reading_leaves_the_random_state_as_it_was() -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    Loader(Noisy(LENGTH), BATCH, seed=SEED)
    assert torch.equal(torch.rand(3), expected)


# --- lengths -----------------------------------------------------------------------------------------------------


def train(run: farandole.Run, loader: Loader, **length: int) -> list[float]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run.replicate(model=model, optimizer=optimizer)
    used: list[float] = []
    for step in run.steps(loader, **length):
        for rows in step:
            assert step.indices.tolist() == rows.tolist()
            used += rows.tolist()
            step.backward(model(rows[:, None]).mean())
        optimizer.step()
    return used


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Sized(40), {}),
        (Numbers(40), {"samples": 40}),
        (DataLoader(Sized(40), 16), {"micro": 4}),
        (DataLoader(Sized(40), 16, num_workers=2), {"micro": 4, "num_workers": 0}),
        (ChainDataset([Sized(40)]), {}),
    ],
    ids=["len", "samples", "data loader", "its processes", "chain"],
)
def test_epochs(run: farandole.Run, dataset: Any, options: dict[str, Any]) -> None:
    loader = run.loader(dataset, None if "micro" in options else GlobalBatch(16, micro=4), **options)
    assert (len(loader), loader.length, loader.order.shuffle) == (3, 40, False)
    assert train(run, loader, epochs=2) == [*map(float, range(40))] * 2


def test_the_last_batch_of_an_epoch_is_left_out(run: farandole.Run) -> None:
    loader = run.loader(DataLoader(Sized(40), 16, drop_last=True), micro=8)
    assert train(run, loader, epochs=2) == [*map(float, range(32))] * 2


def test_a_number_of_steps_of_a_stream_without_a_length(run: farandole.Run) -> None:
    assert train(run, run.loader(Numbers(40), GlobalBatch(8, micro=4)), base_steps=5) == [*map(float, range(40))]


def test_a_batch_that_follows_the_workers(run: farandole.Run) -> None:
    loader = run.loader(Numbers(40), PerWorkerBatch(8, micro=4), samples=40)
    assert train(run, loader, epochs=1) == [*map(float, range(40))]


@pytest.mark.failure(
    "Data and loader processes", "an iterable dataset has no `len()`, or ends before or after its length"
)
def test_a_stream_that_ends_too_early_or_too_late(run: farandole.Run) -> None:
    loaders = (
        run.loader(Numbers(40), GlobalBatch(8, micro=4)),
        run.loader(Numbers(40), GlobalBatch(8, micro=4), samples=44),
        run.loader(Numbers(40), GlobalBatch(8, micro=4), samples=36),
    )
    for loader, last, number in zip(loaders, (36, 36, 28), (40, 40, 36), strict=True):
        for start in range(0, last + 1, 4):
            loader.fetch(key(start))
        for _ in range(2):
            with pytest.raises(UsageError, match=rf"\b{number}\b"):
                loader.fetch(key(last + 4))


def test_an_evaluation_of_a_stream(run: farandole.Run) -> None:
    model = torch.nn.Linear(1, 1)
    run.replicate(model=model)
    for step in run.steps(run.loader(Sized(40), GlobalBatch(40, micro=8)), epochs=1):
        for rows in step:
            step.backward(model(rows[:, None]).mean())
        mean = partial(run.evaluate, model, metric=lambda rows: rows, predict=lambda _, rows: (rows,), micro=16)
        assert mean(Sized(40)) == mean(Numbers(40), samples=40) == mean(DataLoader(Sized(40), 7)) == 19.5
        with pytest.raises(UsageError):
            mean(Numbers(40))


# --- refused -----------------------------------------------------------------------------------------------------


class Once(IterableDataset[int]):
    """A queue: what was taken out is gone."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(100):
            self.waiting.put(number)

    def __iter__(self) -> Iterator[int]:
        while not self.waiting.empty():
            yield self.waiting.get()


class Kept(IterableDataset[int]):
    """One iterator for all iterations."""

    def __init__(self) -> None:
        self.samples = iter(range(100))

    def __iter__(self) -> Iterator[int]:
        return self.samples


class Entropy(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        import secrets

        yield from (secrets.randbelow(1 << 40) for _ in range(100))


class Part(Sized):
    class _distributed:  # noqa: N801  its name in the datasets of Hugging Face
        rank, world_size = 1, 4


@pytest.mark.failure(
    "Data and loader processes",
    (
        "an iterable dataset yields other samples the second time (a socket, a queue), yields the part of one rank, "
        "or is empty"
    ),
    seen="an error names the dataset when the loader is created",
    outcome="nothing is trained",
)
@pytest.mark.parametrize(
    ("dataset", "options", "named"),
    [
        (Once(), {}, "Once"),
        (Kept(), {}, "Kept"),
        (Entropy(), {}, "Entropy"),
        (Numbers(0), {}, "Numbers"),
        (Part(40), {}, "split_dataset_by_node"),
        ((number for number in range(100)), {}, "IterableDataset"),
        (map(float, range(100)), {}, "IterableDataset"),
        (Sized(40), {"samples": 41}, "41"),
        (Numbers(40), {"samples": 0}, "samples"),
        (Numbers(5), {"samples": 7}, "5"),
        (Sized(40), {"num_workers": 2}, "num_workers=1"),
        (Sized(40), {"shuffle": True}, "shuffle"),
        (Sized(40), {"on_bad_sample": "skip"}, "on_bad_sample"),
        (Numbers(40), {"drop_last": True}, "samples"),
        ([1.0, 2.0], {"samples": 2}, "samples"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_streams_that_are_refused(dataset: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as error:
        Loader(dataset, GlobalBatch(4, micro=2), seed=SEED, **options)
    assert named in str(error.value)


@pytest.mark.failure(
    "Data and loader processes",
    "an iterable dataset has no `len()`, or ends before or after its length",
    seen="an error names `samples=` and `base_steps=`, or the number of samples found",
    outcome="the script fails, exit code 1",
)
def test_epochs_without_a_length_are_refused(run: farandole.Run) -> None:
    loader = run.loader(Numbers(40), GlobalBatch(8, micro=4))
    run.replicate(model=torch.nn.Linear(1, 1))
    for wrong in (lambda: len(loader), lambda: run.steps(loader, epochs=1)):
        with pytest.raises(UsageError) as error:
            wrong()
        assert "base_steps" in str(error.value)


def test_a_sample_that_raises_is_named_and_not_taken_for_the_end() -> None:
    class Broken(Sized):
        def __iter__(self) -> Iterator[Any]:
            for number, sample in enumerate(super().__iter__()):
                if number == 18:
                    raise KeyError("label")
                yield sample

    loader = Loader(Broken(40), BATCH, seed=SEED)
    for _ in range(2):
        with pytest.raises(BadSample, match=r"\b18\b.*\bBroken\b"):
            loader.fetch(key(20))
    assert loader.fetch(key(12)).tolist() == [12, 13, 14, 15]


def test_workers_whose_streams_differ_have_other_signatures() -> None:
    def facts(dataset: Any, policy: BatchPolicy = BATCH) -> dict[str, str]:
        replica = Replica({"model": torch.nn.Linear(1, 1)}, {})
        loader = Loader(dataset, policy, seed=SEED)
        return dict(signature(torch.device("cpu"), loader, Length(base_steps=1), replica).facts)

    one, other = facts(Noisy(40)), facts(Sized(40))
    assert {name for name in one if one[name] != other[name]} == {ORDER}
    assert facts(Noisy(40)) == one
    assert facts(Numbers(40)) != facts(Sized(40)), "one knows its length"
    assert Stream(Noisy(40), SEED + 1).digest != Stream(Noisy(40), SEED).digest
