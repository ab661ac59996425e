"""`farandole evaluate`: the metrics of checkpoints, by the script's own evaluations, in a single process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.options import check_file, check_script, write_file
from farandole.cli.reproduce import copies_of, refuse_others, script_of, settings_of
from farandole.control.run_folder import CHECKPOINTS, SETTINGS
from farandole.errors import UsageError
from farandole.platform import cpu
from farandole.platform.output import say, tell

if TYPE_CHECKING:
    from rich.table import Table

    from farandole.evaluation.checkpoints import Rows, Value


def evaluate(
    place: Annotated[
        str,
        typer.Argument(metavar="RUN|CHECKPOINT", help="A run's folder, a folder or URL of checkpoints, or a .pt file."),
    ],
    script: Annotated[
        str, typer.Argument(help="Training script, whose evaluations are used.", show_default="the run's own")
    ] = "",
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Also do the work of `run.once` in the loop. It may write files.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Intra-op threads.", show_default="those of the run, or 1")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file, for programs.")
    ] = None,
) -> None:
    """Evaluate a run's checkpoints by the script's own evaluations.

    The script runs in one process and trains nothing. Its loop body runs once for each checkpoint, with
    `step.ends_epoch` true. What `run.evaluate` returns and `run.log` gets is the checkpoint's row. Code after the loop
    does not run, unless there is one checkpoint and the loop evaluates nothing.
    """
    check_file("--json", json)
    json = json and json.absolute()
    folder = _run_of(place)
    settings = settings_of(folder) if folder is not None else None
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads}: use 1 or more")
    if settings is None and not script:
        raise UsageError(
            f"{place}: this is no run's folder, so the script is not known: `farandole evaluate {place} SCRIPT`"
        )
    bits = settings.bits if settings else "same"
    cpu.set_for(bits)
    from farandole.checkpoint.store import RunIdentity, reaching
    from farandole.evaluation import checkpoints
    from farandole.script import run_alone
    from farandole.training.loop import use

    others = refuse_others(folder, settings, script, "evaluate") if folder and settings else ""
    identity = None
    if folder is not None and settings is not None and Path(place).is_dir():
        identity = settings.checkpoints.identity and RunIdentity(settings.checkpoints.identity, settings.run)
        place = settings.checkpoints.url or str(folder / CHECKPOINTS)
    if others and settings and settings.checkpoints.url == place:
        raise UsageError(f"{others}: its checkpoints are at {place}; name that place, if you trust it")
    with reaching(place):
        store, entries = checkpoints.entries_of(_absolute(place), identity or None)
        seed = store.manifest(entries[-1].stem).seed
    many = len(entries)
    rows = checkpoints.Rows(lambda row: say(f"farandole: step {row['step']}: {len(rows.complete)} of {many}"))
    copied = False
    if folder is not None and settings is not None:
        script, arguments, copied = script_of(folder, settings, script, arguments, others, "evaluate")
    else:
        check_script(script)
    use(checkpoints.loads(store, entries, rows, once=once))
    os.environ |= {
        "FARANDOLE_TICKET": "", "FARANDOLE_HISTORY": "", "FARANDOLE_FOLDER": "", "FARANDOLE_SEED": str(seed),
        "FARANDOLE_THREADS": str(threads or (settings.threads if settings else 1)), "FARANDOLE_BITS": bits,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        copies = copies_of(folder, temporary) if copied and folder is not None else None
        run_alone(script, arguments or [], copies)
    rows.end()
    if not any(len(row) > len(("step", "epoch", "seconds")) for row in rows.complete):
        raise UsageError(f"{script}: it has called neither run.evaluate nor run.log, so there is nothing to show")
    _show(rows, json)


def _run_of(place: str) -> Path | None:
    """Return the absolute folder of the run that `place` is, or in which it is a checkpoint; None if there is none."""
    path = Path(place).absolute()
    return next((folder for folder in (path, path.parent, path.parent.parent) if (folder / SETTINGS).exists()), None)


def _absolute(place: str) -> str:
    """Return `place` so that it is valid in any working folder."""
    return os.path.abspath(place) if os.path.exists(place) else place


def _show(rows: Rows, json: Path | None) -> None:
    from farandole.bench.table import print_table

    print_table(_table(rows))
    if json is not None:
        import msgspec

        write_file("--json", json, msgspec.json.format(msgspec.json.encode(rows.complete)) + b"\n")
        tell(f"written to {json}")


def _table(rows: Rows) -> Table:
    from farandole.bench.table import plain_table

    names = list(dict.fromkeys(name for row in rows.complete for name in row if name != "seconds"))
    table = plain_table(*names, "seconds", left=0)
    for row in rows.complete:
        table.add_row(*(_word(row.get(name, "")) for name in (*names, "seconds")))
    return table


def _word(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
