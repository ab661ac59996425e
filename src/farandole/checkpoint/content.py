"""What a checkpoint's file holds, and the copy of the state that it is written from.

It is plain torch.save of plain containers: `torch.load(path, weights_only=True)["model"]` is the state_dict of what was
replicated as `model`. Under the key "farandole" lies what else the run needs: position, buffers that state_dict()
leaves out, requires_grad.

The training thread is blocked for `HostCopy.take`, nothing else: one copy into memory that is kept from one checkpoint
to the next, since fresh memory costs page faults, several times the copy itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import msgspec
import torch

from farandole.checkpoint import archive
from farandole.checkpoint.sealing import Sealing
from farandole.checkpoint.store import DamagedError, first_line
from farandole.collective.state import decode, encode
from farandole.errors import FarandoleError
from farandole.membership.values import Count, Name
from farandole.plan.shards import Position

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
    operations = archive.check(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if _lacks_memory(error):
            raise  # no fault of the file's, which has been seen to ask for no more than it has
        raise DamagedError(f"torch can't read it ({type(error).__name__})") from error
    archive.check_outcome(content, operations)
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
