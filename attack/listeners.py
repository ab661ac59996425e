"""At the workers' own ports, where Gloo listens: who only connects."""

from __future__ import annotations

from attack.base import STRANGER, Attack, Succeeded
from attack.door import stay
from attack.live import Live

CONNECTIONS = 3000
SPARE = 64  # descriptors that a worker may have more of, afterwards


def connections(live: Live) -> str:
    """More than a worker has descriptors for, to each of its ports."""
    before, ports = live.descriptors(), live.listeners()
    for address in ports:
        live.by_stranger(stay, address, CONNECTIONS // 3, 0.2)
    live.go_on(1)
    after = live.descriptors()
    if after > before + SPARE:
        raise Succeeded(f"a worker's descriptors went from {before} to {after}")
    return f"{len(ports)} ports, {before} descriptors before and {after} after"


ATTACKS = (Attack(name="gloo: connections", who=STRANGER, act=connections, short=True),)
