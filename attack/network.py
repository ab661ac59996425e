"""A network of this process's own, in which nobody else listens: strangers may go for every port that they find."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct

_NEWNET = 0x40000000
_SET_FLAGS, _UP = 0x8914, 0x1


def leave_the_others() -> bool:
    """Go into a namespace with nothing but loopback, with all processes to be started. False where one may not."""
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL(None, use_errno=True).unshare(_NEWNET) == 0:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
                fcntl.ioctl(loopback, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
            return True
    return False
