"""`farandole check`: whether a script computes the same bits whoever joins and dies, and with any micro-batch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.options import check_file, check_script, show_script_help, write_file
from farandole.errors import UsageError
from farandole.platform import cpu
from farandole.platform.bounds import MAX_WORKERS
from farandole.platform.output import say, tell
from farandole.run_options import default

if TYPE_CHECKING:
    from farandole.check.findings import Finding


def check(
    script: Annotated[str, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    workers: Annotated[int, typer.Option("--workers", help="Workers at the beginning; one more joins.")] = 2,
    micro: Annotated[
        bool, typer.Option("--micro/--no-micro", help="Also compute one step with smaller micro-batches.")
    ] = True,
    threads: Annotated[int, typer.Option("--threads", help="Intra-op threads of each worker.")] = default("threads"),
    seed: Annotated[int, typer.Option("--seed", help="As for `farandole run`.")] = default("seed"),
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file, for programs.")
    ] = None,
    die_with: Annotated[int, typer.Option("--die-with", metavar="PID", hidden=True)] = 0,
) -> None:
    """Check that a script computes the same bits whoever joins or dies.

    Exit code 1 if bits differ.

    Local workers train three steps: some begin, one more joins, one is killed. One process resumes from a checkpoint.
    If bits differ, the first difference is named, with its likely cause. Named are also sums over the inner loop, of
    which each worker has only its own part. Then one step is computed with smaller
    micro-batches, and its gradient compared. Keeps no files.
    """
    cpu.set_for("same")
    if die_with:
        from farandole.check.legs import run_alone

        run_alone(script, arguments or [], die_with)
    check_script(script)
    show_script_help(script, arguments)
    check_file("--json", json)
    for option, value, most in (("--workers", workers, MAX_WORKERS - 1), ("--threads", threads, 1 << 10)):
        if not 1 <= value <= most:
            raise UsageError(f"{option} {value}: from 1 to {most}")
    found = _findings((script, *(arguments or ())), workers, threads, seed, micro=micro)
    tell("")
    from farandole.check.report import lines_of

    for line in lines_of(found, workers):
        tell(line)
    if json is not None:
        import msgspec

        write_file("--json", json, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    if any(each.outcome != "agrees" for each in found):
        raise typer.Exit(1)


def _findings(command: Sequence[str], workers: int, threads: int, seed: int, *, micro: bool) -> list[Finding]:
    from farandole.bench import child
    from farandole.check.findings import findings_of_bits
    from farandole.check.legs import Legs, ScriptRaised

    child.exit_on_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="farandole-check-"))
    legs = Legs(folder, command, workers=workers, threads=threads, seed=seed)
    try:
        tell("three steps alone")
        legs.alone("alone")
        tell(f"three steps with {workers} workers; one more joins before the second, one is killed in the third")
        if code := legs.run():
            raise typer.Exit(code)
        tell("the last two of these steps from a checkpoint")
        legs.alone("resume")
        found = findings_of_bits(legs.records("alone"), legs.records("workers"), legs.records("resume"))
        if micro:
            from farandole.check.micro import finding_of_micro

            tell("one step with two sizes of micro-batch")
            found.append(finding_of_micro(legs))
        return found
    except ScriptRaised as error:
        say("farandole: the script failed:")
        say(str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        legs.close()
        shutil.rmtree(folder, ignore_errors=True)
