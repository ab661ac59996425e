"""A batch that follows the machines, against a constant one: what a larger batch costs in samples.

Two facts decide. A larger batch needs more samples to the same target (`farandole bench batch`, or a table of the
user's). A batch that grows with the machines lets each of them compute as efficiently as one alone, where the parts of
a constant batch become small (`farandole bench scaling`, weak against strong).

The speed of n machines is the work of one machine alone, with its batch, that they do in a second:

    speed(n) = samples/s of n machines, over that of one  *  samples(batch of one) / samples(batch of n)

Between two measured sizes of the batch the number of samples is interpolated linearly. Beyond the last one the last
line goes on, if that rises. That is the law of McCandlish, Kaplan, Amodei, *An Empirical Model of Large-Batch Training*
(arXiv 1812.06162): samples = least samples * (1 + batch / critical batch). A batch that makes the job slower is not
used: from there on the batch stays as it is, and more machines are taken to be no faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from farandole.errors import UsageError


class _Row(msgspec.Struct):
    """What is read of a row: of `farandole bench batch --json`, or of the user's."""

    batch: int
    samples: float | list[float | None]
    workers: int | None = None
    target: str = ""


class BatchTable(msgspec.Struct, frozen=True, kw_only=True):
    """How many samples the target needs, by the batch. `target`: as it was measured; "": the table is the user's."""

    samples: dict[int, float]
    target: str

    @property
    def base(self) -> int:
        """The batch of one machine: the smallest one."""
        return min(self.samples)

    @property
    def largest(self) -> int:
        return max(self.samples)

    def needed(self, batch: int) -> float:
        """Return how many samples a batch needs that is at least `base`."""
        sizes = sorted(self.samples)
        above = next((size for size in sizes[1:] if size >= batch), sizes[-1])
        below = max(size for size in sizes if size < above)
        slope = (self.samples[above] - self.samples[below]) / (above - below)
        if batch > above:
            slope = max(slope, 0.0)
        return self.samples[above] + slope * (batch - above)


def read_batches(path: Path) -> BatchTable:
    """Return the table in a file: a JSON list of rows such as `{"batch": 256, "samples": 1200000}`.

    Raises:
        UsageError: it can't be read, has fewer than two sizes or one twice, its smallest batch is that of several
            workers, a size does not reach the target, or a number is not above 0.
    """
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[_Row])
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f'--batches {path}: not a list of rows such as {{"batch": 256, "samples": 1200000}}, as of `farandole '
            f"bench batch --json`: {error}"
        ) from None
    if (first := min(rows, key=lambda row: row.batch, default=None)) and first.workers not in (None, 1):
        raise UsageError(
            f"--batches {path}: its smallest batch is that of {first.workers} workers, and that of one is needed; "
            "measure it, as with --workers 1,2,4"
        )
    found = dict[int, float]()
    for row in rows:
        samples = row.samples if isinstance(row.samples, list) else [row.samples]
        known = [each for each in samples if each is not None]
        if row.batch < 1 or not known or len(known) < len(samples) or min(known) <= 0 or row.batch in found:
            what = "is there twice" if row.batch in found else "has no number of samples above 0 to the target"
            raise UsageError(f"--batches {path}: the batch of {row.batch} {what}; correct or leave out its row")
        found[row.batch] = statistics.fmean(known)
    if len(found) < 2:
        raise UsageError(f"--batches {path}: it has {len(found)} sizes of the batch; at least two are needed")
    return BatchTable(samples=found, target=rows[0].target)


def following_speeds(weak: Sequence[float], table: BatchTable) -> tuple[tuple[float, ...], int]:
    """Return how many times faster 1, 2, ... machines are with a batch that follows them, and the largest batch used.

    `weak`: how many times more samples a second they compute than one, each with the batch `table.base`.
    """
    base, speeds, best = table.base, list[float](), 1
    for count, throughput in enumerate(weak, 1):
        speed = throughput * table.needed(base) / table.needed(base * count)
        if count > 1 and speed > speeds[-1]:
            best = count
        speeds.append(max(speed, speeds[-1]) if speeds else speed)
    return tuple(speeds), base * best
