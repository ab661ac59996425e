"""The replica: what counts as state, and buffers whose values depend on no history."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farandole.collective.state_transfer import Snapshot, restore
from farandole.errors import UsageError
from farandole.training.replica import LARGEST_LANE_BUFFER, Replica


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def arrived(state: Any) -> Any:
    snapshot = Snapshot(state)
    return restore(snapshot.skeleton, snapshot.stripe(0, 1))


# --- what is replicated ----------------------------------------------------------------------------------------


def test_parameters_and_buffers_go_by_their_full_names() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = Replica({"model": model, "optimizer": optimizer})
    assert list(replica.parameters) == [f"model.{name}" for name, _ in model.named_parameters()]
    assert list(replica.buffers) == [f"model.{name}" for name, _ in model.named_buffers()]


def test_tied_weights_and_shared_modules_count_once() -> None:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    shared = nn.BatchNorm1d(3)
    replica = Replica({"embedding": embedding, "head": head, "a": shared, "b": nn.Sequential(shared)})
    assert list(replica.parameters) == ["embedding.weight", "a.weight", "a.bias"]
    assert list(replica.buffers) == ["a.running_mean", "a.running_var", "a.num_batches_tracked"]


@pytest.mark.parametrize(
    ("objects", "values"),
    [
        ({"x": 3}, r"replicate\(x=int\).*\bstate_dict\(\).*\bload_state_dict\(\)"),
        ({"model": net(), "data": [1]}, r"replicate\(data=list\)"),
        ({}, r"replicate\("),
        ({"relu": nn.ReLU()}, r"replicate\(relu\)"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)}, r"replicate\(optimizer\)"),
    ],
)
def test_what_cannot_be_replicated_is_refused_by_name(objects: dict[str, object], values: str) -> None:
    with pytest.raises(UsageError, match=values):
        Replica(objects)


def test_an_optimizer_of_parameters_that_are_in_no_module_is_refused() -> None:
    """Their gradients would not be summed up: every worker would go its own way."""
    model, forgotten = net(), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *forgotten.parameters()], lr=0.1)
    with pytest.raises(UsageError, match=r"replicate\(optimizer=SGD\).*\b2\b"):
        Replica({"model": model, "optimizer": optimizer})


def test_misaligned_parameters_move_once_and_keep_their_identity_and_values() -> None:
    model = nn.Linear(3, 3, bias=False)
    whole = torch.arange(10.0)
    model.weight.data = whole[1:].view(3, 3)
    parameter = model.weight
    assert parameter.data_ptr() % 64 == 4
    Replica({"model": model})
    assert model.weight is parameter
    assert parameter.data_ptr() % 64 == 0
    assert parameter.flatten().tolist() == whole[1:].tolist()


@pytest.mark.failure(
    "External workers, pools and machines", "the script of an external worker has another model or length of data"
)
def test_facts_tell_models_apart() -> None:
    """The first difference is what a refused joiner is told."""
    base = dict(Replica({"model": net()}).facts())
    assert base["object model"] == "Sequential"
    assert base["parameter model.0.weight"] == "[6, 4] float32"
    assert base["buffer model.1.num_batches_tracked"] == "[] int64"
    others: dict[str, Callable[[], nn.Module]] = {
        "wider": lambda: nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)),
        "half": lambda: net().half(),
        "without normalisation": lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)),
    }
    for name, make in others.items():
        assert dict(Replica({"model": make()}).facts()) != base, name


@pytest.mark.failure(
    "External workers, pools and machines",
    "an external worker has another version of torch or NumPy, and computes the same bits",
)
def test_facts_tell_what_optimizers_and_schedulers_have_settings_for() -> None:
    """One of another version may have one more, and what it hands on would not fit."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)

    def facts() -> dict[str, str]:
        return dict(Replica({"model": model, "optimizer": optimizer, "schedule": schedule}).facts())

    before = facts()
    assert before["form of optimizer"].startswith("dampening, differentiable, foreach, fused, initial_lr, lr, ")
    assert before["form of schedule"].endswith(", step_size")
    optimizer.param_groups[0]["of another version"] = True
    assert {name for name, value in facts().items() if value != before[name]} == {"form of optimizer"}


# --- buffers ---------------------------------------------------------------------------------------------------


def run_step(replica: Replica, forward: Callable[[int], None], shards: int, order: list[int]) -> None:
    """A step as Gradients and Step drive it, its shards in this order, summed in the tree's."""
    replica.keep_buffers()
    replica.begin_shards()
    lanes = {shard: torch.empty(replica.lanes, dtype=torch.float64) for shard in range(shards)}
    for shard in order:
        replica.reset_buffers()
        forward(shard)
        replica.buffers_to(lanes[shard])
    values = [lanes[shard] for shard in range(shards)]
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    replica.buffers_from(values[0], shards)


def test_running_statistics_depend_on_no_order_of_shards() -> None:
    results: list[dict[str, torch.Tensor]] = []
    data = torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(1))
    for seed in range(3):
        model = net()
        replica = Replica({"model": model})
        for _ in range(4):
            order = list(range(5))
            random.Random(seed).shuffle(order)
            run_step(replica, lambda shard, model=model: model(data[shard]), 5, order)
        results.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_running_statistics_are_the_mean_over_the_shards_of_each_ones_update() -> None:
    """Reference: every shard's own BatchNorm update from the step's start, then the plain mean."""
    data = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(2))
    alone = [net() for _ in range(3)]
    for model, batch in zip(alone, data, strict=True):
        model(batch)
    model = net()
    run_step(Replica({"model": model}), lambda shard: model(data[shard]), 3, [0, 1, 2])
    for name, buffer in model.named_buffers():
        mean = torch.stack([dict(m.named_buffers())[name].double() for m in alone]).mean(0)
        torch.testing.assert_close(buffer.double(), mean)
    assert model[1].num_batches_tracked.item() == 1, "integer buffers advance once a step, not once a shard"


class Holder(nn.Module):
    def __init__(self, value: torch.Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("value", value, persistent=persistent)


@pytest.mark.parametrize("shards", [1, 3, 7])
@pytest.mark.parametrize(
    "value",
    [
        torch.full((3, 3), float("-inf")).triu(1),
        torch.tensor([float("nan"), -0.0, 0.1]),
        torch.tensor([0.1, 1 / 3, 1e300], dtype=torch.float64),
        torch.tensor([2**62 + 1, -(2**62) - 1]),
        torch.tensor([0.1, 3.0], dtype=torch.bfloat16),
        torch.tensor(7, dtype=torch.uint8),
    ],
    ids=["causal mask", "nan and -0.0", "float64", "large integers", "bfloat16", "uint8"],
)
def test_a_buffer_that_no_forward_pass_changes_keeps_its_bits(value: torch.Tensor, shards: int) -> None:
    module = Holder(value.clone())
    replica = Replica({"model": module})
    for _ in range(3):
        run_step(replica, lambda _: None, shards, list(range(shards)))
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (module.value, value))
    assert torch.equal(left, right), (module.value, value)


@pytest.mark.failure(
    "The training loop",
    "a forward pass, or the loop body before the inner loop, changes a buffer of more than 65,536 elements",
    seen="an error in that step names the buffer and which of the two changed it",
    outcome="the script fails, exit code 1; change it after the inner loop",
)
def test_a_large_buffer_is_a_constant_and_a_change_of_it_an_error() -> None:
    module = Holder(torch.zeros(LARGEST_LANE_BUFFER + 1))
    replica = Replica({"model": module})
    assert replica.lanes == 0
    run_step(replica, lambda _: None, 2, [0, 1])
    with pytest.raises(UsageError, match=rf"model\.value\b.*\b{LARGEST_LANE_BUFFER + 1}\b"):
        run_step(replica, lambda _: module.value.add_(1), 2, [0, 1])


def test_a_change_of_a_large_buffer_is_found_that_gives_the_tensor_no_new_version() -> None:
    size = LARGEST_LANE_BUFFER + 1
    module, normalization = Holder(torch.zeros(size)), nn.BatchNorm1d(size)
    with pytest.raises(UsageError, match=r"model\.value\b"):
        run_step(Replica({"model": module}), lambda _: module.value.data.add_(1), 2, [0, 1])
    with pytest.raises(UsageError, match=r"model\.running_mean\b"):
        run_step(Replica({"model": normalization}), lambda _: normalization(torch.randn(4, size)), 2, [0, 1])


def test_a_change_of_a_bool_buffer_depends_on_no_history_or_is_refused() -> None:
    """Never silently less than asked: a flag set in one shard's forward pass must not show in the next one's."""
    module = Holder(torch.tensor([False]))
    replica = Replica({"model": module})
    seen: list[bool] = []

    def forward(shard: int) -> None:
        del shard
        seen.append(bool(module.value))
        module.value.fill_(True)

    try:
        run_step(replica, forward, 2, [0, 1])
    except UsageError:
        return
    assert seen == [False, False]


# --- state -----------------------------------------------------------------------------------------------------


def trained_pair() -> tuple[Replica, nn.Sequential, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return Replica({"model": model, "optimizer": optimizer}), model, optimizer


def test_a_joiner_that_took_the_state_has_the_same_fingerprint() -> None:
    veteran, *_ = trained_pair()
    joiner_model = net()
    joiner = Replica(
        {"model": joiner_model, "optimizer": torch.optim.SGD(joiner_model.parameters(), lr=0.5, momentum=0.9)}
    )
    assert joiner.fingerprint() != veteran.fingerprint()
    joiner.load(arrived(veteran.state()))
    assert joiner.fingerprint() == veteran.fingerprint()


def test_a_joiner_keeps_nothing_of_the_memory_that_the_state_came_in() -> None:
    """Else the whole payload would stay as long as one momentum buffer that refers to it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    snapshot = Snapshot(Replica({"model": model, "optimizer": optimizer}).state())
    payload = snapshot.piece(0, snapshot.bytes)
    joining = net()
    joiner = Replica({"model": joining, "optimizer": torch.optim.SGD(joining.parameters(), lr=0.1, momentum=0.9)})
    joiner.load(restore(snapshot.skeleton, payload))
    before = joiner.fingerprint()
    payload.zero_()
    assert joiner.fingerprint() == before


def test_the_fingerprint_sees_one_bit() -> None:
    replica, model, _ = trained_pair()
    before = replica.fingerprint()
    assert replica.fingerprint() == before
    with torch.no_grad():
        model[2].bias[0] = torch.nextafter(model[2].bias[0], torch.tensor(float("inf")))
    assert replica.fingerprint() != before


def test_the_state_is_that_of_the_steps_start_while_forward_passes_change_buffers() -> None:
    replica, model, _ = trained_pair()
    replica.keep_buffers()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(8, 4) + 5)
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    state = replica.state()
    assert torch.equal(state["objects"]["model"]["1.running_mean"], before["1.running_mean"])
    assert all(torch.equal(a, b) for a, b in zip(state["buffers"], before.values(), strict=True))


def test_buffers_that_state_dict_leaves_out_travel_too() -> None:
    veteran, joiner = Holder(torch.tensor([1.0, 2.0]), persistent=False), Holder(torch.zeros(2), persistent=False)
    assert "value" not in veteran.state_dict()
    Replica({"model": joiner}).load(arrived(Replica({"model": veteran}).state()))
    assert joiner.value.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_buffers_of_every_dtype_travel(dtype: torch.dtype) -> None:
    for persistent in (True, False):
        veteran = Holder(torch.ones(2, dtype=dtype), persistent=persistent)
        joiner = Holder(torch.zeros(2, dtype=dtype), persistent=persistent)
        Replica({"model": joiner}).load(arrived(Replica({"model": veteran}).state()))
        assert torch.equal(joiner.value, veteran.value), f"persistent={persistent}"


def test_requires_grad_travels() -> None:
    veteran, joiner = net(), net()
    veteran[0].requires_grad_(False)
    Replica({"model": joiner}).load(arrived(Replica({"model": veteran}).state()))
    assert [p.requires_grad for p in joiner.parameters()] == [False, False, True, True, True, True]
