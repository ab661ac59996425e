"""Options of a script that a checkpoint overrules: what its optimizers, schedulers and frozen parameters begin with.

A run that is resumed goes on with the rates, and whatever else its optimizers and schedulers hold, of the checkpoint.
A rate that somebody has given on the command line meanwhile counts for nothing, and that must be said. A rate in the
checkpoint is another than the script's own also where nothing was given, since schedulers change it; so what the
script began with is kept in the state and compared with what the resumed script begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from farandole.membership.difference import in_words
from farandole.training.replica import Replica

LONGEST = 100  # characters of a value


def options_of(replica: Replica) -> dict[str, str]:
    """The settings of optimizers and schedulers, and which parameters are frozen, in words by name."""
    found: dict[str, str] = {}
    for name, thing in replica.objects.items():
        if isinstance(thing, torch.optim.Optimizer):
            for index, group in enumerate(thing.param_groups):
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                found |= {f"{name}.param_groups[{index}].{key}": _words(value) for key, value in settings.items()}
        elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            found |= {f"{name}.{key}": _words(value) for key, value in thing.state_dict().items()}
    frozen = [name for name, parameter in replica.parameters.items() if not parameter.requires_grad]
    return found | {f"{name}.requires_grad": "False" for name in frozen}


def overruled(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """At most one line: what the script has now, where it had something else when the run began."""
    unlike = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    words = [f"{name} is {now.get(name, 'none')} in this script, and was {then.get(name, 'none')}" for name in unlike]
    return [f"the checkpoint overrules what the script sets: {in_words(words)}"] if words else []


def _words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"
    return repr(value)[:LONGEST] if " at 0x" not in repr(value) else type(value).__name__
