"""`farandole runs`: the runs in a folder of runs, and what disk they take; `farandole runs prune` frees it.

Invariant: nothing is removed but whole folders of runs, this user's own, that are over and that nobody holds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from farandole.errors import UsageError

app = typer.Typer(no_args_is_help=False, invoke_without_command=True, help="List runs, and delete old ones.")

Place = Annotated[Path, typer.Option("--in", metavar="FOLDER", help="Folder that contains the runs' folders.")]
DAY_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """One run. `state`: live, or how it ended; `used`: when it last wrote anything, Unix time."""

    folder: Path
    state: str
    steps: int
    size: int
    used: float

    @property
    def live(self) -> bool:
        return self.state == "live"


@app.callback()
def runs(context: typer.Context, place: Place = Path("runs")) -> None:
    """List the runs in a folder, with their outcome and the disk space that they use."""
    context.obj = place
    if context.invoked_subcommand is None:
        _show(sorted(found(place), key=lambda run: run.used))


@app.command()
def prune(
    context: typer.Context,
    *,
    keep: Annotated[int, typer.Option("--keep", help="Keep this many, the most recently used.")] = 0,
    older: Annotated[
        float, typer.Option("--older", metavar="DAYS", help="Remove only runs that were not used for this long.")
    ] = 0.0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it, only list them.")] = False,
) -> None:
    """Remove runs that have ended, with their checkpoints and logs."""
    from farandole.platform.output import tell

    if not keep and not older:
        raise UsageError("runs prune: say who stays, with --keep NUMBER or --older DAYS")
    over = sorted((run for run in found(context.obj) if not run.live), key=lambda run: -run.used)
    gone = [run for run in over[keep:] if time.time() - run.used > older * DAY_S]
    _show(gone)
    freed = in_words(sum(run.size for run in gone))
    if not yes:
        tell(f"{len(gone)} runs, {freed}: nothing is removed yet; --yes does it")
        return
    for run in gone:
        remove(run.folder)
    tell(f"{len(gone)} runs removed, {freed} freed")


def found(place: Path) -> Iterator[Found]:
    """The runs of this user's in `place`.

    Raises:
        UsageError: there is no such folder.
    """
    from farandole.cli.folders import past_of
    from farandole.control.run_folder import METRICS, SETTINGS, held
    from farandole.platform import files as private

    if not place.is_dir():
        raise UsageError(f"{place}: no such folder; name the one in which the runs are with --in")
    for folder in sorted(place.iterdir()):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or private.foreign(folder.stat()) or not (folder / SETTINGS).is_file():
                continue
            files = [path.lstat() for path in folder.rglob("*")]
            live, past = held(folder), past_of(folder)
            state = "live" if live else past.outcome if past else "never began"
            newest = (folder / METRICS if (folder / METRICS).exists() else folder / SETTINGS).stat().st_mtime
            size = sum(info.st_blocks * 512 for info in files)
            yield Found(folder=folder, state=state, steps=past.steps if past else 0, size=size, used=newest)


def remove(folder: Path) -> None:
    """One run's folder, unless somebody has begun to use it: then it stays, and that is an error.

    Raises:
        RunFolderInUse: a run is alive in it.
    """
    from farandole.control.run_folder import hold

    handle = hold(folder)
    try:
        shutil.rmtree(folder)
    finally:
        os.close(handle)


def _show(runs: list[Found]) -> None:
    from rich.console import Console
    from rich.table import Table

    from farandole.platform.output import one_line

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("run", "state", "steps", "disk", "last used"):
        table.add_column(title)
    for run in runs:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.used))
        table.add_row(one_line(run.folder.name), run.state, str(run.steps or ""), in_words(run.size), used)
    Console().print(table)


def in_words(size: int) -> str:
    """Bytes as people read them: 1.5 GB."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
