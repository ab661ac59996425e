"""`--bits portable`: bit-identical results on every x86 CPU with AVX2, of any vendor, at full speed.

The differences between such CPUs, and the measures against them:

- ATen, oneDNN and NumPy select kernels by the instruction set: all are restricted to AVX2 (`platform/cpu.py`).
- MKL selects kernels by the vendor. Restricted to COMPATIBLE they are the same everywhere, but products take three
  times as long. So NumPy's OpenBLAS computes products: its kernels for Haswell run on every CPU with AVX2, give the
  same bits there, take any layout, and loop over a batch in C.
- A few of MKL's functions refine the hardware's estimate of 1/x or 1/sqrt(x), which each vendor defines differently:
  square root, arc tangent, some logarithms. They are computed from functions that do not. IEEE 754 fixes the square
  root, and NumPy's is the hardware's own instruction.
- oneDNN's LSTM differs; torch's own, composed of products, does not.

`take_over` puts these kernels in the place of torch's, for this process and those that it forks. Invariant: a replaced
operator accepts the same arguments as torch's; for types without a replacement it calls torch's own kernel. bfloat16
products are computed in float32, because CPUs without AVX-512 do not have them.

Not covered: float64 except products, roots and logarithms, complex numbers, CUDA, code of torch.compile. This file
lists the operators that are known to be portable, and reports any other when it first runs.
"""

from __future__ import annotations

import ctypes
import math
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode  # pyright: ignore

from farandole.errors import UsageError
from farandole.platform import cpu

# --- pointwise --------------------------------------------------------------------------------------------------------
#
# Convolutions with a kernel of one pixel, computed as matrix products, where torch would call MKL: for images in the
# memory format channels_last.
#
# For pixels X (pixels, inputs) and weights W (outputs, inputs): Y = X W'. For the gradient G of Y: dX = G W and
# dW = G' X. In channels_last the pixels of all images lie one after the other, so each of these is one product. Other
# convolutions that torch computes by MKL are not replaced: they give the same bits everywhere, and are slow.

POINTWISE_FORWARD = "_slow_conv2d_forward"
POINTWISE_BACKWARD = "_slow_conv2d_backward.output_mask"
LAST = torch.channels_last


def register_pointwise(library: torch.library.Library) -> None:
    """Register the convolutions above in place of torch's."""
    theirs_forward = torch.library.get_kernel(f"aten::{POINTWISE_FORWARD}", "CPU")
    theirs_backward = torch.library.get_kernel(f"aten::{POINTWISE_BACKWARD}", "CPU")

    def forward(keys: Any, x: Tensor, weight: Tensor, kernel: Sequence[int], bias: Tensor | None,
                stride: Sequence[int], padding: Sequence[int]) -> Tensor:  # fmt: skip
        if not _is_pointwise(x, kernel, stride, padding):
            return theirs_forward.call_boxed(keys, x, weight, kernel, bias, stride, padding)
        pixels, matrix = _pixels(x), _matrix(weight).t()
        result = torch.mm(pixels, matrix) if bias is None else torch.addmm(bias, pixels, matrix)
        return _images(result, x)

    def backward(keys: Any, grad: Tensor, x: Tensor, weight: Tensor, kernel: Sequence[int], stride: Sequence[int],
                 padding: Sequence[int], mask: Sequence[bool]) -> tuple[Tensor | None, ...]:  # fmt: skip
        if not _is_pointwise(x, kernel, stride, padding):
            return theirs_backward.call_boxed(keys, grad, x, weight, kernel, stride, padding, mask)
        g, matrix = _pixels(grad.contiguous(memory_format=LAST)), _matrix(weight)
        return (
            _images(torch.mm(g, matrix), x) if mask[0] else None,
            torch.mm(g.t(), _pixels(x)).view(weight.shape) if mask[1] else None,
            g.sum(0) if mask[2] else None,
        )

    library.impl(POINTWISE_FORWARD, forward, "CPU", with_keyset=True)
    library.impl(POINTWISE_BACKWARD, backward, "CPU", with_keyset=True)


def _is_pointwise(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> bool:
    one = (*kernel, *stride) == (1, 1, 1, 1) and not any(padding)
    return one and x.dim() == 4 and x.dtype in (torch.float32, torch.float64) and x.is_contiguous(memory_format=LAST)


def _pixels(x: Tensor) -> Tensor:
    """View `x` (images, channels, height, width) as (pixels, channels), without a copy."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _images(pixels: Tensor, like: Tensor) -> Tensor:
    """View `pixels` (pixels, channels) as images of the size of `like`: the inverse of `_pixels`."""
    batch, _, height, width = like.shape
    return pixels.view(batch, height, width, -1).permute(0, 3, 1, 2)


def _matrix(weight: Tensor) -> Tensor:
    return weight.reshape(weight.shape[0], -1)


# --- attention --------------------------------------------------------------------------------------------------------
#
# Attention on a CPU from portable products. It replaces torch's fused kernel, which calls MKL for them.
#
# For queries Q (L, D), keys K and values V (S, D), for each sample and head: P = softmax(scale Q K' + mask), out = P V.
# For the gradient G of out (the backward of softmax subtracts the row sums of G * out):
#
#     dV = P' G,   dS = softmax_backward(G V', P),   dQ = scale dS K,   dK = scale dS' Q
#
# The backward pass computes P again instead of storing it. The work is done in tiles that stay in the CPU's cache:
# whole rows, of as many heads as fit into `TILE` numbers. A causal tile ends at the diagonal of its last row. The sizes
# of the tiles depend on the shapes alone, so they are the same on every CPU.

TILE = 1 << 17  # scores in a tile: 512 kB
ROWS = 64  # least rows of a tile: smaller products are inefficient
ATTENTION_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def register_attention(library: torch.library.Library) -> None:
    """Register the attention above in place of torch's."""
    library.impl(ATTENTION_FORWARD, forward, "CPU")
    library.impl(ATTENTION_BACKWARD, backward, "CPU")


def forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output (batch, heads, L, D), and NaN instead of the logarithms of the sums, which nothing reads."""
    assert dropout_p == 0, "torch calls its fused kernel only without dropout"
    q, k, v = (_laid_out(x, query.shape[1]) for x in (query, key, value))
    output = torch.empty_like(q)
    for tile in _Tiles(q, k, attn_mask, is_causal, scale).all():
        tile.product(tile.softmax(), tile.cut(v), tile.rows(output))
    return output.to(query.dtype), q.new_full(q.shape[:3], torch.nan)


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value."""
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
    """The tiles of the scores of one call. `q`: the scaled queries."""

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
                    batch_part = slice(sample, sample + samples), slice(head, head + together)
                    yield _Tile(self, batch_part, slice(row, min(row + rows, length)))


class _Tile:
    """Some rows of the scores, for some samples and heads (`batch_part`)."""

    def __init__(self, tiles: _Tiles, batch_part: tuple[slice, slice], rows: slice) -> None:
        self._tiles, self._batch_part, self._rows = tiles, batch_part, rows
        end = min(rows.stop, tiles.k.shape[2]) if tiles.causal else tiles.k.shape[2]
        self._columns = slice(0, end)

    def rows(self, x: Tensor) -> Tensor:
        """Return the part of `x` (batch, heads, L, D) that belongs to the tile's rows."""
        return x[(*self._batch_part, self._rows)]

    def cut(self, x: Tensor) -> Tensor:
        """Return the part of `x` (batch, heads, S, D) that belongs to the tile's columns."""
        return x[(*self._batch_part, self._columns)]

    def softmax(self) -> Tensor:
        """Return P for the tile."""
        tiles = self._tiles
        q, k = self.rows(tiles.q), self.cut(tiles.k)
        scores = q.new_empty((*q.shape[:3], k.shape[2]))
        self.product(q, k.mT, scores)
        if tiles.mask is not None:
            scores.add_(tiles.mask[(*self._batch_part, self._rows, self._columns)])
        if tiles.causal:
            later = torch.ones(scores.shape[2:], dtype=torch.bool).triu_(self._rows.start + 1)
            scores.masked_fill_(later, -torch.inf)
        return torch._softmax(scores, -1, False, out=scores)  # pyright: ignore

    def product(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        with np.errstate(all="ignore"):
            np.matmul(a.detach().numpy(), b.detach().numpy(), out=out.numpy())

    def add(self, a: Tensor, b: Tensor, sums: Tensor) -> None:
        """Add a @ b to the part of `sums` that belongs to the tile's columns.

        The first tile of a head sets this part, and sets the rest of `sums` to zero.
        """
        part = sums[(*self._batch_part, self._columns)]
        if self._rows.start == 0:
            self.product(a, b, part)
            sums[(*self._batch_part, slice(self._columns.stop, None))].zero_()
        else:
            product = torch.empty_like(part)
            self.product(a, b, product)
            part.add_(product)


def _laid_out(x: Tensor, heads: int) -> Tensor:
    """Return `x` in a layout that products accept, with `heads` heads.

    One head of `x` may serve several query heads.
    """
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    x = x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
    return (x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()).detach()


def _for_own_heads(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum the gradients of the query heads that share one head of `like`."""
    if gradient.shape != like.shape:
        gradient = gradient.unflatten(1, (like.shape[1], -1)).sum(2)
    return gradient.to(like.dtype)


# --- portable ---------------------------------------------------------------------------------------------------------

HALVES = (torch.bfloat16, torch.float16)
ROOT_HALF, LN2 = math.sqrt(0.5), math.log(2.0)
_library: torch.library.Library | None = None  # the registered kernels live as long as this object


def take_over(threads: int, device: torch.device) -> None:
    """Make this process compute portable results from now on, with `threads` intra-op threads.

    Raises:
        UsageError: this process can't; the message has the reason.
    """
    global _library
    if device.type != "cpu":
        raise UsageError(f"--bits portable: the device is {device}, but results are portable only on CPUs; hide it "
                         f"with CUDA_VISIBLE_DEVICES= or use --bits same")  # fmt: skip
    blas, capability, missing = _openblas(), torch.backends.cpu.get_cpu_capability(), cpu.missing()
    differences = [f"{name} is {os.environ.get(name, 'not set')}" for name in missing]
    differences += [f"OpenBLAS computes for {blas.core}"] if blas.core != "Haswell" else []
    differences += [f"torch computes with {capability}"] if capability != "AVX2" else []
    if differences and (missing or capability == "AVX512"):
        raise UsageError(f"--bits portable: torch is imported already, with other settings ({', '.join(differences)}); "
                         f"{cpu.remedy()}")  # fmt: skip
    if differences:
        raise UsageError(f"--bits portable: {', '.join(differences)}, but a CPU with AVX2 is required; use --bits same")
    blas.set_threads(threads)
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of each replaced kernel
            _register(_library)


def _register(library: torch.library.Library) -> None:
    def put(name: str, function: Callable[..., Any], takes: Callable[[Tensor], bool] | None = None) -> None:
        """Replace aten::`name` if `takes` returns True for the first tensor (None: for all)."""
        if takes is None:
            library.impl(name, function, "CPU")
            return
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

        def either(keys: Any, first: Tensor, *more: Any, **options: Any) -> Any:
            return (
                function(first, *more, **options) if takes(first) else kernel.call_boxed(keys, first, *more, **options)
            )

        library.impl(name, either, "CPU", with_keyset=True)

    for name, product in {"mm": _product, "bmm": _product}.items():
        put(name, product, _real)
        put(f"{name}.out", _with_out_argument(product), _real)
    for name in ("addmm", "baddbmm"):
        put(name, _added, _real)
        put(f"{name}.out", _with_out_argument(_added), _real)
        put(f"{name}_", _in_place(_added), _real)
    functions = {"sqrt": (_root, _wide), "atan": (_arc_tangent, _wide), "log": (_logarithm, _is_double)}
    functions |= {"tan": (_tangent, _is_double)}
    functions |= {"log2": (_logarithm_2, _wide), "log10": (_logarithm_10, _wide)}
    for name, (function, takes) in functions.items():
        put(name, function, takes)
        put(f"{name}.out", _with_out_argument(function), takes)
        put(f"{name}_", _in_place(function), takes)
    for name in ("pow.Tensor_Scalar", "pow_.Scalar", "pow.Tensor_Scalar_out"):
        _put_power(library, name)
    for name in ("lstm.input", "lstm.data"):
        _put_lstm(library, name)
    register_attention(library)
    register_pointwise(library)


# --- products ------------------------------------------------------------------------------------------------------


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, for shapes (m, k) and (k, n), or (batch, m, k) and (batch, k, n)."""
    if a.dtype in HALVES:
        return _product(a.float(), b.float()).to(a.dtype)
    product = a.new_empty((*a.shape[:-1], b.shape[-1]))
    with np.errstate(all="ignore"):
        np.matmul(_array(a), _array(b), out=product.numpy())
    return product


def _added(self: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta * self + alpha * (a @ b)."""
    if a.dtype in HALVES:
        return _added(self.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(a.dtype)
    product = _product(a, b)
    if alpha != 1:
        product.mul_(alpha)
    return product.add_(self, alpha=beta) if beta else product  # if beta is 0, torch ignores even a NaN in `self`


def _array(x: Tensor) -> np.ndarray[Any, Any]:
    """Return `x` as an array that OpenBLAS accepts: its rows or its columns are contiguous."""
    (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
    if not ((across == 1 and down >= columns) or (down == 1 and across >= rows)):
        x = x.contiguous()
    return x.detach().numpy()


# --- functions -----------------------------------------------------------------------------------------------------


def _root(x: Tensor) -> Tensor:
    x = _floating(x)
    root = torch.empty_like(x)
    with np.errstate(all="ignore"):
        np.sqrt(x.detach().numpy(), out=root.numpy())
    return root


def _arc_tangent(x: Tensor) -> Tensor:
    x = _floating(x)
    return torch.atan2(x, x.new_ones(()))


def _tangent(x: Tensor) -> Tensor:
    return torch.sin(x) / torch.cos(x)


def _logarithm(x: Tensor) -> Tensor:
    """Return log1p(m - 1) + e log 2 for x = m 2^e with m from sqrt(1/2) to sqrt(2), where m - 1 is exact."""
    mantissa, exponent = torch.frexp(x.double())
    small = mantissa.abs() < ROOT_HALF
    mantissa = torch.where(small, 2 * mantissa, mantissa)
    return torch.log1p(mantissa - 1) + (exponent - small.int()) * LN2


def _logarithm_2(x: Tensor) -> Tensor:
    return (_logarithm(x) / LN2).to(_floating(x).dtype)


def _logarithm_10(x: Tensor) -> Tensor:
    return (_logarithm(x) / math.log(10.0)).to(_floating(x).dtype)


def _put_power(library: torch.library.Library, name: str) -> None:
    """Replace x ** 0.5, for which torch calls MKL's square root."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def power(keys: Any, x: Tensor, exponent: float, **out: Tensor) -> Tensor:
        if exponent != 0.5 or not _wide(x):
            return kernel.call_boxed(keys, x, exponent, **out)
        if name == "pow_.Scalar":
            return x.sqrt_()
        return torch.sqrt(x, **out)

    library.impl(name, power, "CPU", with_keyset=True)


def _put_lstm(library: torch.library.Library, name: str) -> None:
    """Replace oneDNN's LSTM by torch's own."""
    packet = getattr(torch.ops.aten.lstm, name.partition(".")[2])

    def lstm(*arguments: Any) -> Any:
        enabled = torch._C._get_mkldnn_enabled()  # pyright: ignore
        torch._C._set_mkldnn_enabled(False)  # pyright: ignore
        try:
            return packet.decompose(*arguments)
        finally:
            torch._C._set_mkldnn_enabled(enabled)  # pyright: ignore

    for key in ("CPU", "AutogradCPU"):
        library.impl(name, lstm, key)


# --- types and forms -----------------------------------------------------------------------------------------------


def _real(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64, *HALVES)


def _wide(x: Tensor) -> bool:
    """Return True for a type for which torch calls MKL. Integers are converted to floating point first."""
    return not x.is_complex() and x.dtype not in HALVES


def _is_double(x: Tensor) -> bool:
    return x.dtype is torch.float64


def _floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def _with_out_argument(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def put(*inputs: Any, out: Tensor, **options: Any) -> Tensor:
        result = function(*inputs, **options)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return put


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def put(x: Tensor, *inputs: Any, **options: Any) -> Tensor:
        return x.copy_(function(x, *inputs, **options))

    return put


# --- OpenBLAS ------------------------------------------------------------------------------------------------------


class _OpenBlas:
    """The OpenBLAS that NumPy has loaded. `core`: the CPU for which it selects kernels."""

    def __init__(self, path: str) -> None:
        self._loaded = ctypes.CDLL(path)
        self._core = self._symbol("openblas_get_corename")
        self._core.restype = ctypes.c_char_p
        self.core = self._core().decode()

    def set_threads(self, threads: int) -> None:
        self._symbol("openblas_set_num_threads")(ctypes.c_int(threads))

    def _symbol(self, name: str) -> Any:
        for symbol in (f"scipy_{name}64_", f"{name}64_", name):
            if hasattr(self._loaded, symbol):
                return getattr(self._loaded, symbol)
        raise UsageError(_NO_OPENBLAS)


_NO_OPENBLAS = "--bits portable: this NumPy does not use OpenBLAS on Linux; install the NumPy package of PyPI"


def _openblas() -> _OpenBlas:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text().splitlines() if maps.exists() else []
    for line in loaded:
        path = line.partition("/")[2]
        if "openblas" in path.rpartition("/")[2] and "numpy" in path:
            return _OpenBlas("/" + path)
    raise UsageError(_NO_OPENBLAS)


# --- known ------------------------------------------------------------------------------------------------------------
#
# Operators that are known to be portable, by the types of their floating operands other than float32.
#
# `python -m tests.numerics.sweep --write` generates this list. Each operator has run in one or more of 1,855
# computations, forward and backward, that gave the same bits on three CPUs: one with AVX-512, an EPYC and a Haswell.

KNOWN_BY_TYPES = {
    "": """
    aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool2d_backward.default aten._adaptive_avg_pool3d.default
    aten._adaptive_avg_pool3d_backward.default aten._batch_norm_with_update.default aten._cdist_backward.default
    aten._cdist_forward.default aten._chunk_cat.default aten._ctc_loss.Tensor aten._ctc_loss.default
    aten._ctc_loss_backward.Tensor aten._ctc_loss_backward.default aten._efficientzerotensor.default
    aten._embedding_bag.default aten._embedding_bag_backward.default
    aten._embedding_bag_per_sample_weights_backward.default aten._euclidean_dist.default aten._fft_r2c.default
    aten._foreach_abs.default aten._foreach_add.List aten._foreach_add.Scalar aten._foreach_add_.List
    aten._foreach_add_.Scalar aten._foreach_add_.ScalarList aten._foreach_add_.Tensor aten._foreach_addcdiv_.Scalar
    aten._foreach_addcdiv_.ScalarList aten._foreach_addcmul_.Scalar aten._foreach_clamp_min_.Scalar
    aten._foreach_copy_.default aten._foreach_div_.List aten._foreach_div_.ScalarList aten._foreach_lerp_.Scalar
    aten._foreach_lerp_.ScalarList aten._foreach_maximum_.List aten._foreach_mul.List aten._foreach_mul.ScalarList
    aten._foreach_mul_.List aten._foreach_mul_.Scalar aten._foreach_mul_.ScalarList aten._foreach_mul_.Tensor
    aten._foreach_norm.Scalar aten._foreach_reciprocal_.default aten._foreach_rsqrt_.default aten._foreach_sign_.default
    aten._foreach_sqrt.default aten._foreach_sqrt_.default aten._foreach_sub.List aten._fused_adagrad_.default
    aten._fused_adam_.default aten._fused_adamw_.default aten._fused_sgd_.default aten._histogramdd_bin_edges.default
    aten._histogramdd_from_bin_cts.default aten._histogramdd_from_bin_tensors.default aten._linalg_check_errors.default
    aten._linalg_det.default aten._linalg_eigh.default aten._linalg_slogdet.default aten._linalg_solve_ex.default
    aten._linalg_svd.default aten._local_scalar_dense.default aten._log_softmax.default
    aten._log_softmax_backward_data.default aten._native_batch_norm_legit.default
    aten._native_multi_head_attention.default aten._pdist_backward.default aten._pdist_forward.default
    aten._prelu_kernel.default aten._prelu_kernel_backward.default aten._safe_softmax.default
    aten._scaled_dot_product_flash_attention_for_cpu.default
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default aten._segment_reduce_backward.default
    aten._softmax.default aten._softmax_backward_data.default aten._sparse_mm_reduce_impl.default
    aten._sparse_mm_reduce_impl_backward.default aten._to_copy.default aten._to_dense.default aten._to_sparse.default
    aten._to_sparse.sparse_dim aten._to_sparse_csr.default aten._transformer_encoder_layer_fwd.default
    aten._trilinear.default aten._unique.default aten._unique2.default aten._unsafe_masked_index.default
    aten._unsafe_masked_index_put_accumulate.default aten._unsafe_view.default aten._upsample_bilinear2d_aa.default
    aten._upsample_bilinear2d_aa_backward.default aten._upsample_nearest_exact1d.default
    aten._upsample_nearest_exact1d_backward.default aten.abs.default aten.abs_.default aten.acos.default
    aten.acosh.default aten.adaptive_max_pool2d.default aten.adaptive_max_pool2d_backward.default
    aten.adaptive_max_pool3d.default aten.adaptive_max_pool3d_backward.default aten.add.Scalar aten.add.Tensor
    aten.add_.Scalar aten.add_.Tensor aten.addbmm.default aten.addcdiv.default aten.addcdiv_.default
    aten.addcmul.default aten.addcmul_.default aten.addmm.default aten.addmm.out aten.addmm_.default aten.addmv.default
    aten.addr.default aten.alias.default aten.alias_copy.default aten.all.default aten.all.dim aten.all.dims
    aten.allclose.default aten.amax.default aten.amax.out aten.amin.default aten.aminmax.default aten.angle.default
    aten.any.default aten.any.dim aten.any.dims aten.arange.default aten.arange.start aten.arange.start_step
    aten.argmax.default aten.argmin.default aten.as_strided.default aten.as_strided_copy.default
    aten.as_strided_scatter.default aten.asin.default aten.asinh.default aten.atan.default aten.atan2.default
    aten.atanh.default aten.avg_pool2d.default aten.avg_pool2d_backward.default aten.avg_pool3d.default
    aten.avg_pool3d_backward.default aten.baddbmm.default aten.batch_norm_backward.default aten.bernoulli.default
    aten.bernoulli_.float aten.binary_cross_entropy.default aten.binary_cross_entropy_backward.default
    aten.binary_cross_entropy_with_logits.default aten.bincount.default aten.bitwise_and.Tensor aten.bitwise_and_.Tensor
    aten.bitwise_left_shift.Tensor aten.bitwise_not.default aten.bitwise_or.Tensor aten.bitwise_or_.Tensor
    aten.bitwise_right_shift.Tensor aten.bitwise_xor.Tensor aten.block_diag.default aten.bmm.default
    aten.bucketize.Tensor aten.cat.default aten.cauchy_.default aten.ceil.default aten.ceil_.default aten.celu.default
    aten.channel_shuffle.default aten.cholesky_solve.default aten.clamp.Tensor aten.clamp.default aten.clamp_.default
    aten.clamp_max.Tensor aten.clamp_min.Tensor aten.clamp_min.default aten.clamp_min_.Tensor aten.clamp_min_.default
    aten.clone.default aten.col2im.default aten.complex.default aten.constant_pad_nd.default aten.convolution.default
    aten.convolution_backward.default aten.copy_.default aten.copysign.Tensor aten.cos.default aten.cosh.default
    aten.count_nonzero.default aten.count_nonzero.dim_IntList aten.cummax.default aten.cummin.default
    aten.cumprod.default aten.cumsum.default aten.cumsum_.default aten.deg2rad.default aten.detach.default
    aten.diag_embed.default aten.diagonal.default aten.diagonal_backward.default aten.diagonal_copy.default
    aten.diagonal_scatter.default aten.digamma.default aten.digamma_.default aten.dist.default aten.div.Scalar
    aten.div.Tensor aten.div.Tensor_mode aten.div.out aten.div_.Scalar aten.div_.Tensor aten.dot.default
    aten.elu.default aten.elu_backward.default aten.embedding.default aten.embedding_dense_backward.default
    aten.empty.memory_format aten.empty_like.default aten.eq.Scalar aten.eq.Tensor aten.equal.default aten.erf.default
    aten.erfc.default aten.erfinv.default aten.exp.default aten.exp2.default aten.exp_.default aten.expand.default
    aten.expand_copy.default aten.expm1.default aten.exponential_.default aten.eye.default aten.eye.m aten.fill.Scalar
    aten.fill_.Scalar aten.fill_.Tensor aten.flip.default aten.floor.default aten.floor_divide.default aten.fmax.default
    aten.fmin.default aten.fmod.Tensor aten.frac.default aten.fractional_max_pool2d.default
    aten.fractional_max_pool2d_backward.default aten.fractional_max_pool3d.default
    aten.fractional_max_pool3d_backward.default aten.frexp.Tensor aten.full.default aten.full_like.default
    aten.gather.default aten.gcd.default aten.ge.Scalar aten.ge.Tensor aten.gelu.default aten.gelu_backward.default
    aten.geometric_.default aten.geqrf.default aten.glu.default aten.glu_backward.default aten.gt.Scalar aten.gt.Tensor
    aten.hardshrink.default aten.hardshrink_backward.default aten.hardsigmoid.default aten.hardsigmoid_backward.default
    aten.hardswish.default aten.hardswish_backward.default aten.hardtanh.default aten.hardtanh_backward.default
    aten.hash_tensor.default aten.heaviside.default aten.histc.default aten.histogram.bin_ct aten.histogram.bins_tensor
    aten.huber_loss.default aten.huber_loss_backward.default aten.hypot.default aten.i0.default aten.igamma.default
    aten.igammac.default aten.im2col.default aten.index.Tensor aten.index_add.default aten.index_add_.default
    aten.index_copy.default aten.index_fill.int_Scalar aten.index_fill.int_Tensor aten.index_put.default
    aten.index_put_.default aten.index_reduce.default aten.index_select.default aten.isin.Tensor_Tensor
    aten.isinf.default aten.isnan.default aten.isneginf.default aten.isposinf.default aten.kthvalue.default
    aten.lcm.default aten.ldexp.Tensor aten.le.Scalar aten.le.Tensor aten.leaky_relu.default
    aten.leaky_relu_backward.default aten.lerp.Scalar aten.lerp.Tensor aten.lerp_.Scalar aten.lerp_.Tensor
    aten.lgamma.default aten.lift_fresh.default aten.linalg_cholesky_ex.default aten.linalg_cross.default
    aten.linalg_eig.default aten.linalg_householder_product.default aten.linalg_inv_ex.default
    aten.linalg_ldl_factor_ex.default aten.linalg_ldl_solve.default aten.linalg_lu.default
    aten.linalg_lu_factor_ex.default aten.linalg_lu_solve.default aten.linalg_matrix_exp.default
    aten.linalg_pinv.atol_rtol_tensor aten.linalg_qr.default aten.linalg_solve_triangular.default
    aten.linalg_vector_norm.default aten.linspace.Scalar_Tensor aten.linspace.Tensor_Scalar aten.linspace.Tensor_Tensor
    aten.linspace.default aten.log.default aten.log10.default aten.log1p.default aten.log2.default aten.log_.default
    aten.log_normal_.default aten.log_sigmoid_backward.default aten.log_sigmoid_forward.default aten.logaddexp.default
    aten.logaddexp2.default aten.logcumsumexp.default aten.logical_and.default aten.logical_and_.default
    aten.logical_not.default aten.logical_not_.default aten.logical_or.default aten.logical_or_.default
    aten.logical_xor.default aten.logit.default aten.logit_backward.default aten.logspace.Scalar_Tensor
    aten.logspace.Tensor_Scalar aten.logspace.Tensor_Tensor aten.logspace.default aten.logsumexp.default aten.lt.Scalar
    aten.lt.Tensor aten.lu_unpack.default aten.masked_fill.Scalar aten.masked_fill.Tensor aten.masked_fill_.Scalar
    aten.masked_scatter.default aten.masked_scatter_backward.default aten.masked_select.default aten.max.default
    aten.max.dim aten.max_pool2d_with_indices.default aten.max_pool2d_with_indices_backward.default
    aten.max_pool3d_with_indices.default aten.max_pool3d_with_indices_backward.default aten.max_unpool2d.default
    aten.max_unpool3d.default aten.maximum.default aten.maximum.out aten.mean.default aten.mean.dim aten.median.default
    aten.median.dim aten.min.default aten.min.dim aten.minimum.default aten.mish.default aten.mish_backward.default
    aten.mm.default aten.mm.out aten.mode.default aten.mse_loss.default aten.mse_loss_backward.default aten.mul.Scalar
    aten.mul.Tensor aten.mul.out aten.mul_.Scalar aten.mul_.Tensor aten.multi_margin_loss.default
    aten.multi_margin_loss_backward.default aten.multilabel_margin_loss_backward.default
    aten.multilabel_margin_loss_forward.default aten.multinomial.default aten.mv.default aten.mvlgamma.default
    aten.nan_to_num.default aten.nanmedian.default aten.nanmedian.dim aten.nansum.default aten.narrow_copy.default
    aten.native_batch_norm.default aten.native_batch_norm_backward.default aten.native_dropout_backward.default
    aten.native_group_norm.default aten.native_group_norm_backward.default aten.native_layer_norm.default
    aten.native_layer_norm_backward.default aten.ne.Scalar aten.ne.Tensor aten.neg.default aten.neg_.default
    aten.new_empty.default aten.new_empty_strided.default aten.new_full.default aten.new_ones.default
    aten.new_zeros.default aten.nextafter.default aten.nll_loss2d_backward.default aten.nll_loss2d_forward.default
    aten.nll_loss_backward.default aten.nll_loss_forward.default aten.nonzero.default aten.nonzero_static.default
    aten.norm.ScalarOpt_dim aten.normal.Tensor_Tensor aten.normal.Tensor_float aten.normal.float_float
    aten.normal_.default aten.ones.default aten.ones_like.default aten.ormqr.default aten.permute.default
    aten.permute_copy.default aten.pixel_shuffle.default aten.pixel_unshuffle.default aten.polar.default
    aten.polygamma.default aten.pow.Scalar aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor aten.pow_.Scalar
    aten.prod.default aten.prod.dim_int aten.put.default aten.rad2deg.default aten.rand.default aten.rand.generator
    aten.rand_like.default aten.randint.default aten.randint.low aten.randint.low_generator aten.randint_like.default
    aten.randint_like.low_dtype aten.randn.default aten.randn.generator aten.randn_like.default aten.random_.default
    aten.randperm.default aten.randperm.generator aten.reciprocal.default aten.reciprocal_.default
    aten.reflection_pad1d.default aten.reflection_pad1d_backward.default aten.reflection_pad2d.default
    aten.reflection_pad2d_backward.default aten.relu.default aten.relu_.default aten.remainder.Scalar
    aten.remainder.Tensor aten.renorm.default aten.repeat.default aten.repeat_interleave.Tensor
    aten.replication_pad1d.default aten.replication_pad1d_backward.default aten.replication_pad2d.default
    aten.replication_pad2d_backward.default aten.resize_.default aten.resize_as_.default aten.roll.default
    aten.rot90.default aten.round.decimals aten.round.default aten.rrelu_with_noise.default
    aten.rrelu_with_noise_backward.default aten.rsqrt.default aten.rsqrt_.default aten.rsub.Scalar aten.rsub.Tensor
    aten.scalar_tensor.default aten.scatter.src aten.scatter.value aten.scatter_.value aten.scatter_add.default
    aten.scatter_reduce.two aten.searchsorted.Tensor aten.segment_reduce.default aten.select.int
    aten.select_backward.default aten.select_scatter.default aten.sgn.default aten.sigmoid.default aten.sigmoid_.default
    aten.sigmoid_backward.default aten.sign.default aten.signbit.default aten.silu.default aten.silu_backward.default
    aten.sin.default aten.sinc.default aten.sinh.default aten.slice.Tensor aten.slice_backward.default
    aten.slice_scatter.default aten.smooth_l1_loss.default aten.smooth_l1_loss_backward.default
    aten.soft_margin_loss.default aten.soft_margin_loss_backward.default aten.softplus.default
    aten.softplus_backward.default aten.softshrink.default aten.softshrink_backward.default aten.sort.default
    aten.sort.stable aten.sparse_mask.default aten.sparse_sampled_addmm.default aten.special_airy_ai.default
    aten.special_bessel_j0.default aten.special_bessel_j1.default aten.special_bessel_y0.default
    aten.special_bessel_y1.default aten.special_chebyshev_polynomial_t.default
    aten.special_chebyshev_polynomial_u.default aten.special_chebyshev_polynomial_v.default
    aten.special_chebyshev_polynomial_w.default aten.special_entr.default aten.special_erfcx.default
    aten.special_hermite_polynomial_h.default aten.special_hermite_polynomial_he.default aten.special_i0e.default
    aten.special_i1.default aten.special_i1e.default aten.special_laguerre_polynomial_l.default
    aten.special_legendre_polynomial_p.default aten.special_log_ndtr.default aten.special_modified_bessel_i0.default
    aten.special_modified_bessel_i1.default aten.special_modified_bessel_k0.default
    aten.special_modified_bessel_k1.default aten.special_ndtri.default aten.special_scaled_modified_bessel_k0.default
    aten.special_scaled_modified_bessel_k1.default aten.special_shifted_chebyshev_polynomial_t.default
    aten.special_shifted_chebyshev_polynomial_u.default aten.special_shifted_chebyshev_polynomial_v.default
    aten.special_shifted_chebyshev_polynomial_w.default aten.special_spherical_bessel_j0.default
    aten.special_xlog1py.default aten.special_zeta.default aten.split.Tensor aten.split_with_sizes.default
    aten.split_with_sizes_copy.default aten.sqrt.default aten.sqrt_.default aten.squeeze.default aten.squeeze.dim
    aten.squeeze.dims aten.squeeze_.dim aten.squeeze_copy.default aten.squeeze_copy.dim aten.stack.default
    aten.std.correction aten.std_mean.correction aten.sub.Scalar aten.sub.Tensor aten.sub_.Tensor aten.sum.default
    aten.sum.dim_IntList aten.t.default aten.t_.default aten.t_copy.default aten.take.default aten.tan.default
    aten.tanh.default aten.tanh_.default aten.tanh_backward.default aten.threshold.default
    aten.threshold_backward.default aten.topk.default aten.trace.default aten.transpose.int aten.transpose_.default
    aten.transpose_copy.int aten.triangular_solve.default aten.tril.default aten.tril_.default aten.tril_indices.default
    aten.triu.default aten.triu_.default aten.triu_indices.default aten.trunc.default aten.unbind.int
    aten.unbind_copy.int aten.unfold.default aten.unfold_backward.default aten.unfold_copy.default aten.uniform_.default
    aten.unique_consecutive.default aten.unsafe_split.Tensor aten.unsqueeze.default aten.unsqueeze_.default
    aten.unsqueeze_copy.default aten.upsample_bicubic2d.default aten.upsample_bicubic2d_backward.default
    aten.upsample_bilinear2d.default aten.upsample_bilinear2d_backward.default aten.upsample_linear1d.default
    aten.upsample_linear1d_backward.default aten.upsample_nearest1d.default aten.upsample_nearest1d_backward.default
    aten.upsample_nearest2d.default aten.upsample_nearest2d_backward.default aten.upsample_trilinear3d.default
    aten.upsample_trilinear3d_backward.default aten.var.correction aten.var_mean.correction aten.vdot.default
    aten.view.default aten.view.dtype aten.view_as_complex.default aten.view_copy.default aten.where.self
    aten.xlogy.Tensor aten.zero_.default aten.zeros.default aten.zeros_like.default
    torch_nn._linear_cross_entropy_batch_chunked.default
    torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default
    """,
    "bfloat16": """
    aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool2d_backward.default aten._embedding_bag.default
    aten._embedding_bag_backward.default aten._euclidean_dist.default aten._foreach_mul_.Tensor
    aten._foreach_norm.Scalar aten._local_scalar_dense.default aten._log_softmax.default
    aten._log_softmax_backward_data.default aten._native_multi_head_attention.default aten._prelu_kernel.default
    aten._prelu_kernel_backward.default aten._scaled_dot_product_flash_attention_for_cpu.default
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default aten._softmax.default
    aten._softmax_backward_data.default aten._to_copy.default aten._transformer_encoder_layer_fwd.default
    aten._unsafe_view.default aten.abs.default aten.acos.default aten.adaptive_max_pool2d.default
    aten.adaptive_max_pool2d_backward.default aten.add.Scalar aten.add.Tensor aten.add_.Scalar aten.add_.Tensor
    aten.addmm.default aten.amax.default aten.amin.default aten.argmax.default aten.argmin.default aten.asin.default
    aten.asinh.default aten.atan.default aten.atan2.default aten.avg_pool2d.default aten.avg_pool2d_backward.default
    aten.bernoulli_.float aten.binary_cross_entropy.default aten.binary_cross_entropy_backward.default
    aten.binary_cross_entropy_with_logits.default aten.bmm.default aten.cat.default aten.ceil.default aten.celu.default
    aten.clamp.default aten.clamp_min.default aten.clamp_min_.Tensor aten.clone.default aten.col2im.default
    aten.constant_pad_nd.default aten.convolution.default aten.convolution_backward.default aten.copy_.default
    aten.cos.default aten.cosh.default aten.cumprod.default aten.cumsum.default aten.detach.default aten.digamma.default
    aten.div.Scalar aten.div.Tensor aten.div.Tensor_mode aten.div_.Scalar aten.dot.default aten.elu.default
    aten.elu_backward.default aten.embedding.default aten.embedding_dense_backward.default aten.empty_like.default
    aten.eq.Scalar aten.eq.Tensor aten.equal.default aten.erf.default aten.erfc.default aten.exp.default
    aten.exp2.default aten.expand.default aten.expm1.default aten.flip.default aten.floor.default aten.fmod.Tensor
    aten.frac.default aten.gather.default aten.ge.Scalar aten.gelu.default aten.gelu_backward.default aten.glu.default
    aten.glu_backward.default aten.grid_sampler_2d.default aten.grid_sampler_2d_backward.default aten.gt.Scalar
    aten.gt.Tensor aten.hardsigmoid.default aten.hardsigmoid_backward.default aten.hardswish.default
    aten.hardswish_backward.default aten.hardtanh.default aten.hardtanh_backward.default aten.huber_loss.default
    aten.huber_loss_backward.default aten.hypot.default aten.im2col.default aten.index.Tensor aten.index_put.default
    aten.isnan.default aten.le.Scalar aten.leaky_relu.default aten.leaky_relu_backward.default aten.lgamma.default
    aten.lift_fresh.default aten.linalg_vector_norm.default aten.log.default aten.log10.default aten.log1p.default
    aten.log2.default aten.log_sigmoid_backward.default aten.log_sigmoid_forward.default aten.logit.default
    aten.logsumexp.default aten.lt.Tensor aten.masked_fill.Scalar aten.masked_fill_.Scalar aten.max.default
    aten.max_pool2d_with_indices.default aten.max_pool2d_with_indices_backward.default aten.maximum.default
    aten.mean.default aten.mean.dim aten.median.dim aten.min.default aten.minimum.default aten.mish.default
    aten.mish_backward.default aten.mm.default aten.mse_loss.default aten.mse_loss_backward.default aten.mul.Scalar
    aten.mul.Tensor aten.mul_.Scalar aten.mul_.Tensor aten.mv.default aten.native_batch_norm.default
    aten.native_batch_norm_backward.default aten.native_group_norm.default aten.native_group_norm_backward.default
    aten.native_layer_norm.default aten.native_layer_norm_backward.default aten.neg.default aten.neg_.default
    aten.new_empty.default aten.new_zeros.default aten.nll_loss2d_backward.default aten.nll_loss2d_forward.default
    aten.nll_loss_backward.default aten.nll_loss_forward.default aten.permute.default aten.pixel_shuffle.default
    aten.pixel_unshuffle.default aten.polygamma.default aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor aten.prod.dim_int
    aten.reciprocal.default aten.reflection_pad2d.default aten.reflection_pad2d_backward.default aten.relu.default
    aten.remainder.Tensor aten.repeat.default aten.replication_pad2d.default aten.replication_pad2d_backward.default
    aten.roll.default aten.round.default aten.rsqrt.default aten.scatter.src aten.scatter_add.default aten.select.int
    aten.select_backward.default aten.sgn.default aten.sigmoid.default aten.sigmoid_.default
    aten.sigmoid_backward.default aten.sign.default aten.silu.default aten.silu_backward.default aten.sin.default
    aten.sinh.default aten.slice.Tensor aten.slice_backward.default aten.smooth_l1_loss.default
    aten.smooth_l1_loss_backward.default aten.softplus.default aten.softplus_backward.default aten.softshrink.default
    aten.softshrink_backward.default aten.sort.default aten.split.Tensor aten.sqrt.default aten.squeeze.dim
    aten.stack.default aten.std.correction aten.sub.Scalar aten.sub.Tensor aten.sum.default aten.sum.dim_IntList
    aten.t.default aten.tan.default aten.tanh.default aten.tanh_.default aten.tanh_backward.default
    aten.threshold_backward.default aten.topk.default aten.transpose.int aten.transpose_.default aten.trunc.default
    aten.unbind.int aten.unsafe_split.Tensor aten.unsqueeze.default aten.upsample_bicubic2d.default
    aten.upsample_bicubic2d_backward.default aten.upsample_bilinear2d.default aten.upsample_bilinear2d_backward.default
    aten.upsample_nearest2d.default aten.upsample_nearest2d_backward.default aten.var.correction aten.view.default
    aten.view.dtype aten.where.self aten.xlogy.Tensor aten.zero_.default aten.zeros_like.default
    """,
    "float16": """
    aten._to_copy.default aten.clone.default aten.detach.default
    """,
    "float64": """
    aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool2d_backward.default aten._embedding_bag.default
    aten._embedding_bag_backward.default aten._euclidean_dist.default aten._fft_r2c.default aten._foreach_mul_.Tensor
    aten._foreach_norm.Scalar aten._local_scalar_dense.default aten._log_softmax.default
    aten._log_softmax_backward_data.default aten._native_multi_head_attention.default aten._prelu_kernel.default
    aten._prelu_kernel_backward.default aten._safe_softmax.default
    aten._scaled_dot_product_flash_attention_for_cpu.default
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default aten._softmax.default
    aten._softmax_backward_data.default aten._to_copy.default aten._transformer_encoder_layer_fwd.default
    aten._unsafe_view.default aten.abs.default aten.acos.default aten.adaptive_max_pool2d.default
    aten.adaptive_max_pool2d_backward.default aten.add.Scalar aten.add.Tensor aten.add_.Scalar aten.add_.Tensor
    aten.addmm.default aten.amax.default aten.amin.default aten.argmax.default aten.argmin.default aten.asin.default
    aten.asinh.default aten.atan.default aten.atan2.default aten.avg_pool2d.default aten.avg_pool2d_backward.default
    aten.avg_pool3d.default aten.avg_pool3d_backward.default aten.bernoulli_.float aten.binary_cross_entropy.default
    aten.binary_cross_entropy_backward.default aten.binary_cross_entropy_with_logits.default aten.bmm.default
    aten.cat.default aten.ceil.default aten.celu.default aten.clamp.default aten.clamp_min.default
    aten.clamp_min_.Tensor aten.clone.default aten.col2im.default aten.constant_pad_nd.default aten.convolution.default
    aten.convolution_backward.default aten.copy_.default aten.cos.default aten.cosh.default aten.cumprod.default
    aten.cumsum.default aten.detach.default aten.diagonal.default aten.digamma.default aten.div.Scalar aten.div.Tensor
    aten.div.Tensor_mode aten.div_.Scalar aten.dot.default aten.elu.default aten.elu_backward.default
    aten.embedding.default aten.embedding_dense_backward.default aten.empty_like.default aten.eq.Scalar aten.eq.Tensor
    aten.equal.default aten.erf.default aten.erfc.default aten.exp.default aten.exp2.default aten.expand.default
    aten.expm1.default aten.flip.default aten.floor.default aten.fmod.Tensor aten.frac.default aten.gather.default
    aten.ge.Scalar aten.gelu.default aten.gelu_backward.default aten.glu.default aten.glu_backward.default
    aten.grid_sampler_2d.default aten.grid_sampler_2d_backward.default aten.gt.Scalar aten.gt.Tensor
    aten.hardsigmoid.default aten.hardsigmoid_backward.default aten.hardswish.default aten.hardswish_backward.default
    aten.hardtanh.default aten.hardtanh_backward.default aten.huber_loss.default aten.huber_loss_backward.default
    aten.hypot.default aten.im2col.default aten.index.Tensor aten.index_put.default aten.isnan.default aten.le.Scalar
    aten.leaky_relu.default aten.leaky_relu_backward.default aten.lgamma.default aten.lift_fresh.default
    aten.linalg_inv_ex.default aten.linalg_pinv.atol_rtol_tensor aten.linalg_qr.default
    aten.linalg_solve_triangular.default aten.linalg_vector_norm.default aten.log.default aten.log10.default
    aten.log1p.default aten.log2.default aten.log_sigmoid_backward.default aten.log_sigmoid_forward.default
    aten.logit.default aten.logsumexp.default aten.lt.Tensor aten.masked_fill.Scalar aten.masked_fill_.Scalar
    aten.max.default aten.max_pool2d_with_indices.default aten.max_pool2d_with_indices_backward.default
    aten.maximum.default aten.mean.default aten.mean.dim aten.median.dim aten.min.default aten.minimum.default
    aten.mish.default aten.mish_backward.default aten.mm.default aten.mse_loss.default aten.mse_loss_backward.default
    aten.mul.Scalar aten.mul.Tensor aten.mul_.Scalar aten.mul_.Tensor aten.mv.default aten.native_batch_norm.default
    aten.native_batch_norm_backward.default aten.native_group_norm.default aten.native_group_norm_backward.default
    aten.native_layer_norm.default aten.native_layer_norm_backward.default aten.neg.default aten.neg_.default
    aten.new_empty.default aten.new_zeros.default aten.nll_loss2d_backward.default aten.nll_loss2d_forward.default
    aten.nll_loss_backward.default aten.nll_loss_forward.default aten.permute.default aten.pixel_shuffle.default
    aten.pixel_unshuffle.default aten.polygamma.default aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor aten.prod.dim_int
    aten.reciprocal.default aten.reflection_pad2d.default aten.reflection_pad2d_backward.default aten.relu.default
    aten.remainder.Tensor aten.repeat.default aten.replication_pad2d.default aten.replication_pad2d_backward.default
    aten.roll.default aten.round.default aten.rsqrt.default aten.scatter.src aten.scatter_add.default aten.select.int
    aten.select_backward.default aten.sgn.default aten.sigmoid.default aten.sigmoid_.default
    aten.sigmoid_backward.default aten.sign.default aten.silu.default aten.silu_backward.default aten.sin.default
    aten.sinh.default aten.slice.Tensor aten.slice_backward.default aten.smooth_l1_loss.default
    aten.smooth_l1_loss_backward.default aten.softplus.default aten.softplus_backward.default aten.softshrink.default
    aten.softshrink_backward.default aten.sort.default aten.split.Tensor aten.sqrt.default aten.squeeze.dim
    aten.stack.default aten.std.correction aten.sub.Scalar aten.sub.Tensor aten.sum.default aten.sum.dim_IntList
    aten.t.default aten.tan.default aten.tanh.default aten.tanh_.default aten.tanh_backward.default
    aten.threshold_backward.default aten.topk.default aten.transpose.int aten.transpose_.default aten.triu.default
    aten.trunc.default aten.unbind.int aten.uniform_.default aten.unsafe_split.Tensor aten.unsqueeze.default
    aten.upsample_bicubic2d.default aten.upsample_bicubic2d_backward.default aten.upsample_bilinear2d.default
    aten.upsample_bilinear2d_backward.default aten.upsample_nearest2d.default aten.upsample_nearest2d_backward.default
    aten.var.correction aten.view.default aten.view.dtype aten.where.self aten.xlogy.Tensor aten.zero_.default
    aten.zeros_like.default
    """,
}
KNOWN_OPERATORS = frozenset(
    f"{name} {types}".strip() for types, names in KNOWN_BY_TYPES.items() for name in names.split()
)


# --- watch ------------------------------------------------------------------------------------------------------------
#
# Reports the operators that are not known to be portable, when they first run.
#
# A dispatch mode of torch observes the operators, which costs 10 us for each call. So it is active from the beginning
# to the end of a worker's second step, and in its first evaluation. An operator that a script first runs later, or in
# another thread, is not observed.

T = TypeVar("T")


class Seeing(TorchDispatchMode):
    """Calls `see` with each operator that runs: its name, and the types of its floating operands except float32."""

    def __init__(self, see: Callable[[str], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "profiler":
            self._see(" ".join((str(func), *sorted({name_of_type(x) for x in _types((*args, *kwargs.values()))}))))
        return func(*args, **kwargs)


class KernelMode:
    """The mode of `--bits portable`, for the thread that calls `watch`. Without `watch` it reports nothing."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reported = set[str]()
        self._mode: Seeing | None = None
        self._first: set[str] | None = None  # the names that `first` has received

    def begin(self, threads: int, device: torch.device) -> None:
        take_over(threads, device)

    def watch(self) -> None:
        if self._mode is None:
            self._first = self._first or set()
            self._mode = Seeing(self._see)
            self._mode.__enter__()

    def end(self) -> None:
        """Stop watching. Does nothing while a mode of the script is active inside ours; a later call then stops it."""
        if self._mode is not None and _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._mode = None

    def until_the_second(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield the same steps. The watch ends after the second one."""
        for number, step in enumerate(steps):
            if number > 1:
                self.end()
            yield step
        self.end()

    @contextmanager
    def first(self, operation: str) -> Generator[None]:
        """Watch inside the context if this is the first call with this `operation`, and `watch` was called before."""
        if self._first is None or operation in self._first or self._mode is not None:
            yield
            return
        self._first.add(operation)
        self.watch()
        try:
            yield
        finally:
            self.end()

    def _see(self, operator: str) -> None:
        if operator not in self._reported:
            self._reported.add(operator)
            if operator not in KNOWN_OPERATORS:
                self._report(operator)


def name_of_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _types(operands: tuple[Any, ...]) -> Iterator[torch.dtype]:
    for x in operands:
        if isinstance(x, Tensor):
            if x.dtype is not torch.float32 and (x.is_floating_point() or x.is_complex()):
                yield x.dtype
        elif isinstance(x, list | tuple):
            yield from _types(tuple(x))  # pyright: ignore
