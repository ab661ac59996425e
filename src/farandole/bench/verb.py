"""`farandole bench`: measures the cost of farandole for a script on this machine.

`bench steps` is a special run (`measuring.py`) in a temporary folder. Local workers run the unchanged script, and the
contestants take turns in them (`loop.py`). No checkpoint is written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.options import check_script
from farandole.errors import UsageError
from farandole.platform import cpu
from farandole.platform.output import say, tell

if TYPE_CHECKING:
    from farandole.bench.figures import Figures

SIGNALLED = 128  # exit codes from here on mean: ended by a signal
app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure the cost of farandole for a script on this machine."
)


@app.command("steps", context_settings={"allow_interspersed_args": False})
def steps(
    script: Annotated[str, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    workers: Annotated[int, typer.Option("--workers", help="How many workers; all run on this machine.")] = 2,
    timed: Annotated[
        int, typer.Option("--steps", help="Steps to time in each block, after three steps of warm-up.")
    ] = 10,
    rounds: Annotated[
        int, typer.Option("--rounds", help="How many rounds; in each round every contestant runs one block.")
    ] = 5,
    threads: Annotated[int, typer.Option("--threads", help="Intra-op threads of each worker.")] = 1,
    pin: Annotated[bool, typer.Option("--pin", help="Bind each worker to cores of its own.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, for programs.")
    ] = None,
) -> None:
    """Time a script's steps alone, with farandole and under DistributedDataParallel, in turns. Keeps no files."""
    from farandole.bench.terms import BenchTerms, environment

    terms = BenchTerms(workers=workers, steps=timed, rounds=rounds)
    check_script(script)
    if json is not None and not json.absolute().parent.is_dir():
        raise UsageError(f"--json {json}: there is no such folder")
    os.environ |= environment(terms)
    from farandole.pool.local import load_ahead

    load_ahead(threads, {**os.environ, **cpu.environment_of("same")})
    from farandole.bench.measuring import Measuring, settings_of

    folder = Path(tempfile.mkdtemp(prefix="farandole-bench-"))
    begin = f"{workers} workers start" if workers > 1 else "1 worker starts"
    tell(f"{begin}; all files of this run are deleted at its end, and no checkpoint is written")
    command = (script, *(arguments or ()))
    measuring = Measuring(settings_of(folder, command, terms, threads, pin=pin), terms)
    code = measuring.supervise()
    if (result := measuring.figures) is None:
        if code < SIGNALLED:
            say(f"farandole: the workers' logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise typer.Exit(code or 1)
    shutil.rmtree(folder, ignore_errors=True)
    _show(result, json)


def _show(result: Figures, json: Path | None) -> None:
    import msgspec
    from rich.console import Console

    from farandole.bench.table import notes, parts_table, steps_table

    console = Console(highlight=False, soft_wrap=True)
    for table in (steps_table(result), parts_table(result)):
        tell("")
        console.print(table)
    tell("")
    for line in notes(result, os.cpu_count() or 1):
        tell(line)
    if json is not None:
        try:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
        except OSError as error:
            raise UsageError(f"--json {json}: {error.strerror}") from None
