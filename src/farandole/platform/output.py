"""Standard output and error that never fail: output that can't be written is dropped, counted, and reported.

On a full disk, a pipe whose reader is gone, or a closed terminal, Python raises an `OSError` wherever the program
prints, and changes the exit code at the end. Printing only reports, so it must not decide. `guard` replaces
`sys.stdout` and `sys.stderr` by streams whose raw end ignores write errors; once there is room again they print how
much is missing. It also opens /dev/null for a closed standard descriptor (`>&-`): otherwise the next file or socket
would get its number, and everything printed with it.

The output of child processes to the same descriptors is not covered.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import mmap
import os
import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


# --- plain ------------------------------------------------------------------------------------------------------------
#
# Makes text of others plain: removes what a terminal would act on or would show as something else.
#
# Scripts colour their output, move the cursor, set titles, and print text from other users' files. Their log files keep
# all of it. What we show has only visible characters: no control characters except tabs and line ends, and no
# characters that change the direction of writing or have no width. Names have none of these. Pure.

# Unicode's categories Cc, Cf, Zl, Zp and Cs
UNSEEN = (
    "\\x00-\\x1f\\x7f-\\x9f\\u00ad\\u0600-\\u0605\\u061c\\u06dd\\u070f\\u0890\\u0891\\u08e2\\u180e\\u200b-\\u200f"
    "\\u2028-\\u202e\\u2060-\\u206f\\ud800-\\udfff\\ufeff\\ufff9-\\ufffb\\U000110bd\\U000110cd\\U00013430-\\U0001343f"
    "\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a\\U000e0001\\U000e0020-\\U000e007f"
)
NAME = rf"^[^{UNSEEN}]*\Z"
LONGEST_NAME = 256  # characters
SHOWN = "\ufffd"
_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\x9c|$)"  # OSC and the like, to their end or the line's: titles, links
    r"|\x1b[ -/]*[0-~]"  # two characters and more: resets, character sets
    r"|\x9b[0-?]*[ -/]*[@-~]",  # CSI in one character
    re.MULTILINE,
)
_UNSEEN = re.compile(f"[{UNSEEN}]")
_BUT_LINES = re.compile(rf"(?![\t\n])[{UNSEEN}]")
_NAME = re.compile(NAME)


def plain(text: str) -> str:
    """`text` without control sequences, with a replacement character for each other invisible character."""
    return _BUT_LINES.sub(SHOWN, _SEQUENCES.sub("", text))


def one_line(text: str) -> str:
    """`text` with a replacement character also for tabs and line ends, for use inside one of our lines."""
    return _UNSEEN.sub(SHOWN, text)


def escaped(json_text: str) -> str:
    """The same JSON value, with such characters escaped. Layout stays."""
    return _BUT_LINES.sub(_escape, json_text)


def _escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def is_text(text: str) -> bool:
    """Returns True if UTF-8 can encode it. Python represents other bytes of a command line or path as surrogates."""
    return text.isprintable() or text == text.encode(errors="replace").decode()


def is_name(text: str) -> bool:
    """Returns True if all characters are visible and the text is at most `LONGEST_NAME` long."""
    return len(text) <= LONGEST_NAME and _NAME.search(text) is not None


# --- output -----------------------------------------------------------------------------------------------------------


class RawStream(io.RawIOBase):
    """The raw end of a stream on `descriptor`. Every write counts as done. `lost_bytes`: the number of bytes that were
    not written.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.lost_bytes = 0
        self.name = f"<descriptor {descriptor}>"
        self.mode = "wb"
        self._descriptor = descriptor
        self._why = ""
        self._is_partial = False  # only the beginning of a line could be written

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        content = bytes(data)
        if self.lost_bytes and self._put(self._note()) == 0:
            self.lost_bytes, self._is_partial = 0, False
        unwritten = len(content) if self.lost_bytes else self._put(content)
        self._is_partial = self._is_partial or 0 < unwritten < len(content)
        self.lost_bytes += unwritten
        return len(content)

    def _put(self, data: bytes) -> int:
        """Write `data`. Returns the number of bytes at its end that could not be written."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            self._why = error.strerror or type(error).__name__
        return len(data) - written

    def _note(self) -> bytes:
        start = "\n" if self._is_partial else ""
        return f"{start}farandole: {self.lost_bytes} bytes of output are lost here ({self._why})\n".encode()


def guard() -> None:
    """Make printing in this process never fail. Call it before anything else is opened."""
    for descriptor in (0, 1, 2):
        _occupy(descriptor)
    if sys.stdout is sys.__stdout__:  # else it was replaced already, for example by an earlier call
        sys.stdout = _stream(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(sys.stderr, 2)


def say(text: str) -> None:
    """Print a line on standard error, even if a script has closed or replaced it.

    Control sequences in the text are removed, so that they do nothing to a terminal.
    """
    with contextlib.suppress(Exception):
        print(plain(text), file=sys.stderr, flush=True)


def tell(text: str) -> None:
    """Print a line on standard output, with control sequences removed."""
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
    """A stream like `stream`, which is None if its descriptor was closed; it escapes what its encoding can't
    represent.
    """
    encoding, line_buffering, at_once = "utf-8", True, False
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            stream.flush()
        encoding, line_buffering, at_once = stream.encoding, stream.line_buffering, stream.write_through
    sink = RawStream(descriptor)
    return io.TextIOWrapper(
        sink if at_once else io.BufferedWriter(sink),
        encoding=encoding, errors="backslashreplace", line_buffering=line_buffering, write_through=at_once,
    )  # fmt: skip


# --- logs -------------------------------------------------------------------------------------------------------------
#
# farandole's log: the messages of each module's logger, `logging.getLogger(__name__)`, as plain lines on standard
# error.
#
# A library leaves logging alone: importing farandole gives the logger "farandole" a handler that does nothing, and
# changes nothing else, in particular not the root logger. The program that starts the process decides. farandole's own
# commands call `show`. In a script that was started by itself `show_by_default` does so, but only if logging is not
# configured: errors are seen, and nothing is reported twice.
#
# Without `-v` there are warnings and errors, each as a line `farandole: ...`. With `-v` the progress of the run is
# logged (views, connections, checkpoints), with a second one also each round and message; lines then have their time,
# worker and module. An error in making or writing a line changes nothing, and text of others in it does nothing to a
# terminal (`plain`). No secret is ever passed to a logger, so nothing has to be removed here.

LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)  # by the number of -v
_BRIEF = "farandole: %(message)s"
_LONG = "farandole: %(asctime)s.%(msecs)03d %(worker)s %(levelname)s %(name)s: %(message)s"
_ours = logging.getLogger("farandole")
_warned: set[str] = set()


class LineFormatter(logging.Handler):
    """A handler that passes formatted lines to `write`. `worker` appears in the lines."""

    def __init__(self, verbosity: int, write: Callable[[str], object]) -> None:
        super().__init__()
        self._write = write
        self.worker = "-"
        self.setFormatter(logging.Formatter(_LONG if verbosity else _BRIEF, datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            record.worker = self.worker
            self._write(self.format(record))


def show(verbosity: int, write: Callable[[str], object] = say) -> None:
    """Show farandole's log in this process, and by no other handler. The last call counts.

    `write` writes a line to the current standard error.
    """
    worker = next((handler.worker for handler in _ours.handlers if isinstance(handler, LineFormatter)), "-")
    hide()
    lines = LineFormatter(verbosity, write)
    lines.worker = worker
    _ours.addHandler(lines)
    _ours.setLevel(LEVELS[min(verbosity, len(LEVELS) - 1)])
    _ours.propagate = False


def show_by_default(verbosity: int) -> None:
    """Call `show`, unless logging is configured already: for farandole, or for the whole process."""
    handlers = [handler for handler in _ours.handlers if not isinstance(handler, logging.NullHandler)]
    if not handlers and not logging.getLogger().handlers:
        show(verbosity)


def hide() -> None:
    """Undo `show`."""
    for handler in [handler for handler in _ours.handlers if isinstance(handler, LineFormatter)]:
        _ours.removeHandler(handler)
    _ours.setLevel(logging.NOTSET)
    _ours.propagate = True


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning once in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning("%s", message)


def name(worker: str) -> None:
    """Set this process's worker name in log lines."""
    for handler in _ours.handlers:
        if isinstance(handler, LineFormatter):
            handler.worker = worker


# --- command line -----------------------------------------------------------------------------------------------------
#
# The command line and environment of this process that other users' tools read from /proc (`ps`, `pkill -f`).
#
# A forked process shows those of its parent. On Linux it can set other ones (prctl(2), PR_SET_MM_MAP), which takes no
# privilege; if the kernel was built without that, it shows its parent's.

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_CODE, _STACK, _DATA, _BREAK = 26, 28, 45, 47  # the first of their fields in /proc/self/stat, proc(5)
_kept_maps: list[mmap.mmap] = []  # the kernel reads this memory as long as the process lives


def show_command(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Make this process appear as if it had been started with `command` and `environ`."""
    if sys.platform != "linux":
        return
    words = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in command)
    variables = b"".join(f"{n}={v}".encode(errors="surrogateescape") + b"\0" for n, v in environ.items())
    memory = mmap.mmap(-1, len(words) + len(variables), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(words + variables)
    _kept_maps[:] = [memory]
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = start + len(words), start + len(words) + len(variables)
    fields = [int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
    field = dict(enumerate(fields, start=4))
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    places = (field[_CODE], field[_CODE + 1], field[_DATA], field[_DATA + 1], field[_BREAK], libc.sbrk(0))
    memory_map = struct.pack("11QQIi", *places, field[_STACK], start, middle, middle, end, 0, 0, -1)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, memory_map, len(memory_map), 0)
