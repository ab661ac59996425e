"""Attention on a CPU from products that are portable, in the place of torch's fused kernel, which asks MKL for them.

Of queries Q (L, D), keys K and values V (S, D), for each sample and head: P = softmax(scale Q K' + mask), out = P V.
With the gradient G of out, and the row sums of G * out taken off by softmax's own backward:

    dV = P' G,   dS = softmax_backward(G V', P),   dQ = scale dS K,   dK = scale dS' Q

P is computed once more in the backward pass rather than kept. Tiles of whole rows, of as many heads as fit into `TILE`
numbers, stay in the cache; a causal tile ends at its last row's diagonal. The tiles' sizes follow the shapes alone, so
they are the same on every CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

TILE = 1 << 17  # scores at a time: 512 kB
ROWS = 64  # at least, so that a tile is worth a product
FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def register(library: torch.library.Library) -> None:
    library.impl(FORWARD, forward, "CPU")
    library.impl(BACKWARD, backward, "CPU")


def forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, (batch, heads, L, D), and in the place of the logarithms of the sums, which nobody needs, NaN."""
    assert dropout_p == 0, "torch takes its fused kernel without dropout only"
    q, k, v = (_laid_out(x, query.shape[1]) for x in (query, key, value))
    made = torch.empty_like(q)
    for tile in _Tiles(q, k, attn_mask, is_causal, scale).all():
        tile.product(tile.softmax(), tile.cut(v), tile.rows(made))
    return made.to(query.dtype), q.new_full(q.shape[:3], torch.nan)


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    del out, logsumexp, dropout_p
    grad, q, k, v = (_laid_out(x, query.shape[1]) for x in (grad_out, query, key, value))
    tiles = _Tiles(q, k, attn_mask, is_causal, scale)
    dq, dk, dv = (
        torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2) for x in (q, k, v)
    )
    for tile in tiles.all():
        p, g = tile.softmax(), tile.rows(grad)
        dp = torch.empty_like(p)
        tile.product(g, tile.cut(v).mT, dp)
        tile.add(p.mT, g, dv)
        torch._softmax_backward_data(dp, p, -1, p.dtype, grad_input=dp)  # pyright: ignore
        tile.product(dp, tile.cut(k), tile.rows(dq))
        tile.add(dp.mT, tile.rows(tiles.q), dk)
    return dq.mul_(tiles.scale).to(query.dtype), _for_own_heads(dk, key), _for_own_heads(dv, value)


class _Tiles:
    """The scores of a call, a tile at a time. `q`: the scaled queries."""

    def __init__(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> None:
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.q, self.k, self.causal = q * self.scale, k, causal
        self.mask = None if mask is None else mask.to(q.dtype).expand(*q.shape[:3], k.shape[2])

    def all(self) -> Iterator[_Tile]:
        batch, heads, length, _ = self.q.shape
        columns = max(self.k.shape[2], 1)
        rows = min(length, max(ROWS, TILE // columns))
        together = max(1, TILE // max(rows * columns, 1))  # heads in a tile
        samples = max(1, together // max(heads, 1))
        for sample in range(0, batch, samples):
            for head in range(0, heads, min(together, heads)):
                for row in range(0, length, max(rows, 1)):
                    of = slice(sample, sample + samples), slice(head, head + together)
                    yield _Tile(self, of, slice(row, min(row + rows, length)))


class _Tile:
    """Some rows of some heads."""

    def __init__(self, tiles: _Tiles, of: tuple[slice, slice], rows: slice) -> None:
        self._tiles, self._of, self._rows = tiles, of, rows
        end = min(rows.stop, tiles.k.shape[2]) if tiles.causal else tiles.k.shape[2]
        self._columns = slice(0, end)

    def rows(self, x: Tensor) -> Tensor:
        return x[(*self._of, self._rows)]

    def cut(self, x: Tensor) -> Tensor:
        return x[(*self._of, self._columns)]

    def softmax(self) -> Tensor:
        tiles = self._tiles
        q, k = self.rows(tiles.q), self.cut(tiles.k)
        scores = q.new_empty((*q.shape[:3], k.shape[2]))
        self.product(q, k.mT, scores)
        if tiles.mask is not None:
            scores.add_(tiles.mask[(*self._of, self._rows, self._columns)])
        if tiles.causal:
            later = torch.ones(scores.shape[2:], dtype=torch.bool).triu_(self._rows.start + 1)
            scores.masked_fill_(later, -torch.inf)
        return torch._softmax(scores, -1, False, out=scores)  # pyright: ignore

    def product(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        with np.errstate(all="ignore"):
            np.matmul(a.detach().numpy(), b.detach().numpy(), out=out.numpy())

    def add(self, a: Tensor, b: Tensor, sums: Tensor) -> None:
        """a @ b to the rows of `sums` that the tile's columns are; to nothing, where it is the first to do so."""
        part = sums[(*self._of, self._columns)]
        if self._rows.start == 0:
            self.product(a, b, part)
            sums[(*self._of, slice(self._columns.stop, None))].zero_()
        else:
            made = torch.empty_like(part)
            self.product(a, b, made)
            part.add_(made)


def _laid_out(x: Tensor, heads: int) -> Tensor:
    """As products take it, with as many heads: each of `x` may serve several of the queries'."""
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    x = x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
    return (x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()).detach()


def _for_own_heads(gradient: Tensor, of: Tensor) -> Tensor:
    if gradient.shape != of.shape:
        gradient = gradient.unflatten(1, (of.shape[1], -1)).sum(2)
    return gradient.to(of.dtype)
