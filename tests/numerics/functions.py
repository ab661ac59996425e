"""Functions of one or more tensors, each with what it takes. For `operators.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.layers import words


class Numbers:
    """In (-0.5, 0.5), by a generator that is the same everywhere."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.rand(shape, generator=self._generator) - 0.5).to(dtype)


def functions(take: Numbers) -> Iterator[tuple[str, Callable[..., Any], tuple[Tensor, ...]]]:
    """Name, function, and what it takes."""
    x, y, p = take(41, 203), take(41, 203), take(41, 203).abs() + 1e-3
    for name in words(
        "exp exp2 expm1 sin cos tan sinh cosh tanh asin acos atan asinh erf erfc sigmoid abs neg sign "
        "floor ceil round trunc frac square relu sgn"
    ):
        yield name, getattr(torch, name), (8 * x if name not in ("asin", "acos") else x,)
    for name in words("log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma"):
        yield name, getattr(torch, name), (8 * p,)
    for name in words("add sub mul div maximum minimum atan2 hypot fmod remainder"):
        yield name, getattr(torch, name), (x, y)
    for exponent in (0.5, 2, 3, -0.5, -1, 2.5):
        yield f"power {exponent}", lambda x, exponent=exponent: x**exponent, (p,)
    yield "power of both", torch.pow, (p, y)
    for name in [
        "sum",
        "mean",
        "var",
        "std",
        "norm",
        "amax",
        "amin",
        "prod",
        "logsumexp",
        "cumsum",
        "cumprod",
        "argmax",
        "argmin",
        "median",
    ]:
        for dim in (0, -1):
            yield f"{name} over {dim}", lambda x, name=name, dim=dim: getattr(torch, name)(x, dim=dim), (x,)
    for name in words("sum mean var std norm max min"):
        yield f"{name} of all", getattr(torch, name), (x,)
        yield f"{name} of many", getattr(torch, name), (take(100003),)
    yield "sort", lambda x: x.sort()[0], (x,)
    yield "topk", lambda x: x.topk(5)[0], (x,)
    index = torch.arange(41 * 203).view(41, 203) * 7 % 41
    yield "gather", lambda x: x.gather(0, index), (x,)
    yield "scatter", lambda x, y: x.scatter_add(0, index, y), (x, y)
    yield "index", lambda x: x[index[0]], (x,)
    yield "index put", lambda x, y: x.index_put((index[0][:41],), y, accumulate=True), (x, y)
    yield "select and join", lambda x, y: torch.cat([x[:7].flip(0), y.roll(3, 1)[5:]]), (x, y)
    yield "where", lambda x, y: torch.where(x > 0, x, y), (x, y)
    yield "clamp", lambda x: x.clamp(-0.2, 0.1), (x,)
    yield "einsum", lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), (take(2, 3, 17, 8), take(2, 3, 19, 8))
    yield "outer", torch.outer, (take(41), take(23))
    yield "matrix times vector", torch.mv, (take(41, 203), take(203))
    yield "dot", torch.dot, (take(2003), take(2003))
    yield "cosine", F.cosine_similarity, (x, y)
    yield "distances", torch.cdist, (take(60, 20), take(50, 20))
    yield "normalize", F.normalize, (x,)
    for rows, inner, columns in (
        (64, 1024, 512),
        (33, 257, 65),
        (1, 300, 77),
        (8, 2048, 10),
        (256, 96, 384),
        (7, 9, 1),
    ):
        a, b = take(rows, inner), take(inner, columns)
        yield f"product {rows}x{inner}x{columns}", torch.mm, (a, b)
        yield f"product of columns {rows}x{inner}x{columns}", torch.mm, (a.t().contiguous().t(), b.t().contiguous().t())
    yield "products", torch.bmm, (take(12, 33, 24), take(12, 24, 35))
    for causal in (False, True):
        queries = (take(2, 4, 133, 24), take(2, 4, 133, 24), take(2, 4, 133, 24))
        yield f"attention, {causal}", lambda *o, c=causal: F.scaled_dot_product_attention(*o, is_causal=c), queries
    yield (
        "attention with a mask",
        F.scaled_dot_product_attention,
        (*(take(2, 4, 33, 24) for _ in range(3)), take(33, 33)),
    )
    tokens = torch.arange(120).view(8, 15) * 7 % 50
    yield "embedding", lambda w: F.embedding(tokens, w), (take(50, 48),)
    yield "bag", lambda w: F.embedding_bag(tokens, w), (take(50, 48),)
    of_classes = torch.arange(41) % 203
    yield "cross entropy", lambda x: F.cross_entropy(8 * x, of_classes), (x,)
    yield "smoothed", lambda x: F.cross_entropy(8 * x, of_classes, label_smoothing=0.1), (x,)
    pixels = torch.arange(2 * 9 * 9).view(2, 9, 9) % 5
    yield "cross entropy of pixels", lambda x: F.cross_entropy(x, pixels, ignore_index=3), (take(2, 5, 9, 9),)
    for name in ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"]:
        yield name, getattr(F, name), (x, y)
    yield "binary cross entropy", F.binary_cross_entropy, (p.clamp(max=0.9), p.clamp(max=0.8))
    yield "divergence", lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), (x, y)
    yield "clip", lambda x, y: [nn.utils.clip_grad_norm_(_with_gradients(x, y), 0.1)], (x, y)
    yield "grid", lambda x, g: F.grid_sample(x, g, align_corners=False), (take(2, 3, 9, 9), 2 * take(2, 7, 7, 2))
    yield "conjugate transform", lambda x: torch.fft.rfft(x).abs(), (take(5, 128),)
    yield "linear algebra", lambda x: (torch.linalg.qr(x)[0], torch.linalg.inv(x)), (take(20, 20),)


def _with_gradients(*tensors: Tensor) -> list[nn.Parameter]:
    made = [nn.Parameter(x.detach().clone()) for x in tensors]
    for parameter in made:
        parameter.grad = parameter.detach() * 3
    return made
