"""Learning-rate rules: what becomes of the user's rate when the batch is `k` times the one that it was chosen for.

A rule is a pure function. From its memory and this step's `k` it gives the factor that multiplies whatever rate the
user's schedule has set, around `optimizer.step()` only, and its memory for the next step. Memory is a flat mapping of
numbers: it is part of the run's state, handed to joiners and written to checkpoints.

    k       this step's batch over the base batch
    noise   what the shards' gradients tell (`Noise`), for a rule that asks for it with `measures_noise`

Every rule gives 1 for a history of k = 1, and comes back to 1 after any excursion.

| rule                   | optimizer            | factor                                                              |
| ---                    | ---                  | ---                                                                 |
| `LinearScaling`        | SGD                  | k, at once (Goyal et al. 2017)                                      |
| `MomentumCompensation` | SGD with momentum    | toward k over 8 steps times the growth; a shrink at once            |
| `RateInBuffer`         | SGD with momentum    | k, at once; the momentum buffer keeps the rate that it was made with |
| `AdaScale`             | SGD                  | the gain that the measured noise allows, 1 to k                     |
| `SquareRoot`           | Adam and its kind    | sqrt(k), at once                                                    |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from farandole.errors import UsageError

Memory = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The gradient's first two moments, as this step's shards show them.

    `variance`: of one sample's gradient around the true one, summed over the parameters; None from a single shard.
    `square`: the squared norm of the step's mean gradient over `samples` samples.
    """

    variance: float | None
    square: float
    samples: int

    @staticmethod
    def of(squares: float, square: float, samples: int, shards: int) -> Noise:
        """From `squares`, the sum over shards of samples times the squared norm of the shard's mean gradient.

        For shards of n_i samples, n in all, with mean gradients g_i: E sum n_i |g_i|^2 = n |g|^2 + shards * variance
        and E n |mean|^2 = n |g|^2 + variance; the difference of the two gives the variance, whatever the n_i are.
        """
        variance = max(squares - samples * square, 0.0) / (shards - 1) if shards > 1 else None
        return Noise(variance=variance, square=square, samples=samples)


class Rule(Protocol):
    """`family`: the optimizers that it is for, "sgd" or "adaptive"."""

    family: ClassVar[str]
    measures_noise: ClassVar[bool]
    rate_in_buffer: ClassVar[bool]

    def begin(self) -> Memory:
        """The memory before the first step."""
        ...

    def factor(self, memory: Memory, k: float, base: int, noise: Noise | None) -> tuple[float, Memory]:
        """This step's factor, and the memory after it."""
        ...


class _Immediate:
    """No memory: the factor follows from k alone."""

    family: ClassVar[str] = "sgd"
    measures_noise: ClassVar[bool] = False
    rate_in_buffer: ClassVar[bool] = False

    def begin(self) -> Memory:
        return {}

    def factor(self, memory: Memory, k: float, base: int, noise: Noise | None) -> tuple[float, Memory]:
        del base, noise
        return self.of(k), memory

    def of(self, k: float) -> float:
        return k


@dataclass(frozen=True)
class LinearScaling(_Immediate):
    """The rate follows the batch at once: factor k.

    "Accurate, Large Minibatch SGD" (Goyal et al. 2017, arXiv 1706.02677). With momentum in PyTorch's form the new rate
    multiplies the whole buffer, the noise of the smaller batches in it included: after a growth training overshoots.
    """


@dataclass(frozen=True)
class SquareRoot(_Immediate):
    """For optimizers that divide by the gradient's size: factor sqrt(k), at once.

    "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (Malladi et al. 2022, arXiv 2205.10287), of whose
    rule this is the part about the rate; betas and epsilon stay the user's.
    """

    family: ClassVar[str] = "adaptive"

    def of(self, k: float) -> float:
        return math.sqrt(k)


@dataclass(frozen=True)
class RateInBuffer(_Immediate):
    """Factor k at once, on new gradients only: v <- mu v - k eta g, w <- w + v, MXNet's form of momentum.

    What is in the buffer keeps the rate that it came in with, so a change smooths itself over 1 / (1 - mu) steps. In
    PyTorch's form that is the buffer times (old factor / new factor) before the step, known as momentum correction
    (Goyal et al. 2017, section 3). It follows the factor only: a change of rate by the user's schedule is PyTorch's.
    """

    rate_in_buffer: ClassVar[bool] = True


@dataclass(frozen=True)
class MomentumCompensation:
    """The paper's Dynamic SGD: after a growth the factor moves to k in equal parts, over time for old noise to fade.

        u <- mu u + g                     PyTorch's momentum, g the mean gradient over the batch
        w <- w - gamma_t eta u
        gamma_t = a + (t - t0) / T (k - a) while t - t0 < T, then k      after a change at step t0, with a = gamma_t0

    "Dynamic Mini-batch SGD for Elastic Distributed Training" (Lin et al. 2019, arXiv 1904.12043), which leaves T open.
    Here T = `steps` * k / a: the time needed grows with the ratio between the old buffer's noise and the new one's,
    and that is the growth of the factor, whatever the base. A shrink cuts at once: a slow way down would overshoot.

    Raises:
        UsageError: `steps` is negative.
    """

    steps: int = 8
    family: ClassVar[str] = "sgd"
    measures_noise: ClassVar[bool] = False
    rate_in_buffer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise UsageError(f"MomentumCompensation(steps={self.steps}): use 0 or more; 8 is the default")

    def begin(self) -> Memory:
        return {"origin": 0.0, "target": 0.0, "since": 0.0}  # the first step's k is no change: nothing is in the buffer

    def factor(self, memory: Memory, k: float, base: int, noise: Noise | None) -> tuple[float, Memory]:
        del base, noise
        if k != memory["target"]:
            memory = {"origin": min(self._at(memory), k) if memory["target"] else k, "target": k, "since": 0.0}
        return self._at(memory), {**memory, "since": memory["since"] + 1}

    def _at(self, memory: Memory) -> float:
        origin, target, since = memory["origin"], memory["target"], memory["since"]
        period = self.steps * target / origin
        return origin + since / period * (target - origin) if since < period else target


@dataclass(frozen=True)
class AdaScale:
    """The factor is the gain that the gradient's measured noise allows: k where noise dominates, 1 where there is none.

        gain = (variance / base + |g|^2) / (variance / (k base) + |g|^2)

    "AdaScale SGD: A User-Friendly Algorithm for Distributed Training" (Johnson et al. 2020, arXiv 2007.05105). Both
    moments are moving averages with the paper's weight, max(1 - k / 1000, 0) for the past. The shards' gradients are
    what they are measured from, so that the figure does not depend on the number of workers. Schedules go by samples
    seen (`Step.base_steps`), not by the sum of gains, since a run here is given its length in epochs.
    """

    memory_steps: int = 1000
    family: ClassVar[str] = "sgd"
    measures_noise: ClassVar[bool] = True
    rate_in_buffer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.memory_steps < 1:
            raise UsageError(f"AdaScale(memory_steps={self.memory_steps}): use 1 or more; 1000 is the paper's")

    def begin(self) -> Memory:
        return {"variance": 0.0, "square": 0.0, "measured": 0.0}

    def factor(self, memory: Memory, k: float, base: int, noise: Noise | None) -> tuple[float, Memory]:
        if noise is not None and noise.variance is not None:
            memory = self._measured(memory, k, noise.variance, noise.square - noise.variance / noise.samples)
        if not memory["measured"] or k == 1:
            return 1.0, memory
        variance, square = memory["variance"] / base, max(memory["square"], 0.0)
        below = variance / k + square
        return (variance + square) / below if below > 0 else 1.0, memory

    def _measured(self, memory: Memory, k: float, variance: float, square: float) -> Memory:
        kept = max(1 - k / self.memory_steps, 0.0) if memory["measured"] else 0.0
        return {
            "variance": kept * memory["variance"] + (1 - kept) * variance,
            "square": kept * memory["square"] + (1 - kept) * square,
            "measured": 1.0,
        }


RULES: tuple[type[Rule], ...] = (MomentumCompensation, LinearScaling, RateInBuffer, AdaScale, SquareRoot)
