"""Numbers that are quantized on a GPU become the bytes that they become on the CPU; so do their sums."""

from __future__ import annotations

import pytest
import torch

from farandole.collective.quantization import GROUP_BYTES, Place, Quantization
from tests.support.gpu import CPU, ON_EACH

GROUPS = {"cpu": 70, "cuda": 5000}  # more than are processed at a time
HERE = Place(step=11, bucket=3, start=5 * GROUP_BYTES)


def numbers(count: int, seed: int) -> torch.Tensor:
    """Over all exponents, subnormal ones too, with zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-149, 128, (count,), generator=generator, dtype=torch.float64).exp2()
    result = (torch.randn(count, generator=generator, dtype=torch.float64) * exponents).float()
    result[::7] = 0.0
    for place, value in ((5, torch.inf), (1_000, -torch.inf), (60_000, torch.nan)):
        result[place] = value
    return result


@ON_EACH
@pytest.mark.parametrize("kind", [Quantization(8), Quantization(4)], ids=lambda kind: f"int{kind.bits}")
def test_the_bytes_are_those_of_the_cpu(kind: Quantization, device: torch.device) -> None:
    count = GROUPS[device.type] * kind.group
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for where in (CPU, device):
        left, right, total = (torch.empty(kind.bytes_of(count), dtype=torch.uint8, device=where) for _ in range(3))
        kind.quantize(numbers(count, 1).to(where), left, HERE)
        kind.quantize(numbers(count, 2).to(where), right, HERE)
        kind.add(left, right, total, HERE)
        values = torch.empty(count, device=where)
        kind.dequantize(total, values)
        groups[where] = [each.cpu() for each in (left, right, total, values.view(torch.int32))]
    for here, there in zip(groups[CPU], groups[device], strict=True):
        assert here.equal(there)
