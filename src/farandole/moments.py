"""The square-root rule on optimizers of Adam's kind: betas, epsilon, weight decay, bias correction and second moment.

A batch of k times the base goes with (Malladi et al. 2022; f = sqrt(k) is the rule's factor)

    eta' = f eta      1 - beta' = k (1 - beta), at most 1      eps' = eps / f

**Why, and how a change is passed.** Let v' = k v be the second moment in units of the base batch. With the values above
an update is f eta m / (sqrt(v) + eps / f) = k eta m / (sqrt(v') + eps): k of the base batch's updates. v' forgets
k times as fast a step, so as fast a sample, and so does m, whose mean and noise are the same for every k. So all that a
change of k has to do, for nothing to jump, is to keep v': v is multiplied by (old k / new k) before the step. Then v'
goes to its new value at its own pace, from the safe side after a growth. Without it the first updates are sqrt(new k /
old k) times too small after a growth, and as many times too large after a shrink, the old v being too small.

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

from collections.abc import Sequence
from typing import Any

import torch

from farandole.errors import UsageError
from farandole.output import say

SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")  # second moments, in torch's optimizers

Betas = tuple[float, ...]


class Moments:
    """What one optimizer is under a batch that follows the workers.

    `counts`: for each group, [steps, steps with the betas in force, then for each beta: it, and the product of all
    those before]; nothing, and the optimizer as it is, until the first factor that is not 1.

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

    def set(self, factor: float, last: float) -> None:
        """Before an update: with `factor` instead of `last`, the one of the update before."""
        if factor == 1 and not self.counts:
            return
        k = factor**2
        if last != factor:
            for state in self._optimizer.state.values():
                for moment in SECOND:
                    if moment in state:
                        state[moment].mul_(last**2 / k)
        if not self.counts:
            self.counts = [self._begun(group) for group in self._optimizer.param_groups]
        for group, count in zip(self._optimizer.param_groups, self.counts, strict=True):
            if "alpha" in group:
                group["alpha"] = self._scaled((group["alpha"],), k)[0]
                rate, epsilon = factor, 1 / factor
            else:
                group["betas"] = self._scaled(group["betas"], k)
                right = corrections(count, group["betas"])
                torchs = [1 - beta ** count[0] for beta in group["betas"]]
                epsilon = (right[1] / torchs[1]) ** 0.5
                rate, epsilon = factor * torchs[0] / right[0] * epsilon, epsilon / factor
                if group.get("decoupled_weight_decay"):
                    group["weight_decay"] = group["weight_decay"] * (k / rate)
            group["lr"] = group["lr"] * rate
            group["eps"] = group["eps"] * epsilon

    def _begun(self, group: dict[str, Any]) -> list[float]:
        """Of an optimizer that may have been stepped before, with the betas that it has."""
        states = [self._optimizer.state[p] for p in group["params"] if p in self._optimizer.state]
        steps = max((float(state["step"]) for state in states if "step" in state), default=0.0)
        return [steps, steps, *(value for beta in group.get("betas", ()) for value in (float(beta), 1.0))]

    def _scaled(self, betas: Sequence[float], k: float) -> Betas:
        scaled = tuple(beta if k == 1 else 1 - k * (1 - beta) for beta in betas)
        if min(scaled) < 0 and not self._told:
            self._told = True
            most = 1 / (1 - min(betas))
            say(
                f"farandole: {self._name}: with {k:g} times the base batch beta would be {min(scaled):.3g} under "
                f"SquareRoot(), and is 0; the rule holds up to {most:.4g} times, so use max_factor={most**0.5:.3g}, or "
                f"a larger base"
            )
        return tuple(max(beta, 0.0) for beta in scaled)


def corrections(count: list[float], betas: Sequence[float]) -> list[float]:
    """Count a step with `betas`; what each moment is to be divided by after it."""
    before = count[2::2]
    if list(betas) != before:
        for place, beta in enumerate(before):
            count[3 + 2 * place] *= beta ** count[1]
        count[1], count[2::2] = 0.0, list(betas)
    count[0] += 1
    count[1] += 1
    return [1 - product * beta ** count[1] for beta, product in zip(count[2::2], count[3::2], strict=True)]
