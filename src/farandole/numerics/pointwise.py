"""Convolutions of one pixel as products, where torch would ask MKL for them: of images whose channels come last.

Of pixels X (pixels, inputs) and weights W (outputs, inputs): Y = X W', and for the gradient G of Y, dX = G W and
dW = G' X. With channels last the pixels of all images lie one after the other, so each is one product. Other
convolutions that torch computes by MKL stay with it: they are the same everywhere, and slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FORWARD = "_slow_conv2d_forward"
BACKWARD = "_slow_conv2d_backward.output_mask"
LAST = torch.channels_last


def register(library: torch.library.Library) -> None:
    theirs_forward = torch.library.get_kernel(f"aten::{FORWARD}", "CPU")
    theirs_backward = torch.library.get_kernel(f"aten::{BACKWARD}", "CPU")

    def forward(keys: Any, x: Tensor, weight: Tensor, kernel: Sequence[int], bias: Tensor | None,
                stride: Sequence[int], padding: Sequence[int]) -> Tensor:  # fmt: skip
        if not _is_pointwise(x, kernel, stride, padding):
            return theirs_forward.call_boxed(keys, x, weight, kernel, bias, stride, padding)
        pixels, matrix = _pixels(x), _matrix(weight).t()
        made = torch.mm(pixels, matrix) if bias is None else torch.addmm(bias, pixels, matrix)
        return _images(made, x)

    def backward(keys: Any, grad: Tensor, x: Tensor, weight: Tensor, kernel: Sequence[int], stride: Sequence[int],
                 padding: Sequence[int], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:  # fmt: skip
        if not _is_pointwise(x, kernel, stride, padding):
            return theirs_backward.call_boxed(keys, grad, x, weight, kernel, stride, padding, wanted)
        g, matrix = _pixels(grad.contiguous(memory_format=LAST)), _matrix(weight)
        return (
            _images(torch.mm(g, matrix), x) if wanted[0] else None,
            torch.mm(g.t(), _pixels(x)).view(weight.shape) if wanted[1] else None,
            g.sum(0) if wanted[2] else None,
        )

    library.impl(FORWARD, forward, "CPU", with_keyset=True)
    library.impl(BACKWARD, backward, "CPU", with_keyset=True)


def _is_pointwise(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> bool:
    one = (*kernel, *stride) == (1, 1, 1, 1) and not any(padding)
    return one and x.dim() == 4 and x.dtype in (torch.float32, torch.float64) and x.is_contiguous(memory_format=LAST)


def _pixels(x: Tensor) -> Tensor:
    """(images, channels, height, width) as (pixels, channels), without a copy."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _images(pixels: Tensor, like: Tensor) -> Tensor:
    """The way back."""
    batch, _, height, width = like.shape
    return pixels.view(batch, height, width, -1).permute(0, 3, 1, 2)


def _matrix(weight: Tensor) -> Tensor:
    return weight.reshape(weight.shape[0], -1)
