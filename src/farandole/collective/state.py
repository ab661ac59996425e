"""State without pickling: nested state_dicts as a typed skeleton plus raw tensors.

The skeleton is msgpack of tagged lists; nothing in it names code. The tensors follow each other in one run of bytes,
each at a 64-byte aligned offset.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import msgspec
import torch

from farandole.collective.buckets import ALIGNMENT
from farandole.errors import ProtocolError, UnknownState

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip


def encode(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The skeleton of a nested state and its tensors, in order.

    Raises:
        UnknownState: a value that is no tensor, number, text, None or container of those; names its path.
    """
    tensors: list[torch.Tensor] = []
    return msgspec.msgpack.encode(_encode(state, "state", tensors)), tensors


def _encode(value: Any, path: str, tensors: list[torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise UnknownState(f"{path}: the text {value!r} is no Unicode text and can't be sent")
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
            raise UnknownState(f"{path}: a tensor of {value.dtype} can't be sent; known are {', '.join(_DTYPES)}")
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
    """The nested state again.

    Raises:
        ProtocolError: `skeleton` is not what `encode` makes, or not of these tensors.
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
    """The skeleton's tree, checked: it comes from a peer, whom nothing authenticates."""
    try:
        tree = msgspec.msgpack.decode(skeleton)
        _check(tree)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(skeleton)} bytes are no state's skeleton: {error}") from error
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
                        raise ProtocolError("a state's skeleton holds a pair that is none")
        case _:
            raise ProtocolError(f"a state's skeleton holds a {type(item).__name__} that `encode` never makes")


def _shapes(tree: Any) -> list[tuple[torch.dtype, list[int]]]:
    found: list[tuple[torch.dtype, list[int]]] = []

    def walk(item: Any) -> None:
        if isinstance(item, list):
            items = cast("list[Any]", item)
            if items[0] == "T":
                found.append((_DTYPES[items[1]], items[2]))
            elif items[0] in ("C", "d"):
                for _, v in items[1]:
                    walk(v)
            else:
                for v in items[1]:
                    walk(v)

    walk(tree)
    return found


def _padded(tensor_bytes: int) -> int:
    return -(-tensor_bytes // ALIGNMENT) * ALIGNMENT


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Snapshot:
    """A replicated state as it is at a step's start, ready to be sent: references, not copies."""

    def __init__(self, state: Any) -> None:
        self.skeleton, self.tensors = encode(state)
        self.flags = [int(flag) for flag in state["requires_grad"]]
        sizes = [_padded(t.numel() * t.element_size()) for t in self.tensors]
        self._offsets = list(accumulate(sizes, initial=0))
        self.bytes = self._offsets.pop()

    def piece(self, start: int, stop: int) -> torch.Tensor:
        """The payload's bytes [start, stop), shape (stop - start,): where they lie, if they are of one tensor there."""
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
        for place, part in parts:
            out[place : place + part.numel()].copy_(part)
        return out

    def stripe(self, part: int, parts: int) -> torch.Tensor:
        return self.piece(*cut(self.bytes, part, parts)).clone()


def restore(skeleton: bytes, payload: torch.Tensor) -> Any:
    """The nested state from its skeleton and bytes; tensors are aligned views of `payload`.

    Raises:
        ProtocolError: `skeleton` is not what `encode` makes, or not of so many bytes.
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
    """The stripe `[start, stop)` of `total` bytes that is one of so many `parts`."""
    units = total // ALIGNMENT
    return units * part // parts * ALIGNMENT, units * (part + 1) // parts * ALIGNMENT
