"""What a killed command leaves behind, for a moment."""

from __future__ import annotations

import contextlib
import os


def group_lives(group: int) -> bool:
    """Whether a process of that group is there."""
    with contextlib.suppress(ChildProcessError):  # orphans may be ours: who forks programs is a subreaper
        while os.waitpid(-group, os.WNOHANG) != (0, 0):
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
