"""`farandole rehearse`: a world of one that trains as if workers came and went by a given history.

Under any batch policy the weights depend only on the seed and on how many workers began each step, so these are the
bits that a real run of that history gives: a policy tried against a trace on one machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.checks import check_script
from farandole.platform import cpu
from farandole.platform.output import tell

if TYPE_CHECKING:
    from farandole.run import Run


def rehearse(
    script: Annotated[str, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    history: Annotated[
        Path,
        typer.Option(
            "--history", metavar="FILE", help="File of lines `STEP WORKERS`: the number of workers from that step on."
        ),
    ],
    seed: Annotated[int, typer.Option("--seed", help="As for `farandole run`.")] = 0,
    threads: Annotated[int, typer.Option("--threads", help="Intra-op threads. Results depend on it.")] = 1,
    bits: Annotated[str, typer.Option("--bits", metavar="same|portable", help="As for `farandole run`.")] = "same",
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder for metrics and checkpoints.", show_default="nowhere")
    ] = None,
) -> None:
    """Train in one process as if workers joined and left, with the bits of such a run."""
    check_script(script)
    cpu.set_for(bits)
    from farandole.worker.participant import read_history

    read_history(str(history))
    run = train(script, arguments or [], history=history, seed=seed, threads=threads, bits=bits, folder=folder)
    tell(f"fingerprint {run.fingerprint()}")


def train(
    script: str,
    arguments: list[str],
    *,
    history: Path,
    seed: int,
    threads: int,
    bits: str,
    folder: Path | None,
    copies: Path | None = None,
) -> Run:
    """Run the script to its end as a world of one that stands for `history`; from a run's `copies` of its code. The
    switches for `bits` have been set.

    Raises:
        UsageError: the script never joined a run. Whatever the script itself raises.
    """
    from farandole.script import run_alone

    os.environ |= {
        "FARANDOLE_TICKET": "",
        "FARANDOLE_HISTORY": str(history),
        "FARANDOLE_SEED": str(seed),
        "FARANDOLE_THREADS": str(threads),
        "FARANDOLE_BITS": bits,
        "FARANDOLE_FOLDER": str(folder or ""),
    }
    return run_alone(script, arguments, copies)
