"""This process's sockets, those that others have made and own among them: looked at, and given filters.

A socket is known by its descriptor's number; it is neither copied, which would keep it open, nor closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from farandole.collective.packet_filter import Instruction

# From Linux's headers; Python's `socket` does not name them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_ACCEPTCONN = 26, 27, 30

_libc = ctypes.CDLL(None, use_errno=True)


class Socket:
    """One that others own: looked at by its number, and neither copied, which would keep it open, nor closed.

    Python's own `socket` changes the mode (blocking or not) of what it is made of.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def listens(self) -> bool:
        value, size = ctypes.c_int(0), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
        asked = (self.number, socket.SOL_SOCKET, _SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(size))
        return _libc.getsockopt(*asked) == 0 and value.value == 1

    def near(self) -> str:
        """Its own end, as "address port"; "" if it has none."""
        return self._end(_libc.getsockname)

    def far(self) -> str:
        """The end that it is connected to; "" if there is none."""
        return self._end(_libc.getpeername)

    def attach(self, program: Sequence[Instruction]) -> None:
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
        described = _Program(len(program), ctypes.addressof(code))
        self._set(_SO_ATTACH_FILTER, described)

    def detach(self) -> None:
        with contextlib.suppress(OSError):  # it has none, or is gone
            self._set(_SO_DETACH_FILTER, ctypes.c_int(0))

    def _end(self, ask: Any) -> str:
        name, size = ctypes.create_string_buffer(128), ctypes.c_uint(128)
        if ask(self.number, name, ctypes.byref(size)) != 0:
            return ""
        family, port = struct.unpack_from("=H", name)[0], struct.unpack_from(">H", name, 2)[0]
        if family == socket.AF_INET:
            return f"{ipaddress.IPv4Address(name.raw[4:8])} {port}"
        if family == socket.AF_INET6:
            return f"{ipaddress.IPv6Address(name.raw[8:24])} {port}"
        return ""

    def _set(self, option: int, value: Any) -> None:
        if _libc.setsockopt(self.number, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.sizeof(value)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def lowest_free() -> int:
    """The number that the next descriptor gets."""
    with open(os.devnull, "rb", buffering=0) as null:
        return null.fileno()


def own_sockets() -> Iterator[Socket]:
    """All sockets of this process. None without /proc."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    yield Socket(int(name))


def connected_at(listening: Socket) -> bool:
    """Whether the kernel knows a connection at this socket's port, accepted or not, or its remains."""
    address, _, port = listening.near().partition(" ")
    table = Path("/proc/self/net/tcp6" if ":" in address else "/proc/self/net/tcp")
    rows = (line.split()[:4] for line in table.read_text().splitlines()[1:])
    return any(
        local.endswith(f":{int(port):04X}") and state not in ("0A", "03")  # LISTEN, SYN_RECV
        for _, local, _, state in rows
    )


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]
