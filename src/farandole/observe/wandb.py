"""Exports a run to Weights & Biases: one history row for each step, with the same names as in TensorBoard
(`export_common.py`), and the events meanwhile as one text, `events`.

A row is sent when the next step's line arrives, because the script may log more values of the step until then. If
steps are faster, one step in `LEAST_S` is sent with its numbers (`export_common.py`), and each step with logged
values is sent with those: a row costs W&B's own process a millisecond. W&B's history only grows, so a step that a
resumed run repeats is skipped: its first values count there. The *mark* (`export_common.py`) holds the current row
and W&B's id of the run, so a resumed run continues as the same W&B run.

W&B's own variables set the destination: WANDB_MODE=offline writes to FOLDER/wandb, for `wandb sync`. Its system metrics
are off: they would show only the machine of this process, and cost more than all the rest.
"""

from __future__ import annotations

import secrets
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from farandole import __version__
from farandole.control.run_folder import WANDB, Observer
from farandole.errors import UsageError
from farandole.observe.export_common import Mark, Spacing, load, of_log, of_step
from farandole.observe.text import describe
from farandole.platform import files
from farandole.platform.extras import how_to_install
from farandole.protocol.metrics import Line, LogLine, StepLine

MARK = "farandole.json"
EVENTS = "events"
LEAST_S = 1.0  # least time between two steps whose numbers are written
LONGEST = 10_000  # characters of a row's events


def require_wandb() -> None:
    """Raises `UsageError` if wandb is not installed."""
    if find_spec("wandb") is None:
        raise UsageError(f"--wandb: the package wandb is not installed: {how_to_install('wandb')}")


class WeightsAndBiases(Observer):
    """Exports the run with the lines in the file `metrics` to a project."""

    name = "Weights & Biases"

    def __init__(self, project: str, metrics: Path) -> None:
        self._project, self._metrics = project, metrics
        self._place = metrics.parent / WANDB  # the name that W&B itself uses
        self._run: Any = None
        self._mark = Mark()
        self._row: dict[str, Any] = {}
        self._happened: list[str] = []
        self._is_repeat = False  # True: W&B already has the current step
        self._spacing = Spacing(LEAST_S)

    def begin(self) -> int:
        """Starts or continues the W&B run. Raises any exception of W&B."""
        wandb = import_module("wandb")
        files.make(self._place)
        mark = load(self._place / MARK, self._metrics)
        self._mark = msgspec.structs.replace(mark, id=mark.id or secrets.token_hex(4))
        self._row, self._happened, self._is_repeat = {}, [], False
        self._spacing = Spacing(LEAST_S)
        if self._run is None:
            folder = self._metrics.parent
            self._run = wandb.init(
                project=self._project, id=self._mark.id, name=folder.name, dir=str(folder), resume="allow",
                config={"farandole": __version__},
                settings=wandb.Settings(console="off", silent=True, save_code=False, x_disable_stats=True),
            )  # fmt: skip
            self._mark.save(self._place / MARK)  # from now on W&B has a run with this id
        return self._mark.at

    def take(self, line: Line, at: int = 0) -> None:
        match line:
            case StepLine():
                self._is_repeat = line.step < self._mark.step
                if not self._is_repeat:
                    self._send()
                    self._mark = msgspec.structs.replace(self._mark, at=at, step=line.step)
                    self._row = dict(of_step(line)) if self._spacing.admits(line) else {}
            case LogLine():
                if not self._is_repeat:
                    numbers, texts = of_log(line)
                    self._row |= numbers | texts
            case _:
                self._happened.append(describe(line))

    def flush(self) -> None:
        self._mark.save(self._place / MARK)

    def close(self) -> None:
        if self._run is None:
            return
        self._send()
        msgspec.structs.replace(self._mark, step=self._mark.step + 1).save(self._place / MARK)
        self._run.finish()
        self._run = None

    def _send(self) -> None:
        """Sends the current row."""
        if self._happened:
            self._row[EVENTS] = "\n".join(self._happened)[:LONGEST]
        if self._row:
            self._run.log(self._row, step=self._mark.step)
        self._row, self._happened = {}, []
