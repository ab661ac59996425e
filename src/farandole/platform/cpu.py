"""Cores of its own for each worker of a host (`farandole run --pin`): slot k computes on the k-th core, with t threads
on the k-th t of them.

Threads of one core each come before second ones, where cores have two (SMT). All threads that the process has are
bound, and those that it starts later; what it forks is free again, since a loader process would take the training
thread's core. So is what `free` is called in. Programs that a script starts otherwise stay where it is.

For machines on which nothing else computes: whoever is bound can't make way, and two runs would take the same cores.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from farandole.errors import UsageError

# --- cores ------------------------------------------------------------------------------------------------------------

CPUS = Path("/sys/devices/system/cpu")
_before: frozenset[int] = frozenset()  # the cores that this process had


def of_slot(slot: int, threads: int, cores: Iterable[int]) -> tuple[int, ...]:
    """Of those cores, the ones of a slot; none where there are not enough."""
    mine = _in_order(cores)[slot * threads : (slot + 1) * threads]
    return tuple(mine) if len(mine) == threads else ()


def pin(slot: int, threads: int) -> str:
    """Bind this process to its slot's cores. Returns why it is not, "" if it is."""
    global _before
    try:
        here = frozenset(os.sched_getaffinity(0))
        mine = of_slot(slot, threads, here)
        if not mine:
            return f"slot {slot} of {threads} a slot, and this process may use {len(here)} cores"
        _bind(mine)
    except (AttributeError, OSError) as error:  # another system than Linux
        return f"this system has no such thing ({error})"
    if not _before:
        os.register_at_fork(after_in_child=free)
    _before = _before or here
    return ""


def free() -> None:
    """This process may use again what it could before."""
    if _before:
        with contextlib.suppress(OSError):
            _bind(_before)


def before() -> frozenset[int]:
    """The cores that this process had before it was bound; empty if it is not."""
    return _before


def give(cores: Collection[int]) -> None:
    """This process may use these, if there are any. For one that was started by one that is bound."""
    if cores:
        with contextlib.suppress(OSError):
            _bind(cores)


def _bind(cores: Collection[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def _in_order(cores: Iterable[int]) -> list[int]:
    """First one thread of each core, then the second ones."""

    def place(core: int) -> tuple[int, int]:
        try:
            siblings = _numbers((CPUS / f"cpu{core}" / "topology" / "thread_siblings_list").read_text())
            return siblings.index(core), core
        except (OSError, ValueError):
            return 0, core

    return sorted(cores, key=place)


def _numbers(text: str) -> list[int]:
    """Of a list as the kernel writes it: "0,64" or "0-1"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


# --- switches ---------------------------------------------------------------------------------------------------------
#
# Variables by which numeric libraries choose their kernels, read once, when they are loaded or first used.
#
# `PORTABLE` is what `--bits portable` needs: oneDNN, ATen and NumPy hold to AVX2, OpenBLAS computes with its kernels
# for Haswell (which need AVX2, and no Intel CPU), and MKL takes no path that depends on the CPU's maker. That is the
# ground only; what still differs is taken over when the libraries are there (`numerics/portable.py`). `SAME` is what
# `--bits same` needs on a GPU: workspaces of cuBLAS of one size, without which it may add in another order. It is
# read when cuBLAS is first used, so libraries that are loaded already do not matter (`numerics/settings.py` sees to
# the rest).

PORTABLE = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",  # those of NumPy 2.4; an older one does not know them
}
SAME = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def of(bits: str) -> dict[str, str]:
    """What a process that computes for a run of these `--bits` has in its environment."""
    return {"portable": PORTABLE, "same": SAME}.get(bits, {})


def set_for(bits: str) -> None:
    """Before anything numeric is loaded in this process.

    Raises:
        UsageError: torch or NumPy is loaded, and has begun with other switches.
    """
    if bits != "portable":
        os.environ.update(of(bits))
        return
    loaded = [name for name in ("torch", "numpy") if name in sys.modules]
    if loaded and missing():
        raise UsageError(f"--bits portable: {loaded[0]} is imported already, and has begun otherwise; {remedy()}")
    os.environ.update(PORTABLE)


def missing() -> dict[str, str]:
    """The switches that this process's environment does not have."""
    return {name: value for name, value in PORTABLE.items() if os.environ.get(name) != value}


def remedy() -> str:
    words = " ".join(f"{name}='{value}'" if " " in value else f"{name}={value}" for name, value in PORTABLE.items())
    return f"start the process with `farandole join` or `farandole run`, or with {words}"
