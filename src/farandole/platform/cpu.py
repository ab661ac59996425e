"""Separate cores for each worker of a host (`farandole run --pin`): slot k computes on the k-th core, with t threads on
the k-th group of t cores.

The first threads of all cores come before the second ones, if cores have two (SMT). All threads of the process are
bound, and those that it starts later. Forked processes are unbound again, since a loader process would take the
training thread's core; so is a process that calls `free`. Programs that a script starts in other ways stay bound.

Only for machines on which nothing else computes: a bound process can't make way, and two runs would take the same
cores.
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
_before: frozenset[int] = frozenset()  # the cores of this process before it was bound


def of_slot(slot: int, threads: int, cores: Iterable[int]) -> tuple[int, ...]:
    """The cores of a slot, out of `cores`; empty if there are not enough."""
    own_cores = _in_order(cores)[slot * threads : (slot + 1) * threads]
    return tuple(own_cores) if len(own_cores) == threads else ()


def pin(slot: int, threads: int) -> str:
    """Bind this process to its slot's cores. Returns the reason of a failure, "" for success."""
    global _before
    try:
        allowed = frozenset(os.sched_getaffinity(0))
        own_cores = of_slot(slot, threads, allowed)
        if not own_cores:
            return f"slot {slot} with {threads} threads a slot, and this process may use {len(allowed)} cores"
        _bind(own_cores)
    except (AttributeError, OSError) as error:  # another system than Linux
        return f"this system can't bind processes to cores ({error})"
    if not _before:
        os.register_at_fork(after_in_child=free)
    _before = _before or allowed
    return ""


def free() -> None:
    """Let this process use its original cores again."""
    if _before:
        with contextlib.suppress(OSError):
            _bind(_before)


def before() -> frozenset[int]:
    """The cores of this process before it was bound; empty if it is not bound."""
    return _before


def give(cores: Collection[int]) -> None:
    """Let this process use `cores`, unless that is empty. For a process that a bound one has started."""
    if cores:
        with contextlib.suppress(OSError):
            _bind(cores)


def _bind(cores: Collection[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def _in_order(cores: Iterable[int]) -> list[int]:
    """The cores, sorted: the first thread of each core, then the second ones."""

    def place(core: int) -> tuple[int, int]:
        try:
            siblings = _numbers((CPUS / f"cpu{core}" / "topology" / "thread_siblings_list").read_text())
            return siblings.index(core), core
        except (OSError, ValueError):
            return 0, core

    return sorted(cores, key=place)


def _numbers(text: str) -> list[int]:
    """The numbers in a list of the kernel: "0,64" or "0-1"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


# --- switches ---------------------------------------------------------------------------------------------------------
#
# Environment variables that select the kernels of numeric libraries. Libraries read them once, when they are loaded or
# first used.
#
# `PORTABLE` is for `--bits portable`: oneDNN, ATen and NumPy use at most AVX2, OpenBLAS uses its kernels for Haswell
# (which need AVX2, and no Intel CPU), and MKL takes no path that depends on the CPU's vendor. This is only the base;
# `numerics/portable.py` replaces the operators that still differ, when the libraries are loaded. `SAME` is for `--bits
# same` on a GPU: cuBLAS workspaces of one size, without which it may add in another order. It is read when cuBLAS is
# first used, so libraries that are loaded already do not matter (`numerics/settings.py` does the rest).

PORTABLE = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",  # names of NumPy 2.4; older versions do not know them
}
SAME = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def environment_of(bits: str) -> dict[str, str]:
    """The environment variables for a process that computes for a run with these `--bits`."""
    return {"portable": PORTABLE, "same": SAME}.get(bits, {})


def set_for(bits: str) -> None:
    """Set the variables. Call it before any numeric library is loaded in this process.

    Raises:
        UsageError: torch or NumPy is loaded already, with other values.
    """
    if bits != "portable":
        os.environ.update(environment_of(bits))
        return
    loaded = [name for name in ("torch", "numpy") if name in sys.modules]
    if loaded and missing():
        raise UsageError(f"--bits portable: {loaded[0]} is imported already, with other settings; {remedy()}")
    os.environ.update(PORTABLE)


def missing() -> dict[str, str]:
    """The variables that this process's environment lacks."""
    return {name: value for name, value in PORTABLE.items() if os.environ.get(name) != value}


def remedy() -> str:
    assignments = " ".join(
        f"{name}='{value}'" if " " in value else f"{name}={value}" for name, value in PORTABLE.items()
    )
    return f"start the process with `farandole join` or `farandole run`, or with {assignments}"
