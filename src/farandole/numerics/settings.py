"""What of torch's settings bears on bits, as facts: a name, and its value in words.

A script may set them at any time, also for one thread alone (denormals). Reading all of them takes 10 us, so it is done
in each step. Nothing is set here but by `flush_as`, in a thread of our own.

Left out: what only environment variables say (they show in the fingerprint), and generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

import torch
from torch import backends

from farandole.membership.likeness import SETTING

_SMALLEST = 2.0**-1022  # of float64 that is not denormal


def flushes() -> bool:
    """Whether the calling thread takes denormal numbers for zero. Python's own multiplication shows it."""
    half = _SMALLEST * 0.5
    return half == 0.0


def flush_as(flushes_now: bool) -> None:
    """The calling thread is to do as another one does."""
    if flushes() is not flushes_now:
        torch.set_flush_denormal(flushes_now)


_READ: dict[str, Callable[[], object]] = {
    "default dtype": torch.get_default_dtype,
    "denormals flushed": flushes,
    "deterministic algorithms": lambda: ("off", "warn", "on")[torch.get_deterministic_debug_mode()],
    "attention by flash kernels": backends.cuda.flash_sdp_enabled,
    "attention by memory-efficient kernels": backends.cuda.mem_efficient_sdp_enabled,
    "attention by plain kernels": backends.cuda.math_sdp_enabled,
    "autocast on CPU": lambda: torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
    "autocast on CUDA": lambda: torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
}
_BACKENDS = {
    name: attrgetter(path)
    for name, path in {
        "precision of products": "fp32_precision",
        "precision of products, oneDNN": "mkldnn.matmul.fp32_precision",
        "precision of convolutions, oneDNN": "mkldnn.conv.fp32_precision",
        "precision of recurrent layers, oneDNN": "mkldnn.rnn.fp32_precision",
        "precision of products, CUDA": "cuda.matmul.fp32_precision",
        "precision of convolutions, cuDNN": "cudnn.conv.fp32_precision",
        "precision of recurrent layers, cuDNN": "cudnn.rnn.fp32_precision",
        "sums in bfloat16, CUDA": "cuda.matmul.allow_bf16_reduced_precision_reduction",
        "sums in float16, CUDA": "cuda.matmul.allow_fp16_reduced_precision_reduction",
        "oneDNN": "mkldnn.enabled",
        "oneDNN deterministic": "mkldnn.deterministic",
        "cuDNN": "cudnn.enabled",
        "cuDNN benchmark": "cudnn.benchmark",
        "cuDNN deterministic": "cudnn.deterministic",
    }.items()
}


def facts() -> Iterator[tuple[str, str]]:
    """All of them, of the calling thread."""
    for name, read in _READ.items():
        yield SETTING + name, _words(read())
    for name, of in _BACKENDS.items():
        yield SETTING + name, _words(of(backends))


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value).removeprefix("torch.")
