"""One process: what a micro-batch is made of, and what is refused."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, UserDict
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from farandole.data.loader import Key, Loader
from farandole.data.order import derive, set_random_state
from farandole.data.workers import aligned
from farandole.errors import BadSample, UsageError
from farandole.plan.batch import GlobalBatch
from tests.support.drawing import BATCH, Drawing, keys, misaligned, mixing


def test_steps_an_epoch() -> None:
    for length, steps in [(1, 1), (24, 1), (25, 2), (48, 2), (100, 5)]:
        assert len(Loader(Drawing(length), BATCH, seed=0)) == steps


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_sample_once(shuffle: bool) -> None:
    loader = Loader(Drawing(), BATCH, seed=3, shuffle=shuffle)
    seen: Counter[tuple[int, int]] = Counter()
    for key in keys(loader, epochs=2):
        samples = loader.fetch(key)[0].tolist()
        assert samples == loader.order.samples(key.epoch, key.start, key.stop).tolist()
        seen.update((key.epoch, sample) for sample in samples)
    assert seen == Counter({(epoch, sample): 1 for epoch in range(2) for sample in range(100)})


def test_random_state_belongs_to_epoch_and_sample_not_to_history_or_cut() -> None:
    coarse = Loader(Drawing(), BATCH, seed=3)
    fine = Loader(Drawing(), GlobalBatch(size=20, micro=3), seed=3)
    drawn: dict[int, Any] = {}
    for key in keys(coarse):
        for index, *values in zip(*coarse.fetch(key), strict=True):
            drawn[int(index)] = values
    for key in reversed(keys(fine)):
        for index, *values in zip(*fine.fetch(key), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(values, drawn[int(index)], strict=True))
    again = coarse.fetch(Key(1, 5, 0, 0, 24))
    assert all(not torch.equal(again[3][at], drawn[int(again[0][at])][2]) for at in range(24)), (
        "epochs draw differently"
    )


def test_a_sample_is_what_its_documented_seed_gives() -> None:
    """Reference: anyone can make a sample by hand from (seed, epoch, sample)."""
    loader = Loader(Drawing(), BATCH, seed=3)
    batch = loader.fetch(Key(2, 10, 1, 8, 16))
    expected = []
    for sample in loader.order.samples(2, 8, 16).tolist():
        set_random_state(derive(3, "sample", 2, sample))
        expected.append(Drawing()[sample])
    assert all(torch.equal(a, b) for a, b in zip(batch, default_collate(expected), strict=True))


def test_random_state_of_a_collate_function_belongs_to_the_micro_batch() -> None:
    loader = Loader(Drawing(), BATCH, seed=3, collate_fn=mixing)
    first = [loader.fetch(key) for key in keys(loader)]
    random.seed(0)
    assert [loader.fetch(key) for key in reversed(keys(loader))] == first[::-1]
    assert len({batch["weight"] for batch in first}) == len(first)


TENSORS = {
    "images and labels": (torch.randn(100, 1, 28, 28), torch.arange(100)),
    "one column": (torch.randn(100),),
    "small types": (
        torch.randint(0, 255, (100, 3), dtype=torch.uint8),
        torch.rand(100) < 0.5,
        torch.randn(100).bfloat16(),
    ),
    "not numbers": (torch.tensor([float("nan"), -0.0, float("inf"), 1e-40] * 25).view(100, 1),),
    "empty rows": (torch.empty(100, 0, 4),),
    "transposed": (torch.randn(7, 100).T,),
    "channels last": (torch.randn(100, 3, 6, 5).contiguous(memory_format=torch.channels_last),),
}


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS.keys())
def test_taking_rows_of_a_tensor_dataset_at_once_changes_nothing(tensors: tuple[torch.Tensor, ...]) -> None:
    """The same bits, types, strides and container as sample by sample."""
    fast = Loader(TensorDataset(*tensors), BATCH, seed=5)
    slow = Loader(Subset(TensorDataset(*tensors), range(100)), BATCH, seed=5)
    for key in keys(fast, epochs=2):
        a, b = fast.fetch(key), slow.fetch(key)
        assert type(a) is type(b) is list
        for left, right in zip(a, b, strict=True):
            assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
            assert left.contiguous().view(torch.uint8).tolist() == right.contiguous().view(torch.uint8).tolist()


def test_a_subclass_of_tensor_dataset_is_asked_for_its_samples() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return tuple(2 * row for row in super().__getitem__(index))

    loader = Loader(Doubled(torch.arange(100)), BATCH, seed=0, shuffle=False)
    assert loader.fetch(Key(0, 0, 0, 0, 4))[0].tolist() == [0, 2, 4, 6]


def test_dataset_code_sees_one_thread_and_the_caller_keeps_his() -> None:
    class Threads(Drawing):
        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            if index == 7:
                raise KeyError("seven")
            return torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loader = Loader(Threads(), BATCH, seed=0, shuffle=False)
        assert loader.fetch(Key(0, 0, 0, 0, 7)).tolist() == [1] * 7
        with pytest.raises(BadSample, match=r"\b7\b.*\bThreads\b.*KeyError: 'seven'.*on_bad_sample=\"skip\""):
            loader.fetch(Key(0, 0, 0, 0, 8))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class Pair(NamedTuple):
    a: Any
    b: Any


def test_alignment_reaches_into_every_container_and_changes_no_value() -> None:
    good = torch.randn(4)
    batch = {
        "list": [misaligned(3), good, "text"],
        "tuple": (misaligned(2, 2), None),
        "named": Pair(misaligned(5), 1),
        "ordered": OrderedDict(x=misaligned(1)),
        "user": UserDict(x=misaligned(2)),
        "strided": misaligned(4, 6).T,
        "numpy": np.ones(3),
    }
    result = aligned(batch)
    assert [type(value) for value in result.values()] == [type(value) for value in batch.values()]
    pairs = [
        (result["list"][0], batch["list"][0]),
        (result["tuple"][0], batch["tuple"][0]),
        (result["named"].a, batch["named"].a),
        (result["ordered"]["x"], batch["ordered"]["x"]),
        (result["user"]["x"], batch["user"]["x"]),
        (result["strided"], batch["strided"]),
    ]
    for new, old in pairs:
        assert new.data_ptr() % 64 == 0
        assert old.data_ptr() % 64 != 0, "the user's own container stays as it was"
        assert torch.equal(new, old)
        assert new.stride() == old.stride()
    assert result["list"][1] is good
    assert result["numpy"] is batch["numpy"]


def test_an_aligned_batch_is_passed_on_untouched() -> None:
    batch = {"x": [torch.randn(3), (torch.randn(2), 1)]}
    assert aligned(batch) is batch


def test_numpy_backed_samples_arrive_aligned() -> None:
    memory = np.zeros(4 * 100 + 64, dtype=np.uint8)
    offset = (-memory.ctypes.data) % 64 + 4
    rows = torch.from_numpy(memory[offset : offset + 400].view(np.float32))
    loader = Loader([rows], GlobalBatch(size=1, micro=1), seed=0, collate_fn=lambda samples: samples[0])  # type: ignore[arg-type]
    batch = loader.fetch(Key(0, 0, 0, 0, 1))
    assert rows.data_ptr() % 64 == 4
    assert batch.data_ptr() % 64 == 0


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (iter([1, 2]), r"^list_iterator\b.*\bIterableDataset\b"),
        (Unsized(), r"^Unsized\b.*__len__"),
        (Drawing(0), r"^Drawing\b"),
        ({1, 2}, r"^set\b.*__getitem__"),
    ],
)
def test_datasets_that_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(dataset, BATCH, seed=0)


@pytest.mark.failure(
    "Data and loader processes",
    (
        "an option of the loader or the length of a dataset is invalid: `num_workers=2.0`, `timeout=nan`, a `Subset` "
        "beyond its dataset"
    ),
    seen="an error names the option, the value and the remedy when the loader is created",
    outcome="nothing is trained",
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 32}, "batch_size=32 .*`batch`"),
        ({"sampler": range(3)}, "sampler=.*DataLoader"),
        ({"batch_sampler": [[1]]}, "batch_sampler="),
        ({"generator": torch.Generator()}, "generator=.*seed"),
        ({"in_order": False}, "in_order=False"),
        ({"persistent_workers": False}, "persistent_workers=False"),
        ({"num_worker": 2}, "num_worker=2 .*num_workers"),
        ({"num_workers": -1}, "num_workers"),
        ({"prefetch_factor": 2}, "prefetch_factor.*num_workers > 0"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor=0: "),
        ({"num_workers": 1, "prefetch_factor": 1.5}, "prefetch_factor=1.5: "),
        ({"num_workers": 1, "prefetch_factor": 10**9}, "prefetch_factor=1000000000: "),
        ({"num_workers": 2.0}, "num_workers=2.0: "),
        ({"num_workers": "2"}, "num_workers='2': "),
        ({"num_workers": None}, "num_workers=None: "),
        ({"num_workers": 10**6}, "num_workers=1000000: "),
        ({"num_workers": 1, "timeout": float("nan")}, "timeout=nan: "),
        ({"num_workers": 1, "timeout": float("inf")}, "timeout=inf: "),
        ({"num_workers": 1, "timeout": 1e8}, "timeout=100000000.0: "),
        ({"num_workers": 1, "timeout": -1}, "timeout=-1: "),
        ({"num_workers": 1, "timeout": "3"}, "timeout='3': "),
        ({"timeout": 3}, "timeout=3.*num_workers > 0"),
        ({"collate_fn": 3}, "collate_fn=3 "),
        ({"num_workers": 1, "worker_init_fn": 3}, "worker_init_fn=3 "),
        ({"multiprocessing_context": "spawn"}, "multiprocessing_context='spawn'.*num_workers > 0"),
        ({"num_workers": 1, "multiprocessing_context": "spoon"}, "spoon"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(Drawing(), BATCH, seed=0, **options)


@pytest.mark.parametrize("number", [np.int64(2), torch.tensor(2)])
def test_numbers_of_other_libraries_are_python_s_own(number: Any) -> None:
    loader = Loader(Drawing(), BATCH, seed=0, num_workers=number, prefetch_factor=number)
    assert type(loader.processes) is int
    assert loader.processes == 2


class Length:
    """A data set whose `len` is what it is told."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> Any:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.failure(
    "Data and loader processes",
    (
        "an option of the loader or the length of a dataset is invalid: `num_workers=2.0`, `timeout=nan`, a `Subset` "
        "beyond its dataset"
    ),
)
@pytest.mark.parametrize("length", [7.0, -7, 2**70, NotImplementedError(), None])
def test_a_length_that_is_none_is_refused(length: Any) -> None:
    with pytest.raises(UsageError, match=r"^len\(\) of Length "):
        Loader(cast(Any, Length(length)), BATCH, seed=0)


def test_a_class_in_place_of_a_data_set_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\blen\(\).*\btype\b.*__len__"):
        Loader(cast(Any, Length), BATCH, seed=0)


@pytest.mark.failure(
    "Data and loader processes",
    "the length of a dataset changes between epochs",
    seen="an error at the first micro-batch of the epoch, with both lengths",
    outcome="the run ends as after an error of the script",
)
def test_a_length_that_changes_is_named_in_the_next_epoch() -> None:
    dataset = Length(48)
    loader = Loader(cast(Any, dataset), BATCH, seed=0)
    loader.fetch(Key(0, 0, 0, 0, 8))
    dataset.set_epoch = lambda epoch: setattr(dataset, "length", 48 + epoch)  # type: ignore[attr-defined]
    loader = Loader(cast(Any, dataset), BATCH, seed=0)
    loader.fetch(Key(0, 0, 0, 0, 8))
    with pytest.raises(UsageError, match=r"^Length\b.*\b48\b.*\b49\b"):
        loader.fetch(Key(1, 2, 0, 0, 8))


@pytest.mark.failure(
    "Data and loader processes",
    (
        "an option of the loader or the length of a dataset is invalid: `num_workers=2.0`, `timeout=nan`, a `Subset` "
        "beyond its dataset"
    ),
)
@pytest.mark.parametrize("index", [100, -101, np.int64(1000)])
def test_a_subset_that_picks_what_is_not_there_is_refused_unless_it_is_to_be_left_out(index: int) -> None:
    rows = TensorDataset(torch.arange(100))
    subset = Subset(rows, [0, *range(99), index])
    for dataset in (subset, Subset(subset, range(101)), ConcatDataset([rows, subset])):
        with pytest.raises(UsageError, match=rf"^Subset.indices\[100\] .*{index}\b.*\b100\b"):
            Loader(dataset, BATCH, seed=0)
        Loader(dataset, BATCH, seed=0, on_bad_sample="skip")


@pytest.mark.parametrize("indices", [[1] * 24, [-1, -100] * 12, torch.arange(24), range(0, 48, 2)])
def test_a_subset_may_pick_what_is_there_in_any_way(indices: Any) -> None:
    loader = Loader(Subset(TensorDataset(torch.arange(100)), indices), BATCH, seed=0, shuffle=False)
    expected = torch.arange(100)[torch.as_tensor(indices)][:8]
    assert torch.equal(loader.fetch(Key(0, 0, 0, 0, 8))[0], expected)


def test_a_subset_may_number_as_its_data_set_does() -> None:
    Loader(Subset(cast(Any, {200: 1, 300: 2}), [200, 300]), BATCH, seed=0)


def test_what_is_implied_may_be_said() -> None:
    Loader(Drawing(), BATCH, seed=0, persistent_workers=True)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_pinning_in_one_process_gives_the_same() -> None:
    plain, pinned = Loader(Drawing(), BATCH, seed=3), Loader(Drawing(), BATCH, seed=3, pin_memory=True)
    pinned.expect(iter(keys(pinned)))
    for key in reversed(keys(plain)):
        batch = pinned.fetch(key)
        assert all(torch.equal(a, b) for a, b in zip(plain.fetch(key), batch, strict=True))
        assert all(tensor.is_pinned() for tensor in batch) == torch.cuda.is_available()
