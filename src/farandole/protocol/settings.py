"""Settings of `farandole run` that are kept with the run: exports, pools and their targets, spending limits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath

import msgspec

from farandole.errors import UsageError

# --- exports ----------------------------------------------------------------------------------------------------------


class Exports(msgspec.Struct, frozen=True, kw_only=True):
    """The exports of a run; "" for one that is off.

    `tensorboard`: the folder of its event files. `wandb`: a project's name. `metrics_token`: the path of the file whose
    token opens `/metrics`, never the token.
    """

    tensorboard: str = ""
    wandb: str = ""
    metrics_token: str = ""

    def within(self, folder: PurePath) -> Exports:
        """Return the exports of the run in `folder`, to which a relative path refers."""
        place = self.tensorboard and str(folder / self.tensorboard)
        return msgspec.structs.replace(self, tensorboard=place)

    @property
    def from_file(self) -> bool:
        """True if an export reads metrics.jsonl, in a process of its own."""
        return bool(self.tensorboard or self.wandb)


# --- preference -------------------------------------------------------------------------------------------------------
#
# How many workers a run wants of each of its pools, in their order: the first is preferred. A pool is asked for all
# that the pools before it do not claim. It claims its capacity, and at least its present workers. Without a total
# (`--workers` left out) each pool is asked for all that it can have. `farandole scale --pool` and `farandole release`
# fix the number of a pool; the others share the rest.
# So a preferred pool without capacity is still asked while the next ones fill its place, and they make workers leave
# only when it has capacity again. Until a pool has reported its capacity, and while its hosts are on their way, it
# claims all that it is asked for; so at a run's beginning no other pool is asked in its place.
# See docs/protocol.md, Pools.


class PoolTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of the run. `kind`: "local", or another kind of `pool/base.py`, which also has its `options`.

    `size`: the most workers that it may have, None: no limit.
    """

    name: str
    kind: str = "local"
    size: int | None = None
    options: dict[str, str] = msgspec.field(default_factory=dict[str, str])


def targets(
    total: int | None, sizes: Sequence[tuple[str, int | None]], fixed: Mapping[str, int],
    can: Mapping[str, int], there: Mapping[str, int], gather: Collection[str] = (),
) -> dict[str, int]:  # fmt: skip
    """Return the target number of workers of each pool, by its mark.

    `sizes`: the run's pools in their order, with their limits. `fixed`: the fixed targets of some pools. `can`: the
    capacity that a pool has reported. `there`: its workers that do not leave. `gather`: pools whose hosts still start.
    """
    result, remaining = dict(fixed), total
    for mark, size in sizes:
        if mark in fixed:
            continue
        present = there.get(mark, 0)
        if remaining is None:
            most = max(can.get(mark, size or 0), present)  # a pool without a known capacity has its size
            result[mark] = most if size is None else min(most, size)
            continue
        target = result[mark] = remaining if size is None else min(remaining, size)
        remaining -= target if mark in gather else min(target, max(can.get(mark, target), present))
    return result


def wanted(total: int | None, by_pool: Mapping[str, int], fixed: Mapping[str, int]) -> int:
    """Return the target number of workers of the whole run, as users see it. `by_pool`: from `targets`."""
    return sum(by_pool.values()) if total is None else total + sum(fixed.values())


# --- spending ---------------------------------------------------------------------------------------------------------
#
# When a run has lasted, or cost, as much as it may. Pure; times are Unix time.


def spending_of(
    max_hours: float | None, max_cost: float | None, keep_failed_s: float, now: float,
    deadline_s: float | None = None, speeds: Sequence[float] = (), start_s: float | None = None,
) -> Spending:  # fmt: skip
    """Return the limits of a run that begins at Unix time `now`.

    Raises:
        UsageError: a limit is not above 0, or not finite.
    """
    until = None if max_hours is None else now + 3600 * max_hours
    deadline = None if deadline_s is None else now + deadline_s
    return Spending(
        max_hours=max_hours, until=until, max_cost=max_cost, keep_failed_s=keep_failed_s, begins=now, deadline=deadline,
        speeds=tuple(speeds), start_s=start_s,
    )  # fmt: skip


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a run in time and cost.

    `until`: the Unix time at which the run ends, None: no limit. `max_hours`: the option that set it. `max_cost`: in
    dollars, of instances. `keep_failed_s`: seconds for which a failed host is kept. `begins`: the Unix time at which
    the run began. `deadline`: the Unix time at which it has to be done; it does not end the run. `speeds`: how many
    times faster 1, 2, ... workers are than one; (): not known. `start_s`: how long a worker of the last pool takes to
    start; None: not known. Both are for the deadline.

    Raises:
        UsageError: a limit is not above 0, or not finite.
    """

    max_hours: float | None = None
    until: float | None = None
    max_cost: float | None = None
    keep_failed_s: float = 0.0
    begins: float = 0.0
    deadline: float | None = None
    speeds: tuple[float, ...] = ()
    start_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--max-hours", self.max_hours), ("--max-cost", self.max_cost)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} {value:g}: use a number above 0")
        if not 0 <= self.keep_failed_s < math.inf:
            raise UsageError(f"--keep-failed {self.keep_failed_s / 60:g}: use a number of minutes, 0 or more")

    def over(self, now: float, dollars: float) -> str:
        """Return why the run must end, "" if it continues. `dollars`: its cost so far."""
        if self.until is not None and now >= self.until:
            return f"it has lasted {self.max_hours:g} hours (--max-hours)"
        if self.max_cost is not None and dollars >= self.max_cost:
            return f"its instances have cost {dollars:.2f} dollars (--max-cost {self.max_cost:g})"
        return ""
