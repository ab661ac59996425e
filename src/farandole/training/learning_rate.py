"""The learning rate around `optimizer.step()`: a rule's factor on it, and nobody else any the wiser.

    1. A step's exchange is over: `step_ended` asks the rule for this step's factor. All workers hold the same batch
       sizes and the same reduced noise, so all get the same. An epoch's short last window gets the factor of its own
       samples, never below 1 where that of a whole window would not be, and leaves no trace in the rule's memory.
    2. Before `optimizer.step()` each group's rate is multiplied by the factor. For a rule that acts on the buffer
       momentum buffers are multiplied by (the factor that they were made with) / (this one); for one that acts on
       moments see `training/learning_rate.py`.
    3. After it the groups are what the user and the schedule had set. So schedules, logs and checkpoints never see a
       factor.

A short window's factor is its gradient's, not the buffer's. Were the rate lower and nothing else, u <- mu u + g would
take in the gradient of few samples like any other, and the steps after it, at the whole factor, would multiply its
noise. So momentum buffers are multiplied by (whole factor) / (short factor) before such a step and by the reverse after
it: w <- w - eta (whole mu u + short g), and g stays in the buffer with the part short / whole of its weight.

What is remembered is part of the run's state: the rule's memory, the sum of gains, and of each optimizer the last
factor and its counts.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from farandole.errors import UsageError
from farandole.plan.batch import RULES, BatchPolicy, GlobalBatch, Noise, PerWorkerBatch, Rule, StepFacts

# --- moments ----------------------------------------------------------------------------------------------------------
#
# The square-root rule on optimizers of Adam's kind: betas, epsilon, weight decay, bias correction and second moment.
#
# A batch of k times the base goes with (Malladi et al. 2022; f = sqrt(k) is the rule's factor)
#
#     eta' = f eta      1 - beta' = k (1 - beta), at most 1      eps' = eps / f
#
# **Why.** Let v' = k v be the second moment in units of the base batch. With the values above an update is
# f eta m / (sqrt(v) + eps / f) = k eta m / (sqrt(v') + eps): k of the base batch's updates. v' and m forget k times as
# fast a step, so as fast a sample, and the mean and the noise of m are the same for every k.
#
# **How a change is passed.** Where noise prevails v goes with 1 / k. After a growth the old v is too large, and
# updates are too small until it has faded, in 1 / (k (1 - beta2)) steps: the safe side, and v is left as it is.
# (Divided by the growth it would keep v', but strides k times as long then meet directions without noise, and
# training is thrown off.) After a shrink it is too small, and updates would be sqrt(old k / new k) times too large:
# so v is multiplied by what it lacks. That is not always the ratio of the two, since it may not have followed the
# growth before. `lag` is the mean of 1 / k over the squares in v, a moving average like v itself: a shrink to k
# multiplies v by 1 / (k lag), if that is above 1. A short last window, after which k is what it was, changes nothing
# in v.
#
# **Weight decay** that is decoupled takes eta' wd off a weight in each step; for as much a sample it has to be k eta
# wd.
#
# **Bias correction.** With betas that change, m after t steps is a weighted sum of gradients whose weights add up to
# 1 - beta_1 beta_2 ... beta_t, as 1 - w_t = beta_t (1 - w_(t-1)). torch divides by 1 - beta_t ** t instead, for both
# moments; the rate and epsilon make up for it:
#
#     eta'' = eta' (torch's c1 / c1) sqrt(c2 / torch's c2)      eps'' = eps' sqrt(c2 / torch's c2)
#
# with c1 and c2 the right ones. Steps are counted for an optimizer, not for each parameter: one that had no gradient in
# some steps gets the others' correction. RMSprop has none.
#
# All of this is for the time of `optimizer.step()`. What is remembered of it goes where the rule's memory goes.

_log = logging.getLogger(__name__)
SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")  # second moments, in torch's optimizers
Betas = tuple[float, ...]


class Moments:
    """What one optimizer is under a batch that follows the workers.

    `counts`: for each group, [steps, steps with the betas in force, lag of v without bias correction, then for each
    beta: it, and the product of all those before]; nothing, and the optimizer as it is, until the first factor that is
    not 1.

    Raises:
        UsageError: RMSprop with momentum, or centered: what is in those buffers has no rule.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name = name
        self._optimizer = optimizer
        self.counts: list[list[float]] = []
        self._told = False
        for group in optimizer.param_groups:
            if group.get("centered") or (group.get("momentum") and "alpha" in group):
                raise UsageError(
                    f"PerWorkerBatch(rule=SquareRoot()) does not fit {name}, RMSprop with momentum or centered; use it "
                    f"without, or Adam"
                )

    def set(self, factor: float, *, stays: bool) -> None:
        """Before an update: what this factor asks for. `stays`: not only for a short window."""
        if factor == 1 and not self.counts:
            return
        k = factor**2
        for group in self._optimizer.param_groups[len(self.counts) :]:  # all of them, or those added since
            self.counts.append(self._begun(group))
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
        """A k below that of the squares in v."""
        there = 1 - count[-1] * count[-2] ** count[1]
        if there > 0 and (lacks := there / (k * count[2])) > 1 + 1e-9:
            count[2] *= lacks
            for state in [self._optimizer.state[p] for p in group["params"] if p in self._optimizer.state]:
                for moment in SECOND:
                    if moment in state:
                        state[moment].mul_(lacks)

    def _begun(self, group: dict[str, Any]) -> list[float]:
        """Of an optimizer that may have been stepped before, with the betas that it has."""
        states = [self._optimizer.state[p] for p in group["params"] if p in self._optimizer.state]
        steps = max((float(state["step"]) for state in states if "step" in state), default=0.0)
        betas = [float(beta) for beta in group.get("betas", (group.get("alpha"),))]
        return [steps, steps, 1 - betas[-1] ** steps, *(value for beta in betas for value in (beta, 1.0))]

    def _scaled(self, betas: Sequence[float], k: float) -> Betas:
        scaled = tuple(beta if k == 1 else 1 - k * (1 - beta) for beta in betas)
        if min(scaled) < 0 and not self._told:
            self._told = True
            most = 1 / (1 - min(betas))
            _log.warning(
                "%s: with %g times the base batch beta would be %.3g under SquareRoot(), and is 0; the rule holds up "
                "to %.4g times, so use max_factor=%.3g, or a larger base", self._name, k, min(scaled), most, most**0.5,
            )  # fmt: skip
        return tuple(max(beta, 0.0) for beta in scaled)


def corrections(count: list[float], betas: Sequence[float], k: float) -> list[float]:
    """Count a step with `betas`; what each moment is to be divided by after it."""
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

SET = ("lr", "betas", "alpha", "eps", "weight_decay")  # of a group, for the time of an update


class LearningRate:
    """The rates of `optimizers`, by name, under a batch policy; with a constant batch there is nothing to do.

    Attributes:
        factor: this step's, once its exchange is over; 1 before.
        gains: the sum of all steps' factors, for a rule whose clock that is; 0 for others. `gains_before`: without the
            newest.

    Raises:
        UsageError: a rule that is not for one of the optimizers; says which are.
    """

    def __init__(self, policy: BatchPolicy, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.factor = 1.0
        self.gains_before = self.gains = 0.0
        self._stretch = 1.0  # of momentum buffers, for this step's update
        self._policy = policy if isinstance(policy, PerWorkerBatch) else None
        self._optimizers = list(optimizers.values())
        self._memory = dict(self._policy.rule.begin()) if self._policy else {}
        self._last: dict[str, float] = {}  # the factor of an optimizer's newest update
        self._moments: dict[str, Moments] = {}
        self._set: dict[str, list[dict[str, Any]]] = {}
        self._stretched: dict[str, float] = {}
        if self._policy is None:
            return
        for name, optimizer in optimizers.items():
            _check_fits(self._policy.rule, name, optimizer)
            if self._policy.rule.acts_on == "moments":
                self._moments[name] = Moments(name, optimizer)
            optimizer.register_step_pre_hook(partial(self._before, name))
            optimizer.register_step_post_hook(partial(self._after, name))

    @property
    def measures_noise(self) -> bool:
        return self._policy is not None and self._policy.rule.measures_noise

    @property
    def counts_gains(self) -> bool:
        """Whether the rule's clock is the sum of its gains."""
        return self._policy is not None and self._policy.rule.clock == "gain"

    @property
    def learning_rate(self) -> float | None:
        """That of the first optimizer's first group, without the factor; None without any optimizer."""
        return next((float(group["lr"]) for o in self._optimizers for group in o.param_groups if "lr" in group), None)

    def step_ended(self, samples: int, whole: int, noise: Noise | None) -> None:
        """The exchange of a step is over; the optimizer's part comes next. `samples`: the step's; `whole`: those that a
        window has where no epoch ends.
        """
        policy = self._policy
        if policy is None:
            return
        most = policy.max_factor or math.inf
        k = whole / policy.base
        facts = StepFacts(k=k, base=policy.base, momentum=self._momentum(), noise=noise if samples == whole else None)
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
        counts = {name: moments.counts for name, moments in self._moments.items()}
        return {"memory": dict(self._memory), "last": dict(self._last), "gains": self.gains, "counts": counts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what another worker, or this run before, has remembered; nothing of it from another rule."""
        if set(state["memory"]) == set(self._memory):
            self._memory = dict(state["memory"])
            self._last = dict(state["last"])
            self.gains = float(state.get("gains", 0.0))
            for name, counts in state.get("counts", {}).items():
                if name in self._moments:
                    self._moments[name].counts = [list(count) for count in counts]

    def _momentum(self) -> float:
        """The largest of all groups, or beta1: the longest memory."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return max((float(g.get("momentum") or g.get("betas", (0.0,))[0]) for g in groups), default=0.0)

    def _before(self, name: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._after(name, optimizer)  # an update that raised has left its rates behind
        assert self._policy is not None
        factor, last = self.factor, self._last.get(name, 1.0)
        self._last[name] = factor
        self._set[name] = [{key: group[key] for key in SET if key in group} for group in optimizer.param_groups]
        if name in self._moments:
            self._moments[name].set(factor, stays=self._stretch == 1)
            return
        if self._policy.rule.acts_on == "buffer":
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
    """Multiply the momentum buffers."""
    for state in optimizer.state.values() if by != 1 else ():
        buffer = state.get("momentum_buffer")
        if buffer is not None:
            buffer.mul_(by)


def _check_fits(rule: Rule, name: str, optimizer: torch.optim.Optimizer) -> None:
    """Torch's own optimizers and what is derived from them: by name, as a rule's source names them."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if not rule.fits or names & set(rule.fits):
        return
    kind = type(optimizer).__name__
    fitting = [each.__name__ for each in RULES if names & set(each.fits)]
    known = ", ".join(sorted({each for rule in RULES for each in rule.fits}))
    raise UsageError(
        f"PerWorkerBatch(rule={rule!r}) does not fit {name}, {kind}; use {' or '.join(fitting)}"
        if fitting
        else f"PerWorkerBatch: no rule has a source for {name}, {kind}, only for {known}; use one of those, a constant "
        f"batch (GlobalBatch), or a rule of your own"
    )


def learning_rate_of(policy: BatchPolicy, objects: Mapping[str, object]) -> LearningRate:
    """The rates of the optimizers among a run's replicated objects.

    Raises:
        UsageError: the batch follows the workers and there is no optimizer whose rate could.
    """
    optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}
    if not optimizers and not isinstance(policy, GlobalBatch):
        raise UsageError("PerWorkerBatch: no optimizer is replicated, so no learning rate can follow the batch")
    return LearningRate(policy, optimizers)
