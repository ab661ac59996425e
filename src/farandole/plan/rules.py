"""Learning-rate rules: how the user's rate changes when the batch is `k` times the one that it was chosen for.

A rule is a pure function. From its memory and the facts of a step it computes a factor and its memory for the next
step. The factor multiplies the rate that the user's schedule has set, around `optimizer.step()` only. Memory is a
flat mapping of numbers: it is part of the run's state, sent to joiners and written to checkpoints.

Every rule gives 1 for a history of k = 1, and returns to 1 when k does. The size of the first step is a change from
k = 1 like any other.

| rule                 | optimizer            | factor                                                               |
| ---                  | ---                  | ---                                                                  |
| `LinearScaling`      | SGD                  | k, at once                                                           |
| `MomentumCompensation` | SGD with momentum  | toward k, slowly; a shrink at once                                   |
| `RateInBuffer`       | SGD with momentum    | k, at once; the momentum buffer keeps the rate that it was made with |
| `AdaScale`           | SGD                  | the gain that the gradient's measured noise allows, 1 to k           |
| `SquareRoot`         | Adam, AdamW, RMSprop | sqrt(k), slowly; a shrink at once; with betas, epsilon and moments   |

For an epoch's short last window the rule gets the k of its samples, and the memory that the rule returns is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from farandole.errors import UsageError

Memory = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The first two moments of the gradient, measured from this step's micro-batches.

    Attributes:
        variance: the variance of one sample's gradient, summed over the parameters; None if the step has one shard.
        square: the squared norm of the step's mean gradient over `samples` samples.
        samples: the number of samples of the step.
    """

    variance: float | None
    square: float
    samples: int

    @staticmethod
    def estimate(squares: float, square: float, samples: int, shards: int) -> Noise:
        """Computes the moments. `squares`: the sum over shards of samples times the squared norm of the mean gradient.

        For shards of n_i samples, n in all, with mean gradients g_i: E sum n_i |g_i|^2 = n |g|^2 + shards * variance
        and E n |mean|^2 = n |g|^2 + variance; the difference of the two gives the variance, whatever the n_i are.
        """
        variance = max(squares - samples * square, 0.0) / (shards - 1) if shards > 1 else None
        return Noise(variance=variance, square=square, samples=samples)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a step that a rule gets.

    Attributes:
        k: the step's batch divided by the base batch; above 0.
        base: the base batch, in samples.
        momentum: the momentum of the optimizers; 0 without momentum.
        noise: the gradient's noise, for a rule that measures it, if this step's micro-batches show it; otherwise None.
    """

    k: float
    base: int
    momentum: float = 0.0
    noise: Noise | None = None


class Rule:
    """The base class of learning-rate rules; a rule of your own implements `factor`.

    Attributes:
        fits: the names of the optimizers that the rule's source covers, subclasses included; empty: any optimizer.
        acts_on: what the factor changes: "rate", the learning rate alone; "buffer", also the momentum buffer, which
            keeps the rate that it was made with; or "moments", for optimizers like Adam.
        measures_noise: True if the rule needs the gradient's noise.
        clock: what a step counts for in a run whose length is given in base steps: its "samples", or its factor, the
            "gain".
    """

    fits: ClassVar[tuple[str, ...]] = ()
    acts_on: ClassVar[Literal["rate", "buffer", "moments"]] = "rate"
    measures_noise: ClassVar[bool] = False
    clock: ClassVar[Literal["samples", "gain"]] = "samples"

    def begin(self) -> Memory:
        """Returns the memory before the first step."""
        return {}

    def factor(self, memory: Memory, facts: Facts) -> tuple[float, Memory]:
        """Returns this step's factor, and the memory after it."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearScaling(Rule):
    """The rate follows the batch at once: factor k.

    "Accurate, Large Minibatch SGD" (Goyal et al. 2017, arXiv 1706.02677). With momentum in PyTorch's form the new rate
    multiplies the whole buffer, including the noise of the smaller batches in it: training overshoots after a growth.
    """

    fits = ("SGD",)

    def factor(self, memory: Memory, facts: Facts) -> tuple[float, Memory]:
        return facts.k, memory


@dataclass(frozen=True)
class RateInBuffer(LinearScaling):
    """Factor k at once, on new gradients only: v <- mu v + k eta g, w <- w - v.

    Gradients in the buffer keep the rate at which they were added, so a change is smoothed over 1 / (1 - mu) steps.
    This is the form with the rate inside (Goyal et al. 2017, equation 10). Its authors warn of it if the rate changes:
    their momentum correction turns it into PyTorch's form. This rule does the reverse: it multiplies PyTorch's buffer
    by (old factor / new factor) before the step. It applies to the factor only: a change of rate by the user's schedule
    acts as in PyTorch.
    """

    acts_on = "buffer"


@dataclass(frozen=True)
class _Ramped(Rule):
    """The base class of rules that move to a larger k in equal increments, and to a smaller one at once.

        k_t = a + (t - t0) / T (k - a) while t - t0 < T, then k          after a change at step t0, with a = k_t0

    T = `steps` * k / a. `steps` is 0.8 / (1 - mu) unless it is given: the memory of momentum, or of the first moment,
    is 1 / (1 - mu) steps.
    """

    steps: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and not 0 <= self.steps < math.inf:
            raise UsageError(
                f"{type(self).__name__}(steps={self.steps}): use 0 or more; the default is 0.8 / (1 - momentum)"
            )

    def begin(self) -> Memory:
        return {"origin": 1.0, "target": 1.0, "since": 0.0, "period": 0.0}

    def ramped(self, memory: Memory, facts: Facts) -> tuple[float, Memory]:
        """Returns the k that is in force, and the memory after the step."""
        k = facts.k
        if k != memory["target"]:
            origin = min(self._at(memory), k)
            steps = 0.8 / max(1 - facts.momentum, 1e-3) if self.steps is None else self.steps
            memory = {"origin": origin, "target": k, "since": 0.0, "period": steps * k / origin}
        return self._at(memory), {**memory, "since": memory["since"] + 1}

    def _at(self, memory: Memory) -> float:
        origin, target, since, period = (memory[name] for name in ("origin", "target", "since", "period"))
        return origin + since / period * (target - origin) if since < period else target


@dataclass(frozen=True)
class MomentumCompensation(_Ramped):
    """The paper's Dynamic SGD: after a growth the factor moves to k in equal increments, while old noise decays.

        u <- mu u + g                     PyTorch's momentum, g the mean gradient over the batch
        w <- w - k_t eta u

    "Dynamic Mini-batch SGD for Elastic Distributed Training" (Lin et al. 2019, arXiv 1904.12043), which leaves the
    ramp's length open. Here it is `steps` times the growth: the time needed grows with the ratio between the old
    buffer's noise and the new one's, and that is the growth of the factor, for any base. A shrink applies at once: a
    slow decrease would overshoot.

    Raises:
        UsageError: `steps` is negative.
    """

    fits = ("SGD",)

    def factor(self, memory: Memory, facts: Facts) -> tuple[float, Memory]:
        return self.ramped(memory, facts)


@dataclass(frozen=True)
class SquareRoot(_Ramped):
    """The rule for optimizers that divide by the gradient's size: factor sqrt(k), with changed betas and epsilon.

        rate     eta -> sqrt(k) eta            beta      1 - beta -> k (1 - beta), at most 1
        epsilon  eps -> eps / sqrt(k)          decoupled weight decay per sample as before

    "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (Malladi et al. 2022, arXiv 2205.10287, definitions
    5.2 and 5.3), for a batch that is k times as large from the beginning. The changes of weight decay, of bias
    correction and, when k changes, of the second moment follow from the same equations: see
    `training/learning_rate.py`. k grows by the ramp of `MomentumCompensation`. The rule is valid up to
    k = 1 / (1 - beta): 10 for a beta1 of 0.9; beyond that the memory of the moment is a single step.

    Raises:
        UsageError: `steps` is negative.
    """

    fits = ("Adam", "AdamW", "RMSprop")
    acts_on = "moments"

    def factor(self, memory: Memory, facts: Facts) -> tuple[float, Memory]:
        k, memory = self.ramped(memory, facts)
        return math.sqrt(k), memory


@dataclass(frozen=True)
class AdaScale(Rule):
    """The factor is the gain that the gradient's measured noise allows: k if noise dominates, 1 if there is none.

        gain = (variance / base + |g|^2) / (variance / (k base) + |g|^2)
        mean <- theta mean + (1 - theta) measured, theta = 1 - k / 1000; plain means for the first 1000 / k steps

    "AdaScale SGD: A User-Friendly Algorithm for Distributed Training" (Johnson et al. 2020, arXiv 2007.05105). Both
    moments are measured from the gradients of the micro-batches, so that they do not depend on the number of workers.
    The paper's clock is the sum of gains, its scale-invariant steps. `Step.base_steps` counts them in a run whose
    length is given in base steps, `run.steps(loader, base_steps=...)`. In a run whose length is given in epochs,
    schedules count samples.

    Raises:
        UsageError: `memory_steps` is below 1 or infinite.
    """

    memory_steps: int = 1000
    fits = ("SGD",)
    measures_noise = True
    clock = "gain"

    def __post_init__(self) -> None:
        if not 1 <= self.memory_steps < math.inf:
            raise UsageError(f"AdaScale(memory_steps={self.memory_steps}): use 1 or more; 1000 is the paper's")

    def begin(self) -> Memory:
        return {"variance": 0.0, "square": 0.0, "measured": 0.0}

    def factor(self, memory: Memory, facts: Facts) -> tuple[float, Memory]:
        k, noise = facts.k, facts.noise
        if noise is not None and noise.variance is not None and math.isfinite(noise.variance + noise.square):
            memory = self._measured(memory, k, noise.variance, noise.square - noise.variance / noise.samples)
        variance, square = memory["variance"] / facts.base, max(memory["square"], 0.0)
        below = variance / k + square
        return (variance + square) / below if below > 0 else 1.0, memory

    def _measured(self, memory: Memory, k: float, variance: float, square: float) -> Memory:
        new = min(max(1 / (memory["measured"] + 1), k / self.memory_steps), 1.0)
        return {
            "variance": memory["variance"] + new * (variance - memory["variance"]),
            "square": memory["square"] + new * (square - memory["square"]),
            "measured": memory["measured"] + 1,
        }


RULES: tuple[type[Rule], ...] = (MomentumCompensation, LinearScaling, RateInBuffer, AdaScale, SquareRoot)
