"""What a worker finds of one shard, told by digests: what it read, its loss, its gradients, what its buffers became.

For a shard that two workers compute (`membership/verdicts.py`). Whoever computes it has the same digests, or the first
name whose digest is another says in what they differ. A gradient is digested as the backward pass produces it, before
it is added to any other, and goes no further if the shard is another's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from farandole.collective.buckets import Partials
from farandole.collective.state_transfer import encode
from farandole.errors import UnknownState
from farandole.membership.comparison import MICRO_BATCH

NAME = 200  # characters, of those that a name may have on the wire


class Findings:
    """Of the open shard. `partials` take what is found, None for the shard of another.

    Used in place of `Partials`: `fold`, `folded`, `close`.
    """

    def __init__(self, names: Sequence[str], partials: Partials | None) -> None:
        self._names = names
        self._partials = partials
        self.mine = partials is not None
        self._gradients: dict[int, int] = {}
        self._read: list[tuple[str, int]] = []

    def read(self, batch: Any) -> None:
        """The shard's micro-batch, before the script gets it. What has no digest, of a class of its own, has none."""
        try:
            skeleton, tensors = encode(batch)
        except UnknownState:
            return
        self._read.append((MICRO_BATCH, _digest(skeleton, *map(_bytes, tensors))))

    def fold(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient of parameter `index`."""
        self._gradients[index] = _digest(_bytes(gradient))
        if self._partials is not None:
            self._partials.fold(index, gradient)

    def folded(self, index: int) -> bool:
        return index in self._gradients

    def close(self, lanes: torch.Tensor, loss: int, buffers: int) -> tuple[list[str], list[int]]:
        """The shard is done. `lanes`: of which `loss` is the loss, and those from `buffers` on are the buffers.

        Returns names and digests, in the order in which a shard comes by what they name.
        """
        found = [*self._read, ("the loss", _digest(_bytes(lanes[loss : loss + 1])))]
        found += [(f"the gradient of {self._names[i]}", self._gradients[i]) for i in sorted(self._gradients)]
        if buffers < len(lanes):
            found.append(("the buffers", _digest(_bytes(lanes[buffers:]))))
        return [_plain(name) for name, _ in found], [digest for _, digest in found]


def _digest(*parts: Any) -> int:
    """63 bits, not 0."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest()[:8], "little") >> 1 or 1


def _bytes(tensor: torch.Tensor) -> Any:
    """Its elements in their order, not as they lie in memory."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def _plain(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name[:NAME])
