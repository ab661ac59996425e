"""Exact codecs: the format to which gradients are rounded before they are summed, and whether the sums are compressed.

A codec of 16 bits rounds the gradient of each shard (a leaf of the summation tree) and the sum at each node of the tree
to its format, to nearest, ties to even. Both operands of a sum are already rounded, so the sum has one right value,
whichever worker computes it, in one process or in many. The bits of the result depend on the format, and not on which
workers come and go. The sums have half the bytes of float32, in memory and between workers.

A codec of 8 or 4 bits rounds in the same places, to blocks of small integers with a common scale, at random but
reproducibly (`quantization.py`).

Compression (`compression.py`) changes no value: a codec with it has the bits of the one without. With `auto` each
sender compresses where that saves time.

Only float32 gradients are rounded. The float64 lanes (loss, counts, buffers) are summed as without a codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from farandole.collective.quantization import Quantization
from farandole.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One codec. The default encodes nothing.

    Attributes:
        name: the value of `--codec`.
        dtype: the format to which float32 gradients and their sums are rounded; None to round nothing. uint8 for
            groups of quantized numbers.
        quantization: how such numbers are quantized; None for another format.
        scale: a power of two by which gradients are multiplied before they are rounded. The sums are divided by it.
        compresses: what goes between hosts is compressed without loss.
        adapts: it is compressed only where that saves time.
    """

    name: str = "none"
    dtype: torch.dtype | None = None
    quantization: Quantization | None = None
    scale: float = 1.0
    compresses: bool = False
    adapts: bool = False

    @property
    def compressed(self) -> torch.dtype | None:
        """The dtype of the sums that are compressed between hosts; None if none are."""
        return self.wire(torch.float32) if self.compresses else None

    def check_suits(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raise `UsageError` if the codec can't hold the gradients of one of the parameters, given by name."""
        for name, parameter in parameters.items():
            if self.dtype is not None and parameter.dtype not in (torch.float32, self.dtype):
                raise UsageError(
                    f"--codec {self.name}: the gradient of {name} is {_name(parameter.dtype)}, and the codec rounds "
                    f"float32 only; use --codec none"
                )

    def check_used(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raise `UsageError` if the codec changes nothing: no parameter is float32."""
        changes = self.dtype is not None or self.compresses
        if changes and not any(p.dtype == torch.float32 for p in parameters.values()):
            dtypes = " and ".join(sorted({_name(parameter.dtype) for parameter in parameters.values()})) or "missing"
            raise UsageError(
                f"--codec {self.name} would change nothing: it is for float32, and the parameters are {dtypes}; leave "
                f"it out"
            )

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of `dtype` are summed and sent."""
        return self.dtype if self.dtype is not None and dtype == torch.float32 else dtype

    def quantizes(self, dtype: torch.dtype) -> Quantization | None:
        """Return how gradients of `dtype` are quantized; None if they are not."""
        return self.quantization if dtype == torch.float32 else None

    def encode(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient in the floating-point format of the sums; the gradient itself if there is none.

        Quantized numbers have none: a bucket of them is quantized as a whole.
        """
        wire = self.wire(gradient.dtype)
        if wire == gradient.dtype or self.quantization is not None:
            return gradient
        if self.scale == 1.0:
            return gradient.to(wire)
        return torch.mul(gradient, self.scale, out=torch.empty_like(gradient, dtype=wire))

    def decode(self, total: torch.Tensor, into: torch.Tensor) -> None:
        """Write a sum, shape (n,), to `into`, a float32 tensor of its numbers, shape (n,) unless they are quantized.

        All NaNs get the same bits.

        The floating-point sums on the way do not: torch's vectorized loops and its scalar loops round a NaN to
        different bits, and which loop rounds an element depends on how a bucket is divided among workers.
        """
        if self.quantization is not None:
            self.quantization.dequantize(total, into)
            return
        into.copy_(total)
        if self.scale != 1.0:
            into.mul_(1.0 / self.scale)
        if not torch.isfinite(into.sum()):
            torch.nan_to_num_(into, nan=float("nan"), posinf=float("inf"), neginf=float("-inf"))


NONE = Codec()
# bfloat16 has the exponents of float32, so it needs no scale. The smallest number above 0 in float16 is 6e-8. With the
# scale, gradients from 6e-11 to 64 have a value other than 0 and infinity.
_BF16, _FP16 = Codec(name="bf16", dtype=torch.bfloat16), Codec(name="fp16", dtype=torch.float16, scale=1024.0)
_INT8, _INT4 = (Codec(name=f"int{n}", dtype=torch.uint8, quantization=Quantization(n)) for n in (8, 4))
CODECS = {
    codec.name: codec
    for codec in (
        NONE, _BF16, _FP16, _INT8, _INT4, Codec(name="float32+zstd", compresses=True),
        replace(_BF16, name="bf16+zstd", compresses=True), replace(_FP16, name="fp16+zstd", compresses=True),
        Codec(name="auto", compresses=True, adapts=True),
        replace(_BF16, name="bf16+auto", compresses=True, adapts=True),
        replace(_FP16, name="fp16+auto", compresses=True, adapts=True),
    )
}  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
