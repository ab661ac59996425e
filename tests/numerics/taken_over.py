"""Each operator that `--bits portable` takes over, beside torch's own in one process: what differs is printed.

    python -m tests.numerics.taken_over

Same type, shape and layout are asked for, and the same values but for the last bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from farandole.platform import cpu

cpu.set_for("portable")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from farandole.numerics import portable  # noqa: E402

ODD = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 1000.0, float("inf"), float("nan"), -1.0, 1e-40, 1e30])
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def functions() -> Iterator[tuple[str, Tensor]]:
    x = torch.cat([torch.linspace(0.01, 10, 900), ODD])
    for name in ("sqrt", "atan", "log", "log2", "log10", "tan"):
        for kind in TYPES:
            given = torch.arange(20) if kind is torch.int64 else x.to(kind)
            function, called = getattr(torch, name), f"{name} of {kind}"
            yield called, function(given)
            yield f"{called} into", function(given, out=torch.empty(0, dtype=function(given).dtype))
            if kind is not torch.int64:
                yield f"{called} in place", getattr(given.clone(), f"{name}_")()
    yield "power 0.5", x**0.5
    yield "power 0.5 of integers", torch.arange(5) ** 0.5
    yield "power 3", x**3
    yield "power 2 of integers", torch.arange(5) ** 2
    yield "power 0.5 in place", x.clone().pow_(0.5)
    yield "power 0.5 into", torch.pow(x, 0.5, out=torch.empty(0))
    yield "root of a complex number", torch.sqrt(torch.tensor([1 + 2j]))
    yield "root of columns", torch.sqrt(x[:900].view(30, 30).t())
    yield "root of every third", torch.sqrt(x[::3])


def products() -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    a, b, c = torch.rand(7, 5), torch.rand(5, 3), torch.rand(3)
    many, each = torch.rand(4, 7, 5), torch.rand(4, 5, 3)
    yield "product", a @ b
    yield "product of columns", b.t() @ a.t()
    yield "product of every second", torch.rand(4, 5)[:, ::2] @ torch.rand(3, 6)[:, ::2]
    yield "product of one number, repeated", torch.ones(1).expand(3, 4) @ torch.ones(4, 2)
    yield "product of nothing", torch.rand(3, 0) @ torch.rand(0, 2)
    yield "product with infinity", torch.tensor([[float("inf"), 1.0]]) @ torch.tensor([[0.0], [1.0]])
    yield "product of doubles", a.double() @ b.double()
    yield "product of halves", a.bfloat16() @ b.bfloat16()
    yield "product of integers", torch.arange(6).view(2, 3) @ torch.arange(6).view(3, 2)
    yield "product of complex numbers", (a + 1j) @ (b - 1j)
    yield "product into", torch.mm(a, b, out=torch.empty(0))
    yield "sum and product", torch.addmm(c, a, b, beta=0.5, alpha=2)
    yield "product without the sum", torch.addmm(torch.full((3,), float("nan")), a, b, beta=0)
    yield "sum and product in place", torch.zeros(7, 3).addmm_(a, b)
    yield "products", torch.bmm(many, each)
    yield "sums and products", torch.baddbmm(c, many, each, alpha=0.3)
    yield "sums and products in place", torch.zeros(4, 7, 3).baddbmm_(many, each, alpha=2)
    yield "Einstein's", torch.einsum("bij,bjk->ik", many, each)


def attention() -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    for length, keys in ((9, 11), (11, 9), (300, 600)):
        q, k, mask = torch.rand(2, 3, length, 4), torch.rand(2, 3, keys, 4), torch.rand(length, keys)
        masked = {"no mask": {}, "a mask": {"attn_mask": mask}, "a choice": {"attn_mask": mask > 0.1}}
        for name, options in {**masked, "the past": {"is_causal": True}, "a scale": {"scale": 0.3}}.items():
            given = [x.clone().requires_grad_() for x in (q, k, k)]
            out = F.scaled_dot_product_attention(*given, **options)
            yield f"attention with {name}", out
            out.backward(torch.rand_like(out))
            yield from ((f"its gradient {n} with {name}", x.grad) for n, x in enumerate(given) if x.grad is not None)
        yield "attention of halves", F.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), k.bfloat16())
        few = torch.rand(2, 1, keys, 4)
        yield "shared keys", F.scaled_dot_product_attention(q, few, few, enable_gqa=True)
        yield "heads inside", F.scaled_dot_product_attention(*(x.mT.contiguous().mT for x in (q, k, k)))


def convolutions() -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    for last in (torch.channels_last, torch.contiguous_format):
        for bias in (False, True):
            for batch, kernel, stride, padding in (
                (4, 1, 1, 0),
                (1, 1, 1, 0),
                (4, 1, 2, 0),
                (2, 3, 1, 1),
                (2, 1, 1, 1),
            ):
                layer = torch.nn.Conv2d(12, 20, kernel, stride, padding, bias=bias)
                x = torch.rand(batch, 12, 9, 7).to(memory_format=last).requires_grad_()
                name, out = f"convolution of {kernel}, {stride}, {padding}, {batch}, {last}", layer(x)
                yield name, out
                out.backward(torch.rand_like(out))
                yield from ((f"gradient of {name}", g) for p in (x, *layer.parameters()) if (g := p.grad) is not None)


def layers() -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    layer, x = torch.nn.LSTM(4, 5, batch_first=True), torch.rand(3, 9, 4)
    out = layer(x)[0]
    yield "LSTM", out
    out.sum().backward()
    yield from ((f"gradient of {name}", p.grad) for name, p in layer.named_parameters() if p.grad is not None)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, [9, 5, 2], batch_first=True)
    yield "LSTM of sequences of several lengths", layer(packed)[0].data
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([0.1, 0.2, 0.3])
    optimizer = torch.optim.AdamW([p], lr=0.1)
    optimizer.step()
    yield "AdamW", p.detach().clone()


def computed() -> list[tuple[str, Tensor]]:
    return [*functions(), *products(), *attention(), *convolutions(), *layers()]


def differences(ours: Tensor, theirs: Tensor) -> str:
    for what in ("dtype", "shape", "is_contiguous"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        if (mine() if callable(mine) else mine) != (other() if callable(other) else other):
            return what
    near = 2e-2 if theirs.dtype is torch.bfloat16 else 1e-5
    return "" if torch.allclose(ours, theirs, rtol=near, atol=1e-6, equal_nan=True) else "values"


def not_taken() -> Iterator[str]:
    """What has other bits than those of OpenBLAS, and of what IEEE 754 fixes."""
    torch.manual_seed(0)
    a, b, x = torch.rand(65, 130), torch.rand(130, 33), torch.rand(5000)
    product, root = a.numpy() @ b.numpy(), np.sqrt(x.numpy())
    found = {
        "mm": (a @ b, product), "mm into": (torch.mm(a, b, out=torch.empty(65, 33)), product),
        "addmm": (torch.addmm(torch.zeros(33), a, b), product), "bmm": (torch.bmm(a[None], b[None])[0], product),
        "baddbmm": (torch.baddbmm(torch.zeros(1), a[None], b[None])[0], product),
        "linear": (F.linear(a, b.t()), product), "sqrt": (x.sqrt(), root), "sqrt_": (x.clone().sqrt_(), root),
        "power": (x**0.5, root), "sqrt of all": (torch._foreach_sqrt([x])[0], root),
        "atan": (x.atan(), torch.atan2(x, torch.ones(())).numpy()),
        "log2 of 8": (torch.tensor([8.0, 0.125]).log2(), np.array([3, -3])),
        "log10 of 1000": (torch.tensor([1000.0]).log10(), np.array([3])),
    }  # fmt: skip
    near_one = torch.tensor([1 + 2.0**-30], dtype=torch.float64).log().item()
    if abs(near_one - math.log1p(2.0**-30)) > 1e-24:
        yield "log of nearly 1"
    yield from (f"{name}: not taken over" for name, (ours, theirs) in found.items() if (ours.numpy() != theirs).any())


def main() -> None:
    theirs = computed()
    portable.take_over(1, torch.device("cpu"))
    portable.take_over(1, torch.device("cpu"))  # once more is nothing more
    ours = computed()
    wrong = [f"{name}: {what}" for (name, x), (_, y) in zip(ours, theirs, strict=True) if (what := differences(x, y))]
    wrong += not_taken()
    print(len(ours), "compared")
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
