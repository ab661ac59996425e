"""A learning-rate rule's factor, applied to the rates only during `optimizer.step()`.

    1. When a step's exchange is over, `step_ended` computes this step's factor by the rule. All workers hold the same
       batch sizes and the same reduced noise, so all get the same factor. An epoch's short last window gets the factor
       of its own samples, never below 1 unless that of a whole window is, and does not change the rule's memory.
    2. Before `optimizer.step()` each group's rate is multiplied by the factor. For a rule that acts on the buffer,
       momentum buffers are multiplied by (the factor of the previous update) / (this factor). For a rule that acts on
       moments see `Moments`.
    3. After it the groups have the values again that the user and the schedule have set. So schedules, logs and
       checkpoints never see a factor.

A short window's factor applies to its gradient, not to the momentum buffer. If only the rate were lower,
u <- mu u + g would add the gradient of few samples with the usual weight, and the next steps, with the whole factor,
would multiply its noise. So momentum buffers are multiplied by (whole factor) / (short factor) before such a step and
by the reverse after it: w <- w - eta (whole mu u + short g), and g remains in the buffer with short / whole of its
weight.

The memory of all this is part of the run's state: the rule's memory, the sum of gains, and for each optimizer the last
factor and its counts.

Each loop of a script has its own rule, with a new memory. What belongs to an optimizer goes on in the next loop: its
counts of moments, also where that loop has a constant batch; and momentum buffers get PyTorch's form when a loop ends.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from farandole.errors import UsageError
from farandole.plan.batch import BatchPolicy, GlobalBatch, PerWorkerBatch
from farandole.plan.rules import RULES, Facts, Noise, Rule

# --- moments ----------------------------------------------------------------------------------------------------------
#
# The square-root rule for Adam and related optimizers: betas, epsilon, weight decay, bias correction, second moment.
#
# A batch of k times the base uses (Malladi et al. 2022; f = sqrt(k) is the rule's factor)
#
#     eta' = f eta      1 - beta' = k (1 - beta), at most 1      eps' = eps / f
#
# **Why.** Let v' = k v be the second moment in units of the base batch. With the values above an update is
# f eta m / (sqrt(v) + eps / f) = k eta m / (sqrt(v') + eps): k updates of the base batch. v' and m decay k times as
# fast per step, so equally fast per sample, and the mean and the noise of m are the same for every k.
#
# **Changes of k.** Where noise dominates, v is proportional to 1 / k. After k grows, the old v is too large, and
# updates are too small until it has decayed, in 1 / (k (1 - beta2)) steps. This is the safe side, so v is not changed.
# (If v were divided by the growth, v' would be kept, but updates k times as long would then meet directions without
# noise, and training diverges.) After k shrinks, v is too small, and updates would be sqrt(old k / new k) times too
# large: so v is multiplied by the missing factor. This factor is not always the ratio of the two, because v may not
# have followed the growth before. `lag` is the mean of 1 / k over the squares in v, a moving average like v itself: a
# shrink to k multiplies v by 1 / (k lag), if this is above 1. A short last window, after which k has its old value,
# does not change v.
#
# **Weight decay** that is decoupled subtracts eta' wd of a weight in each step; for the same decay per sample it must
# be k eta wd.
#
# **Bias correction.** With betas that change, m after t steps is a weighted sum of gradients whose weights add up to
# 1 - beta_1 beta_2 ... beta_t, as 1 - w_t = beta_t (1 - w_(t-1)). torch divides by 1 - beta_t ** t instead, for both
# moments; the rate and epsilon compensate for this:
#
#     eta'' = eta' (torch's c1 / c1) sqrt(c2 / torch's c2)      eps'' = eps' sqrt(c2 / torch's c2)
#
# with c1 and c2 the right ones. Steps are counted per optimizer, not per parameter: a parameter without a gradient in
# some steps gets the same correction as the others. RMSprop has no bias correction.
#
# All of this holds only during `optimizer.step()`. Its memory is part of the run's state, beside the rule's memory.

_log = logging.getLogger(__name__)
SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")  # names of second moments in torch's optimizers
Betas = tuple[float, ...]


class Moments:
    """Applies the square-root rule to the betas, epsilon, weight decay and moments of one optimizer.

    `counts`: for each group, [steps, steps with the current betas, lag of v without bias correction, then for each
    beta: the beta, and the product of all betas before]. It is empty, and the optimizer is not changed, until the first
    factor that is not 1.

    Raises:
        UsageError: the optimizer is RMSprop with momentum, or centered: the rule does not cover these buffers.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name = name
        self._optimizer = optimizer
        self.counts: list[list[float]] = []
        self._warned = False
        for group in optimizer.param_groups:
            if group.get("centered") or (group.get("momentum") and "alpha" in group):
                raise UsageError(
                    f"PerWorkerBatch(rule=SquareRoot()) does not support {name}, RMSprop with momentum or centered; "
                    f"use RMSprop without these, or Adam"
                )

    def set(self, factor: float, *, stays: bool) -> None:
        """Set the optimizer's values for `factor` before an update. `stays`: the factor is not of a short window."""
        if factor == 1 and not self.counts:
            return
        k = factor**2
        for group in self._optimizer.param_groups[len(self.counts) :]:  # all groups, or those added since the last call
            self.counts.append(self._initial_counts(group))
        for group, count in zip(self._optimizer.param_groups, self.counts, strict=True):
            betas = self._scaled((group["alpha"],) if "alpha" in group else group["betas"], k)
            if stays:
                self._make_up(group, count, k)
            right = corrections(count, betas, k)
            if "alpha" in group:
                group["alpha"] = betas[0]
                rate, epsilon = factor, 1 / factor
            else:
                group["betas"] = betas
                torchs = [1 - beta ** count[0] for beta in betas]
                epsilon = (right[1] / torchs[1]) ** 0.5
                rate, epsilon = factor * torchs[0] / right[0] * epsilon, epsilon / factor
                if group.get("decoupled_weight_decay"):
                    group["weight_decay"] = group["weight_decay"] * (k / rate)
            group["lr"] = group["lr"] * rate
            group["eps"] = group["eps"] * epsilon

    def _make_up(self, group: dict[str, Any], count: list[float], k: float) -> None:
        """Multiply v by the missing factor, if `k` is below that of the squares in v."""
        weight = 1 - count[-1] * count[-2] ** count[1]
        if weight > 0 and (missing := weight / (k * count[2])) > 1 + 1e-9:
            count[2] *= missing
            for state in [self._optimizer.state[p] for p in group["params"] if p in self._optimizer.state]:
                for moment in SECOND:
                    if moment in state:
                        state[moment].mul_(missing)

    def _initial_counts(self, group: dict[str, Any]) -> list[float]:
        """Return the initial counts of a group. The optimizer may have done steps before, with its present betas."""
        states = [self._optimizer.state[p] for p in group["params"] if p in self._optimizer.state]
        steps = max((float(state["step"]) for state in states if "step" in state), default=0.0)
        betas = [float(beta) for beta in group.get("betas", (group.get("alpha"),))]
        return [steps, steps, 1 - betas[-1] ** steps, *(value for beta in betas for value in (beta, 1.0))]

    def _scaled(self, betas: Sequence[float], k: float) -> Betas:
        scaled = tuple(beta if k == 1 else 1 - k * (1 - beta) for beta in betas)
        if min(scaled) < 0 and not self._warned:
            self._warned = True
            most = 1 / (1 - min(betas))
            _log.warning(
                "%s: at %g times the base batch beta would be %.3g under SquareRoot(), and is set to 0; the rule is "
                "valid up to %.4g times, so use max_factor=%.3g, or a larger base",
                self._name, k, min(scaled), most, most**0.5,
            )  # fmt: skip
        return tuple(max(beta, 0.0) for beta in scaled)


def corrections(count: list[float], betas: Sequence[float], k: float) -> list[float]:
    """Count a step with `betas`. Returns the bias correction of each moment: its divisor after this step."""
    before = count[3::2]
    if list(betas) != before:
        for place, beta in enumerate(before):
            count[4 + 2 * place] *= beta ** count[1]
        count[1], count[3::2] = 0.0, list(betas)
    count[0] += 1
    count[1] += 1
    count[2] = betas[-1] * count[2] + (1 - betas[-1]) / k
    return [1 - product * beta ** count[1] for beta, product in zip(count[3::2], count[4::2], strict=True)]


# --- learning rate ----------------------------------------------------------------------------------------------------

SET = ("lr", "betas", "alpha", "eps", "weight_decay")  # a group's values that are changed during an update


class LearningRate:
    """The rates of `optimizers`, by name, under a batch policy. With a constant batch it changes nothing.

    `before`: those of the script's loop before, which has ended.

    Attributes:
        factor: this step's factor, when its exchange is over; 1 before.
        gains: the sum of all steps' factors, for a rule that uses it as its clock; 0 for others. `gains_before`: the
            sum without the newest.

    Raises:
        UsageError: the rule does not support one of the optimizers. The message names rules that do.
    """

    def __init__(
        self, policy: BatchPolicy, optimizers: Mapping[str, torch.optim.Optimizer], before: LearningRate | None = None
    ) -> None:
        self.factor = 1.0
        self.gains_before = self.gains = 0.0
        self._stretch = 1.0  # factor on momentum buffers during this step's update
        self._policy = policy if isinstance(policy, PerWorkerBatch) else None
        self._optimizers = dict(optimizers)
        self._memory = dict(self._policy.rule.begin()) if self._policy else {}
        self._last: dict[str, float] = {}  # factor of each optimizer's newest update
        self._moments: dict[str, Moments] = {}
        self._set: dict[str, list[dict[str, Any]]] = {}
        self._stretched: dict[str, float] = {}
        self._hooks: list[RemovableHandle] = []
        for name, optimizer in optimizers.items():
            if self._policy is not None:
                _check_fits(self._policy.rule, name, optimizer)
            if self._policy is None or self._policy.rule.acts_on == "moments":
                moments = before._moments.get(name) if before and before._optimizers.get(name) is optimizer else None
                if moments is None and self._policy is not None:
                    moments = Moments(name, optimizer)
                if moments is not None:
                    self._moments[name] = moments
            if self._policy is not None or self._moments.get(name):
                self._hooks += (
                    optimizer.register_step_pre_hook(partial(self._before, name)),
                    optimizer.register_step_post_hook(partial(self._after, name)),
                )

    def end(self) -> None:
        """Let go of the optimizers when the loop has ended."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for name, optimizer in self._optimizers.items():
            self._after(name, optimizer)  # restores the rates after an update that raised
            if self._acts_on == "buffer":
                _stretch(optimizer, self._last.pop(name, 1.0))

    @property
    def _acts_on(self) -> str:
        return self._policy.rule.acts_on if self._policy else "rate"

    @property
    def measures_noise(self) -> bool:
        """True if the rule needs the noise of the gradients."""
        return self._policy is not None and self._policy.rule.measures_noise

    @property
    def counts_gains(self) -> bool:
        """True if the rule's clock is the sum of its gains."""
        return self._policy is not None and self._policy.rule.clock == "gain"

    @property
    def learning_rate(self) -> float | None:
        """The rate of the first optimizer's first group, without the factor; None without any optimizer."""
        return next(
            (float(group["lr"]) for o in self._optimizers.values() for group in o.param_groups if "lr" in group), None
        )

    def step_ended(self, samples: int, whole: int, noise: Noise | None) -> None:
        """Compute the factor of a step when its exchange is over, before the optimizer's update.

        `samples`: the step's number of samples; `whole`: that of a window in which no epoch ends.
        """
        policy = self._policy
        if policy is None:
            return
        most = policy.max_factor or math.inf
        k = whole / policy.base
        facts = Facts(k=k, base=policy.base, momentum=self._momentum(), noise=noise if samples == whole else None)
        factor, memory = policy.rule.factor(self._memory, facts)
        self.factor, self._stretch = min(factor, most), 1.0
        if samples < whole:
            short = max(samples / policy.base, 1.0 if k >= 1 else 0.0)
            factor, memory = policy.rule.factor(self._memory, dataclasses.replace(facts, k=short))[0], self._memory
            self._stretch, self.factor = self.factor / min(factor, most), min(factor, most)
        self._memory = dict(memory)
        if self.counts_gains:
            self.gains_before, self.gains = self.gains, self.gains + self.factor

    def state(self) -> dict[str, Any]:
        """Return the memory, for joiners and checkpoints."""
        counts = {name: moments.counts for name, moments in self._moments.items()}
        return {"memory": dict(self._memory), "last": dict(self._last), "gains": self.gains, "counts": counts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the memory of another worker or of a checkpoint. It is ignored if it comes from another rule."""
        if set(state["memory"]) == set(self._memory):
            self._memory = dict(state["memory"])
            self._last = dict(state["last"])
            self.gains = float(state.get("gains", 0.0))
            for name, counts in state.get("counts", {}).items():
                if name in self._moments:
                    self._moments[name].counts = [list(count) for count in counts]

    def _momentum(self) -> float:
        """Return the largest momentum, or beta1, of all groups: the longest memory."""
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        return max((float(g.get("momentum") or g.get("betas", (0.0,))[0]) for g in groups), default=0.0)

    def _before(self, name: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._after(name, optimizer)  # restores the rates after an update that raised
        factor, last = self.factor, self._last.get(name, 1.0)
        self._last[name] = factor
        self._set[name] = [{key: group[key] for key in SET if key in group} for group in optimizer.param_groups]
        if name in self._moments:
            self._moments[name].set(factor, stays=self._stretch == 1)
            return
        if self._acts_on == "buffer":
            _stretch(optimizer, last / factor)
        else:
            _stretch(optimizer, self._stretch)
            self._stretched[name] = self._stretch
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def _after(self, name: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, values in zip(optimizer.param_groups, self._set.pop(name, ()), strict=False):
            group.update(values)
        _stretch(optimizer, 1 / self._stretched.pop(name, 1.0))


def _stretch(optimizer: torch.optim.Optimizer, by: float) -> None:
    """Multiply the momentum buffers by `by`."""
    for state in optimizer.state.values() if by != 1 else ():
        buffer = state.get("momentum_buffer")
        if buffer is not None:
            buffer.mul_(by)


def _check_fits(rule: Rule, name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if `rule` does not support the optimizer.

    Rules list torch's optimizers by class name, as their sources do; classes derived from these are supported too.
    """
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if not rule.fits or names & set(rule.fits):
        return
    kind = type(optimizer).__name__
    fitting = [each.__name__ for each in RULES if names & set(each.fits)]
    supported = ", ".join(sorted({each for rule in RULES for each in rule.fits}))
    raise UsageError(
        f"PerWorkerBatch(rule={rule!r}) does not support {name}, {kind}; use {' or '.join(fitting)}"
        if fitting
        else f"PerWorkerBatch: no published rule covers {name}, {kind}, only {supported}; use one of these, a constant "
        f"batch (GlobalBatch), or your own rule"
    )


def learning_rate_of(
    policy: BatchPolicy, objects: Mapping[str, object], before: LearningRate | None = None
) -> LearningRate:
    """Return the rates of the optimizers among a run's replicated objects. `before`: those of the loop before.

    Raises:
        UsageError: the batch grows with the workers, and no optimizer is replicated whose rate could follow it.
    """
    optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}
    if not optimizers and not isinstance(policy, GlobalBatch):
        raise UsageError("PerWorkerBatch: no optimizer is replicated, so no learning rate can follow the batch")
    return LearningRate(policy, optimizers, before)
