"""The square-root rule on optimizers of Adam's kind: betas, epsilon, weight decay, bias correction and second moment.

A batch of k times the base goes with (Malladi et al. 2022; f = sqrt(k) is the rule's factor)

    eta' = f eta      1 - beta' = k (1 - beta), at most 1      eps' = eps / f

**Why.** Let v' = k v be the second moment in units of the base batch. With the values above an update is
f eta m / (sqrt(v) + eps / f) = k eta m / (sqrt(v') + eps): k of the base batch's updates. v' and m forget k times as
fast a step, so as fast a sample, and the mean and the noise of m are the same for every k.

**How a change is passed.** Where noise prevails v goes with 1 / k. After a growth the old v is too large, and updates
are too small until it has faded, in 1 / (k (1 - beta2)) steps: the safe side, and v is left as it is. (Divided by the
growth it would keep v', but strides k times as long then meet directions without noise, and training is thrown off.)
After a shrink it is too small, and updates would be sqrt(old k / new k) times too large: so v is multiplied by what it
lacks. That is not always the ratio of the two, since it may not have followed the growth before. `lag` is the mean of
1 / k over the squares in v, a moving average like v itself: a shrink to k multiplies v by 1 / (k lag), if that is above
1. A short last window, after which k is what it was, changes nothing in v.

**Weight decay** that is decoupled takes eta' wd off a weight in each step; for as much a sample it has to be k eta wd.

**Bias correction.** With betas that change, m after t steps is a weighted sum of gradients whose weights add up to
1 - beta_1 beta_2 ... beta_t, as 1 - w_t = beta_t (1 - w_(t-1)). torch divides by 1 - beta_t ** t instead, for both
moments; the rate and epsilon make up for it:

    eta'' = eta' (torch's c1 / c1) sqrt(c2 / torch's c2)      eps'' = eps' sqrt(c2 / torch's c2)

with c1 and c2 the right ones. Steps are counted for an optimizer, not for each parameter: one that had no gradient in
some steps gets the others' correction. RMSprop has none.

All of this is for the time of `optimizer.step()`. What is remembered of it goes where the rule's memory goes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from farandole.errors import UsageError

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
