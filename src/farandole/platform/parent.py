"""A process that ends when the one that started it ends, however that happens (kill -9 included).

On Linux the kernel does it (PR_SET_PDEATHSIG); elsewhere a thread looks at the parent's id every half second. The
signal is SIGKILL, which a frozen process obeys too. Linux sends it when the *thread* that started us ends, so
whoever starts such a process does so from its main thread. Children of ours are not covered: a DataLoader's
workers watch for themselves (within 5 s), and the pool kills a dead worker's whole process group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """End this process when process `parent`, which started it, is gone; at once if it is gone already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_watch, args=(parent,), name="farandole-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
