"""`farandole replay` and `rehearse`, which reproduce a run in a single process, and `farandole numerics`.

`replay` repeats a run from its record and compares the results. The run's folder holds everything that the weights
depend on: the script and the modules that it imports from its folder, as they were when the run began, its arguments,
the seed, the threads, and the number of workers that began each step. `replay` compares libraries and hardware before,
and results after. A script on the command line is run as it is, and compared with the run's copy.

The folder names code to execute and places to read. So it is trusted only if it belongs to this user (to root, if root
runs the command). From the folder of another user only numbers are read. Then the user must give the script; the
working folder, the copies of the code, the journal and checkpoints at another place are not used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from farandole.cli.folders import others_word
from farandole.cli.options import check_script
from farandole.code import snapshot
from farandole.code.pack import ORIGIN
from farandole.control.run_folder import CHECKPOINTS, CODE, METRICS, SETTINGS
from farandole.errors import FarandoleError, UsageError
from farandole.plan.shards import History
from farandole.platform import cpu, files
from farandole.platform.files import decoded
from farandole.platform.output import plain, say, tell
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.events import FinishedEvent
from farandole.protocol.metrics import Line, StepLine, parse_lines

if TYPE_CHECKING:
    from farandole.control.status import Numerics
    from farandole.run import Run


# --- rehearse ---------------------------------------------------------------------------------------------------------
#
# `farandole rehearse`: trains in a single process as if workers joined and left by a given history.
#
# Under any batch policy the weights depend only on the seed and on how many workers began each step. So the results are
# bit-identical to those of a real run with that history: a user can try a batch policy against a trace on one machine.


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
    codec: Annotated[
        str, typer.Option("--codec", metavar="none|bf16|fp16|...", help="As for `farandole run`.")
    ] = "none",
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder for metrics and checkpoints.", show_default="nowhere")
    ] = None,
) -> None:
    """Train in one process as if workers joined and left: same bits."""
    check_script(script)
    cpu.set_for(bits)
    from farandole.worker.context import read_history

    read_history(str(history))
    run = train(
        script, arguments or [], history=history, seed=seed, threads=threads, bits=bits, codec=codec, folder=folder
    )
    tell(f"fingerprint {run.fingerprint()}")


def train(
    script: str,
    arguments: list[str],
    *,
    history: Path,
    seed: int,
    threads: int,
    bits: str,
    codec: str,
    folder: Path | None,
    copies: Path | None = None,
) -> Run:
    """Runs the script to its end in a single process that simulates `history`. `copies`: a run's copy of the code.

    The caller has set the environment variables for `bits`.

    Raises:
        UsageError: the script never joined a run.

    Exceptions of the script itself pass through.
    """
    from farandole.script import run_alone

    os.environ |= {
        "FARANDOLE_TICKET": "",
        "FARANDOLE_HISTORY": str(history),
        "FARANDOLE_SEED": str(seed),
        "FARANDOLE_THREADS": str(threads),
        "FARANDOLE_BITS": bits,
        "FARANDOLE_CODEC": codec,
        "FARANDOLE_FOLDER": str(folder or ""),
    }
    return run_alone(script, arguments, copies)


# --- replay -----------------------------------------------------------------------------------------------------------


def replay(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    script: Annotated[
        str,
        typer.Argument(help="Training script to use instead of the run's copy.", show_default="the code as it was run"),
    ] = "",
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder for metrics and checkpoints.", show_default="nowhere")
    ] = None,
) -> None:
    """Train a run again in one process, and compare the bits.

    The run's journal says which worker did what. Exit code 1 if bits differ.
    """
    folder = folder and folder.absolute()
    settings, lines = settings_of(run), _lines(run)
    cpu.set_for(settings.bits)
    others = refuse_others(run, settings, script, "replay")
    history, fingerprint = history_of(lines, run, _saved(run, settings, others)), _fingerprint(lines)
    run = run.absolute()
    script, arguments, copied = script_of(run, settings, script, arguments, others, "replay")
    if not others:
        warn_of_differences(run, settings)
    steps = sum(isinstance(line, StepLine) for line in lines)
    tell(f"replaying {steps} steps, {len(history.changes)} worker counts up to {history.peak}")
    with tempfile.TemporaryDirectory() as folder_name:
        path = Path(folder_name, "history")
        path.write_text(history.text())
        replayed_fingerprint = train(
            script, arguments, history=path, seed=settings.seed, threads=settings.threads, bits=settings.bits,
            codec=settings.codec, folder=folder, copies=copies_of(run, folder_name) if copied else None,
        ).fingerprint()  # fmt: skip
    if not fingerprint:
        tell(f"fingerprint {replayed_fingerprint}; the run did not finish, so there is nothing to compare")
    elif replayed_fingerprint == fingerprint:
        tell(f"bit-identical to the run: {replayed_fingerprint}")
    else:
        tell(f"different from the run: {replayed_fingerprint} here, {fingerprint} in the run")
        raise typer.Exit(1)


def refuse_others(run: Path, settings: RunSettings, script: str, command: str) -> str:
    """Return why another user may own the folder or the script of `run`; "" if none may.

    `command`: the name of the command that runs the script.

    Raises:
        UsageError: another user may, and no `script` is given.
    """
    others = others_word(run, CODE) or _others_script(settings, copied=(run / CODE / ORIGIN).exists())
    if others and not script:
        raise UsageError(
            f"{others}, and {run} would run as you ({plain(' '.join(settings.command)) or 'no script'}): if "
            f"you trust it, give the script yourself, farandole {command} {run} SCRIPT"
        )
    return others


def script_of(
    run: Path, settings: RunSettings, script: str, arguments: list[str] | None, others: str, command: str
) -> tuple[str, list[str], bool]:
    """Return the script to run, its arguments, and True if the run's copies of the code are used.

    Without a `script`, they are the run's, and the working folder becomes the run's.

    Raises:
        UsageError: there is no script.
    """
    copied = (run / CODE / ORIGIN).exists()
    if script:
        check_script(script)
        if copied and not others and snapshot.of_kept(run / CODE)[0][1] != snapshot.of_file(script)[0][1]:
            say(f"farandole: warning: {script} differs from the script of the run, which is in {run / CODE}")
        return script, arguments or [], False
    if not settings.command:
        raise UsageError(f"{run} does not name its script: give it, `farandole {command} {run} SCRIPT`")
    os.chdir(settings.directory)
    if not copied:
        check_script(settings.command[0])
    return settings.command[0], list(settings.command[1:]), copied


def copies_of(run: Path, folder: str) -> Path:
    """Return a folder within `folder` with the run's copies of its code.

    Modules that the run has not imported are copied there, not into the run's folder.
    """
    copies = Path(folder, CODE)
    shutil.copytree(run / CODE, copies)
    return copies


def history_of(lines: list[Line], run: Path, saved: tuple[int, History | None] = (0, None)) -> History:
    """Returns the number of workers that began each step, from a run's metrics. A repeated step counts as it was last.

    `saved`: a checkpoint's step and the history up to it, for steps whose lines were lost with all workers.

    Raises:
        UsageError: steps are missing, so the results could not be bit-identical.
    """
    until, before = saved
    steps = [(step, before.workers(step)) for step in range(until)] if before else []
    for line in lines:
        if isinstance(line, StepLine) and line.step >= (until if before else 0):
            while steps and steps[-1][0] >= line.step:
                steps.pop()  # the run went back to a checkpoint or to step 0
            steps.append((line.step, line.workers))
    numbers = [step for step, _ in steps]
    missing = next((n for n, step in enumerate([*numbers, -1]) if n != step), 0)
    if not steps or missing < len(steps):
        why = (
            "the run began from another run's checkpoint" if steps and missing == 0 else "its metrics have no such line"
        )
        raise UsageError(f"{run}: how many workers began step {missing} is not known ({why}), so it can't be replayed")
    return History.from_steps(steps)


def _others_script(settings: RunSettings, *, copied: bool) -> str:
    """Returns why another user may own a script that was not copied; "" if none may, or there is no script."""
    script = Path(settings.directory, settings.command[0]) if settings.command else None
    return files.objection(script, script.stat()) if script and not copied and script.exists() else ""


def _saved(run: Path, settings: RunSettings, others: str) -> tuple[int, History | None]:
    """Returns the step of the run's newest checkpoint, and the history in it."""
    from farandole.checkpoint import restore
    from farandole.checkpoint.store import RunIdentity, reaching

    elsewhere = settings.checkpoints.url
    if others and elsewhere:
        say(f"farandole: warning: {others}: its checkpoints, at {plain(elsewhere)}, are not read")
        return 0, None
    place, identity = elsewhere or str(run / CHECKPOINTS), settings.checkpoints.identity
    try:
        with reaching(place):
            restored = restore.find([place], RunIdentity(identity, settings.run) if identity else None)
    except FarandoleError as error:
        say(f"farandole: warning: {error}")
        return 0, None
    changes = (restored.state or {}).get("history")
    return restored.position.step, History(tuple((step, workers) for step, workers in changes)) if changes else None


def warn_of_differences(run: Path, settings: RunSettings) -> None:
    """Warns of differences from the run's libraries and hardware, before the results differ."""
    from farandole.coordinator.journal import read_state
    from farandole.protocol import numeric_facts
    from farandole.training import run_state

    try:
        state = read_state(run)
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        say(f"farandole: warning: {run} has no journal to compare with ({error})")
        return
    then = dict(state.signature.facts) if state and state.signature else {}
    differences = numeric_facts.unlike_then(then.items(), run_state.local_facts(settings.threads, settings.bits))
    for each in differences.words(numeric_facts.REPLAYED):
        say(f"farandole: warning: {each}; results may differ")
    if then.get(snapshot.OWN, snapshot.own()) != snapshot.own():
        say(f"farandole: warning: {snapshot.OWN} differs from the version of the run; results may differ")


def settings_of(run: Path) -> RunSettings:
    """Return the settings of the run in the folder `run`. Raises UsageError if there is none."""
    try:
        return decoded((run / SETTINGS).read_bytes(), RunSettings)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{run}: it holds no run ({error})") from None


def _lines(run: Path) -> list[Line]:
    """Returns the complete lines of the run's metrics, without damaged ones."""
    try:
        lines, damaged = parse_lines((run / METRICS).read_bytes().split(b"\n")[:-1])
    except OSError as error:
        raise UsageError(f"{run}: its metrics can't be read ({error})") from None
    if damaged:
        say(f"farandole: warning: {damaged} damaged lines of {run / METRICS} are skipped")
    return lines


def _fingerprint(lines: list[Line]) -> str:
    fingerprints = [line.fingerprint for line in lines if isinstance(line, FinishedEvent) and line.equal]
    return fingerprints[-1] if fingerprints else ""


# --- numerics ---------------------------------------------------------------------------------------------------------
#
# `farandole numerics`: shows the results of test operations on this machine, or compares them with a run or a machine.
#
# A script sets the settings of torch, not the machine. So a comparison first sets them as on the other side.


def numerics(
    *,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Intra-op threads.", show_default="those compared with, or 1")
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            "--bits", metavar="same|portable", help="Compute in this mode.", show_default="as what it is compared with"
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the results to this file, for a later --against."),
    ] = None,
    rows: Annotated[bool, typer.Option("--rows", help="With --against: show every operation and setting.")] = False,
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="TICKET|FILE",
            help="Compare with a live run (its ticket) or with a file that --json wrote.",
        ),
    ] = "",
) -> None:
    """Show which bits this machine computes, or if it may join a run.

    With --against, print one sentence; exit code 0 if all bits are equal, else 1.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads}: a worker needs at least one")
    if bits not in (None, "same", "portable"):
        raise UsageError(f"--bits {bits}: give same or portable; with any, machines compute as with same")
    other = _other(against) if against else None
    bits = bits or ("portable" if other and other.bits == "portable" else "same")
    cpu.set_for(bits)
    from rich.console import Console

    from farandole.control.status import write
    from farandole.observe.tables import numerics_table
    from farandole.protocol import numeric_facts
    from farandole.training import run_state

    with contextlib.suppress(ImportError):  # with PIL, the image decoder is compared too
        import PIL.Image  # noqa: F401  # pyright: ignore[reportUnusedImport]

    theirs = other.facts if other else {}
    own = dict(run_state.local_facts(threads or int(theirs.get(numeric_facts.THREADS, "1")), bits, theirs))
    if json is not None:
        write(json, own, bits)
    if other is None or rows:
        Console().print(numerics_table(own, theirs), soft_wrap=True)
    if other is not None:
        differences = numeric_facts.numeric_differences(theirs.items(), own.items())
        other_name = f"run {other.run}" if other.run else against
        tell(f"{numeric_facts.verdict(differences, other_name, other.bits if other.run else bits)}")
        raise typer.Exit(1 if differences.bits else 0)


def _other(against: str) -> Numerics:
    from farandole.control.api import Api
    from farandole.control.status import read
    from farandole.control.ticket import load

    try:
        ticket = load(against)
    except UsageError:
        return read(Path(against))
    numbers = Api(ticket).numerics()
    if not numbers.facts:
        raise UsageError(
            f"run {numbers.run}: no worker has asked to join yet, so there is nothing to compare with; try again later"
        )
    return numbers
