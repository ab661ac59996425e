"""The schedule of most of today's training, for `torch.optim.lr_scheduler.LambdaLR`: warm-up, then half a cosine.

It counts steps of the base batch, `step.base_steps` of which pass in a step, and is the same whoever takes them.
"""

import math
from collections.abc import Callable


def warmup_cosine(steps: int, warmup: int, floor: float = 0.0) -> Callable[[int], float]:
    """The factor of base step 0, 1, ...: up in a straight line over `warmup` steps, then down to `floor` at `steps`."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return factor
