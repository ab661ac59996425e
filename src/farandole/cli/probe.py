"""`farandole probe`: which holds a step up, the data or the compute? The answer, from the script itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.checks import check_script
from farandole.errors import UsageError
from farandole.platform.output import tell

if TYPE_CHECKING:
    from rich.table import Table

    from farandole.data.probe import Findings


def probe(
    script: Annotated[str, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    seconds: Annotated[float, typer.Option("--seconds", help="Seconds for each of the three phases.")] = 10.0,
    threads: Annotated[int, typer.Option("--threads", help="Intra-op threads; use the run's number.")] = 1,
) -> None:
    """Time a script's input pipeline, its computation, and both together, in one process. Writes nothing."""
    if seconds <= 0 or threads < 1:
        raise UsageError(f"--seconds {seconds:g} --threads {threads}: more than 0 seconds, at least 1 thread")
    check_script(script)
    os.environ["FARANDOLE_TICKET"] = os.environ["FARANDOLE_FOLDER"] = ""
    os.environ["FARANDOLE_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(threads)

    from farandole.data.loader import Loader
    from farandole.data.probe import Ended, Probe
    from farandole.script import run_alone

    watching = Probe(seconds)
    Loader.watch, Loader.timed = watching, True
    try:
        run_alone(script, arguments or [])
    except Ended:
        assert watching.loader is not None
        watching.loader.close()
        _print(watching.findings(os.cpu_count() or 1), watching.loader.batch.samples(1))
        return
    raise UsageError(
        f"{script} ended within the probe, which had timed {len(watching.phases)} of 3 phases of {seconds:g} s; "
        f"let it train for more epochs, or give --seconds less"
    )


def _print(found: Findings, batch: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"one worker, num_workers={found.processes}, {found.cores} cores", title_justify="left")
    for name in ("", "ms a step", "samples/s", "waiting for data"):
        table.add_column(name, justify="right" if name else "left")
    for name, phase in (("data alone", found.data), ("compute alone", found.compute), ("both", found.both)):
        waiting = f"{found.share:.1%}" if phase is found.both else ""
        table.add_row(name, f"{1e3 * batch / phase.rate:.1f}", f"{phase.rate:.0f}", waiting)
    first = found.first
    table.add_row(
        "first step", f"{1e3 * first.seconds:.1f}", f"{first.rate:.0f}", f"{first.waiting / first.seconds:.1%}"
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table, _making(found), sep="\n")
    bottleneck, advice = found.verdict()
    tell(f"bottleneck: {bottleneck}; {advice}")


def _making(found: Findings) -> Table:
    """Where those who make samples spend their time."""
    from rich.table import Table

    table = Table(title="making a sample, ms of one process; cold: waited for the store", title_justify="left")
    for name in ("", "samples", "store", "cache", "decoding", "collating", "handing over"):
        table.add_column(name, justify="right" if name else "left")
    for name, spent in (("cold", found.making.cold), ("warm", found.making.warm)):
        if spent.samples:
            phases = (spent.fetching, spent.reading, spent.computing, spent.collating, spent.handing_over)
            each = (f"{1e3 * seconds / spent.samples:.3f}" for seconds in phases)
            table.add_row(name, str(spent.samples), *each)
    return table
