"""Batch policies: the number of samples in a step, and how they are cut into micro-batches; and learning-rate rules.

A policy is a pure function of the number of workers that begin the step. `base` is the batch that the user's learning
rate was chosen for: `len(loader)` and `Step.base_steps` count in units of it, so that a schedule does not drift when
the batch changes. This module neither changes an optimizer (`training/learning_rate.py` does) nor decides which workers
begin a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from farandole.errors import UsageError
from farandole.plan.rules import MomentumCompensation, Rule
from farandole.platform.bounds import whole

# --- batch ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GlobalBatch:
    """A constant batch of `size` samples a step, for any number of workers, in micro-batches of `micro` samples.

    If `micro` does not divide the batch, or an epoch's short last batch, micro-batches differ by at most one sample:
    65 samples at `micro=64` are 33 and 32.

    If each loss is the mean over its micro-batch, the gradient is that of the mean over the batch, and `micro` affects
    rounding only. With `reduction="sum"` the gradient grows with `micro`: see `Step.backward`.

    The weights depend only on the seed: not on the number of workers, and not on which workers join or leave.

    Raises:
        UsageError: `micro` or `size` below 1, or `micro` above `size`.
    """

    size: int
    micro: int

    def __post_init__(self) -> None:
        _check("GlobalBatch", self, "size", "micro")

    @property
    def base(self) -> int:
        return self.size

    def samples(self, workers: int) -> int:
        """Returns the batch of a step that `workers` workers begin, in samples."""
        del workers
        return self.size


@dataclass(frozen=True)
class PerWorkerBatch:
    """A batch that grows and shrinks with the number of workers, in micro-batches of `micro` samples.

    The weights depend only on the seed and on the number of workers that began each step.

    Attributes:
        size: samples for each worker.
        micro: samples in a micro-batch.
        base: the batch, in samples, that the script's learning rate was chosen for; default: `size`.
        rule: the learning-rate rule that scales the rate; the default is the paper's Dynamic SGD.
        min_batch, max_batch: bounds of the batch, in samples; `max_batch` None is no bound.
        max_factor: a bound of the factor that multiplies the rate; None is no bound.

    Raises:
        UsageError: a size is below 1, `micro` is above the smallest batch, the bounds contradict each other, or `rule`
            is not a `Rule`.
    """

    size: int
    micro: int
    base: int = 0  # 0: `size`
    rule: Rule = field(default_factory=MomentumCompensation)
    min_batch: int = 1
    max_batch: int | None = None
    max_factor: float | None = None

    def __post_init__(self) -> None:
        _check(
            "PerWorkerBatch",
            self,
            "size",
            "micro",
            "min_batch",
            *(("max_batch",) if self.max_batch is not None else ()),
        )
        base = whole("PerWorkerBatch(base={})", self.base, why="the batch that the learning rate was chosen for")
        object.__setattr__(self, "base", base)
        if not self.base:
            object.__setattr__(self, "base", self.size)
        if not isinstance(self.rule, Rule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"PerWorkerBatch(rule={self.rule!r}): use a rule such as farandole.MomentumCompensation()")
        if self.max_batch is not None and not max(self.micro, self.min_batch) <= self.max_batch:
            raise UsageError(
                f"PerWorkerBatch(micro={self.micro}, min_batch={self.min_batch}, max_batch={self.max_batch}): "
                f"use a max_batch that is not below micro or min_batch"
            )
        if self.max_factor is not None and not self.max_factor > 0:
            raise UsageError(f"PerWorkerBatch(max_factor={self.max_factor}): it multiplies the rate; use more than 0")

    def samples(self, workers: int) -> int:
        """Returns the batch of a step that `workers` workers begin, in samples."""
        batch = max(self.size * workers, self.min_batch)
        return batch if self.max_batch is None else min(batch, self.max_batch)


BatchPolicy = GlobalBatch | PerWorkerBatch


def _check(name: str, policy: BatchPolicy, *sizes: str) -> None:
    """Checks the sizes, in samples, and converts them to Python's own int. Raises UsageError."""
    for each in sizes:
        object.__setattr__(policy, each, whole(f"{name}({each}={{}})", getattr(policy, each), 1, why="samples"))
    size, micro = policy.size, policy.micro
    if micro > size:
        raise UsageError(f"{name}(size={size}, micro={micro}): the micro-batch exceeds the batch; use micro <= {size}")
