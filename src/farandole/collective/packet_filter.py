"""A socket's packet filter: the program that the kernel runs on each packet, in classic BPF.

It lets pass the first packet of every connection, and otherwise what comes from the ends that it names, nothing else.
"""

from __future__ import annotations

import ipaddress
import struct
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

# From Linux's headers.
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _AND, _JUMP, _EQUAL, _RETURN = 0x20, 0x28, 0x30, 0x54, 0x05, 0x15, 0x06
_SOURCE_PORT, _FLAGS = 0, 13  # in a TCP header, at which a filter's offsets begin
_IP_HEADER = 0xFFF00000  # added to an offset from the IP header's beginning
_SOURCE_ADDRESS = {4: 12, 6: 8}
_SYN, _SYN_OR_ACK = 0x02, 0x12
_ALL, _NOTHING = 0xFFFFFFFF, 0

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand

ALL_OUT: tuple[Instruction, ...] = ((_RETURN, 0, 0, _NOTHING),)  # not even a first packet passes


def only(ends: Iterable[str]) -> list[Instruction]:
    """The program that lets pass the beginning of every connection, and all packets from `ends` ("address port").

    Raises:
        ValueError: what is no such end.
    """
    ports: dict[Any, set[int]] = defaultdict(set)
    for end in ends:
        address, _, port = end.partition(" ")
        ports[ipaddress.ip_address(address)].add(port_of(port))
    program = [
        (_LOAD_BYTE, 0, 0, _FLAGS),
        (_AND, 0, 0, _SYN_OR_ACK),
        (_EQUAL, 0, 1, _SYN),
        (_RETURN, 0, 0, _ALL),
    ]
    for address, of_address in ports.items():
        of_ports = [(_LOAD_HALF, 0, 0, _SOURCE_PORT)]
        for port in sorted(of_address):
            of_ports += [(_EQUAL, 0, 1, port), (_RETURN, 0, 0, _ALL)]
        words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
        for number, word in enumerate(words):  # each that differs jumps to the next address, beyond all that follows
            left = 3 * (len(words) - number - 1) + len(of_ports)
            at = _IP_HEADER + _SOURCE_ADDRESS[address.version] + 4 * number
            program += [(_LOAD_WORD, 0, 0, at), (_EQUAL, 1, 0, word), (_JUMP, 0, 0, left)]
        program += of_ports
    return [*program, (_RETURN, 0, 0, _NOTHING)]


def port_of(text: str) -> int:
    port = int(text)
    if not 0 < port < 65536:
        raise ValueError(f"port {port}: there is none below 1 or above 65535")
    return port
