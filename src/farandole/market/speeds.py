"""Reads how many times faster several machines are than one, from a file of `farandole bench scaling --json`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farandole.errors import UsageError
from farandole.plan.deadline import speeds_from


class _Run(msgspec.Struct):
    workers: int
    mode: str = "strong"


class _Row(msgspec.Struct):
    """What is read of a row that `farandole bench scaling --json` wrote."""

    run: _Run
    samples_per_s: float
    contestant: str = "farandole"


def speeds_of(path: Path | None, machines: int, mode: str = "") -> tuple[tuple[float, ...], int]:
    """Return how many times faster 1, 2, ... `machines` machines are than one, and the largest number measured.

    `path`: a file of `farandole bench scaling --json`; None: n machines are n times as fast. `mode`: "strong" is the
    script's batch, whatever the number of workers; "weak" is the script's batch for each worker; "" is strong if the
    file has it, else weak. Numbers that were not measured: see `plan.deadline.speeds_from`.

    Raises:
        UsageError: the file has no speed of one worker, or two of one number, or lacks the mode, or can't be read.
    """
    if path is None:
        return tuple(float(count) for count in range(1, machines + 1)), machines
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[_Row])
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"--speeds {path}: not a file of `farandole bench scaling --json`: {error}") from None
    rows = [row for row in rows if row.contestant == "farandole" and row.samples_per_s > 0]
    of_mode = [row for row in rows if row.run.mode == (mode or "strong")]
    if mode and not of_mode:
        raise UsageError(f"--speeds {path}: it has no {mode} scaling; measure it with --mode strong,weak")
    rows = of_mode or rows
    measured = {row.run.workers: row.samples_per_s for row in rows}
    if 1 not in measured:
        raise UsageError(f"--speeds {path}: it has no speed of one worker; measure it, as with --workers 1,2,4")
    if len(measured) < len(rows):
        raise UsageError(
            f"--speeds {path}: it has {len(rows)} speeds of {len(measured)} numbers of workers; measure one codec, one "
            "transport and one list of arguments"
        )
    speeds = speeds_from(measured, machines)
    return tuple(speed / measured[1] for speed in speeds), max(measured)
