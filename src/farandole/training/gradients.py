"""The path of a replica's gradients into the partial sums and back to `.grad`, with the lanes and the noise of a rule.

A shard's gradients go into the partial sums while its last backward pass produces them, parameter by parameter, so
that a bucket can be sent as soon as it is full. Beside the gradients each shard has a row of float64 lanes: its loss,
its weight, its number of samples, the square of its gradient, a 1 that counts the shard, a 1 if the script has given
its weight, a 1 if it has had a backward pass, the script's values (`values.py`), the forms of its rows (`gather.py`),
which parameters it used, and its buffers. Gradients and lanes are summed in the order of the tree, so the result has
the same bits on all workers. A parameter that no shard used keeps `.grad = None`, as in a single process.

A shard of weight w contributes w / (samples of the window) times the gradient of its mean loss. After the round the sum
is multiplied by (samples of the window) / (sum of the weights). A shard's weight is its number of samples if the script
gives none: then this factor is 1, unless samples were left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farandole.collective.arena import Memory
from farandole.collective.buckets import Bucket, Layout, Partials
from farandole.collective.codec import NONE, Codec
from farandole.collective.state_transfer import encode
from farandole.errors import UnknownState, UsageError
from farandole.plan.rules import Noise
from farandole.protocol.messages import MICRO_BATCH
from farandole.training import gather
from farandole.training.replica import Replica
from farandole.training.values import count_lanes

# --- findings ---------------------------------------------------------------------------------------------------------
#
# A worker's results for one shard, as digests: its input, its loss, its gradients, and its buffers afterwards.
#
# They are made for a shard that two workers compute (`protocol/coordinator/disputes.py`). Both workers have the same
# digests, or the first name with a different digest tells in what they differ. A gradient's digest is taken as the
# backward pass produces it, before it is added to another one. If the shard belongs to another worker, the gradient is
# not used any further.

NAME = 200  # most characters of a name; the wire allows more


class ShardDigests:
    """The digests of the open shard. `partials` take its gradients; None for the shard of another worker.

    It replaces `Partials` for this shard: `add_gradient`, `has_gradient`, `close`.
    """

    def __init__(self, names: Sequence[str], partials: Partials | None) -> None:
        self._names = names
        self._partials = partials
        self.mine = partials is not None
        self._gradients: dict[int, int] = {}
        self._read: list[tuple[str, int]] = []

    def read(self, batch: Any) -> None:
        """Take the digest of the shard's micro-batch, before the script gets it.

        A batch of a class that can't be encoded has no digest.
        """
        try:
            skeleton, tensors = encode(batch)
        except UnknownState:
            return
        self._read.append((MICRO_BATCH, _digest(skeleton, *map(_bytes, tensors))))

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Take the digest of the gradient of parameter `index`, and pass the gradient on to the partial sums."""
        self._gradients[index] = _digest(_bytes(gradient))
        if self._partials is not None:
            self._partials.add_gradient(index, gradient)

    def has_gradient(self, index: int) -> bool:
        """Return True if `add_gradient` has received the gradient of parameter `index`."""
        return index in self._gradients

    def close(self, lanes: torch.Tensor, loss: int, buffers: int) -> tuple[list[str], list[int]]:
        """Return names and digests of the finished shard, in the order in which it produces the named values.

        `lanes`: lane `loss` has the loss, and the lanes from `buffers` on have the buffers.
        """
        pairs = [*self._read, ("the loss", _digest(_bytes(lanes[loss : loss + 1])))]
        pairs += [(f"the gradient of {self._names[i]}", self._gradients[i]) for i in sorted(self._gradients)]
        if buffers < len(lanes):
            pairs.append(("the buffers", _digest(_bytes(lanes[buffers:]))))
        return [_plain(name) for name, _ in pairs], [digest for _, digest in pairs]


def _digest(*parts: Any) -> int:
    """Return a digest of 63 bits, never 0."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest()[:8], "little") >> 1 or 1


def _bytes(tensor: torch.Tensor) -> Any:
    """Return the tensor's bytes in the order of its elements, not in the order of its memory."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def _plain(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name[:NAME])


# --- gradients --------------------------------------------------------------------------------------------------------

Tell = Callable[[Sequence[str], Sequence[int]], None]  # names and digests
# The first lanes, in the order of `fill`, then the script's values and the forms of its rows. One lane per parameter
# follows (1 if it was used), then the buffers.
_LOSS, _WEIGHT, _SAMPLES, _SQUARES, _SHARDS, _WEIGHED, _BACKWARD, _VALUES = range(8)


@dataclass(frozen=True, kw_only=True)
class ShardTotals:
    """What a shard has come to, beside its gradients.

    Attributes:
        loss: the mean loss times the weight; 0 if the weight is 0.
        weight: its weight in the step's mean: the number of samples, or what the script gives.
        samples: its number of usable samples.
        scale: the factor by which its gradients were multiplied.
        weighed: True if the script has given the weight.
        backward: True if it has had a backward pass.
    """

    loss: float
    weight: float
    samples: int
    scale: float
    weighed: bool = False
    backward: bool = True


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """The sums over a step's shards. `values`: those of the lanes of `values.py`; `rows`: those of `gather.py`.

    `backward`: the number of shards that have had a backward pass.
    """

    loss: float
    weight: float
    samples: int
    shards: int
    backward: int
    values: torch.Tensor
    rows: torch.Tensor


class Gradients:
    """Moves the replica's gradients into the partial sums, and back to `.grad`. Lives as long as the run.

    `memory`: the memory of the partial sums, None for this process's own heap.
    `codec`: the format in which gradients are summed.
    `noise`: the noise of the last step's gradients over its shards, for a learning-rate rule that needs it; else None.
    """

    def __init__(
        self, replica: Replica, *, memory: Memory | None = None, measures_noise: bool = False, codec: Codec = NONE
    ) -> None:
        self.replica = replica
        self._rows = _VALUES + count_lanes(replica.shards)  # the first lane of the forms of rows
        self._first = self._rows + gather.LANES  # the first lane that is a parameter's
        self._codec = codec
        self._memory = memory
        self.noise: Noise | None = None
        self._measures_noise = measures_noise
        self._squares = 0.0  # squared norm of the open shard's gradient
        self.parameters = list(replica.parameters.values())
        self._flags: list[bool] = []
        self._hooks: list[Any] = []
        self.layout: Layout
        self.partials: Partials
        self._used: list[float] = []  # by parameter: not 0 if the newest step has a gradient for it
        self._adding = False
        self._findings: ShardDigests | None = None  # set while the open shard is one that two workers compute
        codec.check_used(replica.parameters)
        self._views: dict[int, list[tuple[torch.Tensor, dict[int, torch.Tensor]]]] = {}  # by bucket, the last two
        self._decoded: dict[int, torch.Tensor] = {}  # by bucket: its sum in the dtype of its parameters
        self.refresh()

    def refresh(self) -> bool:
        """Adapt to changes of `requires_grad`: a frozen parameter has no bucket. Returns True if anything changed."""
        flags = [parameter.requires_grad for parameter in self.parameters]
        if flags == self._flags:
            return False
        self._codec.check_suits({n: p for n, p in self.replica.parameters.items() if p.requires_grad})
        self._flags = flags
        lanes = self._first + len(self.parameters) + self.replica.lanes
        self.layout = Layout(self.parameters, lanes, codec=self._codec)
        self.partials = Partials(self.layout, self._memory)
        self._frozen = [index for index, flag in enumerate(flags) if not flag]
        self._lanes = torch.zeros(self.layout.lanes, dtype=torch.float64)
        self._buffers = self._lanes[self._first + len(self.parameters) :]
        self._row = self._lanes.numpy()[: self._first + len(self.parameters)]
        self.values = self._lanes[_VALUES : self._rows]
        self.rows = self._lanes[self._rows : self._first]
        self._flags_as_lanes = [float(flag) for flag in flags]
        self._views.clear()
        self._decoded.clear()
        self.unhook()
        self.hook()
        return True

    def follow(self) -> None:
        """Adopt new parameters of the replica, of the same shapes and dtypes. The buckets do not change."""
        self.parameters[:] = self.layout.parameters[:] = self.replica.parameters.values()
        self._views.clear()
        self.unhook()
        self.hook()

    def hook(self) -> None:
        """Register the hooks that add gradients to the partial sums as `backward` produces them."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self.parameters)
            if self._flags[index] and parameter.requires_grad
        ]

    def unhook(self) -> None:
        """Remove the hooks: until `hook`, backward passes behave like torch's."""
        for hook in self._hooks:
            hook.remove()

    def examine(self, *, mine: bool, digests: type[ShardDigests] = ShardDigests) -> ShardDigests:
        """Take digests of the next shard, which two workers compute. Unless it is `mine`, the sums do not include it.

        Returns the object that takes the digests, of class `digests`.
        """
        self._findings = digests(list(self.replica.parameters), self.partials if mine else None)
        return self._findings

    def clear(self) -> None:
        """Set `.grad` of all parameters to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def backward(self, loss: torch.Tensor, weight: float, *, last: bool) -> None:
        """Run one backward pass of the open shard, with gradients scaled by `weight`. `last`: no other pass follows."""
        self._adding = last
        try:
            loss.backward(torch.full_like(loss, weight))
        finally:
            self._adding = False

    def fill(self, totals: ShardTotals) -> None:
        """Take the last gradients, the `totals` and the buffers of the open shard after its backward passes."""
        row, sink = self._row, self._findings or self.partials
        for index in self._frozen:
            if self.parameters[index].grad is not None:
                raise UsageError(
                    f"parameter {list(self.replica.parameters)[index]} got a gradient in a step that began with "
                    f"requires_grad=False; change requires_grad only between two steps"
                )
        row[self._first :] = self._flags_as_lanes
        for index in [index for index in self.layout.where if not sink.has_gradient(index)]:
            gradient = self.parameters[index].grad
            if gradient is not None:  # from a pass before the last one
                self._add_gradient(index, gradient)
            else:
                row[self._first + index] = 0.0
        squares = self._squares * totals.weight / totals.scale**2 if totals.scale else 0.0
        self._squares = 0.0
        row[_LOSS], row[_WEIGHT], row[_SAMPLES] = totals.loss, totals.weight, totals.samples
        row[_SQUARES], row[_SHARDS], row[_WEIGHED], row[_BACKWARD] = squares, 1.0, totals.weighed, totals.backward
        self.replica.buffers_to(self._buffers)

    def fill_empty(self) -> None:
        """Take an open shard without any usable sample: its lanes are zeros."""
        self._lanes.zero_()

    def close(self, tell: Tell) -> None:
        """Finish the open shard, which is filled.

        `tell`: called with the digests of a shard that two workers compute, before its sums can be sent.
        """
        findings, self._findings = self._findings, None
        if findings is not None:
            tell(*findings.close(self._lanes, _LOSS, self._first + len(self.parameters)))
        if findings is None or findings.mine:
            self.partials.close(self._lanes)

    def publish(self, reduced: list[torch.Tensor], window_samples: int) -> StepTotals:
        """Set `.grad` and buffers from the reduced buckets after the round. Returns the sums over the shards.

        `window_samples`: the window's number of samples, by which the shards' gradients were divided.

        Raises:
            UsageError: the sum of the weights is 0, or only some of the shards have a weight of the script, or a
                backward pass.
        """
        lanes = reduced[-1]
        samples, shards, weight = int(lanes[_SAMPLES]), int(lanes[_SHARDS]), float(lanes[_WEIGHT])
        backward = int(lanes[_BACKWARD])
        if 0 < backward < shards:
            raise UsageError(
                f"{backward} of the {shards} micro-batches of this pass have called step.backward, and the others only "
                f"step.gather; call step.backward(loss) in each micro-batch, or in none of this pass"
            )
        if backward and not weight:
            raise UsageError(
                "the weights of all micro-batches of this step are 0, so its mean loss and its gradient do not exist; "
                "give the step samples that count"
            )
        if 0 < int(lanes[_WEIGHED]) < backward:
            raise UsageError(
                "step.backward got weight= for some micro-batches of this step and not for others, which then count by "
                "their samples; pass weight= for all"
            )
        gradients = [self._decode(bucket, reduced[bucket.index]) for bucket in self.layout.buckets if bucket.params]
        if backward and weight != window_samples:
            for flat in gradients:
                flat.mul_(window_samples / weight)
        used = self._used = lanes[self._first : self._first + len(self.parameters)].tolist()
        for bucket in self.layout.buckets:
            if bucket.params:
                for index, view in self._views_of(bucket, gradients[bucket.index]).items():
                    try:
                        self.parameters[index].grad = view if used[index] else None
                    except RuntimeError:
                        self.replica.check_forms()  # names the parameter whose `.data` has another form
                        raise
        if self._measures_noise and backward:
            square = sum(_square(p.grad) for p in self.parameters if p.grad is not None)
            # The noise is that of a sample, which has weight / samples units of the weight.
            self.noise = Noise.estimate(float(lanes[_SQUARES]) * (samples / weight), square, samples, shards)
        if shards:
            self.replica.buffers_from(lanes[self._first + len(used) : self.layout.lanes], shards)
        return StepTotals(
            loss=float(lanes[_LOSS]), weight=weight, samples=samples, shards=shards, backward=backward,
            values=lanes[_VALUES : self._rows], rows=lanes[self._rows : self._first],
        )  # fmt: skip

    def gave(self, parameter: torch.Tensor) -> bool:
        """Return True if the newest step has a gradient for `parameter`."""
        return any(each is parameter and used for each, used in zip(self.parameters, self._used, strict=False))

    def _decode(self, bucket: Bucket, total: torch.Tensor) -> torch.Tensor:
        """Return a bucket's sum in the dtype of its parameters; the sum itself if it has that dtype."""
        dtype = self.parameters[bucket.params[0]].dtype
        if total.dtype == dtype:
            return total
        decoded = self._decoded.get(bucket.index)
        if decoded is None:
            numbers = bucket.numbers_before(bucket.numel)
            decoded = self._decoded[bucket.index] = torch.empty(numbers, dtype=dtype, device=total.device)
        self._codec.decode(total, decoded)
        return decoded

    def _views_of(self, bucket: Bucket, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the parameters' gradients in a reduced bucket, which alternates between two memory locations."""
        cached = self._views.setdefault(bucket.index, [])
        for tensor, views in cached:
            if tensor is flat:
                return views
        views = self.layout.views(bucket, flat)
        cached[:] = [*cached[-1:], (flat, views)]
        return views

    def _hook(self, index: int) -> Any:
        def add_gradient(parameter: torch.Tensor) -> None:
            if self._adding and parameter.grad is not None:
                if (self._findings or self.partials).has_gradient(index):
                    raise UsageError(
                        f"parameter {list(self.replica.parameters)[index]} got its gradient in two parts of one "
                        f"backward pass, as with reentrant checkpointing; checkpoint with use_reentrant=False"
                    )
                self._add_gradient(index, parameter.grad)

        return add_gradient

    def _add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            raise UsageError(
                f"parameter {list(self.replica.parameters)[index]} got a gradient of layout {gradient.layout}, which "
                f"can't be summed over workers; use a dense gradient (sparse=False)"
            )
        if self._measures_noise:
            self._squares += _square(gradient)
        (self._findings or self.partials).add_gradient(index, gradient)
        self.parameters[index].grad = None


def _square(gradient: torch.Tensor) -> float:
    """Return the squared norm, summed in float64."""
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
