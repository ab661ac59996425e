"""What a checkpoint's file holds, and the copy of the state that it is written from.

It is plain torch.save of plain containers: `torch.load(path, weights_only=True)["model"]` is the state_dict of what was
replicated as `model`. Under the key "farandole" lies what else the run needs: position, buffers that state_dict()
leaves out, requires_grad.

The training thread is blocked for `HostCopy.take`, nothing else: one copy into memory that is kept from one checkpoint
to the next, since fresh memory costs page faults, several times the copy itself.
"""

from __future__ import annotations

import pickletools
import re
import struct
import zipfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import msgspec
import torch

from farandole.checkpoint.store import DamagedError, Sealing, first_line
from farandole.collective.state_transfer import decode, encode
from farandole.errors import FarandoleError
from farandole.plan.shards import Position
from farandole.protocol.values import Count, Name

# --- archive ----------------------------------------------------------------------------------------------------------
#
# Whether a file is one that torch.save writes of plain containers, looked at before torch opens it.
#
# A file whose manifest fits may still be anybody's: who makes the one makes the other. What torch.load is handed takes,
# in memory, at most what the file has in bytes, and some for each object that its structure names:
#
# 1. *archive*   a zip archive from the first byte to the last, its entries those of torch.save, stored and not deflated
#                (1.5 MB became 1.4 GB), beside each other and not over each other
# 2. *structure* its pickle, read by `pickletools`, which runs nothing: no operation but those that make numbers, texts,
#                lists, tuples and dicts, and no call but those that put a tensor, a Counter or bytes together. torch's
#                own list is longer: `bytearray(10**11)` is on it
# 3. *outcome*   what torch has made of it: no object in it that the structure has not named (a list of lists of the
#                same list has as many as you like), and no more in its tensors than the file has (a tensor may be all
#                views)
#
# Invariant: what passes is whole, or `DamagedError` says why not.

MAX_ENTRIES = 1 << 20
MAX_OBJECTS = 1 << 24  # that the structure names, other than numbers and texts; a tensor is twenty
_STRUCTURE = "archive/data.pkl"
_NAME = re.compile(
    r"archive/(data\.pkl|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d{1,9})"
)
_END = struct.Struct("<4s4H2LH")  # end of central directory
_LOCATOR = struct.Struct("<4sLQL")  # of its 64-bit form
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
    """Phases 1 and 2; `file` is at its beginning afterwards. The number of operations in its structure.

    Raises:
        DamagedError: it is no such file.
    """
    try:
        start, entries = _directory(file)
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            if (archive.start_dir, len(archive.infolist())) != (start, entries):
                raise DamagedError("its directory is not what its end says")
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
    """Where the archive's directory begins, and its entries. It ends where the file does: zipfile and torch would look
    further, each in its own way, and might find two directories.
    """
    size = file.seek(0, 2)
    if size < _END.size:
        raise DamagedError("it is no archive of torch.save, or not all of one")
    file.seek(size - _END.size)
    mark, disk, first, here, entries, length, start, comment = _END.unpack(file.read(_END.size))
    if mark != b"PK\5\6" or disk or first or comment or here != entries:
        raise DamagedError("it is no archive of torch.save, or not all of one")
    until = size - _END.size
    located = _read(file, until - _LOCATOR.size, _LOCATOR)
    if located and located[0] == b"PK\6\7":
        until -= _LOCATOR.size + _END_64.size
        wide = _read(file, until, _END_64)
        if located[2] != until or not wide or wide[0] != b"PK\6\6" or wide[1] != _END_64.size - 12:
            raise DamagedError("its directory is not where its end says")
        *_, here, entries, length, start = wide
    if here != entries or start + length != until or entries > MAX_ENTRIES:
        raise DamagedError(f"its directory of {entries} entries is not where its end says")
    return start, entries


def _read(file: BinaryIO, place: int, form: struct.Struct) -> Sequence[Any]:
    if place < 0:
        return ()
    file.seek(place)
    return form.unpack(file.read(form.size))


def _beside_each_other(file: BinaryIO, entries: list[zipfile.ZipInfo], until: int) -> None:
    end = 0
    seen: set[str] = set()
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        name = entry.orig_filename
        if _NAME.fullmatch(name) is None or name in seen:
            raise DamagedError(f"it holds an entry {name[:100]!r}, which torch.save does not write, or not twice")
        seen.add(name)
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise DamagedError(f"its entry {name} is not stored as it is")
        mark, *lengths = _read(file, entry.header_offset, _HEAD)
        if mark != b"PK\3\4" or entry.header_offset < end:
            raise DamagedError(f"its entry {name} lies over another one")
        end = entry.header_offset + 30 + sum(lengths) + entry.file_size
    if end > until:
        raise DamagedError("its last entry lies over its directory")


def _operations(structure: bytes) -> int:
    """How many there are. What calls get is followed as far as who is called, and in which encoding bytes are."""
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
                given, called = stack.pop(), stack.pop()
                if not (isinstance(called, tuple) and called[0] is _CALLED):
                    raise ValueError("it calls what is not to be called")
                if called[1] == _BYTES and (not isinstance(given, tuple) or given[1:] != ("latin1",)):
                    raise ValueError("it encodes a text as something else than bytes")
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
    """Phase 3, of what the structure became: no more objects than it has operations.

    Raises:
        DamagedError: there are more; whoever goes through them all might never end.
    """
    found, left = 1, [value]
    while left:
        inner = list(_inside(left.pop()))
        found += len(inner)
        if found > operations:
            raise DamagedError("its objects hold each other more often than it has any")
        left += inner


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
_PIECE = 1 << 20  # elements looked at at a time: what that takes is memory too


@dataclass(frozen=True)
class Content:
    """A nested state in host memory, as `encode` takes it apart."""

    skeleton: bytes
    tensors: list[torch.Tensor]


class HostCopy:
    """Memory for one copy of the state."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []

    def reserve(self, state: Any) -> None:
        """Allocate what `state` takes and touch it, on a thread where nobody waits."""
        self._held = [torch.zeros(t.shape, dtype=t.dtype) for t in _distinct(encode(state)[1])[0]]

    @torch.no_grad()
    def take(self, state: Any) -> Content:
        """Copy `state` as it is now. The result is good until the next `take`."""
        skeleton, tensors = encode(state)
        distinct, places = _distinct(tensors)
        del self._held[len(distinct) :]
        for index, tensor in enumerate(distinct):
            if index == len(self._held):
                self._held.append(torch.empty(tensor.shape, dtype=tensor.dtype))
            elif self._held[index].shape != tensor.shape or self._held[index].dtype != tensor.dtype:
                self._held[index] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._held[index].copy_(tensor)
        return Content(skeleton, [self._held[place] for place in places])


def in_place(state: Any) -> Content:
    """`state` itself, for when nobody trains any more."""
    skeleton, tensors = encode(state)
    distinct, places = _distinct(tensors)
    held = [_alone(tensor.cpu().contiguous()) for tensor in distinct]
    return Content(skeleton, [held[place] for place in places])


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """torch.save would write all that `tensor` is a view of."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _distinct(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """The tensors without repetition (tied weights, buffers), and for each of them its place among those."""
    places: dict[Any, int] = {}
    distinct: list[torch.Tensor] = []
    for tensor in tensors:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if places.setdefault(key, len(distinct)) == len(distinct):
            distinct.append(tensor)
    found = [(t.data_ptr(), t.dtype, t.shape, t.stride(), t.device) for t in tensors]
    return distinct, [places[key] for key in found]


def save(content: Content, position: Position, sink: Sealing) -> None:
    """Write the file.

    Raises:
        OSError: as the sink says.
    """
    state = decode(content.skeleton, content.tensors)
    ours = {name: value for name, value in state.items() if name != "objects"}
    ours |= {"format": _FORMAT, "position": [position.epoch, position.offset, position.step]}
    try:
        torch.save({**state["objects"], OURS: ours}, cast(Any, sink))
    except RuntimeError as error:  # what torch makes of the sink's error on closing
        raise sink.failure or error from None


def finite(content: Content, parameters: Collection[str]) -> bool:
    """Whether the last step's loss was, and all `parameters` ("object.path") are. Buffers may hold what they like: a
    mask is often infinite.
    """
    state = decode(content.skeleton, content.tensors)
    tensors = [
        value
        for name, held in state["objects"].items()
        for path, value in held.items()
        if f"{name}.{path}" in parameters
    ]
    return state.get("finite", True) and all(_finite(tensor) for tensor in tensors)


def _finite(tensor: torch.Tensor) -> bool:
    return all(bool(piece.isfinite().all()) for piece in tensor.detach().reshape(-1).split(_PIECE))


def load(file: BinaryIO, name: str) -> tuple[Position, Any]:
    """Position and nested state from a file that fits its manifest. Nothing in it can be code, and what it holds is
    what a joiner might be sent.

    Raises:
        DamagedError: it is no checkpoint.
        FarandoleError: another version wrote it.
    """
    try:
        return _load(file, name)
    except DamagedError as error:
        raise DamagedError(f"{name}: {error}") from error


class _LearningRate(msgspec.Struct):
    """`training/learning_rate.py`."""

    memory: dict[str, float] = {}
    last: dict[str, float] = {}  # by what the script calls its optimizers, as in `counts`
    gains: float = 0.0
    counts: dict[str, list[list[float]]] = {}


class _Ours(msgspec.Struct):
    """What lies under OURS, beside "format". That of before there were rules lacks some."""

    position: tuple[Count, Count, Count]
    buffers: list[Any]
    requires_grad: list[bool]
    origin: Name
    learning_rate: _LearningRate = msgspec.field(default_factory=_LearningRate)
    history: list[tuple[Count, Count]] = []
    finite: bool = True


def _load(file: BinaryIO, name: str) -> tuple[Position, Any]:
    size = file.seek(0, 2)
    operations = check(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if _lacks_memory(error):
            raise  # no fault of the file's, which has been seen to ask for no more than it has
        raise DamagedError(f"torch can't read it ({type(error).__name__})") from error
    check_outcome(content, operations)
    if not isinstance(content, dict) or not isinstance(ours := content.pop(OURS, None), dict):
        raise DamagedError(f"it is no checkpoint of farandole: it lacks {OURS!r}")
    if ours.get("format") != _FORMAT:
        raise FarandoleError(
            f"{name}: a checkpoint of format {ours.get('format')!r:.20}, this version reads {_FORMAT}; resume it with "
            f"the version of farandole that wrote it"
        )
    del ours["format"]
    try:
        skeleton, tensors = encode({**ours, "objects": content})
        if sum(tensor.nbytes for tensor in _distinct(tensors)[0]) > size:
            raise DamagedError(f"its tensors have more bytes than the {size} of the file")
        state = decode(skeleton, tensors)
        epoch, offset, step = msgspec.convert(ours, _Ours).position
    except (FarandoleError, msgspec.MsgspecError, RecursionError, RuntimeError) as error:
        raise DamagedError(f"it is no checkpoint of farandole: {first_line(error)}") from None
    del state["position"]
    return Position(epoch=epoch, offset=offset, step=step), state


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
