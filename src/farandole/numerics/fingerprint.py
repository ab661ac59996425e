"""The numeric fingerprint: the results of some fixed operations on this machine, each as a digest of its bits.

Libraries select kernels by the CPU's vendor, its instructions, the sizes of its caches, library versions and switches,
and the shape of the operands; no name describes all of that. So the fingerprint is computed: forward and backward, in
float32, with bfloat16 for a product, by torch, by NumPy, and by the decoder of images if one is loaded. Each operation
is one fact of the worker's signature, so a difference is reported with the operation's name.

Invariant: equal machines give equal digests, whatever their scripts have done before. Inputs come from integer
arithmetic, have their own 64-byte aligned memory, and an explicit dtype and device; no generator of the script is used,
and no setting of torch is changed. The present settings (`settings.py`) and the number of intra-op threads of this
process do affect the digests.

It takes 35 ms on one thread of a busy machine, 70 to 90 ms the first time in a process, which creates kernels and
touches pages. It proves little about a model with other shapes: the admission check by a shard covers that. Not
included: operators that none of our examples use (Fourier transforms, linear algebra).
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from farandole.numerics import settings
from farandole.protocol.numeric_facts import DECODER, OPERATION

POOL = 1 << 16  # count of numbers from which all inputs are taken
Operands = tuple[Tensor, ...]
Operation = Callable[[Any], "Tensor | Sequence[Tensor]"]  # takes all operands as one argument


def fingerprint(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield each operation's name, and the digest of its results: 16 hexadecimal digits, of 63 bits."""
    inputs = Inputs(device)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        if device.type == "cuda":
            # cuBLAS warns if it is the first to use the device in a thread, here in that of backward passes.
            (torch.ones(1, device=device, requires_grad=True) * 2).sum().backward()
        for name, operation, operands in _operations(inputs):
            yield OPERATION + name, _result(operation, operands, inputs)
        with torch.no_grad():
            yield OPERATION + "update of Adam's kind", _digest(_adam(inputs))
            yield OPERATION + "random numbers of torch's", _digest(_random(device))
    for name, results in _numpy(inputs):
        yield f"{OPERATION}NumPy's {name}", _digest(results)
    if "PIL.Image" in sys.modules:
        for name, pixels in _images(inputs):
            yield DECODER + name, _digest([pixels])


class Inputs:
    """Pseudo-random numbers in (-0.5, 0.5): a hash of 0, 1, 2, ... (the finalizer of splitmix64).

    Each operand is taken at another offset of the pool. The upper 23 bits of a hash give a number that float32 holds
    exactly.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.place = device, 0
        x = np.arange(1, POOL + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        self.bits = x ^ (x >> np.uint64(31))
        exact = ((self.bits >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
        self._pool = torch.from_numpy(exact - np.float32(0.5)).repeat(2)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an operand of `shape`; torch allocates aligned memory."""
        operand = torch.empty(shape, dtype=dtype, device=self._device)
        numel = operand.numel()
        self.place = (self.place + 12345) % POOL
        values = self._pool[self.place : self.place + POOL].repeat(-(-numel // POOL))[:numel]
        return operand.copy_(values.view(shape))

    def whole(self, below: int, *shape: int) -> Tensor:
        """Return a tensor of whole numbers in [0, below)."""
        values = (self.bits[: int(np.prod(shape))] % np.uint64(below)).astype(np.int64)
        return torch.from_numpy(values).view(shape).to(self._device)


def _operations(take: Inputs) -> Iterator[tuple[str, Operation, Operands]]:
    """Yield the name, the operation and the operands."""
    for rows, inner, columns in ((64, 1024, 512), (33, 257, 65), (1, 300, 77), (8, 2048, 10), (256, 96, 384)):
        yield (
            f"matmul of {rows}x{inner} by {inner}x{columns}",
            lambda o: torch.matmul(*o),
            (take(rows, inner), take(inner, columns)),
        )
    for rows, inner, columns in ((64, 784, 128), (7, 33, 10)):
        operands = (take(rows, inner), take(columns, inner), take(columns))
        yield f"linear of {rows}x{inner} to {columns}", lambda o: F.linear(*o), operands
    for batch, rows, inner, columns in ((16, 32, 24, 32), (5, 17, 19, 23)):
        operands = (take(batch, rows, inner), take(batch, inner, columns))
        yield f"bmm of {batch} of {rows}x{inner} by {inner}x{columns}", lambda o: torch.bmm(*o), operands
    half = (take(32, 64, dtype=torch.bfloat16), take(64, 48, dtype=torch.bfloat16))
    yield "matmul of 32x64 by 64x48 in bfloat16", lambda o: torch.matmul(*o), half
    for dtype in (torch.bfloat16, torch.float16):  # what a codec does to gradients and their sums
        yield f"rounding to {dtype} and a sum".replace("torch.", ""), _rounded(dtype), (take(33, 65), take(33, 65))
    yield from _convolutions(take)
    x = take(8, 16, 13, 13)
    yield "batch norm", lambda o: F.batch_norm(o[0], None, None, o[1], o[2], training=True), (x, take(16), take(16))
    yield "group norm", lambda o: F.group_norm(o[0], 4, *o[1:]), (take(4, 16, 9, 9), take(16), take(16))
    for width in (96, 77):
        operands = (take(64, width), take(width), take(width))
        yield f"layer norm over {width}", lambda o: F.layer_norm(o[0], o[0].shape[-1:], *o[1:]), operands
    for shape in ((64, 10), (32, 65), (4, 4, 33, 33)):
        yield f"softmax over {shape[-1]}", lambda o: (8 * o[0]).softmax(-1), (take(*shape),)
    target = take.whole(65, 32)
    yield "cross entropy of 32x65", lambda o: F.cross_entropy(8 * o[0], target), (take(32, 65),)
    for name, function in _ELEMENTWISE.items():
        yield name, _of_one(function), (take(37, 131),)
    queries = (take(2, 4, 33, 24), take(2, 4, 33, 24), take(2, 4, 33, 24))
    yield "scaled dot product attention", lambda o: F.scaled_dot_product_attention(*o), queries
    yield (
        "scaled dot product attention with a causal mask",
        lambda o: F.scaled_dot_product_attention(*o, is_causal=True),
        queries,
    )
    words = take.whole(50, 8, 16)
    yield "embedding", lambda o: F.embedding(words, o[0]), (take(50, 48),)
    for shape in ((61, 1003), (20000,)):
        name = "x".join(map(str, shape))
        yield f"sum over {name}", lambda o: o[0].sum(-1), (take(*shape),)
        yield f"mean and variance over {name}", lambda o: (o[0].mean(-1), o[0].var(-1)), (take(*shape),)
        yield f"norm over {name}", lambda o: o[0].norm(dim=-1), (take(*shape),)
    yield "sum over rows of 257x129", lambda o: o[0].sum(0), (take(257, 129),)
    yield "sum in float64", lambda o: o[0].sum(), (take(4001, dtype=torch.float64),)
    yield "pooling", _pooled, (x,)
    yield "bilinear resizing", lambda o: F.interpolate(o[0], (19, 17), mode="bilinear"), (take(2, 3, 13, 13),)


_ELEMENTWISE: dict[str, Operation] = {
    "exp": torch.exp,
    "log": lambda x: (x + 0.75).log(),
    "sqrt": lambda x: (x + 0.75).sqrt(),
    "rsqrt": lambda x: (x + 0.75).rsqrt(),
    "division": lambda x: x / (x + 0.75),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sine and cosine": lambda x: (x.sin(), x.cos()),
    "power": lambda x: (x + 0.75) ** 2.5,
}


def _convolutions(take: Inputs) -> Iterator[tuple[str, Operation, Operands]]:
    for channels, size, filters, kernel, stride, groups in (
        (3, 32, 16, 3, 1, 1),
        (16, 17, 33, 3, 2, 1),
        (32, 14, 24, 1, 1, 1),
        (24, 15, 24, 3, 1, 24),
        (1, 28, 10, 5, 1, 1),
    ):

        def convolve(o: Any, stride: int = stride, groups: int = groups) -> Tensor:
            return F.conv2d(*o, stride=stride, padding=1, groups=groups)

        weight = take(filters, channels // groups, kernel, kernel)
        suffix = f" in {groups} groups" if groups > 1 else ""
        name = f"convolution {kernel}x{kernel} of {channels}x{size}x{size} to {filters}, stride {stride}{suffix}"
        yield name, convolve, (take(4, channels, size, size), weight, take(filters))
    operands = (take(4, 16, 12, 12).contiguous(memory_format=torch.channels_last), take(20, 16, 3, 3))
    yield "convolution of channels last", lambda o: F.conv2d(*o, padding=1), operands
    yield "convolution in one dimension", lambda o: F.conv1d(*o), (take(4, 12, 50), take(9, 12, 5))
    yield (
        "transposed convolution",
        lambda o: F.conv_transpose2d(*o, stride=2),
        (take(4, 12, 7, 7), take(12, 8, 3, 3)),
    )


def _rounded(dtype: torch.dtype) -> Operation:
    return lambda o: (o[0].to(dtype) + o[1].to(dtype)).float()


def _of_one(function: Operation) -> Operation:
    return lambda o: function(o[0])


def _pooled(o: Any) -> Sequence[Tensor]:
    return F.max_pool2d(o[0], 2), F.avg_pool2d(o[0], 3, 2), F.adaptive_avg_pool2d(o[0], 4)


def _result(operation: Operation, operands: Operands, take: Inputs) -> str:
    """Return the digest, or a text if torch refuses the operation because it is not deterministic.

    The next operations have the same inputs in both cases.
    """
    place = take.place
    try:
        return _digest(_forward_and_backward(operation, operands, take))
    except RuntimeError as error:
        if name := settings.operator(error):
            return f"none: {name} is not deterministic"
        raise
    finally:
        take.place = place


def _forward_and_backward(operation: Operation, operands: Operands, take: Inputs) -> list[Tensor]:
    """Return the results, and the gradients of all operands for fixed gradients of the results."""
    leaves = tuple(operand.detach().requires_grad_() for operand in operands)
    output = operation(leaves)
    results = [output] if isinstance(output, Tensor) else list(output)
    gradients = torch.autograd.grad(results, leaves, [take(*r.shape, dtype=r.dtype) for r in results])
    return [*results, *gradients]


def _adam(take: Inputs) -> list[Tensor]:
    """Return the state after three steps of the arithmetic of torch.optim.Adam."""
    parameter, mean, square = take(40, 101), torch.zeros_like(take(40, 101)), torch.zeros_like(take(40, 101))
    for step in (1, 2, 3):
        gradient = take(40, 101)
        mean.lerp_(gradient, 0.1)
        square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        root = (square.sqrt() / (1 - 0.999**step) ** 0.5).add_(1e-8)
        parameter.addcdiv_(mean, root, value=-0.001 / (1 - 0.9**step))
    return [parameter, mean, square]


def _random(device: torch.device) -> list[Tensor]:
    """Return random numbers of an own generator. Another version may give other numbers for the same seed."""
    generator = torch.Generator(device).manual_seed(5)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return [
        empty(37).uniform_(generator=generator),
        empty(37).normal_(generator=generator),
        empty(7).normal_(generator=generator),  # torch uses another algorithm for small tensors
        empty(37).bernoulli_(0.3, generator=generator),
        empty(37).exponential_(generator=generator),
        torch.randint(1000, (37,), device=device, generator=generator),
        torch.randperm(37, device=device, generator=generator),
    ]


def _numpy(take: Inputs) -> Iterator[tuple[str, list[Any]]]:
    a, b = take(48, 130).cpu().numpy(), take(130, 40).cpu().numpy()
    positive = np.abs(a) + np.float32(0.25)
    wide = a.astype(np.float64)
    yield "sum and mean", [a.sum(), a.sum(0), a.mean(1), wide.sum(1), a.std(0)]
    of_its_own = np.random.RandomState(5)
    yield "random numbers", [of_its_own.random_sample(9), of_its_own.standard_normal(9), of_its_own.permutation(9)]
    yield "dot", [a @ b, a[0] @ b, wide @ b.astype(np.float64)]
    yield (
        "exp, log, sqrt and tanh",
        [f(x) for x in (a, wide) for f in (np.exp, np.tanh)]
        + [f(x) for x in (positive, positive.astype(np.float64)) for f in (np.log, np.sqrt)],
    )


def _images(take: Inputs) -> Iterator[tuple[str, Any]]:
    """Yield decoded and resized images. They are encoded here, so the encoder affects the digests too."""
    from PIL import Image

    x = np.arange(61)[:, None] * 3 + np.arange(83) * 2
    noise = (take.bits[: 61 * 83 * 3] % np.uint64(32)).astype(np.int64).reshape(61, 83, 3)
    image = Image.fromarray((x[..., None] // 2 + noise).clip(0, 255).astype(np.uint8))
    for kind, options in (("JPEG", {"quality": 90}), ("PNG", {})):
        file = io.BytesIO()
        image.save(file, kind, **options)
        with Image.open(file) as decoded:
            resized = decoded.convert("RGB").resize((32, 40), Image.Resampling.BILINEAR)
            yield f"{kind} of 83x61, resized to 32x40", np.asarray(resized)


def _digest(results: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for result in results:
        if isinstance(result, Tensor):
            result = result.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(np.ascontiguousarray(result).tobytes())
    return f"{int.from_bytes(digest.digest()[:8], 'little') >> 1:016x}"
