"""Reads how fast several machines are. The sources:

- a file of `farandole bench scaling --json`
- the folder of a run: its steps with each number of workers, evaluations included
- a JSON object of samples a second by the number of machines, as {"4": 3012, "8": 5874}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farandole.errors import UsageError
from farandole.plan.deadline import speeds_from
from farandole.protocol.metrics import StepLine, parse_lines

_FORMATS = "a file of `farandole bench scaling --json`, a run's folder, or samples a second by the number of machines"


class _Run(msgspec.Struct):
    workers: int
    mode: str = "strong"


class _Row(msgspec.Struct):
    """What is read of a row that `farandole bench scaling --json` wrote."""

    run: _Run
    samples_per_s: float
    contestant: str = "farandole"


@dataclass(frozen=True, kw_only=True)
class MachineSpeeds:
    """How fast 1, 2, ... machines are.

    Attributes:
        relative: item i is how many times faster i + 1 machines are than one.
        fewest, most: the smallest and the largest number of machines whose speed is known.
        samples_per_s: of one machine; None: not known.
    """

    relative: tuple[float, ...]
    fewest: int
    most: int
    samples_per_s: float | None = None


def speeds_of(path: Path | None, machines: int, mode: str = "") -> MachineSpeeds:
    """Return how fast 1, 2, ... `machines` machines are.

    `path`: one of the sources above; None: n machines are n times as fast. `mode`: of a measurement, "strong" is the
    script's batch, whatever the number of workers; "weak" is the script's batch for each worker; "" is strong if the
    file has it, else weak. Numbers that are not known: see `plan.deadline.speeds_from`.

    Raises:
        UsageError: a measurement has no speed of one worker, or two of one number, or lacks the mode; or there is none
            of the formats.
    """
    if path is None:
        relative = tuple(float(count) for count in range(1, machines + 1))
        return MachineSpeeds(relative=relative, fewest=1, most=machines)
    rates = _of_run(path, mode) if path.is_dir() else _of_file(path, mode)
    speeds = speeds_from(rates, machines)
    return MachineSpeeds(
        relative=tuple(speed / speeds[0] for speed in speeds), fewest=min(rates), most=max(rates),
        samples_per_s=speeds[0],
    )  # fmt: skip


def _of_run(folder: Path, mode: str) -> Mapping[int, float]:
    """Return the samples a second by the number of workers that a run had."""
    _refuse_mode(folder, mode)
    try:
        lines, _ = parse_lines((folder / "metrics.jsonl").read_bytes().splitlines())
    except OSError as error:
        raise UsageError(f"--speeds {folder}: not a run's folder: {error}") from None
    samples, seconds = dict[int, int](), dict[int, float]()
    for line in lines:
        if isinstance(line, StepLine):
            samples[line.workers] = samples.get(line.workers, 0) + line.samples
            step_s = line.training_s + line.evaluation_s
            seconds[line.workers] = seconds.get(line.workers, 0.0) + step_s
    rates = {count: samples[count] / seconds[count] for count in samples if seconds[count] > 0}
    if not rates:
        raise UsageError(f"--speeds {folder}: the run has no step yet")
    return rates


def _of_file(path: Path, mode: str) -> Mapping[int, float]:
    try:
        content = path.read_bytes()
        if content.lstrip().startswith(b"{"):
            _refuse_mode(path, mode)
            return _of_table(path, msgspec.json.decode(content, type=dict[int, float]))
        rows = msgspec.json.decode(content, type=list[_Row])
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"--speeds {path}: it must be {_FORMATS}: {error}") from None
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
    return measured


def _refuse_mode(path: Path, mode: str) -> None:
    if mode:
        raise UsageError(f"--speeds {path}: it has no {mode} scaling; give a file of `farandole bench scaling --json`")


def _of_table(path: Path, rates: Mapping[int, float]) -> Mapping[int, float]:
    for count, rate in rates.items():
        if count < 1 or not 0 < rate < 1e12:
            raise UsageError(f"--speeds {path}: {count}: {rate:g}; it must be samples a second by a number of machines")
    if not rates:
        raise UsageError(f"--speeds {path}: it is empty; it must be {_FORMATS}")
    return rates
