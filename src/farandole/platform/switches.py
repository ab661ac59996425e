"""Variables by which numeric libraries choose their kernels, read once, when they are loaded or first used.

`PORTABLE` is what `--bits portable` needs: oneDNN, ATen and NumPy hold to AVX2, OpenBLAS computes with its kernels for
Haswell (which need AVX2, and no Intel CPU), and MKL takes no path that depends on the CPU's maker. That is the ground
only; what still differs is taken over when the libraries are there (`numerics/portable.py`). `SAME` is what `--bits
same` needs on a GPU: workspaces of cuBLAS of one size, without which it may add in another order. It is read when
cuBLAS is first used, so libraries that are loaded already do not matter (`numerics/settings.py` sees to the rest).
"""

from __future__ import annotations

import os
import sys

from farandole.errors import UsageError

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
