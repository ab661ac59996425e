"""The content of a checkpoint's file, and the copy of the state from which it is written.

The file is a plain torch.save of plain containers: `torch.load(path, weights_only=True)["model"]` is the state_dict of
the object that was replicated as `model`. The key "farandole" has the other parts of the run's state: position, buffers
that state_dict() omits, requires_grad.

The training thread is blocked only for `HostCopy.take`: one copy into memory that is kept from one checkpoint to the
next, because fresh memory costs page faults, several times the copy itself.
"""

from __future__ import annotations

import glob
import os
import pickletools
import re
import struct
import zipfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import torch

from farandole.checkpoint.store import DamagedError, Sealing, first_line
from farandole.collective.state_transfer import decode, encode
from farandole.errors import FarandoleError, UsageError
from farandole.plan.shards import LoopStart, Position
from farandole.protocol.values import Count, Name

# --- archive ----------------------------------------------------------------------------------------------------------
#
# Checks that torch.save has written a file from plain containers, before torch opens it.
#
# A file that matches its manifest may still come from anybody, who has written both. The check makes sure that
# torch.load needs at most as much memory as the file has bytes, and some for each object that its structure names:
#
# 1. *archive*   a zip archive from the first byte to the last, its entries those of torch.save, stored and not deflated
#                (1.5 MB became 1.4 GB), beside each other and not over each other
# 2. *structure* its pickle, read by `pickletools`, which executes nothing: only operations that create numbers, texts,
#                lists, tuples and dicts, and only calls that create a tensor, a Counter or bytes. torch's own list of
#                allowed calls is longer: `bytearray(10**11)` is on it
# 3. *outcome*   the objects that torch has created: no object that the structure has not named (a list of lists of the
#                same list may have any number), and no more bytes in its tensors than the file has (all tensors may be
#                views)
#
# Invariant: a file that passes is complete; otherwise `DamagedError` has the reason.

MAX_ENTRIES = 1 << 20
MAX_OBJECTS = 1 << 24  # most objects in the structure, without numbers and texts; a tensor counts as twenty
_STRUCTURE = "archive/data.pkl"
_NAME = re.compile(
    r"archive/(data\.pkl|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d{1,9})"
)
_END = struct.Struct("<4s4H2LH")  # end of central directory
_LOCATOR = struct.Struct("<4sLQL")  # locator of the 64-bit end of central directory
_END_64 = struct.Struct("<4sQ2H2L4Q")
_HEAD = struct.Struct("<4s22x2H")  # an entry's own header: the lengths of its name and of its extra field
_STORAGES = {
    f"torch {kind}Storage"
    for kind in (
        "Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat",
        "ComplexDouble",
    )
}  # fmt: skip
_BYTES = "_codecs encode"
_CALLED = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict", "collections Counter", _BYTES}
_SCALARS = {
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "BINGET",
    "LONG_BINGET",
}  # fmt: skip
_OTHERS = {
    "PROTO", "STOP", "MARK", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND",
    "APPENDS", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "GLOBAL", "REDUCE", "BINPERSID",
}  # fmt: skip


def check(file: BinaryIO) -> int:
    """Do phases 1 and 2, and rewind `file`. Returns the number of operations in its structure.

    Raises:
        DamagedError: the file does not pass.
    """
    try:
        start, entries = _directory(file)
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            if (archive.start_dir, len(archive.infolist())) != (start, entries):
                raise DamagedError("its directory does not match its end record")
            _beside_each_other(file, archive.infolist(), start)
            structure = archive.read(_STRUCTURE)
    except (
        zipfile.BadZipFile,
        struct.error,
        KeyError,
        ValueError,
        NotImplementedError,
        EOFError,
        OverflowError,
    ) as error:
        raise DamagedError(f"it is no archive of torch.save ({error})") from None
    try:
        operations = _operations(structure)
    except (ValueError, IndexError, KeyError, Warning) as error:  # pickletools warns of escapes, which may be an error
        raise DamagedError(f"its structure can't be read ({error})") from None
    file.seek(0)
    return operations


def _directory(file: BinaryIO) -> tuple[int, int]:
    """Return the offset of the archive's directory, and the number of its entries.

    The directory must end at the file's end: else zipfile and torch search, each in its own way, and might find two
    different directories.
    """
    size = file.seek(0, 2)
    if size < _END.size:
        raise DamagedError("it is no archive of torch.save, or not all of one")
    file.seek(size - _END.size)
    mark, disk, first, entries_here, entries, length, start, comment = _END.unpack(file.read(_END.size))
    if mark != b"PK\5\6" or disk or first or comment or entries_here != entries:
        raise DamagedError("it is no archive of torch.save, or not all of one")
    until = size - _END.size
    located = _read(file, until - _LOCATOR.size, _LOCATOR)
    if located and located[0] == b"PK\6\7":
        until -= _LOCATOR.size + _END_64.size
        wide = _read(file, until, _END_64)
        if located[2] != until or not wide or wide[0] != b"PK\6\6" or wide[1] != _END_64.size - 12:
            raise DamagedError("its directory is not where its end says")
        *_, entries_here, entries, length, start = wide
    if entries_here != entries or start + length != until or entries > MAX_ENTRIES:
        raise DamagedError(f"its directory of {entries} entries is not where its end says")
    return start, entries


def _read(file: BinaryIO, place: int, form: struct.Struct) -> Sequence[Any]:
    if place < 0:
        return ()
    file.seek(place)
    return form.unpack(file.read(form.size))


def _beside_each_other(file: BinaryIO, entries: list[zipfile.ZipInfo], until: int) -> None:
    end = 0
    names: set[str] = set()
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        name = entry.orig_filename
        if _NAME.fullmatch(name) is None or name in names:
            raise DamagedError(f"it has an entry {name[:100]!r} that torch.save does not write, or a duplicate")
        names.add(name)
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise DamagedError(f"its entry {name} is compressed or encrypted")
        mark, *lengths = _read(file, entry.header_offset, _HEAD)
        if mark != b"PK\3\4" or entry.header_offset < end:
            raise DamagedError(f"its entry {name} overlaps another one")
        end = entry.header_offset + 30 + sum(lengths) + entry.file_size
    if end > until:
        raise DamagedError("its last entry overlaps its directory")


def _operations(structure: bytes) -> int:
    """Return the number of operations. Raises ValueError for one that is not allowed.

    The stack is tracked as far as necessary to know the called function, and the encoding of bytes.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    count = objects = 0

    def since_mark() -> tuple[Any, ...]:
        at = marks.pop()
        items = tuple(stack[at:])
        del stack[at:]
        return items

    for operation, argument, _ in pickletools.genops(structure):
        name = operation.name
        count += 1
        if name not in _SCALARS:
            if name not in _OTHERS:
                raise ValueError(f"operation {name}")
            objects += 1
            if objects > MAX_OBJECTS:
                raise ValueError(f"more than {MAX_OBJECTS} objects")
        match name:
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[int(cast(Any, argument))] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[int(cast(Any, argument))])
            case "GLOBAL":
                if argument not in _CALLED and argument not in _STORAGES:
                    raise ValueError(f"it names {str(argument)[:100]!r}")
                stack.append((_CALLED, argument) if argument in _CALLED else None)
            case "REDUCE":
                arguments, called = stack.pop(), stack.pop()
                if not (isinstance(called, tuple) and called[0] is _CALLED):
                    raise ValueError("it calls a function that is not allowed")
                if called[1] == _BYTES and (not isinstance(arguments, tuple) or arguments[1:] != ("latin1",)):
                    raise ValueError("it encodes a text with an encoding other than latin1")
                stack.append(None)
            case "TUPLE2":
                stack[-2:] = [tuple(stack[-2:])]
            case "TUPLE":
                since_mark()
                stack.append(None)
            case "APPENDS" | "SETITEMS":
                since_mark()
            case "APPEND":
                stack.pop()
            case "SETITEM":
                del stack[-2:]
            case "TUPLE1" | "TUPLE3":
                del stack[-int(name[-1]) :]
                stack.append(None)
            case "BINPERSID":
                stack[-1] = None
            case "PROTO" | "STOP":
                pass
            case "BINUNICODE":
                stack.append(argument if argument == "latin1" else None)
            case _:
                stack.append(None)
    return count


def check_outcome(value: Any, operations: int) -> None:
    """Do phase 3 for the loaded `value`: it must not have more objects than the structure has operations.

    Raises:
        DamagedError: there are more; a loop over all of them might never end.
    """
    count, pending = 1, [value]
    while pending:
        inner = list(_inside(pending.pop()))
        count += len(inner)
        if count > operations:
            raise DamagedError("its objects contain each other more often than its structure allows")
        pending += inner


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value)
        yield from pairs
        yield from pairs.values()
    elif isinstance(value, list | tuple):
        yield from cast("Sequence[Any]", value)


# --- content ----------------------------------------------------------------------------------------------------------

OURS = "farandole"
_FORMAT = 1
_PIECE = 1 << 20  # elements that are checked at a time, to limit the memory for the check


@dataclass(frozen=True)
class Content:
    """A nested state in host memory, encoded by `encode`."""

    skeleton: bytes
    tensors: list[torch.Tensor]


class HostCopy:
    """The memory for one copy of the state."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def reserve(self, state: Any) -> None:
        """Allocate and touch the memory for `state`. Call it on a background thread."""
        self._buffers = [torch.zeros(t.shape, dtype=t.dtype) for t in _distinct(encode(state)[1])[0]]

    @torch.no_grad()
    def take(self, state: Any) -> Content:
        """Copy `state`. The result is valid until the next `take`."""
        skeleton, tensors = encode(state)
        distinct, places = _distinct(tensors)
        del self._buffers[len(distinct) :]
        for index, tensor in enumerate(distinct):
            if index == len(self._buffers):
                self._buffers.append(torch.empty(tensor.shape, dtype=tensor.dtype))
            elif self._buffers[index].shape != tensor.shape or self._buffers[index].dtype != tensor.dtype:
                self._buffers[index] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._buffers[index].copy_(tensor)
        return Content(skeleton, [self._buffers[place] for place in places])


def in_place(state: Any) -> Content:
    """Return the content of `state` without a copy where possible, for use after training."""
    skeleton, tensors = encode(state)
    distinct, places = _distinct(tensors)
    contiguous = [_alone(tensor.cpu().contiguous()) for tensor in distinct]
    return Content(skeleton, [contiguous[place] for place in places])


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy if `tensor` is a view, because torch.save would write the whole storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _distinct(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """Return the tensors without repetitions (tied weights, buffers), and for each tensor its index among those."""
    places: dict[Any, int] = {}
    distinct: list[torch.Tensor] = []
    for tensor in tensors:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if places.setdefault(key, len(distinct)) == len(distinct):
            distinct.append(tensor)
    keys = [(t.data_ptr(), t.dtype, t.shape, t.stride(), t.device) for t in tensors]
    return distinct, [places[key] for key in keys]


def save(content: Content, position: Position, sink: Sealing) -> None:
    """Write the file.

    Raises:
        OSError: an error of the sink.
    """
    state = decode(content.skeleton, content.tensors)
    own_part = {name: value for name, value in state.items() if name != "objects"}
    own_part |= {"format": _FORMAT, "position": [position.epoch, position.offset, position.step]}
    if position.loop.number:
        own_part |= {"loop": [position.loop.number, position.loop.step, position.loop.epoch]}
    try:
        torch.save({**state["objects"], OURS: own_part}, cast(Any, sink))
    except RuntimeError as error:  # torch converts the sink's error on closing
        raise sink.failure or error from None


def file_of(path: str | os.PathLike[str]) -> Path:
    """Return the file that `run.save(path)` writes. Raises UsageError if `path` is not the path of a file."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
    if not name or "://" in name:
        raise UsageError(
            f"run.save({path!r}): give the path of a file, such as 'best.pt'; for checkpoints at a URL use "
            f"farandole run --checkpoints"
        )
    return Path(name)


def write(objects: dict[str, Any], file: Path, worker: str) -> None:
    """Write the states of `objects`, by name, to `file`: under the worker's own temporary name first.

    It removes the temporary file of a worker that was killed while it wrote.

    Raises:
        UsageError: the folder is not there, or a folder has that name.
        OSError: the file can't be written.
    """
    if not file.parent.is_dir() or file.is_dir():
        missing = f"there is no folder {file.parent} on this host" if not file.is_dir() else "it is a folder"
        raise UsageError(f"run.save({str(file)!r}): {missing}; give a file in a folder that exists on all hosts")
    content = in_place(objects)
    for left in file.parent.glob(f".{glob.escape(file.name)}.*.tmp"):
        left.unlink(missing_ok=True)
    temporary = file.with_name(f".{file.name}.{worker}.tmp")
    try:
        with temporary.open("wb") as output:
            torch.save(decode(content.skeleton, content.tensors), output)
            output.flush()
            os.fsync(output.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def finite(content: Content, parameters: Collection[str]) -> bool:
    """Return True if the last step's loss and all `parameters` ("object.path") are finite.

    Buffers do not count: a mask is often infinite.
    """
    state = decode(content.skeleton, content.tensors)
    tensors = [
        value
        for name, tensors_by_path in state["objects"].items()
        for path, value in tensors_by_path.items()
        if f"{name}.{path}" in parameters
    ]
    return state.get("finite", True) and all(_finite(tensor) for tensor in tensors)


def _finite(tensor: torch.Tensor) -> bool:
    return all(bool(piece.isfinite().all()) for piece in tensor.detach().reshape(-1).split(_PIECE))


def load(file: BinaryIO, name: str) -> tuple[Position, Any]:
    """Return position and nested state from a file that matches its manifest.

    The file can't contain code, and its state has only types that a joiner may receive.

    Raises:
        DamagedError: the file is no checkpoint.
        FarandoleError: another version wrote it.
    """
    try:
        return _load(file, name)
    except DamagedError as error:
        raise DamagedError(f"{name}: {error}") from error


class _LearningRate(msgspec.Struct):
    """The state of `training/learning_rate.py`."""

    memory: dict[str, float] = {}
    last: dict[str, float] = {}  # by the script's names of its optimizers, as in `counts`
    gains: float = 0.0
    counts: dict[str, list[list[float]]] = {}


class _Ours(msgspec.Struct):
    """The values under the key OURS, without "format". Checkpoints of versions without rules lack some."""

    position: tuple[Count, Count, Count]
    buffers: list[Any]
    requires_grad: list[bool]
    origin: Name
    learning_rate: _LearningRate = msgspec.field(default_factory=_LearningRate)
    history: list[tuple[Count, Count]] = []
    finite: bool = True
    loop: tuple[Count, Count, Count] = (0, 0, 0)  # number, first step, first epoch
    between: list[list[tuple[Name, Any]]] = []
    stream: bytes = b""


def _load(file: BinaryIO, name: str) -> tuple[Position, Any]:
    size = file.seek(0, 2)
    operations = check(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if _lacks_memory(error):
            raise  # not a fault of the file: `check` has limited the memory that it needs
        raise DamagedError(f"torch can't read it ({type(error).__name__})") from error
    check_outcome(content, operations)
    if not isinstance(content, dict) or not isinstance(own_part := content.pop(OURS, None), dict):
        raise DamagedError(f"it is no checkpoint of farandole: it lacks {OURS!r}")
    if own_part.get("format") != _FORMAT:
        raise FarandoleError(
            f"{name}: the checkpoint has format {own_part.get('format')!r:.20}, but this version reads {_FORMAT}; "
            f"resume it with the version of farandole that wrote it"
        )
    del own_part["format"]
    try:
        skeleton, tensors = encode({**own_part, "objects": content})
        if sum(tensor.nbytes for tensor in _distinct(tensors)[0]) > size:
            raise DamagedError(f"its tensors have more bytes than the {size} of the file")
        state = decode(skeleton, tensors)
        ours = msgspec.convert(own_part, _Ours)
    except (FarandoleError, msgspec.MsgspecError, RecursionError, RuntimeError) as error:
        raise DamagedError(f"it is no checkpoint of farandole: {first_line(error)}") from None
    del state["position"]
    state.pop("loop", None)
    (epoch, offset, step), (number, first_step, first_epoch) = ours.position, ours.loop
    loop = LoopStart(number=number, step=first_step, epoch=first_epoch)
    return Position(epoch=epoch, offset=offset, step=step, loop=loop), state


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
