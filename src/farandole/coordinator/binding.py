"""The socket at which a run listens: bound once, by `farandole run`, and inherited by one coordinator after the other.

Invariant: while `farandole run` lives and its run is not over, the port is never free, so nobody else can answer at the
address that is in the tickets. While no coordinator lives, who connects waits in the kernel's queue, and is answered by
the next one. Strangers that fill the queue are dealt with like any others as soon as there is one (`listener.py`); who
finds it full tries again. A coordinator that somebody starts by hand binds for itself.
"""

from __future__ import annotations

import socket

from farandole.coordinator.endpoint import is_loopback
from farandole.errors import UsageError

BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """Listen there, at any port if that is 0.

    Raises:
        UsageError: that address can't be listened at.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"--listen {host}:{port}: {error.strerror}; choose another address or port") from None
    bound = listener.getsockname()[0]
    if is_loopback(bound) and not is_loopback(host):
        listener.close()
        raise UsageError(f"--listen {host}: that is {bound} on this machine, which no other one can reach")
    return listener
