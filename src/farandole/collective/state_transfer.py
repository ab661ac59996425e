"""The transfer of the state to joiners: each veteran (a member that holds the state) sends one stripe of its bytes.

A veteran copies each piece of its stripe into its arena and lends it. A joiner on its host copies it from there to its
own memory; any other joiner receives it in its own memory. So each byte is copied once by one veteran, and once more by
each joiner. Beside the state itself a veteran has `IN_FLIGHT` pieces in shared memory, and a joiner has the whole state
until it is loaded.

Why the state is consistent:

1. A veteran reads its live tensors in the background, while the script computes the next step. Nothing writes to
   parameters or optimizer state before that step's update. The step can't end without the joiner's commit message,
   which states that the joiner has everything (R1): so the update comes after the last piece was read, and after the
   last checksum was made. Buffers do change in a forward pass; the caller passes copies of their values at the start of
   the step.
2. Lent memory does not change until each joiner has acknowledged the piece; then it is used for a later piece. A joiner
   acknowledges a piece when the bytes are in its own memory, and reads only its own memory from then on.
3. If a joiner is lost, another joiner may still read. So the lent memory is kept until the links are closed, which is
   after every reachable worker has abandoned the view. The memory of a lost veteran does not change, and a joiner that
   lacks a piece or a checksum has no state and sends no commit message.
4. A frozen worker delays the thread of the veteran or of the joiner, and the step, until the control plane gives up the
   view. A thread that continues later sends the parameters of that time. The joiner of a view that was given up learns
   that before it takes them (`WorkerStateMachine.become_synced`), or it was evicted and never saves them
   (docs/protocol.md, Joining 5).

With each piece a veteran computes a checksum over its own copy of the next veteran's stripe. So if there are several
veterans, a joiner does not rely on a single one for any part of the state. The checksums are made and compared outside
of the training threads.
"""

from __future__ import annotations

import math
import mmap
import zlib
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from itertools import accumulate, zip_longest
from typing import Any, cast

import msgspec
import torch

from farandole.collective.arena import Memory
from farandole.collective.buckets import ALIGNMENT
from farandole.collective.schedule import STATE, of_round, place
from farandole.collective.transport import Borrowing, Links, PeerLost, Pending, ReceiveBuffer
from farandole.errors import ProtocolError, StateDisputed, UnknownState
from farandole.plan.shards import LoopStart, Position
from farandole.protocol.view import View

# --- state ------------------------------------------------------------------------------------------------------------
#
# The encoding of a state without pickling: nested state_dicts as a typed skeleton plus raw tensors.
#
# The skeleton is msgpack of tagged lists, and nothing in it names code. The tensors follow each other in one sequence
# of bytes, each at a 64-byte aligned offset.

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip


def encode(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Returns the skeleton of a nested state, and its tensors in order.

    Raises:
        UnknownState: a value is not a tensor, number, text, None or container of those. The message has its path.
    """
    tensors: list[torch.Tensor] = []
    return msgspec.msgpack.encode(_encode(state, "state", tensors)), tensors


def _encode(value: Any, path: str, tensors: list[torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise UnknownState(f"{path}: the text {value!r} is not valid Unicode and can't be sent")
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise UnknownState(f"{path}: the number {value} can't be sent; keep it within 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise UnknownState(f"{path}: a tensor of {value.dtype} can't be sent; use one of {', '.join(_DTYPES)}")
        if value.layout != torch.strided:
            raise UnknownState(f"{path}: a tensor of layout {value.layout} can't be sent; make it dense")
        tensors.append(value.detach())
        return ["T", name, list(value.shape)]
    kinds: tuple[tuple[str, type], ...] = (("C", Counter), ("d", OrderedDict), ("d", dict), ("l", list), ("t", tuple))
    for kind, container in kinds:
        if type(value) is container:
            if kind in "Cd":
                pairs = cast("dict[Any, Any]", value).items()
                return [kind, [[_key(k, path), _encode(v, f"{path}[{k!r}]", tensors)] for k, v in pairs]]
            items = cast("Sequence[Any]", value)
            return [kind, [_encode(item, f"{path}[{i}]", tensors) for i, item in enumerate(items)]]
    raise UnknownState(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} can't be sent to a joining worker without "
        f"pickling it; keep numbers, text, tensors, lists, tuples and dicts in what state_dict() returns"
    )


def _key(key: Any, path: str) -> Any:
    if isinstance(key, int | str | float) or key is None:
        return key
    raise UnknownState(f"{path}: the key {key!r} can't be sent; use a number or text")


def decode(skeleton: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Returns the nested state of a skeleton and its tensors; the inverse of `encode`.

    Raises:
        ProtocolError: `skeleton` is invalid, or does not match the number of tensors.
    """
    tree = _parsed(skeleton)
    if len(_shapes(tree)) != len(tensors):
        raise ProtocolError(f"a state of {len(_shapes(tree))} tensors came with {len(tensors)}")
    remaining = iter(tensors)

    def value(item: Any) -> Any:
        if not isinstance(item, list):
            return item
        kind, content = cast("list[Any]", item)[:2]
        if kind == "T":
            return next(remaining)
        if kind == "l":
            return [value(i) for i in content]
        if kind == "t":
            return tuple(value(i) for i in content)
        pairs = {k: value(v) for k, v in content}
        return Counter(pairs) if kind == "C" else pairs

    return value(tree)


def _parsed(skeleton: bytes) -> Any:
    """Returns the skeleton's tree after validation, because the data of a peer is not authenticated."""
    try:
        tree = msgspec.msgpack.decode(skeleton)
        _check(tree)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"invalid skeleton of a state, {len(skeleton)} bytes: {error}") from error
    return tree


def _check(item: Any) -> None:
    match item:
        case None | bool() | int() | float() | str() | bytes():
            return
        case ["T", str(name), [*shape]] if name in _DTYPES and all(type(n) is int and n >= 0 for n in shape):
            return
        case ["l" | "t", [*items]]:
            for inner in items:
                _check(inner)
        case ["C" | "d", [*pairs]]:
            for pair in pairs:
                match pair:
                    case [None | bool() | int() | float() | str(), inner]:
                        _check(inner)
                    case _:
                        raise ProtocolError("invalid skeleton of a state: an entry of a dict is not a pair")
        case _:
            raise ProtocolError(f"invalid skeleton of a state: it contains an invalid {type(item).__name__}")


def _shapes(tree: Any) -> list[tuple[torch.dtype, list[int]]]:
    shapes: list[tuple[torch.dtype, list[int]]] = []

    def walk(item: Any) -> None:
        if isinstance(item, list):
            items = cast("list[Any]", item)
            if items[0] == "T":
                shapes.append((_DTYPES[items[1]], items[2]))
            elif items[0] in ("C", "d"):
                for _, v in items[1]:
                    walk(v)
            else:
                for v in items[1]:
                    walk(v)

    walk(tree)
    return shapes


def _padded(tensor_bytes: int) -> int:
    return -(-tensor_bytes // ALIGNMENT) * ALIGNMENT


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Snapshot:
    """A replicated state at the start of a step, ready to be sent. It holds references, not copies.

    Attributes:
        mark: the bytes of `state["stream"]`, which are no part of what the veterans compare.
    """

    def __init__(self, state: Any) -> None:
        self.mark: bytes = state.get("stream", b"")
        self.skeleton, self.tensors = encode({name: value for name, value in state.items() if name != "stream"})
        self.flags = [int(flag) for flag in state["requires_grad"]]
        sizes = [_padded(t.numel() * t.element_size()) for t in self.tensors]
        self._offsets = list(accumulate(sizes, initial=0))
        self.bytes = self._offsets.pop()

    def piece(self, start: int, stop: int) -> torch.Tensor:
        """Returns the payload's bytes [start, stop), of shape (stop - start,); a view if one host tensor has them."""
        at = max(bisect_right(self._offsets, start) - 1, 0)
        parts: list[tuple[int, torch.Tensor]] = []
        while at < len(self.tensors) and self._offsets[at] < stop:
            offset = self._offsets[at]
            part = _raw(self.tensors[at])[max(start - offset, 0) : stop - offset]
            if part.numel():
                parts.append((max(offset - start, 0), part))
            at += 1
        if len(parts) == 1 and parts[0][1].numel() == stop - start and parts[0][1].device.type == "cpu":
            return parts[0][1]
        out = torch.zeros(stop - start, dtype=torch.uint8)
        for begin, part in parts:
            out[begin : begin + part.numel()].copy_(part)
        return out

    def stripe(self, part: int, parts: int) -> torch.Tensor:
        return self.piece(*cut(self.bytes, part, parts)).clone()


def restore(skeleton: bytes, payload: torch.Tensor) -> Any:
    """Returns the nested state from its skeleton and bytes; its tensors are aligned views of `payload`.

    Raises:
        ProtocolError: `skeleton` is invalid, or does not match the number of bytes.
    """
    tensors: list[torch.Tensor] = []
    offset = 0
    shapes = _shapes(_parsed(skeleton))
    expected = sum(_padded(math.prod(shape) * dtype.itemsize) for dtype, shape in shapes)
    if expected != payload.numel():
        raise ProtocolError(f"a state of {expected} bytes came with {payload.numel()}")
    for dtype, shape in shapes:
        size = math.prod(shape) * dtype.itemsize
        tensors.append(payload[offset : offset + size].view(dtype).reshape(shape))
        offset += _padded(size)
    return decode(skeleton, tensors)


def cut(total: int, part: int, parts: int) -> tuple[int, int]:
    """Returns the bytes `[start, stop)` of stripe `part` of `parts`, of `total` bytes."""
    units = total // ALIGNMENT
    return units * part // parts * ALIGNMENT, units * (part + 1) // parts * ALIGNMENT


# --- transfer ---------------------------------------------------------------------------------------------------------

PIECE_BYTES = 4 << 20
IN_FLIGHT = 4  # pieces of a veteran's stripe that are lent at the same time
_HEADER, _SKELETON, _STRIPE, _CHECK, _TAKEN, _MARK = range(6)
_FIXED = 11  # words of the header before the flags
_ROW = 1023  # words of 8 bytes
_WEIGHTS = torch.arange(1, _ROW + 1, dtype=torch.int64) * (0x9E3779B97F4A7C15 >> 2) * 2 + 1


def send_state(
    view: View, veterans: Sequence[str], worker: str, links: Links, round_: int, position: Position,
    snapshot: Snapshot, memory: Memory,
) -> None:  # fmt: skip
    """Sends a veteran's part of the state to every joiner of `view`. Blocks until the joiners have received it.

    The first veteran sends the header, the mark and the skeleton. Each of the `veterans` sends its stripe, and a
    checksum of the next one's stripe. The pieces are lent in `memory`.

    Raises:
        PeerLost: a joiner is lost.
    """
    part = veterans.index(worker)
    sent: list[Pending] = []
    skeleton = torch.frombuffer(bytearray(snapshot.skeleton), dtype=torch.uint8)
    at, loop = (position.step, position.epoch, position.offset), position.loop
    sizes = skeleton.numel(), snapshot.bytes, len(snapshot.mark)
    header = torch.tensor([round_, *at, *astuple(loop), *sizes, *snapshot.flags], dtype=torch.int64)
    mark = torch.frombuffer(bytearray(snapshot.mark), dtype=torch.uint8) if snapshot.mark else None
    if part == 0:
        for joiner in view.joining:
            sent.append(links.send(header, joiner, _tag(view, _HEADER)))
            if mark is not None:
                sent.append(links.send(mark, joiner, _tag(view, _MARK)))
            sent.append(links.send(skeleton, joiner, _tag(view, _SKELETON)))
    mine = _pieces(snapshot.bytes, part, len(veterans))
    next_ = (part + 1) % len(veterans)
    theirs = _pieces(snapshot.bytes, next_, len(veterans)) if len(veterans) > 1 else []
    checksum = 0 if next_ else zlib.crc32(snapshot.skeleton)  # the first veteran sends that too
    lending = _Lending(view, links, memory)
    try:
        for lent, checked in zip_longest(mine, theirs):
            if lent:
                lending.lend(snapshot.piece(*lent))
            if checked:
                checksum = _checksum(snapshot.piece(*checked), checksum)
        if theirs:
            check = torch.tensor([checksum], dtype=torch.int64)
            sent += [links.send(check, joiner, _tag(view, _CHECK)) for joiner in view.joining]
        lending.wait()
        for pending in sent:
            pending.wait()
    except PeerLost:
        links.keep_alive(lending)
        raise


class _Lending:
    """The pieces that are being lent to all joiners of `view`, at most `IN_FLIGHT` at a time."""

    def __init__(self, view: View, links: Links, memory: Memory) -> None:
        self._view, self._links, self._memory = view, links, memory
        self._slots: list[torch.Tensor] = []  # memory that no joiner reads
        self._under_way: deque[tuple[torch.Tensor, list[Pending]]] = deque()

    def lend(self, piece: torch.Tensor) -> None:
        """Lends a copy of `piece`. Waits for free memory first."""
        if len(self._under_way) == IN_FLIGHT:
            self._wait_for_one()
        slot = self._slots.pop() if self._slots else self._memory.empty(PIECE_BYTES, torch.uint8)
        copy = slot[: piece.numel()].copy_(piece)
        pending: list[Pending] = []
        self._under_way.append((slot, pending))
        for joiner in self._view.joining:
            pending.append(self._links.lend(copy, joiner, _tag(self._view, _STRIPE)))
            taken = torch.empty(1, dtype=torch.int64)
            pending.append(self._links.receive(taken, joiner, _tag(self._view, _TAKEN)))

    def wait(self) -> None:
        """Waits until all joiners have acknowledged all pieces."""
        while self._under_way:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        for each in self._under_way[0][1]:
            each.wait()
        self._slots.append(self._under_way.popleft()[0])


class Arrival:
    """A joiner's part of the transfer: call `header` first, then `state`.

    `ahead` is memory that was allocated before; it is used if it is large enough.

    Attributes:
        mark: a place in the stream of samples, once `header` has returned; b"" if there is none. See `data/stream.py`.

    Raises:
        PeerLost: a veteran is lost; both methods block until then, or until the veterans send.
        StateDisputed: `state` received a stripe that differs from another veteran's copy.
    """

    def __init__(
        self, view: View, veterans: Sequence[str], links: Links, parameters: int, ahead: torch.Tensor | None = None
    ) -> None:
        self._view = view
        self._veterans = veterans
        self._links = links
        self._parameters = parameters
        self._ahead = ahead
        self._sizes = (0, 0)
        self.mark = b""

    def header(self) -> tuple[int, Position, list[bool]]:
        """Returns the first round of the view, the position of the run, and each parameter's requires_grad."""
        header = torch.empty(_FIXED + self._parameters, dtype=torch.int64)
        self._take(header, self._veterans[0], _HEADER)
        round_, step, epoch, offset, number, first_step, first_epoch, facts, *rest = header.tolist()
        skeleton, payload, mark, *flags = rest
        if mark:
            content = torch.empty(mark, dtype=torch.uint8)
            self._take(content, self._veterans[0], _MARK)
            self.mark = content.numpy().tobytes()
        self._sizes = (skeleton, payload)
        loop = LoopStart(number=number, step=first_step, epoch=first_epoch, facts=facts)
        return round_, Position(epoch=epoch, offset=offset, step=step, loop=loop), [bool(flag) for flag in flags]

    def state(self) -> Any:
        skeleton = torch.empty(self._sizes[0], dtype=torch.uint8)
        size, ahead, self._ahead = self._sizes[1], self._ahead, None
        payload = ahead[:size] if ahead is not None and len(ahead) >= size else touched(size)
        veterans, key = self._veterans, _tag(self._view, _STRIPE)
        waits: list[list[tuple[Borrowing, ReceiveBuffer]]] = []
        for part, veteran in enumerate(veterans):
            buffers = [ReceiveBuffer.of(payload[a:b]) for a, b in _pieces(size, part, len(veterans))]
            waits.append([(self._links.borrow(buffer, veteran, key), buffer) for buffer in buffers])
        self._take(skeleton, veterans[0], _SKELETON)
        checksums = [zlib.crc32(skeleton.numpy().data), *(0 for _ in veterans[1:])]
        acknowledgements: list[Pending] = []
        taken = torch.zeros(1, dtype=torch.int64)
        for pieces in zip_longest(*waits):  # one piece of each veteran in turn, so that none of them is delayed
            for part, piece in enumerate(pieces):
                if piece is None:
                    continue
                borrowing, buffer = piece
                content = borrowing.wait()
                if not buffer.holds(content):
                    buffer.memory.copy_(content)
                acknowledgements.append(self._links.send(taken, veterans[part], _tag(self._view, _TAKEN)))
                if len(veterans) > 1:
                    checksums[part] = _checksum(buffer.memory, checksums[part])
        self._compare(checksums)
        for pending in acknowledgements:
            pending.wait()
        return restore(skeleton.numpy().tobytes(), payload)

    def _compare(self, checksums: Sequence[int]) -> None:
        veterans = self._veterans
        checks = torch.empty(len(veterans), 1, dtype=torch.int64)
        if len(veterans) == 1:
            return
        for part in range(len(veterans)):
            self._take(checks[part], veterans[part - 1], _CHECK)
        for part, checksum in enumerate(checksums):
            witness = veterans[part - 1]
            if int(checks[part]) != checksum:
                raise StateDisputed(
                    f"part {part + 1} of {len(veterans)} of the state, sent by {veterans[part]}, differs from the copy "
                    f"of {witness}: one of the two holds, or sends, a wrong state",
                    veterans[part],
                    witness,
                )

    def _take(self, tensor: torch.Tensor, peer: str, kind: int) -> None:
        self._links.receive(tensor, peer, _tag(self._view, kind)).wait()


def _pieces(total: int, part: int, parts: int) -> list[tuple[int, int]]:
    """Returns the pieces of a stripe, of at most `PIECE_BYTES` each, in the order in which they are sent."""
    start, stop = cut(total, part, parts)
    return [(low, min(low + PIECE_BYTES, stop)) for low in range(start, stop, PIECE_BYTES)]


def _checksum(piece: torch.Tensor, before: int) -> int:
    """Returns the checksum of a piece and of the pieces `before` it, modulo 2^32.

    It is a CRC of weighted sums of rows of 8-byte words, modulo 2^64; a word's weight depends on its place in the row.
    Weights are odd, so that any change of one word is detected. The length of a row is odd too: of the words' highest
    bit, a sign, only the parity of the number of changes in a row is detected. It takes a third of the time of a CRC.
    """
    words = piece.view(torch.int64)
    whole = words.numel() // _ROW * _ROW
    rows = torch.mv(words[:whole].view(-1, _ROW), _WEIGHTS)
    rest = torch.dot(words[whole:], _WEIGHTS[: words.numel() - whole])
    return zlib.crc32(rest.view(1).numpy().data, zlib.crc32(rows.numpy().data, before))


def touched(size: int) -> torch.Tensor:
    """Returns memory for a state of `size` bytes, touched, in huge pages if the system has them."""
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _tag(view: View, part: int) -> int:
    return of_round(view, 0) | place(STATE, part)
