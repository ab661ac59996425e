"""Run folders: finds the folder that a command means, checks whether its run is alive, lists and deletes old runs.

A run is alive while its `farandole run` holds the folder's lock, or when its coordinator answers at its ticket's
address. A process id alone proves nothing, since ids are reused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from farandole.checkpoint.owner import Owner
from farandole.code.pack import Origin
from farandole.control.api import Api
from farandole.control.run_folder import (
    FILES,
    FOLDERS,
    LOCK,
    METRICS,
    OUTPUT,
    RECORD,
    SETTINGS,
    TICKET,
    hold,
    in_use,
    is_locked,
)
from farandole.control.ticket import load
from farandole.errors import CoordinatorAway, CoordinatorUnreachable, FarandoleError, UsageError
from farandole.observe.export_common import before
from farandole.observe.past import Past, past
from farandole.platform import files
from farandole.protocol import events
from farandole.protocol.coordinator.state import RunSettings

# --- folders ----------------------------------------------------------------------------------------------------------

RUNS = Path("runs")
SHOWN = 5  # names of files in a message
RunOption = Annotated[
    Path | None, typer.Option("--run", metavar="FOLDER", help="The run's folder.", show_default="the newest in runs/")
]


class Live:
    """Connection to a live run. A refused request raises UsageError; if the run has ended, CoordinatorUnreachable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.api = Api(load(str(folder / TICKET), files.opener))

    def __enter__(self) -> Api:
        return self.api

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CoordinatorUnreachable) and (over := _ending(self.folder)) and is_locked(self.folder):
            raise CoordinatorUnreachable(
                f"the run in {self.folder} is ending: {over.reason} (exit code {over.code}); `farandole status` shows "
                f"the outcome"
            ) from None
        if isinstance(error, CoordinatorUnreachable) and is_locked(self.folder):
            raise CoordinatorAway(
                f"the run in {self.folder} continues, but its coordinator does not answer now: try again ({error})"
            ) from None
        if isinstance(error, CoordinatorUnreachable):
            raise run_is_over(self.folder) from None


def live(folder: Path | None) -> Live:
    """Returns the run in `folder`, or in the newest folder under runs/.

    Raises:
        UsageError: the folder has no run.
        CoordinatorUnreachable: the run is over.
    """
    place = place_of(folder)
    if not (place / RECORD).exists():
        raise run_is_over(place)
    return Live(place)


def run_is_over(folder: Path) -> CoordinatorUnreachable:
    """Returns the error that the run in `folder` is over."""
    return CoordinatorUnreachable(f"the run in {folder} is over: `farandole status` and `report` show it")


def place_of(folder: Path | None) -> Path:
    """Returns the folder that `--run` means.

    Raises:
        UsageError: the folder has no run.
        NotPrivate: the folder belongs to another user.
    """
    if folder is not None:
        with _reaching(f"--run {folder}"):
            if os.path.lexists(folder):
                files.check(folder)
            if not ((folder / RECORD).exists() or (folder / METRICS).exists()):
                raise UsageError(f"--run {folder}: no run has been started in this folder")
        return folder
    newest = max(_records(), default=None)
    if newest is None:
        raise UsageError(f"no run in {RUNS.resolve()}; start one with `farandole run`, or give its folder with --run")
    files.check(newest[1])
    return newest[1]


def _records() -> Iterator[tuple[float, Path]]:
    """Yields the start time of a run's coordinator and its folder under runs/. Folders of other users are skipped."""
    for folder in RUNS.glob("*"):
        with contextlib.suppress(OSError):
            record = (folder / RECORD).stat()
            if not files.foreign(record):
                yield record.st_mtime, folder


def past_of(folder: Path) -> Past | None:
    """Returns the outcome of the run in `folder`.

    None if it has no metrics, or if its `farandole run` is alive and has not recorded the end.
    """
    if not (folder / METRICS).exists() or (is_locked(folder) and _ending(folder) is None):
        return None
    with open(folder / METRICS, "rb", opener=files.opener) as file:
        return past(folder.resolve().name, (line for line in file if line.endswith(b"\n")))


def _ending(folder: Path) -> events.OverEvent | None:
    """Returns the `over` event of the newest start of the run. None if the run continues or nothing can be read."""
    try:
        lines = before(folder / METRICS, (folder / METRICS).stat().st_size)
    except (OSError, FarandoleError):
        return None
    newest = next(
        (line for line in reversed(lines) if isinstance(line, events.OverEvent | events.RunStartedEvent)), None
    )
    return newest if isinstance(newest, events.OverEvent) else None


def lives(owner: Owner, folder: Path) -> bool:
    """Returns True if the run `owner` seems to be alive in `folder`: the folder is locked, and not by another run."""
    if not is_locked(folder):
        return False
    try:
        settings = msgspec.json.decode(files.read(folder / SETTINGS), type=RunSettings)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return True  # a script in single-process training writes no settings
    return settings.checkpoints.identity in ("", owner.id)


def check_folder(folder: Path) -> None:
    """Checks that a run can be started or resumed in `folder`.

    Raises:
        NotPrivate: the folder, or a file in it that a run would use, belongs to another user.
        RunFolderInUse: a run is alive in it.
    """
    with _reaching(f"--folder {folder}"), contextlib.suppress(FileNotFoundError):
        files.check(folder)
        for name in FILES:
            with contextlib.suppress(FileNotFoundError):
                files.check_file(folder / name)
        for name in FOLDERS:
            with contextlib.suppress(FileNotFoundError):
                files.check(folder / name)
                files.check_all(folder / name)
    if is_locked(folder) or ((folder / RECORD).exists() and _answers(folder)):
        raise in_use(folder)


def others_word(folder: Path, *names: str) -> str:
    """Returns why another user may have written the settings in `folder`, or the files under `names`; "" if none may.

    Root counts as another user too, because a user who trusts the files acts in their own name.
    """
    places = [(folder, folder.stat())]
    for name in (SETTINGS, *names):
        places += files.below(folder / name)
    return next((why for path, info in places if (why := files.objection(path, info))), "")


def make_folder(folder: Path | None, script: str, *, run_is_alive: bool = False) -> Path:
    """Creates and locks the run's folder: `folder`, or a new one under runs/. `run_is_alive`: its run is still alive.

    Raises:
        NotPrivate: the folder belongs to another user.
        RunFolderInUse: another `farandole run` has locked it.
    """
    folder = folder or new_folder(script)
    with _reaching(f"--folder {folder}"):
        files.make(folder)
        hold(folder)
        for left_over in () if run_is_alive else (folder / TICKET, folder / RECORD):
            left_over.unlink(missing_ok=True)
    return folder.resolve()


def new_folder(script: str) -> Path:
    """Creates an empty folder under runs/ for a run of `script`."""
    return _create(RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{Origin.from_script(script).run_name}")


def foreign(folder: Path) -> str:
    """Returns a note if a folder without a run holds files, else "": the user may have given the wrong folder."""
    if (folder / SETTINGS).exists() or not folder.is_dir():
        return ""
    names = sorted(path.name for path in folder.iterdir() if path.name not in (LOCK, OUTPUT))
    if not names:
        return ""
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return f"note: {folder} holds files that are not a run's ({shown}); they are not touched"


def close(folder: Path) -> str:
    """Makes a run's folder that another program created unreadable for other users. Returns a note, "" for none."""
    if not folder.stat().st_mode & files.OTHERS:
        return ""
    with contextlib.suppress(OSError):
        folder.chmod(files.FOLDER_MODE)
    if folder.stat().st_mode & files.OTHERS:
        return f"note: other users can read {folder}, and its file system does not allow to change that"
    return f"note: other users could read {folder}; its mode is now 0700"


@contextlib.contextmanager
def _reaching(folder: str) -> Generator[None]:
    """Turns an OSError in the body into a UsageError."""
    try:
        yield
    except FarandoleError:
        raise
    except OSError as error:
        raise UsageError(
            f"{folder}: {error.strerror} for {files.user(os.geteuid())}; use another folder, or make that user the "
            f"owner of this one (in a container the volume's owner counts; a file server may map root to another user)"
        ) from None


def _create(folder: Path) -> Path:
    """Creates `folder`, or a folder with -2, -3, ... appended if a run of the same second has taken the name."""
    for number in range(1, 100):
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            path.mkdir(mode=files.FOLDER_MODE, parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; give a writable folder with --folder") from None
        return path
    raise UsageError(f"{folder}: the name is taken; give another folder with --folder")


def _answers(folder: Path) -> bool:
    try:
        Api(load(str(folder / TICKET), files.opener), timeout_s=2.0).status()
    except (CoordinatorUnreachable, UsageError, msgspec.MsgspecError):
        return False
    return True


# --- runs -------------------------------------------------------------------------------------------------------------
#
# `farandole runs`: lists the runs in a folder and their disk space; `farandole runs prune` deletes runs.
#
# Invariant: only whole run folders are deleted, that belong to this user, are over and are not locked.

app = typer.Typer(no_args_is_help=False, invoke_without_command=True, help="List runs, and delete old ones.")
Place = Annotated[Path, typer.Option("--in", metavar="FOLDER", help="Folder that contains the runs' folders.")]
DAY_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class RunFolderState:
    """One run. `state`: live, or its outcome. `size`: bytes on disk. `used`: Unix time of its last write."""

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
    """Without a command: list the runs in a folder, with their outcome and the disk space that they use."""
    context.obj = place
    if context.invoked_subcommand is None:
        _show(sorted(list_runs(place), key=lambda run: run.used))


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
        raise UsageError("runs prune: give --keep NUMBER or --older DAYS")
    over = sorted((run for run in list_runs(context.obj) if not run.live), key=lambda run: -run.used)
    removed = [run for run in over[keep:] if time.time() - run.used > older * DAY_S]
    _show(removed)
    freed = in_words(sum(run.size for run in removed))
    if not yes:
        tell(f"{len(removed)} runs, {freed}: nothing is removed yet; repeat with --yes to remove them")
        return
    for run in removed:
        remove(run.folder)
    tell(f"{len(removed)} runs removed, {freed} freed")


def list_runs(place: Path) -> Iterator[RunFolderState]:
    """Yields the runs of this user in `place`.

    Raises:
        UsageError: the folder does not exist.
    """
    from farandole.control.run_folder import METRICS, SETTINGS, is_locked
    from farandole.platform import files as private

    if not place.is_dir():
        raise UsageError(f"{place}: no such folder; give the folder of the runs with --in")
    for folder in sorted(place.iterdir()):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or private.foreign(folder.stat()) or not (folder / SETTINGS).is_file():
                continue
            files = [path.lstat() for path in folder.rglob("*")]
            live, past = is_locked(folder), past_of(folder)
            state = "live" if live else past.outcome if past else "never began"
            newest = (folder / METRICS if (folder / METRICS).exists() else folder / SETTINGS).stat().st_mtime
            size = sum(info.st_blocks * 512 for info in files)
            yield RunFolderState(folder=folder, state=state, steps=past.steps if past else 0, size=size, used=newest)


def remove(folder: Path) -> None:
    """Deletes one run's folder, unless another process has begun to use it.

    Raises:
        RunFolderInUse: a run is alive in it.
    """
    from farandole.control.run_folder import hold

    handle = hold(folder)
    try:
        shutil.rmtree(folder)
    finally:
        os.close(handle)


def _show(runs: list[RunFolderState]) -> None:
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
    """Returns a size in bytes as text for people: 1.5 GB."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
