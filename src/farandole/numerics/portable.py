"""`--bits portable`: the same bits on every x86 CPU with AVX2, of whatever maker, at full speed.

What differs between such CPUs, and what is done about it:

- ATen's, oneDNN's and NumPy's kernels follow the instruction set: all are held to AVX2 (`platform/switches.py`).
- MKL's follow the maker. Held to COMPATIBLE they are the same everywhere, and products take three times as long. So
  products are taken over by NumPy's OpenBLAS: its kernels for Haswell run on every CPU with AVX2, do the same there,
  take any layout, and loop over a batch in C.
- A few of MKL's functions refine the hardware's estimate of 1/x or 1/sqrt(x), which makers define each for themselves:
  square root, arc tangent, some logarithms. They are computed from what does not. IEEE 754 fixes the square root, and
  NumPy's is the hardware's own instruction.
- oneDNN's LSTM differs; torch's own, made of products, does not.

`take_over` puts this in the place of torch's kernels, for this process and those it forks. Invariant: an operator that
is taken over takes what torch's takes; types that are not taken over go to torch's own kernel. bfloat16 products are
computed in float32, as no CPU without AVX-512 has them.

Left out: float64 beyond products, roots and logarithms, complex numbers, CUDA, what torch.compile makes. What is known
to be portable is in `known.py`, and `watch.py` names the rest when it first runs.
"""

from __future__ import annotations

import ctypes
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farandole.errors import UsageError
from farandole.numerics import attention, pointwise
from farandole.platform import switches

HALVES = (torch.bfloat16, torch.float16)
ROOT_HALF, LN2 = math.sqrt(0.5), math.log(2.0)

_library: torch.library.Library | None = None  # what is registered lives as long as this


def take_over(threads: int, device: torch.device) -> None:
    """From here on this process computes portable bits, with as many threads within an operator.

    Raises:
        UsageError: it can't, and why.
    """
    global _library
    if device.type != "cpu":
        raise UsageError(f"--bits portable: the device is {device}, and only CPUs compute the same; hide it with "
                         f"CUDA_VISIBLE_DEVICES= or use --bits same")  # fmt: skip
    blas, capability, missing = _openblas(), torch.backends.cpu.get_cpu_capability(), switches.missing()
    began = [f"{name} is {os.environ.get(name, 'not set')}" for name in missing]
    began += [f"OpenBLAS computes for {blas.core}"] if blas.core != "Haswell" else []
    began += [f"torch computes with {capability}"] if capability != "AVX2" else []
    if began and (missing or capability == "AVX512"):
        raise UsageError(f"--bits portable: torch is imported already, and has begun otherwise ({', '.join(began)}); "
                         f"{switches.remedy()}")  # fmt: skip
    if began:
        raise UsageError(f"--bits portable: {', '.join(began)}, and needs a CPU with AVX2; use --bits same")
    blas.set_threads(threads)
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced
            _register(_library)


def _register(library: torch.library.Library) -> None:
    def put(name: str, function: Callable[..., Any], takes: Callable[[Tensor], bool] | None = None) -> None:
        """In the place of aten::`name`, where it `takes` the first tensor's type (None: all)."""
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
        put(f"{name}.out", _into(product), _real)
    for name in ("addmm", "baddbmm"):
        put(name, _added, _real)
        put(f"{name}.out", _into(_added), _real)
        put(f"{name}_", _in_place(_added), _real)
    functions = {"sqrt": (_root, _wide), "atan": (_arc_tangent, _wide), "log": (_logarithm, _is_double)}
    functions |= {"tan": (_tangent, _is_double)}
    functions |= {"log2": (_logarithm_2, _wide), "log10": (_logarithm_10, _wide)}
    for name, (function, takes) in functions.items():
        put(name, function, takes)
        put(f"{name}.out", _into(function), takes)
        put(f"{name}_", _in_place(function), takes)
    for name in ("pow.Tensor_Scalar", "pow_.Scalar", "pow.Tensor_Scalar_out"):
        _put_power(library, name)
    for name in ("lstm.input", "lstm.data"):
        _put_lstm(library, name)
    attention.register(library)
    pointwise.register(library)


# --- products ------------------------------------------------------------------------------------------------------


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of shapes (m, k) and (k, n), or of as many of them (batch, m, k) and (batch, k, n)."""
    if a.dtype in HALVES:
        return _product(a.float(), b.float()).to(a.dtype)
    made = a.new_empty((*a.shape[:-1], b.shape[-1]))
    with np.errstate(all="ignore"):
        np.matmul(_array(a), _array(b), out=made.numpy())
    return made


def _added(self: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * self + alpha * (a @ b)."""
    if a.dtype in HALVES:
        return _added(self.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(a.dtype)
    made = _product(a, b)
    if alpha != 1:
        made.mul_(alpha)
    return made.add_(self, alpha=beta) if beta else made  # with 0 even a NaN does not count


def _array(x: Tensor) -> np.ndarray[Any, Any]:
    """`x` as OpenBLAS takes it: rows or columns one after the other."""
    (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
    if not ((across == 1 and down >= columns) or (down == 1 and across >= rows)):
        x = x.contiguous()
    return x.detach().numpy()


# --- functions -----------------------------------------------------------------------------------------------------


def _root(x: Tensor) -> Tensor:
    x = _floating(x)
    made = torch.empty_like(x)
    with np.errstate(all="ignore"):
        np.sqrt(x.detach().numpy(), out=made.numpy())
    return made


def _arc_tangent(x: Tensor) -> Tensor:
    x = _floating(x)
    return torch.atan2(x, x.new_ones(()))


def _tangent(x: Tensor) -> Tensor:
    return torch.sin(x) / torch.cos(x)


def _logarithm(x: Tensor) -> Tensor:
    """Of x = m 2^e with m from sqrt(1/2) to sqrt(2): log1p(m - 1) + e log 2, where m - 1 is exact."""
    mantissa, exponent = torch.frexp(x.double())
    small = mantissa.abs() < ROOT_HALF
    mantissa = torch.where(small, 2 * mantissa, mantissa)
    return torch.log1p(mantissa - 1) + (exponent - small.int()) * LN2


def _logarithm_2(x: Tensor) -> Tensor:
    return (_logarithm(x) / LN2).to(_floating(x).dtype)


def _logarithm_10(x: Tensor) -> Tensor:
    return (_logarithm(x) / math.log(10.0)).to(_floating(x).dtype)


def _put_power(library: torch.library.Library, name: str) -> None:
    """torch computes x ** 0.5 by MKL's square root."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def power(keys: Any, x: Tensor, exponent: float, **out: Tensor) -> Tensor:
        if exponent != 0.5 or not _wide(x):
            return kernel.call_boxed(keys, x, exponent, **out)
        if name == "pow_.Scalar":
            return x.sqrt_()
        return torch.sqrt(x, **out)

    library.impl(name, power, "CPU", with_keyset=True)


def _put_lstm(library: torch.library.Library, name: str) -> None:
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


# --- what is taken -------------------------------------------------------------------------------------------------


def _real(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64, *HALVES)


def _wide(x: Tensor) -> bool:
    """Of the types for which torch asks MKL; integers are computed as floating numbers."""
    return not x.is_complex() and x.dtype not in HALVES


def _is_double(x: Tensor) -> bool:
    return x.dtype is torch.float64


def _floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def _into(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def put(*inputs: Any, out: Tensor, **options: Any) -> Tensor:
        made = function(*inputs, **options)
        if out.shape != made.shape:
            out.resize_(made.shape)
        return out.copy_(made)

    return put


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def put(x: Tensor, *inputs: Any, **options: Any) -> Tensor:
        return x.copy_(function(x, *inputs, **options))

    return put


# --- OpenBLAS ------------------------------------------------------------------------------------------------------


class _OpenBlas:
    """NumPy's own, which is loaded. `core`: the CPU that its kernels are for."""

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


_NO_OPENBLAS = "--bits portable: this NumPy does not compute with OpenBLAS on Linux; install the one from PyPI"


def _openblas() -> _OpenBlas:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text().splitlines() if maps.exists() else []
    for line in loaded:
        path = line.partition("/")[2]
        if "openblas" in path.rpartition("/")[2] and "numpy" in path:
            return _OpenBlas("/" + path)
    raise UsageError(_NO_OPENBLAS)
