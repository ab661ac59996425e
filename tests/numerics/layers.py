"""Layers as common nets have them, each with the shape of what it takes. For `operators.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def words(text: str) -> list[str]:
    return text.split()


def layers() -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """Name, module, and the shape of what it takes."""
    yield "linear", nn.Linear(300, 70), (33, 300)
    yield "linear, 3d", nn.Linear(48, 40, bias=False), (5, 7, 48)
    for dims, size in ((1, (50,)), (2, (17, 16)), (3, (6, 7, 8))):
        of = {
            1: (nn.Conv1d, nn.ConvTranspose1d),
            2: (nn.Conv2d, nn.ConvTranspose2d),
            3: (nn.Conv3d, nn.ConvTranspose3d),
        }
        convolution, transposed = of[dims]
        for batch in (1, 4):
            for kernel, stride, groups in ((3, 1, 1), (1, 1, 1), (5, 2, 1), (3, 1, 4), (3, 2, 16)):
                name = f"convolution {dims}d of {batch}, {kernel}, {stride}, {groups}"
                yield name, convolution(16, 32, kernel, stride, 1, groups=groups), (batch, 16, *size)
            yield f"dilated {dims}d of {batch}", convolution(8, 8, 3, padding="same", dilation=2), (batch, 8, *size)
            yield f"transposed {dims}d of {batch}", transposed(16, 12, 3, 2, 1, 1), (batch, 16, *size)
            yield f"transposed in groups {dims}d of {batch}", transposed(16, 16, 4, 2, groups=4), (batch, 16, *size)
    yield "pointwise of channels last", nn.Sequential(_Last(), nn.Conv2d(24, 40, 1)), (4, 24, 17, 16)
    yield "convolution of channels last", nn.Sequential(_Last(), nn.Conv2d(24, 40, 3, 2)), (4, 24, 17, 16)
    yield "depthwise of channels last", nn.Sequential(_Last(), nn.Conv2d(24, 24, 3, groups=24)), (4, 24, 17, 16)
    yield "convolution of colours", nn.Conv2d(3, 32, 7, 2, 3), (4, 3, 40, 40)
    yield "patches", nn.Conv2d(3, 96, 8, 8), (4, 3, 32, 32)
    yield "batch norm", nn.BatchNorm2d(19), (6, 19, 9, 9)
    yield "batch norm 1d", nn.BatchNorm1d(70), (33, 70)
    yield "batch norm 3d", nn.BatchNorm3d(5), (2, 5, 4, 5, 6)
    yield "instance norm", nn.InstanceNorm2d(9, affine=True), (3, 9, 8, 8)
    yield "group norm", nn.GroupNorm(4, 20), (3, 20, 9, 9)
    for width in (96, 77, 768):
        yield f"layer norm {width}", nn.LayerNorm(width), (5, 9, width)
    yield "RMS norm", nn.RMSNorm(96), (5, 9, 96)
    yield "local response", nn.LocalResponseNorm(4), (3, 9, 8, 8)
    for name in words(
        "ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Hardswish Hardsigmoid Hardtanh Sigmoid Tanh "
        "Softplus Softsign LogSigmoid PReLU Tanhshrink Softshrink GLU"
    ):
        yield name, getattr(nn, name)(), (37, 130)
    yield "GELU by tanh", nn.GELU("tanh"), (37, 130)
    for width in (10, 65, 1000):
        yield f"softmax {width}", nn.Softmax(-1), (33, width)
        yield f"log softmax {width}", nn.LogSoftmax(-1), (33, width)
    yield "softmax of channels", nn.Softmax(1), (3, 21, 9, 9)
    for module in (
        nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(5),
        nn.AdaptiveMaxPool2d(3), nn.LPPool2d(2, 3), nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ZeroPad2d(2),
        nn.ReflectionPad2d(2), nn.ReplicationPad2d(1), nn.Unfold(3), nn.Dropout(0.3), nn.Dropout2d(0.3),
        nn.AlphaDropout(0.2),
    ):  # fmt: skip
        yield str(module), module, (3, 8, 16, 16)
    for mode in ("nearest", "bilinear", "bicubic", "area"):
        yield f"resizing, {mode}", nn.Upsample((23, 11), mode=mode), (2, 5, 13, 13)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        yield kind.__name__, kind(24, 40, 2, batch_first=True), (5, 11, 24)
    yield "LSTM both ways", nn.LSTM(24, 20, bidirectional=True), (9, 3, 24)
    yield "LSTM cell", nn.LSTMCell(24, 20), (9, 24)
    yield "encoder", nn.TransformerEncoderLayer(96, 4, 128, dropout=0.0, batch_first=True), (4, 33, 96)
    yield "encoder, gelu first", nn.TransformerEncoderLayer(64, 2, 90, 0.1, "gelu", norm_first=True), (12, 3, 64)
    yield "attention with weights", _WithWeights(48), (3, 20, 48)


class _Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)


class _WithWeights(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, need_weights=True)
