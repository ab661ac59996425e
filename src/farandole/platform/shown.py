"""What others see of a process: the command line and the environment that /proc (`ps`, `pkill -f`) shows of it.

A forked process shows those of the one that it was forked from. On Linux it can say that they are elsewhere (prctl(2),
PR_SET_MM_MAP), which takes no privilege; where the kernel was built without that, it shows its parent's.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_CODE, _STACK, _DATA, _BREAK = 26, 28, 45, 47  # the first of their fields in /proc/self/stat, proc(5)
_kept: list[mmap.mmap] = []  # the kernel reads them as long as the process lives


def show(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have this process shown as if it had been started with `command` and `environ`."""
    if sys.platform != "linux":
        return
    words = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in command)
    variables = b"".join(f"{n}={v}".encode(errors="surrogateescape") + b"\0" for n, v in environ.items())
    memory = mmap.mmap(-1, len(words) + len(variables), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(words + variables)
    _kept[:] = [memory]
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = start + len(words), start + len(words) + len(variables)
    fields = [int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
    field = dict(enumerate(fields, start=4))
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    places = (field[_CODE], field[_CODE + 1], field[_DATA], field[_DATA + 1], field[_BREAK], libc.sbrk(0))
    said = struct.pack("11QQIi", *places, field[_STACK], start, middle, middle, end, 0, 0, -1)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, said, len(said), 0)
