"""A digest tells two replicas apart: at once where much differs, and within one rotation where one element does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from farandole.collective.state_transfer import Snapshot, restore
from farandole.protocol import messages
from farandole.protocol.values import MAX_NAMED
from farandole.training.digest import LINE_BYTES, ROTATION, StepDigest, each
from farandole.training.replica import LARGEST_LANE_BUFFER, Replica


class Parts:
    """A trained replica, with tensors larger than a rotation and smaller than a line."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 300))
        self.model.register_buffer("mask", torch.zeros(LARGEST_LANE_BUFFER + 1))
        self.model.register_parameter("large", nn.Parameter(torch.randn(ROTATION * LINE_BYTES // 4 + 77)))
        self.optimizer = (make or (lambda p: torch.optim.AdamW(p, lr=0.1)))(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.replica = Replica({"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule})
        self.train()
        self.step_digest = StepDigest(self.replica)

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.schedule.step()

    def at(self, step: int) -> int:
        self.replica.keep_buffers()
        return self.step_digest.at(step, {})

    def first_seen(self, other: Parts) -> int:
        return next(step for step in range(ROTATION) if self.at(step) != other.at(step))


def with_rate(parts: Parts) -> None:
    parts.optimizer.param_groups[0]["lr"] = 0.05


def with_forward(parts: Parts) -> None:
    parts.model[:2](torch.ones(2, 2, 4, 4))


def with_schedule(parts: Parts) -> None:
    parts.schedule.last_epoch += 1


def with_update(parts: Parts) -> None:
    parts.train()


AT_ONCE = {
    with_rate: "optimizer.param_groups[0].lr",
    with_forward: "model.1.running_mean",
    with_schedule: "schedule.last_epoch",
    with_update: "schedule.last_epoch",
}


@pytest.mark.parametrize("change", AT_ONCE, ids=lambda change: change.__name__)
def test_what_differs_in_settings_buffers_or_many_elements_shows_in_the_next_step(change: Any) -> None:
    one, other = Parts(), Parts()
    assert [one.at(step) for step in range(20)] == [other.at(step) for step in range(20)]
    change(other)
    assert one.first_seen(other) == 0
    (names, mine), (same_names, theirs) = each(one.replica, {}), each(other.replica, {})
    assert names == same_names
    assert next(n for n, a, b in zip(names, mine, theirs, strict=True) if a != b) == AT_ONCE[change]


@pytest.mark.failure(
    "Scripts that differ between workers",
    "the script changes one element of a parameter, a large buffer or an optimizer's state on one worker alone",
)
@pytest.mark.parametrize("element", [1, ROTATION * LINE_BYTES // 8, -1])
@pytest.mark.parametrize("name", ["model.large", "model.3.bias", "model.mask", "optimizer.exp_avg", "optimizer.step"])
def test_a_single_element_shows_within_one_rotation(name: str, element: int) -> None:
    one, other = Parts(), Parts()
    owner, _, key = name.partition(".")
    if owner == "optimizer":
        value = other.optimizer.state[other.model.large][key]
    else:
        value = other.model.state_dict()[key]
    flat = value.view(-1)
    flat[element % flat.numel()] = torch.nextafter(flat[element % flat.numel()], torch.tensor(9e9))
    seen = [step for step in range(ROTATION) if one.at(step) != other.at(step)]
    assert len(seen) == 1, "once in a rotation"
    (names, mine), (_, theirs) = each(one.replica, {}), each(other.replica, {})
    (found,) = [n for n, a, b in zip(names, mine, theirs, strict=True) if a != b]
    assert found == (f"optimizer.state[4].{key}" if owner == "optimizer" else name) or found.startswith(
        "optimizer.state["
    )


def test_every_line_has_its_turn_once_in_a_rotation() -> None:
    """By hand: the run of all lines, cut up anew."""
    parts = Parts(lambda p: torch.optim.SGD(p, lr=0.1))
    taken: list[bytes] = []

    class Collecting:
        def update(self, data: Any) -> None:
            taken.append(bytes(data))

    tensors = [*parts.replica.parameters.values(), *parts.replica.constants.values()]
    for step in range(ROTATION):
        for lines in parts.step_digest._placed(tensors):
            lines.take(step, ROTATION, Collecting(), [])
    everything = b"".join(t.detach().numpy().tobytes() for t in tensors)
    assert sum(map(len, taken)) == len(everything)
    bytes_of = np.bincount(np.frombuffer(b"".join(taken), dtype=np.uint8), minlength=256)
    assert (bytes_of == np.bincount(np.frombuffer(everything, dtype=np.uint8), minlength=256)).all()


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "SGD": lambda p: torch.optim.SGD(p, lr=np.float64(0.1), momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("channels_last", [False, True])
def test_who_was_handed_the_state_has_its_digests(make: Any, channels_last: bool) -> None:
    """Even if its tensors lie in memory in another order, and a rate was a number of NumPy's."""
    veteran, joiner = Parts(make), Parts(make)
    if channels_last:
        veteran.model.to(memory_format=torch.channels_last)
        veteran.train()
    veteran.train()
    before = veteran.at(3)
    assert joiner.at(3) != before
    snapshot = Snapshot(veteran.replica.state())
    joiner.replica.load(restore(snapshot.skeleton, snapshot.stripe(0, 1)))
    assert all(joiner.at(step) == veteran.at(step) for step in range(0, ROTATION, 11))
    assert each(joiner.replica, {}) == each(veteran.replica, {})
    assert joiner.replica.fingerprint() == veteran.replica.fingerprint()


def test_tensors_that_move_are_followed() -> None:
    one, other = Parts(), Parts()
    for parts in (one, other):
        parts.at(0)
        parts.model[3].bias.data = parts.model[3].bias.data.clone()
        parts.optimizer.load_state_dict(parts.optimizer.state_dict())
    assert one.at(1) == other.at(1)
    other.optimizer.state[other.model.large]["exp_avg"].add_(1.0)
    assert one.first_seen(other) == 0


@pytest.mark.parametrize("name", ["large", "3.bias", "mask", "exp_avg"])
def test_a_tensor_whose_data_was_replaced_is_followed_where_that_is_changed(name: str) -> None:
    one, other = Parts(), Parts()
    replaced: list[torch.Tensor] = []
    for parts in (one, other):
        parts.at(0)
        found = dict(parts.model.named_parameters()) | dict(parts.model.named_buffers())
        tensor = parts.optimizer.state[parts.model.large][name] if name == "exp_avg" else found[name]
        tensor.data = tensor.data.clone()
        replaced.append(tensor)
    assert one.at(1) == other.at(1)
    with torch.no_grad():
        replaced[1].add_(1.0)
    assert one.first_seen(other) < ROTATION


def test_torchs_settings_are_in_every_step_s() -> None:
    parts = Parts()
    parts.at(0)
    found = [parts.step_digest.at(3, {"precision": value}) for value in ("high", "high", "highest")]
    assert found[0] == found[1] != found[2]


def test_there_are_no_more_digests_than_a_message_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_NAMED == 10_000
    monkeypatch.setattr(messages, "MAX_NAMED", 5)
    one, other = Parts(), Parts()
    names, mine = each(one.replica, {})
    assert len(names) == len(mine) == 5
    with torch.no_grad():
        other.model.large[-1] += 1
    theirs = each(other.replica, {})[1]
    assert [a == b for a, b in zip(mine, theirs, strict=True)] == [True] * 4 + [False], "the rest are one"
