"""Buckets of an accelerator on their way through pinned host memory, where no collective library of its own serves.

Each of the device's flat tensors has one mirror in host memory, allocated once; the exchange sends, receives and adds
there. A bucket in host memory is its own mirror.
"""

from __future__ import annotations

import torch

from farandole.collective.arena import Memory
from farandole.collective.buckets import Bucket


class Staging:
    """`force` stages host memory too (True): how the path is tested without an accelerator."""

    def __init__(self, memory: Memory, force: bool | None = None) -> None:
        self._memory = memory
        self._force = force
        self._mirrors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the device's tensor, which is kept

    def host(self, flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """The host memory that stands for `flat` on the wire, shape (bucket.numel,)."""
        if not self.serves(bucket):
            return flat
        if id(flat) not in self._mirrors:
            if flat.device.type == "cuda":
                mirror = torch.zeros(flat.numel(), dtype=flat.dtype, pin_memory=True)
            else:
                mirror = self._memory.empty(flat.numel(), flat.dtype)
            self._mirrors[id(flat)] = (flat, mirror)
        return self._mirrors[id(flat)][1]

    def out(self, flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Bring `flat` to the host; waits for the device, since it is sent next."""
        mirror = self.host(flat, bucket)
        return mirror if mirror is flat else mirror.copy_(flat)

    def back(self, flat: torch.Tensor, bucket: Bucket) -> None:
        """Bring `flat` back from the host; waits for the device, since the next round receives into the mirror."""
        mirror = self.host(flat, bucket)
        if mirror is not flat:
            flat.copy_(mirror)

    def serves(self, bucket: Bucket) -> bool:
        """Whether a bucket has mirrors."""
        return bucket.device.type != "cpu" if self._force is None else self._force
