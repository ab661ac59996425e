"""State travels without pickling: what comes out is what went in, and everything else is refused by name."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farandole.collective.buckets import ALIGNMENT
from farandole.collective.state_transfer import Snapshot, cut, restore


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and, for tensors, bits."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and a.detach()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(b.contiguous().reshape(-1).view(torch.uint8))
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def transferred(state: Any, veterans: int = 3) -> Any:
    """Through stripes and back, as a joiner gets it."""
    snapshot = Snapshot({"requires_grad": [], "it": state})
    payload = torch.cat([snapshot.stripe(part, veterans) for part in range(veterans)])
    return restore(snapshot.skeleton, payload)["it"]


# --- what training scripts hand in -----------------------------------------------------------------------------


def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 3) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(4, 3)),
        nn.Parameter(torch.randn(5).bfloat16()),
        nn.Parameter(torch.randn(())),
    ]
    optimizer = make(parameters)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        optimizer.step()
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW with amsgrad and a tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "several groups": lambda p: torch.optim.SGD(
        [{"params": p[:1], "lr": 1.0}, {"params": p[1:]}], lr=0.1, momentum=0.9
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizer_states_arrive_bit_for_bit_and_the_next_update_is_equal(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    veteran = trained(make)
    arrived = transferred(veteran.state_dict())
    assert same(arrived, veteran.state_dict())
    parameters = [p for group in veteran.param_groups for p in group["params"]]
    joiner_parameters = [nn.Parameter(p.detach().clone()) for p in parameters]
    joiner = make(joiner_parameters)
    joiner.load_state_dict(arrived)
    for mine, theirs in zip(joiner_parameters, parameters, strict=True):
        mine.grad = torch.ones_like(mine)
        theirs.grad = torch.ones_like(theirs)
    joiner.step()
    veteran.step()
    assert all(map(same, joiner_parameters, parameters))


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    s = torch.optim.lr_scheduler
    first, second = s.LinearLR(optimizer, total_iters=4), s.CosineAnnealingLR(optimizer, T_max=9)
    return s.SequentialLR(optimizer, [first, second], milestones=[4])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR, whose milestones are a Counter": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "LambdaLR of a function": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 9),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.StepLR(o, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_arrive_and_go_on_alike(make: Callable[[Any], Any]) -> None:
    def advance(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates: list[float] = []
        for _ in range(steps):
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SequentialLR's own use of step(epoch) warns
                scheduler.step(*([1.0] if type(scheduler).__name__ == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def fresh() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return optimizer, make(optimizer)

    veteran, scheduler = fresh()
    advance(veteran, scheduler, 3)
    arrived = transferred({"optimizer": veteran.state_dict(), "scheduler": scheduler.state_dict()})
    assert same(arrived["scheduler"], scheduler.state_dict())
    joiner, joined = fresh()
    joiner.load_state_dict(arrived["optimizer"])
    joined.load_state_dict(arrived["scheduler"])
    assert advance(joiner, joined, 6) == advance(veteran, scheduler, 6)


def test_scaler_and_module_states_arrive() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.no_grad():
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(torch.bfloat16)
    state = {"scaler": scaler.state_dict(), "model": model.state_dict()}
    arrived = transferred(state)
    assert same(arrived["scaler"], state["scaler"])
    model.load_state_dict(arrived["model"])
    assert same(dict(arrived["model"]), dict(state["model"]))


# --- the format ------------------------------------------------------------------------------------------------

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    raw = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    tensor = raw.to(draw(st.sampled_from(DTYPES)))
    return tensor.T if tensor.dim() == 2 and draw(st.booleans()) else tensor


KEYS = st.one_of(
    st.text(max_size=5), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.none(), st.floats(allow_nan=False)
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    tensors(),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(STATES, st.integers(1, 5))
def test_any_nested_state_round_trips_through_any_number_of_veterans(state: Any, veterans: int) -> None:
    assert same(transferred(state, veterans), state)


def test_an_ordered_dict_becomes_a_dict_in_the_same_order() -> None:
    arrived = transferred(OrderedDict(b=1, a=2))
    assert type(arrived) is dict
    assert list(arrived.items()) == [("b", 1), ("a", 2)]


def test_what_arrives_is_aligned() -> None:
    whole = torch.arange(100.0)
    arrived = transferred([whole[1:4], whole[2:9], whole.to(torch.int8)[1:], torch.tensor(1.0)])
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in arrived)


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 5))
def test_stripes_tile_the_payload(sizes: list[int], veterans: int) -> None:
    parts = [torch.full((size,), k + 1, dtype=torch.uint8) for k, size in enumerate(sizes)]
    snapshot = Snapshot({"requires_grad": [True, False], "parts": parts})
    assert snapshot.flags == [1, 0]
    cuts = [cut(snapshot.bytes, part, veterans) for part in range(veterans)]
    assert [cuts[0][0], cuts[-1][1]] == [0, snapshot.bytes]
    assert all(a[1] == b[0] for a, b in pairwise(cuts))
    stripes = [snapshot.stripe(part, veterans) for part in range(veterans)]
    assert [len(stripe) for stripe in stripes] == [stop - start for start, stop in cuts]
    assert max(map(len, stripes)) - min(map(len, stripes)) <= ALIGNMENT
    payload = torch.cat(stripes)
    assert Counter(payload.tolist()) - Counter({0: len(payload)}) == Counter(
        {k + 1: size for k, size in enumerate(sizes) if size}
    )


def test_a_snapshot_refers_and_a_stripe_copies() -> None:
    """Veterans go on computing while they send: what was cut out must not change any more."""
    tensor = torch.zeros(100)
    snapshot = Snapshot({"requires_grad": [], "tensor": tensor})
    tensor.fill_(1.0)
    stripe = snapshot.stripe(0, 1)
    tensor.fill_(2.0)
    assert restore(snapshot.skeleton, stripe)["tensor"].unique().tolist() == [1.0]


def test_nothing_is_pickled_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    state = copy.deepcopy(trained(OPTIMIZERS["AdamW"]).state_dict())
    for name in ("dumps", "dump", "loads", "load", "Pickler", "Unpickler"):
        monkeypatch.delattr(pickle, name)
    assert same(transferred(state), state)
