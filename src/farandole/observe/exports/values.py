"""What a line says, as numbers and texts with names: the same for every tool. Pure.

A step's own numbers are named `step/...`, with the unit in the name. What a script logs keeps its name; where that is
one of ours, `log/` stands before it. A number that is not finite is null in the file, and not a number here.
"""

from __future__ import annotations

import math

from farandole.membership.metrics import LogLine, StepLine

LOSS = "step/loss"
LEARNING_RATE = "step/learning_rate"  # what the script and its schedule had set, times the rule's factor
FACTOR = "step/learning_rate_factor"
SPEED = "step/samples_per_second"
SECONDS = "step/seconds"
EVALUATION, ONCE, PAUSE = "step/evaluation_seconds", "step/once_seconds", "step/pause_seconds"  # of those
SAMPLES = "step/samples"
SKIPPED = "step/samples_skipped"
WORKERS = "step/workers"
VIEW = "step/view"
EPOCH = "step/epoch"
OURS = frozenset((
    LOSS, LEARNING_RATE, FACTOR, SPEED, SECONDS, EVALUATION, ONCE, PAUSE, SAMPLES, SKIPPED, WORKERS, VIEW, EPOCH,
))  # fmt: skip

Numbers = dict[str, float]
Texts = dict[str, str]


def of_step(line: StepLine) -> Numbers:
    """Without those that are not known."""
    numbers: Numbers = {LOSS: _number(line.loss), SECONDS: line.seconds, SAMPLES: float(line.samples)}
    numbers |= {WORKERS: float(line.workers), VIEW: float(line.view), EPOCH: float(line.epoch)}
    if line.samples_per_s is not None:
        numbers[SPEED] = line.samples_per_s
    if line.learning_rate is not None:
        numbers[LEARNING_RATE] = line.learning_rate * _number(line.factor)
        numbers[FACTOR] = _number(line.factor)
    some = {SKIPPED: line.skipped, EVALUATION: line.evaluation_s, ONCE: line.once_s, PAUSE: line.pause_s}
    numbers |= {name: float(value) for name, value in some.items() if value}
    return numbers


def of_log(line: LogLine) -> tuple[Numbers, Texts]:
    """What `run.log` was given: numbers, truths as 0 and 1 among them, and texts."""
    numbers: Numbers = {}
    texts: Texts = {}
    for name, value in line.fields.items():
        known = f"log/{name}" if name in OURS or not name else name
        if isinstance(value, str):
            texts[known] = value
        else:
            numbers[known] = _number(value)
    return numbers, texts


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
