"""Standard output and error on which printing never fails: what can't be written is lost, counted, and told.

A full disk, a pipe whose reader is gone, a terminal that was closed: whoever prints then gets an `OSError` from Python,
wherever in the program it was, and at the end another exit code. Printing only tells, so it must not decide. `guard`
puts streams in place of `sys.stdout` and `sys.stderr` whose raw end swallows what the system refuses; once there is
room again they say how much is missing. It also opens /dev/null in place of a standard descriptor that is closed
(`>&-`), which the next file or socket would get otherwise, and everything printed with it.

What a child process writes to the same descriptors is its own affair.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from farandole.platform.plain import plain

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Sink(io.RawIOBase):
    """The raw end of a stream on `descriptor`; every write counts as done, and `lost` bytes were not."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.lost = 0
        self.name = f"<descriptor {descriptor}>"
        self.mode = "wb"
        self._descriptor = descriptor
        self._why = ""
        self._begun = False  # a line, of which only the beginning could be written

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        whole = bytes(data)
        if self.lost and self._put(self._note()) == 0:
            self.lost, self._begun = 0, False
        left = len(whole) if self.lost else self._put(whole)
        self._begun = self._begun or 0 < left < len(whole)
        self.lost += left
        return len(whole)

    def _put(self, data: bytes) -> int:
        """Returns how many bytes at the end of `data` could not be written."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            self._why = error.strerror or type(error).__name__
        return len(data) - written

    def _note(self) -> bytes:
        start = "\n" if self._begun else ""
        return f"{start}farandole: {self.lost} bytes of output are lost here ({self._why})\n".encode()


def guard() -> None:
    """From here on, printing in this process does not fail. Call it before anything else is opened."""
    for descriptor in (0, 1, 2):
        _occupy(descriptor)
    if sys.stdout is sys.__stdout__:  # else somebody has put something of their own there, a second call among them
        sys.stdout = _stream(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(sys.stderr, 2)


def say(text: str) -> None:
    """A line of ours on standard error, whatever a script has made of that (closed, or something of its own).

    What others have put into it does nothing to a terminal.
    """
    with contextlib.suppress(Exception):
        print(plain(text), file=sys.stderr, flush=True)


def tell(text: str) -> None:
    """A line on standard output, likewise."""
    print(plain(text), flush=True)


def _occupy(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        os.set_inheritable(descriptor, True)


def _stream(stream: TextIO | None, descriptor: int) -> TextIO:
    """As `stream`, which is None where its descriptor was closed; also on what its encoding has no place for."""
    encoding, line_buffering, at_once = "utf-8", True, False
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            stream.flush()
        encoding, line_buffering, at_once = stream.encoding, stream.line_buffering, stream.write_through
    sink = Sink(descriptor)
    return io.TextIOWrapper(
        sink if at_once else io.BufferedWriter(sink),
        encoding=encoding, errors="backslashreplace", line_buffering=line_buffering, write_through=at_once,
    )  # fmt: skip
