"""How long this process has been there, as the system knows it: also before its interpreter could look at a clock."""

from __future__ import annotations

import os
import time
from pathlib import Path

START = 19  # of the fields after the name, in /proc/PID/stat: when the process began, in ticks since boot


def age_s() -> float:
    """In seconds; 0.0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[START]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
