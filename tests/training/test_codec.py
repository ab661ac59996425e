"""With a codec, `.grad` is float32 again: the rounded sum of the rounded gradients of the shards."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch import nn

from farandole.collective.codec import CODECS, Codec
from farandole.collective.quantization import Place, Quantization
from farandole.errors import UsageError
from farandole.plan.shards import root
from farandole.protocol.worker.driver import Driver, Routine
from farandole.training.gradients import Gradients, ShardTotals
from farandole.training.replica import Replica
from tests.support.steps import BATCH, mlp, train


def ignore(*_: object) -> None:
    pass


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_the_gradient_is_the_rounded_sum_in_float32(codec: Codec) -> None:
    model = nn.Linear(3, 1, bias=False)
    gradients = Gradients(Replica({"model": model}), codec=codec)
    inputs = [torch.tensor([[1.001, 0.3, -2.7]]), torch.tensor([[0.1, 1e-3, 0.7]])]
    gradients.partials.begin(2)
    for shard, each in enumerate(inputs):
        gradients.partials.open(shard)
        loss = model(each).sum()
        gradients.backward(loss, 1.0, last=True)
        gradients.fill(ShardTotals(loss=float(loss.detach()), weight=1.0, samples=1, scale=1.0))
        gradients.close(ignore)
    gradients.partials.wait_until_quantized()
    gradients.publish([nodes[root(2)].flat for nodes in gradients.partials.nodes], 2)
    expected = torch.empty(3)
    bucket = gradients.layout.buckets[0]
    if bucket.quantization is None:
        left, right = (codec.encode(each) for each in inputs)
        codec.decode((left + right).flatten(), expected)
    else:
        numbers = [torch.zeros(bucket.quantization.group) for _ in inputs]
        for flat, each in zip(numbers, inputs, strict=True):
            flat[:3] = each
        left, right = (bucket.quantize(flat, torch.empty(1024, dtype=torch.uint8), 0) for flat in numbers)
        codec.decode(bucket.add(left, right, left, 0, 0), numbers[0])
        expected = numbers[0][:3]
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32
    assert model.weight.grad.flatten().equal(expected)
    assert expected.equal(sum(inputs).flatten()) == (codec.dtype is None)  # type: ignore[union-attr]


def test_a_codec_that_does_not_suit_the_model_is_an_error() -> None:
    with pytest.raises(UsageError, match="weight"):
        Gradients(Replica({"model": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1).double()])}), codec=CODECS["bf16"])
    with pytest.raises(UsageError, match="bfloat16"):
        Gradients(Replica({"model": nn.Linear(1, 1).bfloat16()}), codec=CODECS["bf16+zstd"])


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_waits_for_its_peers_only_when_its_sums_are_quantized(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, *, fails: bool
) -> None:
    """Else the coordinator would not look for stacks of a worker for which its peers wait. An error ends the step."""
    quantize, wait_for_round_end, quantized = Quantization.quantize, Driver.wait_for_round_end, [0]
    waited: list[int] = []

    def slow(self: Quantization, numbers: torch.Tensor, out: torch.Tensor, place: Place) -> torch.Tensor:
        time.sleep(0.02)
        if fails:
            raise MemoryError("of a test")
        quantized[0] += 1
        return quantize(self, numbers, out, place)

    def noted(self: Driver) -> Routine[bool]:
        waited.append(quantized[0])
        return wait_for_round_end(self)

    monkeypatch.setattr(Quantization, "quantize", slow)
    monkeypatch.setattr(Driver, "wait_for_round_end", noted)
    monkeypatch.setenv("FARANDOLE_CODEC", "int8")
    steps = train(request.getfixturevalue("run"), mlp())  # of micro-batches of four samples
    with pytest.raises(MemoryError, match="of a test") if fails else contextlib.nullcontext():
        next(steps)
    assert waited == ([] if fails else [BATCH // 4])
