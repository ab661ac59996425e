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
# Text of others as plain text: what a terminal would act on, or would show as something else, is taken out.
#
# Scripts colour their output, move the cursor, set titles, and print what they have read from files of others. In
# their log files all of it stays as it is; what we show has nothing that is not to be seen: no control characters but
# tabs and line ends, and no marks that turn the direction of writing or have no width. Names hold none of these in
# the first place. Pure.

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
    """`text` without control sequences, and a replacement character for each character left that is not to be seen."""
    return _BUT_LINES.sub(SHOWN, _SEQUENCES.sub("", text))


def one_line(text: str) -> str:
    """... and for each tab and line end: what is to be a part of a line of ours."""
    return _UNSEEN.sub(SHOWN, text)


def escaped(json_text: str) -> str:
    """JSON that says the same, in which such characters are escaped. Layout stays."""
    return _BUT_LINES.sub(_escape, json_text)


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold it. Python gives other bytes of a command line, or of a path, as surrogates."""
    return text.isprintable() or text == text.encode(errors="replace").decode()


def is_name(text: str) -> bool:
    """Whether everybody who sees it sees the same."""
    return len(text) <= LONGEST_NAME and _NAME.search(text) is not None


# --- output -----------------------------------------------------------------------------------------------------------


class RawStream(io.RawIOBase):
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
    sink = RawStream(descriptor)
    return io.TextIOWrapper(
        sink if at_once else io.BufferedWriter(sink),
        encoding=encoding, errors="backslashreplace", line_buffering=line_buffering, write_through=at_once,
    )  # fmt: skip


# --- logs -------------------------------------------------------------------------------------------------------------
#
# farandole's log: what each module tells its logger, `logging.getLogger(__name__)`, as plain lines on standard error.
#
# A library leaves logging alone: importing farandole gives the logger "farandole" a handler that does nothing, and
# nothing else is touched, least of all the root logger. Who starts the process decides. Farandole's own commands call
# `show`. In a script that was started by itself `show_by_default` does so, but only where nobody has set up logging:
# what goes wrong is seen, and nothing is told twice.
#
# Without `-v` there are warnings and errors, each a line `farandole: ...`. With it the way of the run is told (views,
# connections, checkpoints), with a second one also each round and message; lines have their time, worker and module
# then. A line is a note: what fails in making or writing one changes nothing, and what others have put into it does
# nothing to a terminal (`output.py`). Nothing secret is ever handed to a logger, so nothing has to be taken out here.

LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)  # by how often -v was given
_BRIEF = "farandole: %(message)s"
_LONG = "farandole: %(asctime)s.%(msecs)03d %(worker)s %(levelname)s %(name)s: %(message)s"
_ours = logging.getLogger("farandole")
_warned: set[str] = set()


class LineFormatter(logging.Handler):
    """Gives records' lines to `write`. `worker` stands in their lines."""

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
    """From here on, this process shows farandole's log, and nobody else in it does. The last call counts.

    `write` writes a line to standard error, whatever that is at the time.
    """
    worker = next((handler.worker for handler in _ours.handlers if isinstance(handler, LineFormatter)), "-")
    hide()
    lines = LineFormatter(verbosity, write)
    lines.worker = worker
    _ours.addHandler(lines)
    _ours.setLevel(LEVELS[min(verbosity, len(LEVELS) - 1)])
    _ours.propagate = False


def show_by_default(verbosity: int) -> None:
    """`show`, unless logging is set up already: for farandole, or for the whole process."""
    told = [handler for handler in _ours.handlers if not isinstance(handler, logging.NullHandler)]
    if not told and not logging.getLogger().handlers:
        show(verbosity)


def hide() -> None:
    """As if `show` had never been called."""
    for handler in [handler for handler in _ours.handlers if isinstance(handler, LineFormatter)]:
        _ours.removeHandler(handler)
    _ours.setLevel(logging.NOTSET)
    _ours.propagate = True


def warn_once(logger: logging.Logger, message: str) -> None:
    """A warning that this process gives once, however often it is due."""
    if message not in _warned:
        _warned.add(message)
        logger.warning("%s", message)


def name(worker: str) -> None:
    """This process is `worker`."""
    for handler in _ours.handlers:
        if isinstance(handler, LineFormatter):
            handler.worker = worker


# --- shown ------------------------------------------------------------------------------------------------------------
#
# What others see of a process: the command line and the environment that /proc (`ps`, `pkill -f`) shows of it.
#
# A forked process shows those of the one that it was forked from. On Linux it can say that they are elsewhere
# (prctl(2), PR_SET_MM_MAP), which takes no privilege; where the kernel was built without that, it shows its parent's.

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_CODE, _STACK, _DATA, _BREAK = 26, 28, 45, 47  # the first of their fields in /proc/self/stat, proc(5)
_kept: list[mmap.mmap] = []  # the kernel reads them as long as the process lives


def show_command(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have this process shown as if it had been started with `command` and `environ`."""
    if sys.platform != "linux":
        return
    words = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in command)
    variables = b"".join(f"{n}={v}".encode(errors="surrogateescape") + b"\0" for n, v in environ.items())
    memory = mmap.mmap(-1, len(words) + len(variables), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(words + variables)
    _kept[:] = [memory]
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = start + len(words), start + len(words) + len(variables)
    fields = [int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
    field = dict(enumerate(fields, start=4))
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    places = (field[_CODE], field[_CODE + 1], field[_DATA], field[_DATA + 1], field[_BREAK], libc.sbrk(0))
    said = struct.pack("11QQIi", *places, field[_STACK], start, middle, middle, end, 0, 0, -1)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, said, len(said), 0)
