"""The process's heap: keep what is freed, and touch it before it is needed.

Activations and gradients come and go by the megabyte. glibc's malloc gives large ones back to the kernel, which
zeroes them again page by page at their next use: a step of 45 ms of a small convolutional net had 2,000 page faults,
some 3 ms, and none after `keep_freed_memory`. A joiner that takes over 10 MB of state has all of its page faults while
everyone waits for it: copying them took 38 ms in memory that was never touched before, 3 ms in memory that was. Other
allocators and systems are left as they are.
"""

from __future__ import annotations

import ctypes
import os

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGEST = 32 << 20  # bytes; the largest threshold that glibc takes: larger pieces are always mapped afresh
_PIECE = 16 << 20
_MOST = 512 << 20


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, in one arena for all threads, so that one can use what another has touched.

    Whoever has set glibc's own MALLOC_* variables has decided otherwise.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST)  # setting one of the two switches off glibc's adapting of both
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    mallopt(_M_ARENA_MAX, 1)


def touch(size: int) -> None:
    """Have `size` bytes of heap, 512 MB at most, touched and free."""
    pieces = [torch.zeros(_PIECE, dtype=torch.uint8) for _ in range(min(size, _MOST) // _PIECE + 1)]
    pieces.clear()
