"""What a run is started with, the same for everyone in it: sizes, seed, threads, checkpoints, limits.

One value: the command line makes it, settings.json holds it, the coordinator goes by it, and each worker gets it with
its Welcome. Invariant: one that exists has been checked, also one that was read from a file or came over the wire.
"""

from __future__ import annotations

import msgspec

from farandole.errors import UsageError
from farandole.membership.values import Checkpoints
from farandole.platform.bounds import MAX_COUNT, MAX_SEED, MAX_THREADS, MAX_WORKERS, real, whole

WHOLE = {  # and the most of each
    "wanted": MAX_WORKERS, "minimum": MAX_WORKERS, "maximum": MAX_WORKERS, "seed": MAX_SEED, "threads": MAX_THREADS,
    "startup_failures": MAX_COUNT, "views_per_group": MAX_COUNT,
}  # fmt: skip
_OPTIONS = {
    "wanted": "--workers", "minimum": "--min", "maximum": "--max", "orphan_s": "--orphan-limit", "stall_s": "--stall",
    "standstill_s": "--standstill", "stop_s": "--stop-limit",
}  # fmt: skip
BITS = ("same", "portable", "any")  # what is promised of them; see `likeness.py`


class RunTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. `wanted`, `minimum`, `maximum`: of workers; None wants all that the run's pools can have.
    `ledger`: every delivered sample is counted.

    `heartbeat_timeout_s`: the most that a worker may be silent; often it is given up earlier (see `silence`). `pin`:
    each worker has cores of its own. `by_speed`: shards are dealt by measured speed, else equally. `bits`: who may
    compute for the run. `stop_on_nan`: a loss that is not finite ends the run. `audit`: the part of all shards that
    another worker computes too; `stop_undecided`: the run ends where two find different things of one and nobody can
    tell who is right. `standstill_s`, `stop_s`: how long the training may stand still before that is told, and before a
    stop that was asked for no longer waits for its step.

    Raises:
        UsageError: a value is beyond its limit, or contradicts another; names both and the remedy.
    """

    wanted: int | None = 1
    minimum: int = 1
    maximum: int | None = None
    seed: int = 0
    threads: int = 1
    pin: bool = False
    ledger: bool = False
    by_speed: bool = True
    bits: str = "same"
    stop_on_nan: bool = False
    audit: float = 0.0
    stop_undecided: bool = False
    checkpoints: Checkpoints = Checkpoints()
    heartbeat_s: float = 0.5
    heartbeat_timeout_s: float = 5.0
    stall_s: float = 30.0
    orphan_s: float = 600.0
    prepare_timeout_s: float = 30.0
    startup_failures: int = 5
    end_s: float = 10.0  # after a stop, for those whose script has not ended where others' have
    standstill_s: float = 60.0
    stop_s: float = 30.0
    views_per_group: int = 256  # numbers; messages of views 512 apart could not be told apart in one group

    def __post_init__(self) -> None:
        for name, most in WHOLE.items():
            if (value := getattr(self, name)) is not None:
                whole(f"{_option(name)} {{}}", value, -MAX_SEED if name == "seed" else 0, most)
        for name in (name for name in self.__struct_fields__ if name.endswith("_s")):
            real(f"{_option(name)} {{}}", getattr(self, name), why="seconds")
        if self.bits not in BITS:
            raise UsageError(f"--bits {self.bits}: say {' or '.join(BITS)}")
        if self.minimum < 1:
            raise UsageError(f"--min {self.minimum}: a run needs at least one worker; use --min 1 or more")
        if self.threads < 1:
            raise UsageError(f"--threads {self.threads}: a worker needs at least one")
        if self.wanted is not None and self.wanted < self.minimum:
            raise UsageError(
                f"--workers {self.wanted} is below --min {self.minimum}: the run could never start; "
                f"raise --workers or lower --min"
            )
        if self.maximum is not None and self.maximum < (self.wanted or self.minimum):
            below = f"--workers {self.wanted}" if self.wanted else f"--min {self.minimum}"
            raise UsageError(f"--max {self.maximum} is below {below}: raise --max or lower {below.split()[0]}")
        if self.heartbeat_timeout_s < 4 * self.heartbeat_s:
            raise UsageError(
                f"a heartbeat timeout of {self.heartbeat_timeout_s:g} s for one every {self.heartbeat_s:g} s: at least "
                f"four of them must fit"
            )
        if self.orphan_s <= self.heartbeat_timeout_s:
            raise UsageError(
                f"--orphan-limit {self.orphan_s:g}: it must be longer than the heartbeat timeout, "
                f"{self.heartbeat_timeout_s:g} s"
            )
        if self.stall_s < self.heartbeat_s:
            raise UsageError(f"--stall {self.stall_s:g}: at least {self.heartbeat_s:g} s, the time between heartbeats")
        if not 0.0 <= self.audit <= 1.0:
            raise UsageError(f"--audit {self.audit:g}: a part of all shards, from 0 to 1 (or 0% to 100%)")
        if self.audit and self.bits == "any":
            raise UsageError(f"--audit {self.audit:g} with --bits any: unlike machines find different bits in any case")
        if self.checkpoints.keep < 1:
            raise UsageError(f"--keep {self.checkpoints.keep}: a run keeps at least one checkpoint")


def _option(field: str) -> str:
    return _OPTIONS.get(field, f"--{field.replace('_', '-')}")
