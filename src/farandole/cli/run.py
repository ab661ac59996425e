"""`farandole run`: start a run on this machine and accompany it to its end.

Checks come first, before anything is started; the rest is `supervise.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from farandole.errors import UsageError


def run(
    script: Annotated[str, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own.")] = None,
    *,
    workers: Annotated[int, typer.Option("--workers", help="Workers wanted; `farandole scale` changes it.")] = 2,
    minimum: Annotated[int, typer.Option("--min", help="Train with as few as this.")] = 1,
    maximum: Annotated[int | None, typer.Option("--max", help="Let in no more than this.  [default: none]")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of initialisation, order and dropout.")] = 0,
    threads: Annotated[int, typer.Option("--threads", help="Intra-op threads of each worker; part of the bits.")] = 1,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="The run's folder.  [default: runs/TIME-SCRIPT]")
    ] = None,
    ledger: Annotated[bool, typer.Option("--ledger", help="Count every delivered sample.")] = False,
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST[:PORT]",
            help="Where workers of other machines reach the run, over TLS; 0.0.0.0: all.",
        ),
    ] = "127.0.0.1",
) -> None:
    """Start a run here, with its coordinator and its workers, and watch it until it is over."""
    from farandole.cli.folders import new_folder
    from farandole.cli.supervise import Supervisor
    from farandole.control import endpoint, tls
    from farandole.membership.records import RunSettings
    from farandole.observe.display import open_display

    if threads < 1:
        raise UsageError(f"--threads {threads}: a worker needs at least one")
    check_script(script)
    if not endpoint.is_loopback(endpoint.parse(listen)[0]):
        tls.check_available(listen)
    RunSettings(run="", wanted=workers, minimum=minimum, maximum=maximum)  # its checks, before a folder is made
    place = new_folder(folder, script)
    settings = RunSettings(
        run=place.name,
        folder=str(place),
        wanted=workers,
        minimum=minimum,
        maximum=maximum,
        seed=seed,
        threads=threads,
        ledger=ledger,
        listen=listen,
    )
    print(f"run folder: {place}", flush=True)
    display = open_display(sys.stdout)
    display.wanted = workers
    raise typer.Exit(Supervisor(settings, script, arguments or [], display).supervise())


def check_script(script: str) -> None:
    """Raises UsageError where `script` is not a file that can be read."""
    try:
        with Path(script).open("rb"):
            return
    except OSError as error:
        raise UsageError(f"script {script}: {error.strerror}") from None
