"""Numbers that are quantized on a GPU have the values that they have on the CPU; so do their sums."""

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
def test_the_values_are_those_of_the_cpu(kind: Quantization, device: torch.device) -> None:
    count = GROUPS[device.type] * kind.group
    values: dict[torch.device, list[torch.Tensor]] = {}
    for where in (CPU, device):
        left, right, total = (torch.empty(kind.bytes_of(count), dtype=torch.uint8, device=where) for _ in range(3))
        kind.quantize(numbers(count, 1).to(where), left, HERE)
        kind.quantize(numbers(count, 2).to(where), right, HERE)
        kind.add(left, right, total, HERE)
        values[where] = [dequantized(kind, groups, count) for groups in (left, right, total)]
    for here, there in zip(values[CPU], values[device], strict=True):
        assert here.isfinite().any()
        assert here.isnan().any()
        assert here.view(torch.int32).equal(there.view(torch.int32))


def dequantized(kind: Quantization, groups: torch.Tensor, count: int) -> torch.Tensor:
    values = torch.empty(count, device=groups.device)
    kind.dequantize(groups, values)
    return values.cpu()
