"""Digests and findings of tensors on a GPU are those of the same values on the CPU; so is what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from farandole.checkpoint import content
from farandole.checkpoint.content import HostCopy, in_place
from farandole.checkpoint.store import Sealing
from farandole.collective.state_transfer import Snapshot, restore
from farandole.plan.shards import Position
from farandole.training import digest
from farandole.training.digest import ROTATION, StepDigest
from farandole.training.gradients import ShardDigests
from farandole.training.replica import KINDS, LARGEST_LANE_BUFFER, Replica
from tests.support.gpu import CPU, ON_EACH

pytestmark = ON_EACH
SETTINGS = {"setting": "on"}
BUFFERS = {
    "mean": torch.tensor([1e-3, 2.0, 3e5, 0.1]), "sum": torch.arange(4), "max": torch.full((4,), 0.1),
    "last": torch.arange(4, dtype=torch.int16), "gathered": torch.zeros(4, dtype=torch.complex64),
    "constant": torch.tensor(2**60 + 1),
}  # fmt: skip


class Trained:
    """A replica with the same values on any device; its gradients are given. SGD's state lies where parameters do."""

    def __init__(self, device: torch.device, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3000))
        model.register_buffer("mask", torch.zeros(LARGEST_LANE_BUFFER + 1))
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        self.model = model.to(device)
        momentum = {"momentum": 0.5} if kind is torch.optim.SGD else {}
        self.optimizer = kind(self.model.parameters(), lr=0.5, **momentum)  # type: ignore[call-arg]
        self.replica = Replica({"model": self.model, "optimizer": self.optimizer})
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        self.optimizer.step()
        self.replica.keep_buffers()

    def take(self, other: Trained) -> None:
        """As a joiner does."""
        snapshot = Snapshot(other.replica.state())
        self.replica.load(restore(snapshot.skeleton, snapshot.piece(0, snapshot.bytes)))


def test_a_step_digests_the_same_lines_on_any_device(device: torch.device) -> None:
    here, there = Trained(CPU), Trained(device)
    ours, theirs = StepDigest(here.replica), StepDigest(there.replica)
    for step in (0, 1, ROTATION - 1, ROTATION):
        assert ours.at(step, SETTINGS) == theirs.at(step, SETTINGS)
    with torch.no_grad():
        there.model[3].bias[0] += 1
    assert any(ours.at(step, SETTINGS) != theirs.at(step, SETTINGS) for step in range(ROTATION))


def test_all_digests_and_the_fingerprint_are_equal(device: torch.device) -> None:
    here, there = Trained(CPU), Trained(device)
    assert digest.each(here.replica, SETTINGS) == digest.each(there.replica, SETTINGS)
    assert here.replica.fingerprint() == there.replica.fingerprint()


def test_findings_are_those_of_the_values(device: torch.device) -> None:
    gradient, batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), torch.ones(2, 5)

    def found(where: torch.device) -> tuple[list[str], list[int]]:
        findings = ShardDigests(["weight"], None)
        findings.read([batch.to(where), 3])
        findings.add_gradient(0, gradient.to(where))
        return findings.close(torch.tensor([0.5, 2.0], dtype=torch.float64), 0, 1)

    assert found(device) == found(CPU)
    names, _ = found(device)
    assert ["weight" in name for name in names] == [False, False, True, False]


def test_a_state_goes_from_device_to_device_and_stays_where_it_belongs(device: torch.device) -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        veteran, joiner = Trained(device, kind), Trained(device, kind)
        with torch.no_grad():
            veteran.model[0].weight.mul_(1.5)
        joiner.take(veteran)
        assert joiner.replica.fingerprint() == veteran.replica.fingerprint()
        assert {tensor.device.type for tensor in joiner.model.state_dict().values()} == {device.type}
        averages = [state.get("exp_avg", state.get("momentum_buffer")) for state in joiner.optimizer.state.values()]
        assert {tensor.device.type for tensor in averages} == {device.type}


def test_a_checkpoint_holds_host_memory_and_is_taken_over_on_either_device(
    device: torch.device, tmp_path: Path
) -> None:
    there = Trained(device, torch.optim.AdamW)
    state = {**there.replica.state(), "origin": ""}
    path = tmp_path / "x.pt"
    for taken in (in_place(state), HostCopy().take(state)):
        assert {tensor.device.type for tensor in taken.tensors} == {"cpu"}
        with path.open("wb") as file:
            content.save(taken, Position(step=3), Sealing(file))
        with path.open("rb") as file:
            _, loaded = content.load(file, "x")
        for other in (device, CPU):
            resumed = Trained(other, torch.optim.AdamW)
            resumed.replica.load(loaded)
            assert digest.each(resumed.replica, SETTINGS) == digest.each(there.replica, SETTINGS)


def test_buffers_of_all_kinds_are_reduced_as_on_the_cpu(device: torch.device) -> None:
    result: dict[torch.device, list[torch.Tensor]] = {}
    for where in (CPU, device):
        model = nn.Linear(7, 2)
        for name, value in BUFFERS.items():
            model.register_buffer(name, value.clone())
        kinds = {f"model.{name}": name for name in BUFFERS if name in KINDS}
        replica = Replica({"model": model.to(where)}, kinds, shards=3)
        lanes, total = torch.zeros(replica.lanes, dtype=torch.float64), torch.zeros(replica.lanes, dtype=torch.float64)
        replica.begin_shards()
        for shard in range(3):
            replica.reset_buffers(shard, 3)
            with torch.no_grad():
                for name in kinds.values():
                    buffer = model.get_buffer(name)
                    buffer[shard] += torch.tensor(0.3 * shard + 1.1, device=where).to(buffer.dtype)
            replica.buffers_to(lanes)
            total += lanes
        replica.buffers_from(total, 3)
        result[where] = [buffer.cpu() for buffer in model.buffers()]
    assert all(here.equal(there) for here, there in zip(result[CPU], result[device], strict=True))
    changed = [not value.equal(now) for value, now in zip(BUFFERS.values(), result[device], strict=True)]
    assert changed == [name in KINDS for name in BUFFERS]
