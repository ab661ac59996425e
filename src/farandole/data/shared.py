"""What a want of shared memory looks like, and what is said of it instead.

Loader processes take it for their queues' locks, and torch takes it for tensors that it collates there. A container
often has 64 MB, and the errors name neither the place nor the remedy.
"""

from __future__ import annotations

import errno
import os

from farandole.errors import UsageError

PLACE = "/dev/shm"
_TORCHS = "unable to allocate shared memory"


def explained(error: BaseException) -> BaseException:
    """`error`; or, if it is for want of shared memory, one that says how much there is and what to do."""
    ours = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if not ours and not (isinstance(error, RuntimeError) and _TORCHS in str(error)):
        return error
    try:
        found = os.statvfs(PLACE)
    except OSError:
        return error
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return UsageError(
        f"the loader's processes need more shared memory than is free: {PLACE} has {free / 1e6:.1f} MB of "
        f"{size / 1e6:.1f}; make it larger (docker run --shm-size 1g, or mount -o remount,size=1g {PLACE}), or load "
        f"with num_workers=0"
    )
