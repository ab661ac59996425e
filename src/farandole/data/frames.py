"""What a process and its fetcher say to each other, over a stream: typed messages, each headed by its length; nothing
is unpickled. The bytes of a range follow their message as they are.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec

_HEAD = struct.Struct("<I")


class FileOf(msgspec.Struct, frozen=True, array_like=True):
    """A file elsewhere: where, its length in bytes, its MD5."""

    url: str
    size: int
    md5: str


class Soon(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: files of this place will be asked for; have the client of its store at hand."""

    url: str


class Expect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: these are wanted, in this order; what was wanted before is not any more."""

    files: tuple[FileOf, ...]


class Range(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: bytes `[start, stop)`, now. `number` is the asker's own."""

    number: int
    url: str
    start: int
    stop: int


class Whole(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: a copy of the file, now."""

    number: int
    file: FileOf


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the fetcher: tell when there is nothing more to fetch of what is wanted."""

    number: int


class Data(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of a range: so many bytes follow."""

    number: int
    size: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The copy is there; or nothing more is to be fetched."""

    number: int


class Trying(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An attempt has failed, as `why` says; another one follows."""

    number: int
    why: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """It can't be had. `usage`: for what was asked, not for what the store does."""

    number: int
    why: str
    usage: bool = False


Asked = Soon | Expect | Range | Whole | Settled
Answer = Data | Done | Trying | Failed
_encoder = msgspec.msgpack.Encoder()
asked = msgspec.msgpack.Decoder(Asked)
answers = msgspec.msgpack.Decoder(Answer)

T = TypeVar("T")


def put(connection: socket.socket, message: Asked | Answer, content: bytes = b"") -> None:
    body = _encoder.encode(message)
    connection.sendall(
        _HEAD.pack(len(body)) + body + content if len(content) < 1 << 12 else _HEAD.pack(len(body)) + body
    )
    if len(content) >= 1 << 12:
        connection.sendall(content)


def get(connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Raises EOFError where the other end is gone."""
    (size,) = _HEAD.unpack(exactly(connection, _HEAD.size))
    return decoder.decode(exactly(connection, size))


def exactly(connection: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    view, at = memoryview(found), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return found
