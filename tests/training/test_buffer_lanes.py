"""What becomes of a buffer that a step's micro-batches change: the kinds, each against a plain reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farandole
from farandole.errors import UsageError
from farandole.training import replica as replicas
from farandole.training.replica import EXACT, KINDS, HostCopies, Replica
from tests.support.steps import BATCH, data

SHARDS = 5


@pytest.fixture(autouse=True, params=[False, True], ids=["in place", "copied as from a GPU"])
def _copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "HostCopies", partial(HostCopies, force=request.param))


class Holder(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("value", value)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def values_of(dtype: torch.dtype, shape: tuple[int, ...] = (3, 2), seed: int = 1) -> list[torch.Tensor]:
    """One for each shard."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(SHARDS)]
    low, high = (0, 2) if dtype == torch.bool else (0, 40)
    return [torch.randint(low, high, shape, generator=generator).to(dtype) for _ in range(SHARDS)]


def after_a_step(
    start: torch.Tensor, forward: Callable[[nn.Module, int], object], kinds: Mapping[str, str], *, empty: int = -1
) -> torch.Tensor:
    """The buffer after a step, the same whatever the order in which its shards are computed."""
    results: list[torch.Tensor] = []
    for seed in range(3):
        module: Any = Holder(start.clone())
        replica = Replica({"model": module}, kinds, shards=SHARDS)
        replica.keep_buffers()
        replica.begin_shards()
        order = list(range(SHARDS))
        random.Random(seed).shuffle(order)
        lanes, memory = [torch.zeros(replica.lanes, dtype=torch.float64) for _ in range(SHARDS)], torch.zeros(0)
        memory = torch.zeros(replica.lanes, dtype=torch.float64)
        for shard in order:
            replica.reset_buffers(shard, SHARDS)
            assert torch.equal(module.value, start)
            if shard != empty:
                forward(module, shard)
                replica.buffers_to(memory)
                lanes[shard].copy_(memory)
        sums = lanes
        while len(sums) > 1:
            pairs = [sums[i] + sums[i + 1] for i in range(0, len(sums) - 1, 2)]
            sums = pairs + sums[len(pairs) * 2 :]
        replica.buffers_from(sums[0], SHARDS - (empty >= 0))
        results.append(module.value)
    assert all(torch.equal(results[0], other) for other in results[1:])
    return results[0]


def assign(values: list[torch.Tensor]) -> Callable[[Any, int], None]:
    def forward(module: Any, shard: int) -> None:
        module.value = values[shard].clone()

    return forward


def add(values: list[torch.Tensor]) -> Callable[[Any, int], None]:
    def forward(module: Any, shard: int) -> None:
        module.value += values[shard]

    return forward


INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool]


# --- where nothing is said -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_that_all_agree_are_exact(dtype: torch.dtype) -> None:
    value = values_of(dtype)[0]
    assert torch.equal(after_a_step(torch.zeros_like(value), assign([value] * SHARDS), {}), value)


@pytest.mark.parametrize("start", [0, 2**53 + 1, -(2**62), 2**62 + 1])
def test_large_counters_that_all_agree_are_exact(start: int) -> None:
    value = torch.tensor([start, 5])
    assert after_a_step(value, add([torch.tensor([3, -7])] * SHARDS), {}).tolist() == [start + 3, -2]


@pytest.mark.failure(
    "The training loop",
    "an integer or boolean buffer (a counter of samples, a histogram) differs after different micro-batches of a step",
    seen="an error at the end of the step, before the update, names the buffer, also in a single-process run",
    outcome=(
        'the script fails, exit code 1; pass `buffers={"model.seen": "sum"}` to `run.replicate` (docs/learning.md, '
        '"Buffers") and resume'
    ),
)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("different", [0, 3, SHARDS - 1])
def test_integers_that_differ_between_shards_are_an_error_by_name(dtype: torch.dtype, different: int) -> None:
    """Also where their mean is an integer, and where one shard alone leaves the buffer as it is."""
    start = torch.zeros(4, dtype=dtype)
    one = torch.ones(4, dtype=dtype)
    for values in (
        [start if s == different else one for s in range(SHARDS)],
        [start] * different + [one] * (SHARDS - different),
    ):
        if all(torch.equal(values[0], other) for other in values):
            continue
        with pytest.raises(UsageError, match=r"model\.value.*'sum'"):
            after_a_step(start, assign(values), {})


@pytest.mark.parametrize(
    "spread", [[-1, 1, 0, 0, 0], [5, 5, 5, 5, 10], [65521, 0, 0, 0, 0], [2**39, -(2**39), 0, 0, 0]]
)
def test_no_spread_passes_for_agreement(spread: list[int]) -> None:
    with pytest.raises(UsageError, match=r"model\.value"):
        after_a_step(torch.tensor(100), add([torch.tensor(each) for each in spread]), {})


@pytest.mark.failure(
    "The training loop",
    "an integer buffer, such as a counter of samples, grows by the same number in all micro-batches of a step",
    seen="one warning names the buffer; no warning for `num_batches_tracked`",
    outcome='it grows once a step; declare `"sum"` if each micro-batch must count',
)
def test_a_counter_of_samples_that_agrees_by_chance_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """8 of 8, 8 and 8 samples: from the numbers alone nobody knows whether 8 or 24 is meant."""
    module: Any = Holder(torch.tensor(0))
    replica = Replica({"model": module, "norm": nn.BatchNorm1d(2)})
    lanes = torch.zeros(replica.lanes, dtype=torch.float64)
    for _ in range(2):
        replica.begin_shards()
        module.value += 8
        replica.objects["norm"].num_batches_tracked += 1  # type: ignore[attr-defined]
        replica.buffers_to(lanes)
        replica.buffers_from(lanes * 3, 3)
    assert module.value.item() == 16
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["model.value"]


def test_a_counter_that_grows_by_too_much_to_be_summed_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"model\.value"):
        after_a_step(torch.tensor(0), add([torch.tensor(2**41)] * SHARDS), {})


def test_floating_point_keeps_the_mean() -> None:
    values = values_of(torch.float32)
    mean = torch.stack(values).double().mean(0).float()
    torch.testing.assert_close(after_a_step(torch.zeros(3, 2), assign(values), {}), mean)


# --- what is meant is said ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64])
def test_sum(dtype: torch.dtype) -> None:
    start, values = values_of(dtype, seed=9)[0], values_of(dtype)
    total = start.double() + torch.stack(values).double().sum(0)
    got = after_a_step(start, add(values), {"model.value": "sum"})
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), total, rtol=0 if not dtype.is_floating_point else 1e-6, atol=1e-6)


def test_a_sum_of_integers_is_exact_up_to_2_to_the_53() -> None:
    part = int(EXACT) // SHARDS - 1
    start = 2**62 + 1
    got = after_a_step(torch.tensor(start), add([torch.tensor(part)] * SHARDS), {"*": "sum"})
    assert got.item() == start + part * SHARDS


@pytest.mark.failure(
    "The training loop",
    "the sum of a buffer does not fit its dtype, or two micro-batches write the same row of a gathered buffer",
    seen="an error at the end of the step names the buffer",
    outcome="the script fails, exit code 1",
)
def test_a_sum_that_its_dtype_does_not_hold_is_an_error() -> None:
    values = [torch.tensor(60, dtype=torch.uint8)] * SHARDS
    with pytest.raises(UsageError, match=r"model\.value.*\b300\b.*torch\.uint8"):
        after_a_step(torch.tensor(0, dtype=torch.uint8), add(values), {"model.value": "sum"})


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float32, torch.bfloat16])
def test_max(dtype: torch.dtype) -> None:
    values = values_of(dtype)
    wanted = torch.stack(values).to(torch.float64).amax(0).to(dtype)
    got = after_a_step(torch.zeros(3, 2, dtype=dtype), assign(values), {"model.value": "max"})
    assert torch.equal(got, wanted)


def test_max_of_negative_numbers_where_some_shards_leave_the_start() -> None:
    start = torch.full((2,), -5.0)

    def forward(module: Any, shard: int) -> None:
        if shard == 2:
            module.value.copy_(torch.tensor([-3.0, -9.0]))

    assert after_a_step(start, forward, {"*": "max"}).tolist() == [-3.0, -5.0]
    assert after_a_step(start, assign([start - 1] * SHARDS), {"*": "max"}, empty=1).tolist() == [-6.0, -6.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float64])
def test_last(dtype: torch.dtype) -> None:
    values = values_of(dtype)
    start = torch.zeros(3, 2, dtype=dtype)
    assert torch.equal(after_a_step(start, assign(values), {"*": "last"}), values[-1])
    assert torch.equal(after_a_step(start, assign(values), {"*": "last"}, empty=SHARDS - 1), start)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_gathered_rows(dtype: torch.dtype) -> None:
    """A row that nobody writes stays; one whose new value is the old one too."""
    start, values = values_of(dtype, (SHARDS + 2, 3), seed=9)[0], values_of(dtype, (3,))

    def forward(module: Any, shard: int) -> None:
        module.value[shard] = values[shard]

    wanted = torch.stack([*values, *start[SHARDS:]])
    assert torch.equal(after_a_step(start, forward, {"*": "gathered"}), wanted)


@pytest.mark.failure(
    "The training loop",
    "the sum of a buffer does not fit its dtype, or two micro-batches write the same row of a gathered buffer",
)
def test_a_row_that_two_shards_write_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"model\.value.*step\.rows"):
        after_a_step(torch.zeros(3), add([torch.ones(3)] * SHARDS), {"*": "gathered"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_that_nobody_changes_keeps_its_bits(kind: str) -> None:
    value = torch.tensor([float("nan"), -0.0, 0.1, float("-inf")])
    kept = after_a_step(torch.full((2,), 2**62 + 1), lambda *_: None, {"*": kind})
    assert kept.tolist() == [2**62 + 1] * 2
    module = Holder(value.clone())
    replica = Replica({"model": module}, {"*": kind}, shards=2)
    lanes = torch.zeros(replica.lanes, dtype=torch.float64)
    replica.begin_shards()
    replica.buffers_to(lanes)
    replica.buffers_from(lanes, 1)
    assert torch.equal(module.value.view(torch.int32), value.view(torch.int32))


@pytest.mark.parametrize(
    ("kinds", "value", "values"),
    [
        ({"model.valeu": "sum"}, torch.zeros(1), r"'model\.valeu'.*model\.value"),
        ({"model.value": "average"}, torch.zeros(1), "'average'.*mean, sum, max, last, gathered"),
        ({"model.value": "sum"}, torch.zeros(1, dtype=torch.bool), r"model\.value.*'max'"),
        ({"model.value": "sum"}, torch.zeros(70000), r"model\.value.*\b70000\b"),
        ({"model.value": "max"}, torch.zeros(60000), r"model\.value.*\b60000\b.*'max'.*\b32\b"),
    ],
)
def test_kinds_that_do_not_fit_are_refused(kinds: dict[str, str], value: torch.Tensor, values: str) -> None:
    with pytest.raises(UsageError, match=values):
        Replica({"model": Holder(value)}, kinds, shards=32)


def test_max_needs_to_know_how_many_micro_batches_there_are() -> None:
    with pytest.raises(UsageError, match=r"'max'.*GlobalBatch"):
        Replica({"model": Holder(torch.zeros(1))}, {"*": "max"}, shards=0)


def test_kinds_are_among_the_facts_that_must_be_equal() -> None:
    """Those of the buffer itself stay as they are: a script that is mended goes on from its checkpoint."""
    plain = dict(Replica({"model": Holder(torch.zeros(1))}).facts())
    said = dict(Replica({"model": Holder(torch.zeros(1))}, {"model.*": "sum"}).facts())
    assert said == {**plain, "kind of buffers model.*": "sum"}


@pytest.mark.failure(
    "The training loop",
    "the model has a `SyncBatchNorm`",
    seen="an error at `run.replicate` names it",
    outcome="nothing is trained; use `BatchNorm`, whose batch is the micro-batch, or `GroupNorm`",
)
def test_synchronized_batch_norm_is_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.1\b.*SyncBatchNorm.*micro="):
        Replica({"model": nn.SyncBatchNorm.convert_sync_batchnorm(net())})


# --- in a run --------------------------------------------------------------------------------------------------


class Seeing(nn.Module):
    """Counts samples and labels, and keeps the newest samples in window order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("histogram", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("largest", torch.full((), -torch.inf))
        self.register_buffer("newest", torch.zeros(BATCH, 6))

    def see(self, x: torch.Tensor, y: torch.Tensor, rows: slice) -> torch.Tensor:
        self.seen += len(x)
        self.histogram = self.histogram + torch.bincount(y, minlength=3)
        self.largest = torch.maximum(self.largest, x.max())
        self.newest[rows] = x
        return F.cross_entropy(self.layer(x), y)


KINDS_OF_SEEING = {"model.seen": "sum", "model.hist*": "sum", "model.largest": "max", "model.newest": "gathered"}


@pytest.mark.parametrize("micro", [BATCH, 5, 1])
def test_counters_and_queues_of_a_run_are_those_of_whole_batches(run: farandole.Run, micro: int) -> None:
    model, plain = Seeing(), Seeing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro))
    run.replicate(model=model, optimizer=optimizer, buffers=KINDS_OF_SEEING)
    for step in run.steps(loader, epochs=2):
        samples = []
        for x, y in step:
            samples.append((x, y))
            step.backward(model.see(x, y, step.rows))
        optimizer.step()
        x, y = (torch.cat(each) for each in zip(*samples, strict=True))
        plain.see(x, y, slice(0, len(x)))
        for (name, buffer), (_, wanted) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
            assert torch.equal(buffer, wanted), (step.number, name)


@pytest.mark.failure(
    "The training loop",
    "an integer or boolean buffer (a counter of samples, a histogram) differs after different micro-batches of a step",
)
def test_a_counter_of_samples_that_nothing_is_said_of_ends_the_run_before_the_update(run: farandole.Run) -> None:
    model = Seeing()
    run.replicate(model=model, buffers={name: kind for name, kind in KINDS_OF_SEEING.items() if "hist" not in name})
    step = next(run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=1))

    def inner_loop() -> None:
        for x, y in step:
            step.backward(model.see(x, y, step.rows))

    with pytest.raises(UsageError, match=r"model\.histogram"):
        inner_loop()
    assert run._context.at_step_start


def test_rows_and_buffers_at_the_wrong_place(run: farandole.Run) -> None:
    with pytest.raises(UsageError, match=r"run\.replicate\(buffers="):
        run.replicate(model=net(), buffers=net())  # type: ignore[arg-type]
    run.replicate(model=Seeing())
    step = next(run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=1))
    with pytest.raises(UsageError, match=r"step\.rows"):
        _ = step.rows
