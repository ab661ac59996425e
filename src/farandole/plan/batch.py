"""Batch policies: how many samples a step takes, and how they are cut into micro-batches.

A policy is a pure function of the number of workers that begin the step. `base` is the batch that the user's learning
rate was chosen for: `len(loader)` and `Step.base_steps` count in it, so that a schedule does not drift when the batch
does. Left out: the learning rate itself (`rules.py`), and who those workers are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from farandole.errors import UsageError
from farandole.plan.rules import MomentumCompensation, Rule
from farandole.platform.bounds import whole


@dataclass(frozen=True)
class GlobalBatch:
    """A constant batch of `size` samples a step, whatever the number of workers, in micro-batches of `micro` samples.

    Where `micro` does not divide the batch, or an epoch's short last one, micro-batches differ by at most one sample:
    65 samples at `micro=64` are 33 and 32.

    The gradient is that of the mean over the batch if each loss is the mean over its micro-batch, and `micro` then
    shows in rounding only. With `reduction="sum"` the gradient grows with `micro`: see `Step.backward`.

    The weights then depend on nothing but the seed: not on how many workers there are, nor on who comes and goes.

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
        """The batch of a step that `workers` workers begin."""
        del workers
        return self.size


@dataclass(frozen=True)
class PerWorkerBatch:
    """A batch that grows and shrinks with the workers: `size` samples for each, in micro-batches of `micro` samples.

    The learning rate follows by `rule` (see `plan/rules.py`); with the default it is the paper's Dynamic SGD. `base`
    is the batch that the script's own rate was chosen for, one worker's unless it is given. `min_batch` and `max_batch`
    bound the batch in samples, `max_factor` bounds what multiplies the rate.

    The weights then depend on the seed and on how many workers began each step, and on nothing else.

    Raises:
        UsageError: a size below 1, `micro` above the smallest batch, bounds that exclude each other, or no rule.
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
                f"max_batch must be at least both"
            )
        if self.max_factor is not None and not self.max_factor > 0:
            raise UsageError(f"PerWorkerBatch(max_factor={self.max_factor}): it multiplies the rate; use more than 0")

    def samples(self, workers: int) -> int:
        """The batch of a step that `workers` workers begin."""
        wanted = max(self.size * workers, self.min_batch)
        return wanted if self.max_batch is None else min(wanted, self.max_batch)


BatchPolicy = GlobalBatch | PerWorkerBatch


def _check(name: str, policy: BatchPolicy, *sizes: str) -> None:
    """The sizes, in samples, become Python's own whole numbers. Raises UsageError."""
    for each in sizes:
        object.__setattr__(policy, each, whole(f"{name}({each}={{}})", getattr(policy, each), 1, why="samples"))
    size, micro = policy.size, policy.micro
    if micro > size:
        raise UsageError(f"{name}(size={size}, micro={micro}): the micro-batch exceeds the batch; use micro <= {size}")
