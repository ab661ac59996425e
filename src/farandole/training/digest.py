"""Digests of the replica: a small one for every step's control word, and one of each value and tensor to tell what
differs.

A step's digest is of the replica as the step begins. In it are

    (a) all plain values: the settings of parameter groups, what schedulers and other objects hold, and torch's own
        settings that bear on bits;
    (b) the start-of-step buffers, all of them;
    (c) a part of parameters, large buffers and optimizers' tensors. Put one after the other they are a run of lines of
        `LINE_BYTES`; step s takes the lines s mod `ROTATION` and every `ROTATION`th from there.

So what differs in (a), in (b), or over more than `LINE_BYTES * ROTATION` bytes (256 KiB) in a row shows in the next
step, and a single element within `ROTATION` steps. The lines are read in place: views of tensors in the host's memory
are kept for as long as the tensors stay where they are; those of an accelerator are gathered there and come in one
copy. Elements count in their order, not as they lie in memory, so a copy in another memory format is equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from farandole.collective.state_transfer import encode
from farandole.membership.comparison import fitting
from farandole.training.replica import Replica

ROTATION = 512  # steps until every element has been looked at
LINE_BYTES = 512
NAME = 256  # characters


class StepDigest:
    """Of one worker's replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._lines: list[Lines] = []
        self._buffers = [Lines(buffer, 0) for buffer in replica.kept_buffers]

    def at(self, step: int, settings: Mapping[str, str]) -> int:
        """The digest, 63 bits and not 0, where `step` begins. Its buffers and plain values are those kept for it."""
        replica = self._replica
        digest = hashlib.sha256(step.to_bytes(8, "little"))
        digest.update(encode(dict(settings))[0])
        digest.update(replica.plain.skeleton)
        for tensor in replica.plain.small:
            digest.update(as_bytes(tensor))
        tensors = [*replica.parameters.values(), *replica.constants.values(), *replica.plain.large]
        elsewhere: list[torch.Tensor] = []
        for lines in self._buffers:
            lines.take(0, 1, digest, elsewhere)
        for lines in self._placed(tensors):
            lines.take(step, ROTATION, digest, elsewhere)
        if elsewhere:
            digest.update(as_bytes(torch.cat(elsewhere)))
        return number(digest.digest())

    def _placed(self, tensors: list[torch.Tensor]) -> list[Lines]:
        """The tensors as lines: those of the step before, where nothing has moved."""
        known = self._lines
        if len(known) != len(tensors) or any(k.moved(t) for k, t in zip(known, tensors, strict=True)):
            self._lines, first = [], 0
            for tensor in tensors:
                self._lines.append(Lines(tensor, first))
                first += self._lines[-1].count
        return self._lines


class Lines:
    """A tensor as lines of `LINE_BYTES`, the last one perhaps shorter. `first`: the first one's place in the run."""

    __slots__ = ("_first", "_flat", "_pointer", "_tail", "_tensor", "_view", "count")

    def __init__(self, tensor: torch.Tensor, first: int) -> None:
        self._tensor, self._pointer, self._first = tensor, tensor.data_ptr(), first
        size = tensor.numel() * tensor.element_size()
        self.count = -(-size // LINE_BYTES)
        whole = size // LINE_BYTES * LINE_BYTES
        self._view: Any = None
        self._tail: Any = None
        if size and tensor.device.type == "cpu" and tensor.is_contiguous():
            flat = _flat(tensor).numpy()
            self._view = flat[:whole].view(f"V{LINE_BYTES}")
            self._tail = flat[whole:] if whole < size else None

    def moved(self, tensor: torch.Tensor) -> bool:
        return self._tensor is not tensor or self._pointer != tensor.data_ptr()

    def take(self, step: int, rotation: int, digest: Any, elsewhere: list[torch.Tensor]) -> None:
        """The step's lines into `digest`; where they are on an accelerator, into `elsewhere`."""
        start = (step - self._first) % rotation
        if start >= self.count:
            return
        ends = (self.count - 1 - start) % rotation == 0
        if self._view is not None:
            digest.update(self._view[start::rotation].tobytes())
            if self._tail is not None and ends:
                digest.update(self._tail)
            return
        flat = _flat(self._tensor)
        whole = flat.numel() // LINE_BYTES * LINE_BYTES
        pieces = [flat[:whole].view(-1, LINE_BYTES)[start::rotation].reshape(-1), *([flat[whole:]] if ends else [])]
        if flat.device.type != "cpu":
            elsewhere += pieces
            return
        for piece in pieces:
            digest.update(as_bytes(piece))


def each(replica: Replica, settings: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and digests of everything: torch's settings, then of the replica plain values, buffers, parameters, and
    optimizers' tensors.

    If there are too many for a message, the last is of all that are left.
    """
    leaves = [*settings.items(), *leaves_of(replica)]
    names = ["".join(c if c.isprintable() else "?" for c in name[:NAME]) for name, _ in leaves]
    most = fitting(names)
    digests = [hashlib.sha256(content(value)) for _, value in leaves[:most]]
    for _, value in leaves[most:]:
        digests[-1].update(content(value))
    return tuple(names[:most]), tuple(number(digest.digest()) for digest in digests)


def unlike(replica: Replica, state: Mapping[str, Any]) -> list[str]:
    """The names of what the replica's objects have otherwise than `state`, which they have just loaded."""
    now = dict(_walk("", replica.state()["objects"]))
    return [name for name, value in _walk("", state["objects"]) if name not in now or not _same(value, now[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return bool((as_bytes(one) == as_bytes(other)).all())
    return encode(one)[0] == encode(other)[0]


def leaves_of(replica: Replica) -> list[tuple[str, Any]]:
    """Each value and tensor of a replica by name: plain values, buffers, parameters, then optimizers' tensors."""
    state = replica.state()
    found = dict(_walk("", state["objects"]))
    found |= {f"{n}.requires_grad": flag for n, flag in zip(replica.parameters, state["requires_grad"], strict=True)}
    found |= dict(zip(replica.buffers, state["buffers"], strict=True))

    def place(name: str) -> int:
        if not isinstance(found[name], torch.Tensor):
            return 0
        return 1 if name in replica.buffers else 2 if name in replica.parameters else 3

    return sorted(found.items(), key=lambda item: place(item[0]))


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is in a nested state, with paths as one would write them; a list of plain values is one."""
    if isinstance(value, dict):
        for key, inner in cast("dict[Any, Any]", value).items():
            yield from _walk(f"{name}.{key}".lstrip(".") if isinstance(key, str) else f"{name}[{key}]", inner)
    elif isinstance(value, list | tuple) and any(
        isinstance(v, dict | list | tuple | torch.Tensor) for v in cast("Sequence[Any]", value)
    ):
        for index, inner in enumerate(cast("Sequence[Any]", value)):
            yield from _walk(f"{name}[{index}]", inner)
    else:
        yield name, value


def content(value: Any) -> Any:
    """What of a value or tensor goes into a digest."""
    return as_bytes(value) if isinstance(value, torch.Tensor) else encode(value)[0]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in order, as bytes; a view where they lie so."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> Any:
    """A tensor's elements in order, as bytes in the host's memory."""
    return _flat(tensor).cpu().numpy()


def number(digest: bytes) -> int:
    """63 bits of a digest, and not 0."""
    return int.from_bytes(digest[:8], "little") >> 1 or 1
