"""What of torch's settings bears on bits, as facts: a name, and its value in words. And each can be set by them.

A script may alter them at any time, some for the calling thread alone (denormals). Reading all takes 16 us, so a run
looks in every step (`alterations.py`). Where a thread of ours computes, it follows the training thread (`flush_as`).

Left out: what only environment variables say (it shows in the fingerprint), generators, the processes of a loader,
which have what was set when they were forked, and the threads within an operator (`--threads` above 1): torch lets
denormals be flushed in the calling thread alone, so which elements of a large tensor are flushed is nobody's promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import backends

from farandole.membership.likeness import SETTING, THREADS

_SMALLEST = 2.0**-1022  # of float64 that is not denormal
_DETERMINISTIC = ("off", "warn", "on")  # as torch numbers them


class Setting(NamedTuple):
    read: Callable[[], object]
    write: Callable[[Any], None]  # what its words stand for


def facts() -> Iterator[tuple[str, str]]:
    """All of them, of the calling thread."""
    for name, setting in _SETTINGS.items():
        yield name, _words(setting.read())


def values() -> tuple[object, ...]:
    """The same, not in words: so that nothing is to be told is known sooner."""
    return tuple([setting.read() for setting in _SETTINGS.values()])


def put(name: str, value: str) -> None:
    """Set what a fact says, in the calling thread. What is not known here stays as it is."""
    if name in _SETTINGS:
        _SETTINGS[name].write(_meant(value))


def flushes() -> bool:
    """Whether the calling thread takes denormal numbers for zero. Python's own multiplication shows it."""
    half = _SMALLEST * 0.5
    return half == 0.0


def flush_as(flushing: bool) -> None:
    """The calling thread is to do as another one does."""
    if flushes() is not flushing:
        torch.set_flush_denormal(flushing)


def _attribute(path: str) -> Setting:
    """Of torch.backends."""
    owner, _, name = path.rpartition(".")
    read = attrgetter(path)

    def write(value: object) -> None:
        setattr(attrgetter(owner)(backends) if owner else backends, name, value)

    return Setting(lambda: read(backends), write)


def _autocast(kind: str) -> Setting:
    def write(value: Any) -> None:
        torch.set_autocast_enabled(kind, value is not False)
        if value is not False:
            torch.set_autocast_dtype(kind, value)

    return Setting(lambda: torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind), write)


def _set_deterministic(value: object) -> None:
    torch.set_deterministic_debug_mode(_DETERMINISTIC.index(_words(value)))


_SETTINGS: dict[str, Setting] = {
    THREADS: Setting(torch.get_num_threads, torch.set_num_threads),
    **{
        SETTING + name: setting
        for name, setting in {
            "default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
            "denormals flushed": Setting(flushes, flush_as),
            "deterministic algorithms": Setting(
                lambda: _DETERMINISTIC[torch.get_deterministic_debug_mode()],
                _set_deterministic,
            ),
            "precision of products": _attribute("fp32_precision"),
            "precision of products, oneDNN": _attribute("mkldnn.matmul.fp32_precision"),
            "precision of convolutions, oneDNN": _attribute("mkldnn.conv.fp32_precision"),
            "precision of recurrent layers, oneDNN": _attribute("mkldnn.rnn.fp32_precision"),
            "precision of products, CUDA": _attribute("cuda.matmul.fp32_precision"),
            "precision of convolutions, cuDNN": _attribute("cudnn.conv.fp32_precision"),
            "precision of recurrent layers, cuDNN": _attribute("cudnn.rnn.fp32_precision"),
            "sums in bfloat16, CUDA": _attribute("cuda.matmul.allow_bf16_reduced_precision_reduction"),
            "sums in float16, CUDA": _attribute("cuda.matmul.allow_fp16_reduced_precision_reduction"),
            "oneDNN": _attribute("mkldnn.enabled"),
            "oneDNN deterministic": _attribute("mkldnn.deterministic"),
            "cuDNN": _attribute("cudnn.enabled"),
            "cuDNN benchmark": _attribute("cudnn.benchmark"),
            "cuDNN deterministic": _attribute("cudnn.deterministic"),
            "attention by flash kernels": Setting(backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
            "attention by memory-efficient kernels": Setting(
                backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp
            ),
            "attention by plain kernels": Setting(backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
            "autocast on CPU": _autocast("cpu"),
            "autocast on CUDA": _autocast("cuda"),
        }.items()
    },
}


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value).removeprefix("torch.")


def _meant(words: str) -> Any:
    if words in ("on", "off"):
        return words == "on"
    if words.isdigit():
        return int(words)
    found = getattr(torch, words, None)
    return found if isinstance(found, torch.dtype) else words
