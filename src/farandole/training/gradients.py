"""The gradients of a replica on their way into the partial sums, and back: lanes beside them, and what a rule measures.

A shard's gradients go into the partial sums while its last backward pass produces them, parameter by parameter, so
that a bucket can be sent as soon as it is full. Beside them each shard has a row of float64 lanes: its loss, its
samples, the square of its gradient, that it is one, which parameters it used, and its buffers. Both are summed in the
order of the tree, so what comes back has the same bits on all workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farandole.collective.arena import Memory
from farandole.collective.buckets import Bucket, Layout, Partials
from farandole.collective.state_transfer import encode
from farandole.errors import UnknownState, UsageError
from farandole.plan.batch import Noise
from farandole.protocol.messages import MICRO_BATCH
from farandole.training.replica import Replica

# --- findings ---------------------------------------------------------------------------------------------------------
#
# What a worker finds of one shard, told by digests: what it read, its loss, its gradients, what its buffers became.
#
# For a shard that two workers compute (`protocol/coordinator/verdicts.py`). Whoever computes it has the same digests,
# or the first name whose digest is another says in what they differ. A gradient is digested as the backward pass
# produces it, before it is added to any other, and goes no further if the shard is another's.

NAME = 200  # characters, of those that a name may have on the wire


class ShardDigests:
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


# --- gradients --------------------------------------------------------------------------------------------------------

Tell = Callable[[Sequence[str], Sequence[int]], None]  # names and digests
# Lanes, in the order of `close`; then one a parameter (was it used?), then the buffers.
_LOSS, _SAMPLES, _SQUARES, _SHARDS, _FIRST = range(5)


class Gradients:
    """The replica's gradients on their way into the partial sums, and back as `.grad`. Lives as long as the run.

    `memory`: where the partial sums lie, None for this process's own.
    `noise`: what the shards' gradients of the last step tell, for a learning-rate rule that asked for it.
    """

    def __init__(self, replica: Replica, *, memory: Memory | None = None, measures_noise: bool = False) -> None:
        self.replica = replica
        self._memory = memory
        self.noise: Noise | None = None
        self._measures_noise = measures_noise
        self._squares = 0.0  # of the open shard
        self.parameters = list(replica.parameters.values())
        self._flags: list[bool] = []
        self._hooks: list[Any] = []
        self.layout: Layout
        self.partials: Partials
        self._folding = False
        self._findings: ShardDigests | None = None  # of a shard that two workers compute
        self._views: dict[int, list[tuple[torch.Tensor, dict[int, torch.Tensor]]]] = {}  # by bucket, the last two
        self.refresh()

    def refresh(self) -> bool:
        """Follow `requires_grad`: a frozen parameter has no bucket. True if anything changed."""
        flags = [parameter.requires_grad for parameter in self.parameters]
        if flags == self._flags:
            return False
        self._flags = flags
        self.layout = Layout(self.parameters, lanes=_FIRST + len(self.parameters) + self.replica.lanes)
        self.partials = Partials(self.layout, self._memory)
        self._frozen = [index for index, flag in enumerate(flags) if not flag]
        self._lanes = torch.zeros(self.layout.lanes, dtype=torch.float64)
        self._buffers = self._lanes[_FIRST + len(self.parameters) :]
        self._row = self._lanes.numpy()[: _FIRST + len(self.parameters)]
        self._flags_as_lanes = [float(flag) for flag in flags]
        self._views.clear()
        self.unhook()
        self.hook()
        return True

    def follow(self) -> None:
        """Parameters of the replica were replaced by others of the same shapes and dtypes: the buckets stay."""
        self.parameters[:] = self.layout.parameters[:] = self.replica.parameters.values()
        self._views.clear()
        self.unhook()
        self.hook()

    def hook(self) -> None:
        """Have gradients folded as the backward passes of `backward` produce them."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self.parameters)
            if self._flags[index] and parameter.requires_grad
        ]

    def unhook(self) -> None:
        """Until `hook`, backward passes are as they would be without any of this."""
        for hook in self._hooks:
            hook.remove()

    def examine(self, *, mine: bool) -> ShardDigests:
        """Two workers compute the shard that comes next. Unless it is `mine`, nothing of it goes into the sums."""
        self._findings = ShardDigests(list(self.replica.parameters), self.partials if mine else None)
        return self._findings

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def backward(self, loss: torch.Tensor, weight: float, *, last: bool) -> None:
        """One backward pass of the open shard, its gradients scaled by `weight`."""
        self._folding = last
        try:
            loss.backward(torch.full_like(loss, weight))
        finally:
            self._folding = False

    def close(self, loss: torch.Tensor, samples: int, weight: float, tell: Tell) -> None:
        """The open shard's backward passes are done. `loss`: the sum over its samples, one float64.

        `tell`: called with what was found of a shard that two compute, before anybody can have its sums.
        """
        row, sink = self._row, self._findings or self.partials
        for index in self._frozen:
            if self.parameters[index].grad is not None:
                raise UsageError(
                    f"parameter {list(self.replica.parameters)[index]} got a gradient in a step that began with its "
                    f"requires_grad off; switch it on between two steps, or leave it on where the inner loop ends"
                )
        row[_FIRST:] = self._flags_as_lanes
        for index in [index for index in self.layout.where if not sink.folded(index)]:
            gradient = self.parameters[index].grad
            if gradient is not None:  # of an earlier pass than the last
                self._fold(index, gradient)
            else:
                row[_FIRST + index] = 0.0
        squares, self._squares = self._squares * samples / weight**2, 0.0
        row[_LOSS], row[_SAMPLES], row[_SQUARES], row[_SHARDS] = float(loss), samples, squares, 1.0
        self.replica.buffers_to(self._buffers)
        self._close(tell)

    def close_empty(self, tell: Tell) -> None:
        """The open shard has no sample that could be used: it takes part with zeros."""
        self._lanes.zero_()
        self._close(tell)

    def _close(self, tell: Tell) -> None:
        findings, self._findings = self._findings, None
        if findings is not None:
            tell(*findings.close(self._lanes, _LOSS, _FIRST + len(self.parameters)))
        if findings is None or findings.mine:
            self.partials.close(self._lanes)

    def publish(self, reduced: list[torch.Tensor], due: int) -> tuple[float, int]:
        """After the round: `.grad` and buffers from the reduced buckets. Returns the loss's sum and the samples.

        `due`: the window's samples, by which the shards' gradients were weighted. Where some of them were left out,
        the gradient is scaled to the mean over the others.
        """
        lanes = reduced[-1]
        samples, shards = int(lanes[_SAMPLES]), int(lanes[_SHARDS])
        if 0 < samples < due:
            for flat in reduced[:-1]:
                flat.mul_(due / samples)
        used = lanes[_FIRST : _FIRST + len(self.parameters)].tolist()
        for bucket in self.layout.buckets:
            if bucket.params:
                flat = reduced[bucket.index]
                for index, view in self._views_of(bucket, flat).items():
                    try:
                        self.parameters[index].grad = view if used[index] else None
                    except RuntimeError:
                        self.replica.check_forms()  # names the parameter whose `.data` has another form
                        raise
        if self._measures_noise and samples:
            square = sum(_square(p.grad) for p in self.parameters if p.grad is not None)
            self.noise = Noise.of(float(lanes[_SQUARES]), square, samples, shards)
        if shards:
            self.replica.buffers_from(lanes[_FIRST + len(used) : self.layout.lanes], shards)
        return float(lanes[_LOSS]), samples

    def _views_of(self, bucket: Bucket, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """The parameters' gradients in a reduced bucket, which lies in two places in turn."""
        known = self._views.setdefault(bucket.index, [])
        for place, views in known:
            if place is flat:
                return views
        views = self.layout.views(bucket, flat)
        known[:] = [*known[-1:], (flat, views)]
        return views

    def _hook(self, index: int) -> Any:
        def fold(parameter: torch.Tensor) -> None:
            if self._folding and parameter.grad is not None:
                if (self._findings or self.partials).folded(index):
                    raise UsageError(
                        f"parameter {list(self.replica.parameters)[index]} got its gradient in two goes of one "
                        f"backward pass, as reentrant checkpointing makes them; checkpoint with use_reentrant=False"
                    )
                self._fold(index, parameter.grad)

        return fold

    def _fold(self, index: int, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            raise UsageError(
                f"parameter {list(self.replica.parameters)[index]} got a gradient of layout {gradient.layout}, which "
                f"can't be added up over workers; use one that is dense (sparse=False)"
            )
        if self._measures_noise:
            self._squares += _square(gradient)
        (self._findings or self.partials).fold(index, gradient)
        self.parameters[index].grad = None


def _square(gradient: torch.Tensor) -> float:
    """The squared norm, summed up in float64."""
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
