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

import torch

from farandole.checkpoint.store import Sealing
from farandole.collective.state import decode, encode
from farandole.errors import FarandoleError
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
    """Position and nested state from a file that was seen to be whole. Nothing in it can be code.

    Raises:
        FarandoleError: another version wrote it.
    """
    content = torch.load(file, map_location="cpu", weights_only=True)
    ours = content.pop(OURS, {})
    if ours.get("format") != _FORMAT:
        raise FarandoleError(
            f"{name}: a checkpoint of format {ours.get('format')}, this version reads {_FORMAT}; resume it with the "
            f"version of farandole that wrote it"
        )
    epoch, offset, step = ours.pop("position")
    del ours["format"]
    return Position(epoch=epoch, offset=offset, step=step), {**ours, "objects": content}
