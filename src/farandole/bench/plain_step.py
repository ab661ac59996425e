"""A step of the user's own loop without farandole: plain accumulation of the same micro-batches.

It has the interface of `Step`. Its gradient is that of this worker alone, or the one of DistributedDataParallel. There
is no seeding, restoring, ordered sum, digest or agreement. It belongs to a bench and is not a step of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from farandole.bench.stopwatch import Stopwatch
from farandole.data.loader import Key, Loader
from farandole.errors import UsageError
from farandole.training.step import Step, on_device


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """The data of a step: this worker's micro-batches, and the number of samples of all workers."""

    keys: tuple[Key, ...]
    samples: int


class Way(Protocol):
    """A way to do the backward passes of steps.

    `reason`: why it can't do them, "" if it can.
    """

    reason: str

    def around(self) -> AbstractContextManager[None]:
        """Return a context for a block of steps."""
        ...

    def opens(self, *, last: bool) -> None:
        """The script gets a micro-batch. `last`: it is this worker's last one in the step."""
        ...

    def backward(self, loss: torch.Tensor, weight: float, *, last: bool) -> None:
        """Add `weight` times the gradient of `loss` to `.grad`. `last`: it is the micro-batch's last backward pass."""
        ...


class Plain:
    """Backward passes as in a script that runs in a single process."""

    reason = ""

    def around(self) -> AbstractContextManager[None]:
        return nullcontext()

    def opens(self, *, last: bool) -> None:
        del last

    def backward(self, loss: torch.Tensor, weight: float, *, last: bool) -> None:
        del last
        loss.backward(torch.full_like(loss, weight))


class PlainStep:
    """A step with the interface of `Step`. Its facts are those of the step `before`, except that it ends no epoch."""

    def __init__(
        self, before: Step, ahead: Ahead, way: Way, *, loader: Loader, parameters: Sequence[torch.nn.Parameter],
        watch: Stopwatch,
    ) -> None:  # fmt: skip
        self.number, self.epoch, self.view = before.number, before.epoch, before.view
        self.base_steps = before.base_steps
        self.samples = ahead.samples
        self.ends_epoch, self.ended = False, False
        self.left_out = self.skipped = 0
        self._ahead, self._way, self._loader, self._watch = ahead, way, loader, watch
        self._parameters = parameters
        self._own_samples = sum(key.stop - key.start for key in ahead.keys)
        self._used = 0  # samples of the current micro-batch
        self._gave = False  # it has given rows
        self._passed = True  # the current micro-batch has had its last backward pass
        self._key: Key | None = None
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._values: dict[str, dict[str, list[tuple[float, float]]]] = {"mean": {}, "sum": {}, "max": {}}
        self._gathered: dict[str, torch.Tensor] = {}
        self._row = 0  # of the next micro-batch in `gathered`

    @property
    def loss(self) -> float:
        """The mean loss over this worker's micro-batches alone."""
        used = sum(weight for _, weight in self._losses)
        return sum(float(loss) * weight for loss, weight in self._losses) / (used or 1.0)

    @property
    def means(self) -> dict[str, float]:
        """The means over this worker's micro-batches alone. So are `sums` and `maxima`."""
        given = self._values["mean"].items()
        return {name: sum(v * w for v, w in pairs) / (sum(w for _, w in pairs) or 1.0) for name, pairs in given}

    @property
    def sums(self) -> dict[str, float]:
        return {name: sum(value for value, _ in pairs) for name, pairs in self._values["sum"].items()}

    @property
    def maxima(self) -> dict[str, float]:
        return {name: max(value for value, _ in pairs) for name, pairs in self._values["max"].items()}

    @property
    def gathered(self) -> dict[str, torch.Tensor]:
        """The rows of this worker's micro-batches alone; those of other samples are 0."""
        return self._gathered

    @property
    def generators(self) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(int(sample)) for sample in self.indices]

    @property
    def indices(self) -> torch.Tensor:
        """The samples of the current micro-batch, as `Step.indices`."""
        assert self._key is not None
        samples = self._loader.order.samples(self._key.epoch, self._key.start, self._key.stop).tolist()
        return torch.tensor([sample for sample in samples if sample not in self._loader.skipped])

    @property
    def rows(self) -> slice:
        """A slice with as many rows as the current micro-batch. Which rows these are does not matter in a bench."""
        return slice(self._row, self._row + self._used)

    def again(self, *, recompute: bool = False) -> Iterator[Any]:
        """Iterate over this worker's micro-batches once more. Random numbers are those of a plain script."""
        del recompute
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        self._row, self._used, self._losses = 0, 0, []
        self._values = {kind: {} for kind in self._values}
        for parameter in self._parameters:
            parameter.grad = None
        for key in self._ahead.keys:
            batch = self._loader.fetch(key)
            self._row += self._used
            self._used = key.stop - key.start - len(self._loader.skipped)
            self._gave = False
            if self._used == 0:
                continue
            self._way.opens(last=key == self._ahead.keys[-1])
            self._watch.open()
            self._key, self._passed = key, False
            yield batch if self._loader.device is None else on_device(batch, self._loader.device)
            if not self._passed and not self._gave:
                raise UsageError(
                    f"step {self.number}: a micro-batch was taken but not finished; call step.backward(loss) once for "
                    f"each micro-batch (with last=False for all but the last of several)"
                )
            self._watch.close()
        self.ended = True

    def backward(
        self, loss: torch.Tensor, *, weight: float | torch.Tensor | None = None, scaler: Any = None, last: bool = True
    ) -> None:
        units = float(self._used if weight is None else weight)
        self._way.backward(loss if scaler is None else scaler.scale(loss), units / self._own_samples, last=last)
        if last:
            self._losses.append((loss.detach(), units))
            self._passed = True

    def mean(self, *, weight: float | torch.Tensor | None = None, **values: float | torch.Tensor) -> None:
        self._keep("mean", values, float(self._used if weight is None else weight))

    def gather(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            if self._row == 0:
                self._gathered[name] = tensor.new_zeros(self.samples, *tensor.shape[1:])
            self._gathered[name][self.rows] = tensor.detach()
        self._gave = True

    def sum(self, **values: float | torch.Tensor) -> None:
        self._keep("sum", values, 1.0)

    def max(self, **values: float | torch.Tensor) -> None:
        self._keep("max", values, 1.0)

    def _keep(self, kind: str, values: Mapping[str, float | torch.Tensor], weight: float) -> None:
        for name, value in values.items():
            number = float(getattr(value.double(), kind)()) if isinstance(value, torch.Tensor) else float(value)
            self._values[kind].setdefault(name, []).append((number, weight))
