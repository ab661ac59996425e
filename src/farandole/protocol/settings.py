"""Where a run is also shown, and how many workers it wants of its pools: settings that `farandole run` keeps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath

import msgspec

from farandole.errors import UsageError

# --- exports ----------------------------------------------------------------------------------------------------------


class Exports(msgspec.Struct, frozen=True, kw_only=True):
    """ "" for what is not wanted. `tensorboard`: the folder of its event files; `wandb`: a project's name;
    `metrics_token`: the path of the file whose token opens `/metrics`, never the token.
    """

    tensorboard: str = ""
    wandb: str = ""
    metrics_token: str = ""

    def within(self, folder: PurePath) -> Exports:
        """... of the run in `folder`: a relative place is there."""
        place = self.tensorboard and str(folder / self.tensorboard)
        return msgspec.structs.replace(self, tensorboard=place)

    @property
    def from_file(self) -> bool:
        """Whether anything is to be made of metrics.jsonl, by a process of its own."""
        return bool(self.tensorboard or self.wandb)


# --- preference -------------------------------------------------------------------------------------------------------
#
# How many workers a run wants of each of its pools, in their order: the first is preferred. A pool is asked for all
# that the pools before it do not claim. It claims its capacity, and at least its present workers. Without a total
# (`--workers` left out) each pool is asked for all that it can have. `farandole scale --pool` and `farandole release`
# fix the number of a pool; the others share the rest.
# See docs/protocol.md, Pools.


class PoolTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of the run. `kind`: local, or another one of `pool/base.py`, where its `options` are, too. `size`: no more
    workers than this, None: no limit.
    """

    name: str
    kind: str = "local"
    size: int | None = None
    options: dict[str, str] = msgspec.field(default_factory=dict[str, str])


def targets(
    total: int | None, sizes: Sequence[tuple[str, int | None]], fixed: Mapping[str, int],
    can: Mapping[str, int], there: Mapping[str, int], gather: Collection[str] = (),
) -> dict[str, int]:  # fmt: skip
    """Workers wanted of each pool, by its mark. `sizes`: the run's pools in their order; `fixed`: what is wanted of
    some; `can`: what they have said; `there`: workers that do not leave; `gather`: whose hosts are on their way.
    """
    found, left = dict(fixed), total
    for mark, size in sizes:
        if mark in fixed:
            continue
        its = there.get(mark, 0)
        if left is None:
            most = max(can.get(mark, size or 0), its)  # a pool that knows no limit of its own has its size
            found[mark] = most if size is None else min(most, size)
            continue
        asked = found[mark] = left if size is None else min(left, size)
        left -= asked if mark in gather else min(asked, max(can.get(mark, asked), its))
    return found


def wanted(total: int | None, found: Mapping[str, int], fixed: Mapping[str, int]) -> int:
    """In all, as people see it."""
    return sum(found.values()) if total is None else total + sum(fixed.values())


# --- spending ---------------------------------------------------------------------------------------------------------
#
# When a run has lasted, or cost, as much as it may. Pure; times are Unix time.


def spending_of(max_hours: float | None, max_cost: float | None, keep_failed_s: float, now: float) -> Spending:
    """Of a run that begins now. Raises UsageError."""
    until = None if max_hours is None else now + 3600 * max_hours
    return Spending(max_hours=max_hours, until=until, max_cost=max_cost, keep_failed_s=keep_failed_s)


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """`until`: the run ends then, None: whenever it does. `max_hours`: what was asked for. `max_cost` in dollars, of
    instances. `keep_failed_s`: a host that has failed is kept for so long.

    Raises:
        UsageError: a limit that is none.
    """

    max_hours: float | None = None
    until: float | None = None
    max_cost: float | None = None
    keep_failed_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("--max-hours", self.max_hours), ("--max-cost", self.max_cost)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} {value:g}: a number above 0")
        if not 0 <= self.keep_failed_s < math.inf:
            raise UsageError(f"--keep-failed {self.keep_failed_s / 60:g}: minutes, from 0")

    def over(self, now: float, dollars: float) -> str:
        """Why the run is to end, "" where it goes on. `dollars`: it has cost so far."""
        if self.until is not None and now >= self.until:
            return f"it has lasted {self.max_hours:g} hours (--max-hours)"
        if self.max_cost is not None and dollars >= self.max_cost:
            return f"its instances have cost {dollars:.2f} dollars (--max-cost {self.max_cost:g})"
        return ""
