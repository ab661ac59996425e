"""Loader processes: the same batches, plans that change under way, mortality."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset, get_worker_info

from farandole.data.loader import Key, Loader
from farandole.data.workers import GO_ANYWHERE, Placed, Slots
from farandole.errors import BadSample, UsageError
from farandole.plan.batch import GlobalBatch
from tests.support.drawing import Drawing, Made, keys, misaligned, mixing, same
from tests.support.fake_worker import until

pytestmark = [
    pytest.mark.processes,
    # Python 3.12 and later warn when a process with threads forks; torch has threads by now
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Channels(Drawing):
    """Clips in channels-last memory, which torch's default_collate lays out otherwise in a loader process."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[3], torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dataset", [Drawing(), Channels(), TensorDataset(torch.randn(100, 3), torch.arange(100))])
def test_batches_do_not_depend_on_who_makes_them(make: Callable[..., Loader], dataset: Any) -> None:
    alone, helped = make(dataset, num_workers=0), make(dataset)
    helped.expect(iter(keys(helped, epochs=2)))
    for key in keys(alone, epochs=2):
        expected, batch = alone.fetch(key), helped.fetch(key)
        assert same(expected, batch)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in batch)


def test_batches_that_are_kept_are_never_written_again(make: Callable[..., Loader]) -> None:
    alone, helped = make(Drawing(), num_workers=0), make(Drawing(), prefetch_factor=1)
    helped.expect(iter(keys(helped, epochs=2)))
    kept = [helped.fetch(key) for key in keys(helped, epochs=2)]
    assert all(same(batch, alone.fetch(key)) for batch, key in zip(kept, keys(alone, epochs=2), strict=True))


def test_a_collate_function_draws_the_same_anywhere(make: Callable[..., Loader]) -> None:
    alone, helped = make(Drawing(), num_workers=0, collate_fn=mixing), make(Drawing(), collate_fn=mixing)
    helped.expect(keys(helped))
    assert [helped.fetch(key) for key in keys(helped)] == [alone.fetch(key) for key in keys(alone)]


def off_by_one(samples: list[Any]) -> torch.Tensor:
    return misaligned(len(samples))


def test_misaligned_batches_of_loader_processes_are_aligned(make: Callable[..., Loader]) -> None:
    helped = make(Drawing(), collate_fn=off_by_one)
    batch = helped.fetch(keys(helped)[0])
    assert batch.data_ptr() % 64 == 0
    assert torch.equal(batch, misaligned(8))


def test_starting_processes_leaves_the_global_random_state_alone(make: Callable[..., Loader]) -> None:
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    loader = make(Drawing())
    loader.expect(keys(loader))
    assert torch.equal(torch.rand(1), expected)


def test_nothing_is_made_twice_when_the_expectation_is_right(make: Callable[..., Loader], tmp_path: Path) -> None:
    dataset = Made(tmp_path / "made")
    loader = make(dataset)
    loader.expect(iter(keys(loader)))
    delivered: Counter[int] = Counter()
    for key in keys(loader):
        delivered.update(loader.fetch(key).tolist())
    assert delivered == dataset.counts() == Counter(dict.fromkeys(range(240), 1))


def test_requests_run_ahead_as_far_as_memory_allows_and_no_further(make: Callable[..., Loader], tmp_path: Path) -> None:
    dataset = Made(tmp_path / "made", length=24_000)
    loader = make(dataset, prefetch_factor=3)
    loader.expect(iter(keys(loader)))
    until(lambda: dataset.counts().total() >= 6 * 8)  # 3 micro-batches of 8 for each of 2 processes, unasked
    time.sleep(0.2)
    assert dataset.counts().total() == 6 * 8


def test_an_endless_expectation_is_read_lazily(make: Callable[..., Loader]) -> None:
    loader = make(Drawing())
    read: list[int] = []

    def endless() -> Iterator[Key]:
        for step in count():
            read.append(step)
            yield Key(step, step, 0, 0, 8)

    loader.expect(endless())
    for step in range(20):
        loader.fetch(Key(step, step, 0, 0, 8))
    assert 20 <= max(read) < 20 + 256


def test_a_finite_expectation_ends_and_the_next_goes_on_with_the_same_processes(make: Callable[..., Loader]) -> None:
    loader, alone = make(Drawing()), make(Drawing(), num_workers=0)
    loader.expect([])
    pids = {process.pid for process in multiprocessing.active_children()}
    assert len(pids) == 2
    for epoch in range(3):
        mine = [Key(epoch, step, 0, 8 * step, 8 * step + 8) for step in range(5)]
        loader.expect(iter(mine))
        assert all(same(loader.fetch(key), alone.fetch(key)) for key in mine)
    assert same(loader.fetch(Key(9, 9, 9, 0, 5)), alone.fetch(Key(9, 9, 9, 0, 5)))
    assert {process.pid for process in multiprocessing.active_children()} == pids


def test_a_new_plan_keeps_what_is_still_ours_and_drops_the_rest(make: Callable[..., Loader], tmp_path: Path) -> None:
    """Two workers become one and back again, while requests are under way."""
    dataset = Made(tmp_path / "made", seconds=0.002)
    loader, alone = make(dataset), make(Made(tmp_path / "alone"), num_workers=0)
    everything = keys(loader)
    mine = [key for key in everything if key.shard < 2]
    loader.expect(iter(mine))
    asked = mine[:6]
    for key in mine[:6]:
        assert torch.equal(loader.fetch(key), alone.fetch(key))
    rest = [key for key in everything if key.step >= 3]
    loader.expect(iter(rest))  # from step 3 on, all three shards are ours
    for key in rest[:9]:
        assert torch.equal(loader.fetch(key), alone.fetch(key))
    asked += rest[:9]
    last = [key for key in everything if key.step >= 6 and key.shard == 2]
    loader.expect(iter(last))
    for key in last:
        assert torch.equal(loader.fetch(key), alone.fetch(key))
    asked += last
    made = dataset.counts()
    handed = Counter(sample for key in asked for sample in loader.order.samples(0, key.start, key.stop).tolist())
    assert set(handed.values()) == {1}
    assert not handed - made
    # Dropped are at most what was ahead when the last plan came: shards 0 and 1 of steps 6 and later.
    assert max(made.values()) == 1, "what the first change kept was made again"
    assert (made - handed).total() <= 8 * 2 * 4


def test_an_inherited_shard_comes_out_of_order(make: Callable[..., Loader], tmp_path: Path) -> None:
    dataset = Made(tmp_path / "made")
    loader, alone = make(dataset), make(Made(tmp_path / "alone"), num_workers=0)
    everything = keys(loader)
    mine, inherited = [key for key in everything if key.shard < 2], everything[2]
    loader.expect(iter(mine))
    delivered = [*mine[:2], inherited, *mine[2:]]
    for key in delivered:
        assert torch.equal(loader.fetch(key), alone.fetch(key))
    assert dataset.counts() == Counter(
        sample for key in delivered for sample in loader.order.samples(0, key.start, key.stop).tolist()
    )


def test_a_dead_peer_s_whole_share_is_inherited_without_running_on(make: Callable[..., Loader], tmp_path: Path) -> None:
    """Sixty unexpected shards in one step; meanwhile what waits stays within the bound, and is used afterwards."""
    dataset = Made(tmp_path / "made", length=4800)
    batch = GlobalBatch(size=960, micro=8)
    loader, alone = make(dataset, batch), make(Made(tmp_path / "alone", length=4800), batch, num_workers=0)
    everything = keys(loader)
    mine = [key for key in everything if key.shard < 60]
    loader.expect(iter(mine))
    delivered = [*mine[:60], *[key for key in everything if key.step == 0 and key.shard >= 60]]
    for key in delivered:
        assert torch.equal(loader.fetch(key), alone.fetch(key))
        assert (dataset.counts().total() - 8 * len(delivered[: delivered.index(key) + 1])) <= 8 * 8
    for key in mine[60:]:
        assert torch.equal(loader.fetch(key), alone.fetch(key))
    assert max(dataset.counts().values()) == 1


class Failing(Drawing):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise KeyError("unlucky")
        return super().__getitem__(index)


def test_an_error_of_the_dataset_s_comes_out_with_its_own_micro_batch(make: Callable[..., Loader]) -> None:
    loader, alone = make(Failing(), shuffle=False), make(Drawing(), num_workers=0, shuffle=False)
    all_keys = keys(loader)
    loader.expect(iter(all_keys))
    for key in all_keys:
        if key.start <= 13 < key.stop:
            with pytest.raises(BadSample, match=r"(?s)\b__getitem__\b.*unlucky"):
                loader.fetch(key)
        else:
            assert same(loader.fetch(key), alone.fetch(key))


def test_an_error_that_nobody_asks_for_is_nobody_s(make: Callable[..., Loader]) -> None:
    loader, alone = make(Failing(), shuffle=False), make(Drawing(), num_workers=0, shuffle=False)
    all_keys = keys(loader)
    loader.expect(iter(all_keys))
    loader.fetch(all_keys[0])
    others = [key for key in all_keys[1:] if not key.start <= 13 < key.stop]
    loader.expect(iter(others))
    assert all(same(loader.fetch(key), alone.fetch(key)) for key in others)


class Remembering(Drawing):
    opened_by: int | None = None

    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        return index, -1 if self.opened_by is None else self.opened_by


def open_files(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    assert type(dataset) is Remembering, "worker_init_fn finds the user's own dataset"
    dataset.opened_by = number


def test_the_user_s_worker_init_fn_runs_too(make: Callable[..., Loader]) -> None:
    loader = make(Remembering(), worker_init_fn=open_files)
    loader.expect(iter(keys(loader)))
    assert {number for key in keys(loader) for number in loader.fetch(key)[1].tolist()} == {0, 1}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_start_method(make: Callable[..., Loader], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[Any] = []
    take = Slots.take
    monkeypatch.setattr(Slots, "take", lambda slots, batch: (arrived.extend(batch), take(slots, batch))[1])
    loader, alone = make(Drawing(), num_workers=1, multiprocessing_context=method), make(Drawing(), num_workers=0)
    assert same(loader.fetch(keys(loader)[0]), alone.fetch(keys(loader)[0]))
    assert all(type(each) is Placed for each in arrived)
    assert arrived or not (GO_ANYWHERE or method == "fork")


def test_notices_are_not_for_loader_processes(make: Callable[..., Loader]) -> None:
    loader, alone = make(Drawing()), make(Drawing(), num_workers=0)
    loader.expect(iter(keys(loader)))
    loader.fetch(keys(loader)[0])
    loader.fetch(keys(loader)[1])  # both have started
    processes = multiprocessing.active_children()
    for process in processes:
        os.kill(process.pid or 0, signal.SIGTERM)
        os.kill(process.pid or 0, signal.SIGINT)
    assert all(same(loader.fetch(key), alone.fetch(key)) for key in keys(loader)[2:])
    assert all(process.is_alive() for process in processes)
    loader.close()
    assert not any(process.is_alive() for process in processes)


@pytest.mark.failure(
    "Data and loader processes",
    "loader processes that are not forked get an object that can't be pickled (a lambda as `collate_fn` with `spawn`)",
    seen="an error when they start names the object and the remedy",
    outcome="nothing is trained",
)
@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_what_can_not_be_sent_to_spawned_processes_is_an_error(make: Callable[..., Loader]) -> None:
    loader = make(Drawing(), multiprocessing_context="spawn", collate_fn=lambda samples: len(samples))
    with pytest.raises(UsageError, match='multiprocessing_context="fork"'):
        loader.expect(iter(keys(loader)))
    assert multiprocessing.active_children() == []
