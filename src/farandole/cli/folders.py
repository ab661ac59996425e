"""Run folders: which one a verb means, and whether its run is alive.

A run is alive while its `farandole run` holds the folder's lock, or when its coordinator answers at its ticket's
address; a process id alone proves nothing, since ids are used again.
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
from farandole.control.api import Api
from farandole.control.run_folder import FILES, FOLDERS, LOCK, METRICS, RECORD, SETTINGS, TICKET, held, hold, in_use
from farandole.control.ticket import load
from farandole.errors import CoordinatorAway, CoordinatorUnreachable, FarandoleError, UsageError
from farandole.observe.export_common import before
from farandole.observe.past import Past, past
from farandole.platform import files
from farandole.protocol import events
from farandole.protocol.coordinator.state import RunSettings

# --- folders ----------------------------------------------------------------------------------------------------------

RUNS = Path("runs")
SHOWN = 5  # names of files
RunOption = Annotated[
    Path | None, typer.Option("--run", metavar="FOLDER", help="The run's folder.", show_default="the newest in runs/")
]


class Live:
    """A run that answers. What it declines raises UsageError; when it has ended meanwhile, CoordinatorUnreachable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.api = Api(load(str(folder / TICKET), files.opener))

    def __enter__(self) -> Api:
        return self.api

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CoordinatorUnreachable) and (over := _ending(self.folder)) and held(self.folder):
            raise CoordinatorUnreachable(
                f"the run in {self.folder} is ending: {over.reason} (exit code {over.code}); `farandole status` tells "
                f"what became of it"
            ) from None
        if isinstance(error, CoordinatorUnreachable) and held(self.folder):
            raise CoordinatorAway(
                f"the run in {self.folder} trains on, but its coordinator does not answer just now: ask again ({error})"
            ) from None
        if isinstance(error, CoordinatorUnreachable):
            raise CoordinatorUnreachable(f"the run in {self.folder} is over ({error})") from None


def live(folder: Path | None) -> Live:
    """The run in `folder`, or in the newest folder under runs/.

    Raises:
        UsageError: there is no run there.
    """
    place = place_of(folder)
    if not (place / RECORD).exists():
        raise CoordinatorUnreachable(f"the run in {place} is over")
    return Live(place)


def place_of(folder: Path | None) -> Path:
    """The folder that `--run` means.

    Raises:
        UsageError: there is no run there.
        NotPrivate: the folder is another's.
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
        raise UsageError(f"no run in {RUNS.resolve()}; start one with `farandole run`, or name its folder with --run")
    files.check(newest[1])
    return newest[1]


def _records() -> Iterator[tuple[float, Path]]:
    """When a run began to be served, and its folder under runs/, where those of other users may lie, too."""
    for folder in RUNS.glob("*"):
        with contextlib.suppress(OSError):
            record = (folder / RECORD).stat()
            if not files.foreign(record):
                yield record.st_mtime, folder


def past_of(folder: Path) -> Past | None:
    """What is known of the run in `folder`; None while a `farandole run` of it is alive, or where nothing is."""
    if held(folder) or not (folder / METRICS).exists():
        return None
    with open(folder / METRICS, "rb", opener=files.opener) as file:
        return past(folder.resolve().name, (line for line in file if line.endswith(b"\n")))


def _ending(folder: Path) -> events.OverEvent | None:
    """What the newest start of the run has recorded as its end; None where it goes on, or nothing can be read."""
    try:
        lines = before(folder / METRICS, (folder / METRICS).stat().st_size)
    except (OSError, FarandoleError):
        return None
    newest = next(
        (line for line in reversed(lines) if isinstance(line, events.OverEvent | events.RunStartedEvent)), None
    )
    return newest if isinstance(newest, events.OverEvent) else None


def lives(owner: Owner, folder: Path) -> bool:
    """True if the run `owner` is seen to be alive in `folder`: something holds it, and not another run."""
    if not held(folder):
        return False
    try:
        settings = msgspec.json.decode(files.read(folder / SETTINGS), type=RunSettings)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return True  # a script that trains by itself has none
    return settings.checkpoints.identity in ("", owner.id)


def check_folder(folder: Path) -> None:
    """See that a run can be started or resumed in `folder`.

    Raises:
        NotPrivate: it, or something in it that a run would use, is another's.
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
    if held(folder) or ((folder / RECORD).exists() and _answers(folder)):
        raise in_use(folder)


def others_word(folder: Path, *names: str) -> str:
    """Why what the settings in `folder` say, and what it holds under `names`, may be another's word: "" if it is this
    user's own. Root is a user like any other here, for whoever believes it acts in its own name.
    """
    places = [(folder, folder.stat())]
    for name in (SETTINGS, *names):
        places += files.below(folder / name)
    return next((why for path, info in places if (why := files.objection(path, info))), "")


def make_folder(folder: Path | None, script: str, *, again: bool = False) -> Path:
    """The run's folder, held by this process: `folder`, or a new one under runs/. `again`: its run is still on.

    Raises:
        NotPrivate: the folder is another's.
        RunFolderInUse: another `farandole run` was faster.
    """
    folder = folder or new_folder(script)
    with _reaching(f"--folder {folder}"):
        files.make(folder)
        hold(folder)
        for left_over in () if again else (folder / TICKET, folder / RECORD):
            left_over.unlink(missing_ok=True)
    return folder.resolve()


def new_folder(script: str) -> Path:
    """An empty one for a run of `script`, under runs/."""
    return _create(RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(script).stem}")


def foreign(folder: Path) -> str:
    """A word about files that are there before any run is, "" for none: somebody may have named the wrong folder."""
    if (folder / SETTINGS).exists() or not folder.is_dir():
        return ""
    names = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
    if not names:
        return ""
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return f"note: {folder} holds files that are not a run's ({shown}); they are left alone"


def close(folder: Path) -> str:
    """Keep others from looking into a run's folder that was made without us. A word about it, "" for none."""
    if not folder.stat().st_mode & files.OTHERS:
        return ""
    with contextlib.suppress(OSError):
        folder.chmod(files.FOLDER_MODE)
    if folder.stat().st_mode & files.OTHERS:
        return f"note: others can look into {folder}, and its file system does not let that be changed"
    return f"note: others could look into {folder}; it has mode 0700 now"


@contextlib.contextmanager
def _reaching(folder: str) -> Generator[None]:
    """What the system refuses, as an error of ours."""
    try:
        yield
    except FarandoleError:
        raise
    except OSError as error:
        raise UsageError(
            f"{folder}: {error.strerror} to {files.user(os.geteuid())}; name another folder, or give that user this "
            f"one (in a container the volume's owner counts, on a file server what it makes of root)"
        ) from None


def _create(folder: Path) -> Path:
    """`folder`, or with -2, -3, ... where another run of the same second has taken it."""
    for number in range(1, 100):
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            path.mkdir(mode=files.FOLDER_MODE, parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; name a writable folder with --folder") from None
        return path
    raise UsageError(f"{folder}: taken; name another folder with --folder")


def _answers(folder: Path) -> bool:
    try:
        Api(load(str(folder / TICKET), files.opener), timeout_s=2.0).status()
    except (CoordinatorUnreachable, UsageError, msgspec.MsgspecError):
        return False
    return True


# --- runs -------------------------------------------------------------------------------------------------------------
#
# `farandole runs`: the runs in a folder of runs, and what disk they take; `farandole runs prune` frees it.
#
# Invariant: nothing is removed but whole folders of runs, this user's own, that are over and that nobody holds.

app = typer.Typer(no_args_is_help=False, invoke_without_command=True, help="List runs, and delete old ones.")
Place = Annotated[Path, typer.Option("--in", metavar="FOLDER", help="Folder that contains the runs' folders.")]
DAY_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class RunFolderState:
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


def found(place: Path) -> Iterator[RunFolderState]:
    """The runs of this user's in `place`.

    Raises:
        UsageError: there is no such folder.
    """
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
            yield RunFolderState(folder=folder, state=state, steps=past.steps if past else 0, size=size, used=newest)


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
    """Bytes as people read them: 1.5 GB."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
