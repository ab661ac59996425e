"""The learning rate around `optimizer.step()`: a rule's factor on it, and nobody else any the wiser.

    1. A step's exchange is over: `step_ended` asks the rule for this step's factor. All workers hold the same batch
       sizes and the same reduced noise, so all get the same.
    2. Before `optimizer.step()` each group's rate is multiplied by the factor, and with `rate_in_buffer` the momentum
       buffers by (the factor that they were made with) / (this one).
    3. After it the rates are what the schedule had set. So schedules, logs and checkpoints never see a factor.

What is remembered, the rule's memory and each optimizer's last factor, is part of the run's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from farandole.errors import UsageError
from farandole.plan.batch import BatchPolicy, GlobalBatch, PerWorkerBatch
from farandole.plan.rules import RULES, Noise, Rule

ADAPTIVE = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
)


class Rates:
    """The rates of `optimizers`, by name, under a batch policy; with a constant batch there is nothing to do.

    Attributes:
        factor: this step's, once its exchange is over; 1 before.

    Raises:
        UsageError: a rule that is not for one of the optimizers; says which are.
    """

    def __init__(self, policy: BatchPolicy, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.factor = 1.0
        self._policy = policy if isinstance(policy, PerWorkerBatch) else None
        self._memory = dict(self._policy.rule.begin()) if self._policy else {}
        self._last: dict[str, float] = {}  # the factor that an optimizer's momentum buffers were made with
        self._rates: dict[str, list[Any]] = {}
        if self._policy is None:
            return
        for name, optimizer in optimizers.items():
            _check_fits(self._policy.rule, name, optimizer)
            optimizer.register_step_pre_hook(partial(self._before, name))
            optimizer.register_step_post_hook(partial(self._after, name))

    @property
    def follow(self) -> bool:
        """Whether the rates follow the batch at all."""
        return self._policy is not None

    @property
    def measures_noise(self) -> bool:
        return self._policy is not None and self._policy.rule.measures_noise

    def step_ended(self, workers: int, noise: Noise | None) -> None:
        """The exchange of a step that `workers` workers have begun is over; the optimizer's part comes next."""
        policy = self._policy
        if policy is None:
            return
        k = policy.samples(workers) / policy.base
        factor, memory = policy.rule.factor(self._memory, k, policy.base, noise)
        self._memory = dict(memory)
        self.factor = factor if policy.max_factor is None else min(factor, policy.max_factor)

    def state(self) -> dict[str, Any]:
        return {"memory": dict(self._memory), "last": dict(self._last)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what another worker, or this run before, has remembered; nothing of it from another rule."""
        if set(state["memory"]) == set(self._memory):
            self._memory = dict(state["memory"])
            self._last = dict(state["last"])

    def _before(self, name: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._after(name, optimizer)  # an update that raised has left its rates behind
        assert self._policy is not None
        last = self._last.get(name, self.factor)
        if self._policy.rule.rate_in_buffer and last != self.factor:
            for state in optimizer.state.values():
                buffer = state.get("momentum_buffer")
                if buffer is not None:
                    buffer.mul_(last / self.factor)
        self._last[name] = self.factor
        self._rates[name] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _after(self, name: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates.pop(name, ()), strict=False):
            group["lr"] = rate


def _check_fits(rule: Rule, name: str, optimizer: torch.optim.Optimizer) -> None:
    family = _family(optimizer)
    fitting = [each.__name__ for each in RULES if each.family == family]
    if rule.family != family and type(rule) in RULES:
        kind = type(optimizer).__name__
        why = "divides by the gradient's size" if family == "adaptive" else "takes the gradient as it is"
        raise UsageError(
            f"PerWorkerBatch(rule={rule!r}) does not fit {name}, {kind}, which {why}; use {' or '.join(fitting)}"
        )


def _family(optimizer: torch.optim.Optimizer) -> str:
    """Torch's own by name, other people's by their settings: what has betas is of Adam's kind."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    return "adaptive" if names & set(ADAPTIVE) or "betas" in optimizer.defaults else "sgd"


def rates(policy: BatchPolicy, objects: Mapping[str, object]) -> Rates:
    """The rates of the optimizers among a run's replicated objects.

    Raises:
        UsageError: the batch follows the workers and there is no optimizer whose rate could.
    """
    optimizers = {name: thing for name, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}
    if not optimizers and not isinstance(policy, GlobalBatch):
        raise UsageError("PerWorkerBatch: no optimizer is replicated, so no learning rate can follow the batch")
    return Rates(policy, optimizers)
