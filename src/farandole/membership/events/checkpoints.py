"""Checkpoints: written, gone on from, and who writes them."""

from __future__ import annotations

from farandole.membership.events.base import Names, Recorded, Step
from farandole.membership.values import Count, Seconds


class Checkpoint(Recorded, frozen=True, kw_only=True):
    """`seconds` were taken to write `bytes`, behind the training, which stood still for `copy_ms`."""

    worker: str
    step: Step
    path: str
    bytes: Count
    seconds: Seconds
    copy_ms: Seconds
    finite: bool = True


class CheckpointFailed(Recorded, frozen=True, kw_only=True):
    worker: str
    step: Step
    reason: str


class CheckpointDamaged(Recorded, frozen=True, kw_only=True):
    """One that was passed over."""

    worker: str
    reason: str


class Resumed(Recorded, frozen=True, kw_only=True):
    """`path`: "" for the script's own beginning. `last_finite`: the newest checkpoint of a finite state, else."""

    worker: str
    step: Step
    path: str
    differences: Names
    finite: bool = True
    last_finite: str = ""


class NothingLeft(Recorded, frozen=True, kw_only=True):
    worker: str
    step: Step
    path: str


class Saved(Recorded, frozen=True, kw_only=True):
    """The last checkpoint, written in `seconds`; `whole`: of a whole step, so that the run can go on from it."""

    worker: str
    path: str
    whole: bool
    finite: bool = True
    seconds: Seconds = 0.0


class SavedElsewhere(Recorded, frozen=True, kw_only=True):
    """... but not in the run's store."""

    worker: str
    host: str
    path: str
    whole: bool
    finite: bool = True
    seconds: Seconds = 0.0


class NotSaved(Recorded, frozen=True, kw_only=True):
    """`worker`: "" where nobody is left to do it."""

    reason: str
    worker: str = ""


class Saver(Recorded, frozen=True, kw_only=True):
    worker: str
    before: str
    at_once: bool


class NoSaver(Recorded, frozen=True, kw_only=True):
    reason: str


class NoLeader(Recorded, frozen=True, kw_only=True):
    reason: str


class Short(Recorded, frozen=True, kw_only=True):
    """It was to begin the first view, and finds less than the run has saved."""

    worker: str
    host: str
    reason: str
