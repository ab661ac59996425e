"""The order of a sampler depends on the run's seed and the epoch alone, and a sampler that can't give it is refused."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import farandole
from farandole.data.loader import Key, Loader
from farandole.data.order import keep_random_state
from farandole.data.sampler_order import SamplerOrder
from farandole.errors import UsageError
from farandole.plan.batch import GlobalBatch
from farandole.plan.shards import Position
from tests.support.mentioned import mentions

SAMPLES = 30
ROWS = TensorDataset(torch.arange(float(SAMPLES)))


class Drawn:
    """A sampler without torch's base class; its order is drawn from `draw`."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draw())


class OwnGenerators(Sampler[int]):
    def __init__(self) -> None:
        self.arrays, self.python = np.random.default_rng(3), random.Random(3)
        self.legacy = np.random.RandomState(3)

    def __len__(self) -> int:
        return 3 * SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(self.arrays.integers(SAMPLES))
            yield self.python.randrange(SAMPLES)
            yield int(self.legacy.randint(SAMPLES))


class ByEpoch(Sampler[int]):
    """The samples of an epoch in their order, turned by the epoch; as DistributedSampler, it is told the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter([(sample + self.epoch) % SAMPLES for sample in range(SAMPLES)])


class Budget(Sampler[list[int]]):
    """Shuffled samples in batches of at most `budget` tokens, where sample i has 1 + i % 7."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for sample in torch.randperm(SAMPLES).tolist():
            if sum(1 + each % 7 for each in [*batch, sample]) > self.budget:
                yield batch
                batch = []
            batch.append(sample)
        yield batch


SAMPLERS: dict[str, Callable[[], Any]] = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 10 + [0.0] * 20, 50),
    "own generator": lambda: RandomSampler(ROWS, replacement=True, generator=torch.Generator().manual_seed(1)),
    "generators": OwnGenerators,
    "torch": lambda: Drawn(lambda: torch.randperm(SAMPLES)),
    "numpy": lambda: Drawn(lambda: np.random.permutation(SAMPLES)),
    "python": lambda: Drawn(lambda: random.sample(range(SAMPLES), SAMPLES)),
    "by epoch": ByEpoch,
}


def whole(order: SamplerOrder, epoch: int) -> list[int]:
    return order.samples(epoch, 0, order.length_in(epoch)).tolist()


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_the_order_depends_on_seed_and_epoch_alone(make: Callable[[], Any]) -> None:
    """Not on what was listed or drawn before; so a joiner, which begins with a later epoch, has the same."""
    one = SamplerOrder(make(), SAMPLES, seed=5)
    epochs = [whole(one, epoch) for epoch in range(5)]
    assert len({tuple(epoch) for epoch in epochs}) == 5
    torch.manual_seed(77)
    np.random.seed(77)
    random.seed(77)
    joiner = SamplerOrder(make(), SAMPLES, seed=5)
    assert [whole(joiner, epoch) for epoch in (4, 2, 3, 0, 1)] == [epochs[epoch] for epoch in (4, 2, 3, 0, 1)]
    assert joiner.digest == one.digest
    assert whole(one, 1) == epochs[1], "an epoch that was dropped is the same when it is listed again"


def test_another_seed_and_other_weights_give_another_digest() -> None:
    orders = [
        SamplerOrder(WeightedRandomSampler(weights, 50), SAMPLES, seed=seed)
        for weights, seed in (([1.0] * 30, 5), ([1.0] * 30, 6), ([1.0] * 29 + [9.0], 5))
    ]
    assert len({order.digest for order in orders}) == len({str(order) for order in orders}) == 3


def test_weights_count() -> None:
    counts = Counter(whole(SamplerOrder(WeightedRandomSampler([1.0] * 10 + [3.0] * 10, 4000), 20, seed=1), 0))
    assert sum(counts[sample] for sample in range(10, 20)) == pytest.approx(3000, abs=150)


def test_listing_leaves_all_random_state_as_it_was() -> None:
    """Workers list an epoch at different moments; a script may use the sampler's generator for other draws."""
    sampler = OwnGenerators()
    order = SamplerOrder(sampler, SAMPLES, seed=5)
    generator = torch.Generator().manual_seed(9)
    with_generator = SamplerOrder(RandomSampler(ROWS, replacement=True, generator=generator), SAMPLES, seed=5)

    def state() -> list[Any]:
        return [
            torch.get_rng_state().tolist(), generator.get_state().tolist(), random.getstate(),
            sampler.python.getstate(), repr(sampler.arrays.bit_generator.state), repr(np.random.get_state()),
            repr(sampler.legacy.get_state()),
        ]  # fmt: skip

    put_back = keep_random_state()
    before = state()
    whole(order, 7), whole(with_generator, 7)
    assert state() == before
    put_back()


def test_batches_of_a_budget() -> None:
    order = SamplerOrder(Budget(20), SAMPLES, seed=5, batches=True)
    numbers = [order.batches_in(epoch) for epoch in range(6)]
    assert len(set(numbers)) > 1, "epochs of one number of batches would show nothing"
    loader = Loader(ROWS, GlobalBatch(order.largest, micro=2), seed=5, order=order)
    for epoch, number in enumerate(numbers):
        position, sizes = Position(epoch=epoch), list[int]()
        while position.offset < loader.samples_in(epoch):
            assert loader.steps_left(position) == number - len(sizes)
            window = loader.window(position, 3)
            batch = order.samples(epoch, window.start, window.stop).tolist()
            assert sum(1 + each % 7 for each in batch) <= 20
            sizes.append(window.samples)
            position = Position(epoch=epoch, offset=window.stop)
        assert (len(sizes), sum(sizes)) == (number, SAMPLES)
        assert sorted(whole(order, epoch)) == list(range(SAMPLES))
    assert (order.batches, len(loader)) == (numbers[0], numbers[0])


def test_a_digest_of_batches_sees_where_they_end() -> None:
    cuts = [[[0, 1], [2]], [[0], [1, 2]], [[0, 1, 2]]]
    assert len({SamplerOrder(cut, 3, seed=0, batches=True).digest for cut in cuts}) == 3


def test_a_wrapped_sampler_is_told_the_epoch() -> None:
    order = SamplerOrder(BatchSampler(ByEpoch(), 4, drop_last=True), SAMPLES, seed=0, batches=True)
    assert whole(order, 3)[:3] == [3, 4, 5]
    assert order.length_in(3) == 28


def test_loader_processes_list_the_same() -> None:
    order = SamplerOrder(WeightedRandomSampler([1.0] * SAMPLES, 50), SAMPLES, seed=5)
    assert whole(pickle.loads(pickle.dumps(order)), 4) == whole(order, 4)
    loader = Loader(ROWS, GlobalBatch(10, micro=5), seed=5, order=order, num_workers=1)
    try:
        for epoch in (0, 3):
            (rows,) = loader.fetch(Key(epoch=epoch, step=0, shard=0, start=20, stop=25))
            assert rows.tolist() == order.samples(epoch, 20, 25).tolist()
    finally:
        loader.close()


class Noisy(Dataset[float]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        if index == 1:
            raise ValueError(index)
        return torch.rand(()).item()


def test_a_sample_that_is_drawn_twice_gets_two_augmentations() -> None:
    order = SamplerOrder([0, 0, 0, 0], 2, seed=5)
    loader = Loader(Noisy(), GlobalBatch(4, micro=2), seed=5, order=order)
    values = [value for start in (0, 2) for value in loader.fetch(_key(start, start + 2)).tolist()]
    assert len(set(values)) == 4
    assert loader.fetch(_key(1, 3)).tolist() == values[1:3], "whatever the micro-batch"


def test_a_bad_sample_that_is_drawn_twice_is_skipped_twice() -> None:
    order = SamplerOrder([0, 1, 1, 0, 1], 2, seed=5)
    loader = Loader(Noisy(), GlobalBatch(5, micro=5), seed=5, order=order, on_bad_sample="skip")
    assert len(loader.fetch(_key(0, 5))) == 2
    assert loader.skipped == (1, 1, 1)


def test_generators_of_a_step_follow_the_place(run: farandole.Run) -> None:
    model = torch.nn.Linear(1, 1)
    run.replicate(model=model)
    drawn: list[float] = []
    for step in run.steps(run.loader(DataLoader(ROWS, 4, sampler=[7, 7, 7, 7]), micro=2), base_steps=1):
        for (rows,) in step:
            drawn += [torch.rand((), generator=generator).item() for generator in step.generators]
            step.backward(model(rows[:, None]).mean())
    assert len(set(drawn)) == 4


def _key(start: int, stop: int) -> Key:
    return Key(epoch=0, step=0, shard=0, start=start, stop=stop)


class NoLength:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Counting(Sampler[int]):
    """It goes on where the last iteration ended, so its order depends on how often it was listed."""

    first = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        self.first += 3
        return iter([sample % SAMPLES for sample in range(self.first, self.first + 3)])


class Growing(ByEpoch):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20 + self.epoch))


class Endless(ByEpoch):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


REFUSED: dict[str, tuple[Any, bool, tuple[Any, ...]]] = {
    "without a length": (NoLength(), False, ("NoLength", "__len__")),
    "with state": (Counting(), False, ("Counting",)),
    "of another length": (Growing(), False, ("Growing", 20, 21)),
    "endless": (Endless(), False, ("Endless", SAMPLES)),
    "empty": ([], False, ("list", 0)),
    "out of range": ([0, SAMPLES], False, (SAMPLES,)),
    "negative": ([0, -1], False, (-1,)),
    "no index": ([0, "cat"], False, ("list",)),
    "a fraction": ([0.5], False, ("list",)),
    "of a rank": (DistributedSampler(ROWS, num_replicas=3, rank=1), False, ("DistributedSampler", 3)),
    "batches of a rank": (
        BatchSampler(DistributedSampler(ROWS, num_replicas=3, rank=1), 2, drop_last=False), True,
        ("DistributedSampler", 3),
    ),
    "an empty batch": ([[0], []], True, ("[]",)),
    "no batches": ([0, 1], True, ("list",)),
    "a batch out of range": ([[0], [SAMPLES]], True, (SAMPLES,)),
}  # fmt: skip


@pytest.mark.failure(
    "Data and loader processes",
    (
        "the sampler of the DataLoader has no length, keeps state between epochs, yields no index, or yields the part "
        "of one rank"
    ),
    seen="an error names the sampler and what it lacks",
    outcome="the script fails, exit code 1; correct the sampler",
)
@pytest.mark.parametrize(("sampler", "batches", "named"), REFUSED.values(), ids=REFUSED)
def test_samplers_that_are_refused(sampler: Any, batches: bool, named: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError) as error:
        SamplerOrder(sampler, SAMPLES, seed=0, batches=batches)
    for value in named:
        assert mentions(str(error.value), value)


def test_a_sampler_whose_later_epoch_has_another_length_is_refused() -> None:
    class Late(ByEpoch):
        def __iter__(self) -> Iterator[int]:
            return iter(range(SAMPLES - (self.epoch == 4)))

    order = SamplerOrder(Late(), SAMPLES, seed=0)
    assert len(whole(order, 3)) == SAMPLES
    with pytest.raises(UsageError) as error:
        order.samples(4, 0, 1)
    assert mentions(str(error.value), SAMPLES - 1)
