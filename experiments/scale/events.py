"""Thousands of workers by events only: what is left of the time when machines fail, for farandole and for restarts.

A failure takes one worker of a run, or the eight of a host. Time passes from event to event.

    farandole   the step in which the failure is takes `pause_s` longer. Until the replacement is there, after
                `start_s`, the workers that are left have the micro-batches of the lost ones: the step is as long as
                that of the worker with most of them. A joiner costs nothing. (`machines.py` measures both with every
                message, for one lost worker at a time.)
    restarts    the work since the last checkpoint is lost, and the job computes again `restart_s` later. Each
                checkpoint stops the job for `checkpoint_s`; its interval is Daly's, sqrt(2 * checkpoint_s * mean time
                between failures), at most that mean.

Goodput is the time in which the job would have done its work without failures and checkpoints, over the time it took.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec


class Failing(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose machines fail. `lost`: workers that a failure takes; `start_s`: until their replacement computes."""

    workers: int
    shards_of_worker: int = 4
    lost: int = 1
    start_s: float = 180.0
    pause_s: float = 1.0


def failure_times(mean_s: float, until_s: float, seed: int) -> list[float]:
    """Return random times of failures until `until_s`, `mean_s` apart in the mean."""
    rng, times, now = random.Random(f"{seed} {mean_s}"), list[float](), 0.0
    while (now := now + rng.expovariate(1 / mean_s)) < until_s:
        times.append(now)
    return times


def elastic_goodput(job: Failing, failures: Sequence[float], until_s: float) -> float:
    """Return the goodput of farandole with failures at these times, in order."""
    changes = sorted(
        [(when, job.lost) for when in failures]
        + [(when + job.start_s, -job.lost) for when in failures if when + job.start_s < until_s]
    )
    done_s, now, missing = 0.0, 0.0, 0
    for when, count in [*changes, (until_s, 0)]:
        done_s += (when - now) * speed(job, missing)
        if count > 0:
            done_s -= job.pause_s * speed(job, missing)
        now, missing = when, missing + count
    return max(done_s, 0.0) / until_s


def speed(job: Failing, missing: int) -> float:
    """Return how fast the job is without `missing` workers, where 1 is the speed of all."""
    left = job.workers - missing
    if left < 1:
        return 0.0
    return job.shards_of_worker / math.ceil(job.shards_of_worker * job.workers / left)


def restarting_goodput(
    failures: Sequence[float], until_s: float, mean_s: float, restart_s: float, checkpoint_s: float
) -> float:
    """Return the goodput of a job that restarts from its last checkpoint, with failures at these times, in order."""
    interval_s = min(math.sqrt(2 * checkpoint_s * mean_s), mean_s)
    done_s, begins = 0.0, 0.0
    for when in [*failures, until_s]:
        ran_s = max(when - begins, 0.0)
        whole = int(ran_s / (interval_s + checkpoint_s))
        done_s += whole * interval_s
        if when == until_s:
            done_s += min(ran_s - whole * (interval_s + checkpoint_s), interval_s)
        begins = max(begins, when + restart_s)
    return done_s / until_s


class GoodputRow(msgspec.Struct, frozen=True, kw_only=True):
    """Goodputs at one mean time between failures of the whole job, over `failures` failures."""

    workers: int
    mean_s: float
    failures: int
    elastic: float
    restart_3m: float
    restart_10m: float


CHECKPOINT_S = 30.0


def goodput_row(job: Failing, mean_s: float, until_s: float, seed: int = 1) -> GoodputRow:
    """Return the goodputs of all three on the same failures."""
    failures = failure_times(mean_s, until_s, seed)
    by_restart = [restarting_goodput(failures, until_s, mean_s, restart, CHECKPOINT_S) for restart in (180.0, 600.0)]
    return GoodputRow(
        workers=job.workers, mean_s=mean_s, failures=len(failures),
        elastic=elastic_goodput(job, failures, until_s), restart_3m=by_restart[0], restart_10m=by_restart[1],
    )  # fmt: skip
