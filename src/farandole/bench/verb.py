"""`farandole bench`: measures the cost of farandole for a script, and the network between hosts.

`bench steps` is a special run (`measuring.py`) in a temporary folder. Local workers run the unchanged script, and the
contestants take turns in them (`loop.py`). No checkpoint is written. `bench scaling` is one such run after the other,
with different numbers of workers (`scaling.py`), on this machine or on the hosts of pools. `bench batch` trains the
script in one process with larger batches (`batch_run.py`). `bench network` watches an ordinary run from outside
(`network_run.py`).
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farandole.cli.options import check_file, check_plot, check_script, write_file, write_plot
from farandole.errors import UsageError
from farandole.platform import cpu
from farandole.platform.extras import require_zstd
from farandole.platform.output import say, tell
from farandole.run_options import RUN_OPTIONS, default

if TYPE_CHECKING:
    from farandole.bench.batch import BatchRow, Target, TargetWatch
    from farandole.bench.figures import Figures
    from farandole.bench.measuring import Hosts
    from farandole.bench.scaling import ScalingResult, ScalingRow
    from farandole.bench.terms import BenchTerms, Record

SIGNALLED = 128  # exit codes from here on mean: ended by a signal
app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure the cost of farandole for a script, and the network."
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
    from farandole.bench.figures import figures
    from farandole.bench.measuring import round_lines
    from farandole.bench.terms import BenchTerms

    terms = BenchTerms(workers=workers, steps=timed, rounds=rounds)
    check_script(script)
    check_file("--json", json)
    begin = f"{workers} workers start" if workers > 1 else "1 worker starts"
    tell(f"{begin}; all files of this run are deleted at its end, and no checkpoint is written")
    records = _measure((script, *(arguments or ())), terms, threads, pin=pin, lines=round_lines)
    if isinstance(records, int):
        raise typer.Exit(records or 1)
    _show(figures(records, terms, rounds), json)


def _measure(
    command: Sequence[str], terms: BenchTerms, threads: int, hosts: Hosts | None = None, *, pin: bool,
    codec: str = default("codec"), shared_memory: bool = True, lines: Any,
) -> Mapping[str, Sequence[Record]] | int:  # fmt: skip
    """Return the reports of the workers of one run, or its exit code if it could not be measured."""
    from farandole.bench.terms import environment

    variables = {**environment(terms), SHARED_MEMORY: str(int(shared_memory))}
    os.environ |= variables
    if hosts is None or not hosts.pools:
        from farandole.pool.local import load_ahead

        load_ahead(threads, {**os.environ, **cpu.environment_of("same")})
    import msgspec

    from farandole.bench.measuring import HERE, Measuring, settings_of

    folder = Path(tempfile.mkdtemp(prefix="farandole-bench-"))
    places = msgspec.structs.replace(hosts or HERE, environ=variables)
    measuring = Measuring(settings_of(folder, command, terms, threads, places, pin=pin, codec=codec), terms, lines)
    code = measuring.supervise()
    if measuring.records is None and code < SIGNALLED:
        say(f"farandole: the workers' logs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return code if measuring.records is None else measuring.records


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
        write_file("--json", json, msgspec.json.format(msgspec.json.encode(result)) + b"\n")


# --- scaling ----------------------------------------------------------------------------------------------------------

CODECS = RUN_OPTIONS["codec"].choices
SHARED_MEMORY = "FARANDOLE_SHARED_MEMORY"  # in the workers' environment; 0: they exchange over Gloo alone


@app.command("scaling", context_settings={"allow_interspersed_args": False})
def scaling(
    script: Annotated[str, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers", metavar="N,N,...", help="The numbers of workers.",
            show_default="1, 2 and the powers of two up to this machine's cores",
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            "--mode", metavar="strong|weak|strong,weak",
            help="strong: the script's batch. weak: the script's batch for each worker.",
        ),
    ] = "strong,weak",
    timed: Annotated[int, typer.Option("--steps", help="Steps to time in each run, after six steps of warm-up.")] = 20,
    codec: Annotated[
        str,
        typer.Option("--codec", metavar="CODEC,...", help=f"Codecs side by side: {', '.join(CODECS)}."),
    ] = default("codec"),
    transport: Annotated[
        str,
        typer.Option(
            "--transport", metavar="shared-memory|gloo|...",
            help="Transports side by side, separated by commas; gloo: over the loopback interface.",
        ),
    ] = "shared-memory",
    ddp: Annotated[
        bool, typer.Option("--ddp", help="Also time the model under DistributedDataParallel over Gloo.")
    ] = False,
    argument: Annotated[
        list[str] | None,
        typer.Option(
            "--argument", metavar="NAME=VALUE,...",
            help="Values for {NAME} in ARGS, one run for each. Repeat it for other names: all combinations run.",
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price", metavar="[NAME=]DOLLARS",
            help="Dollars an hour of one worker. Repeat it with the NAMEs of machine types: a column for each.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", help="Intra-op threads of each worker.")] = 1,
    pin: Annotated[bool, typer.Option("--pin", help="Bind each worker to cores of its own.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, for programs.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg|FILE.png", help="Draw the speed-up. Chromium draws a .png."),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            "--pool", metavar="POOL",
            help="Hosts of the workers, as of `farandole run`: `ssh,hosts=hosts.txt`. Repeatable.",
            show_default="this machine",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS", help="Where the hosts of --pool reach this machine.")
    ] = "127.0.0.1",
    files: Annotated[
        Path | None,
        typer.Option(
            "--files", metavar="FILE", help="File with a pattern a line: what travels to the hosts of --pool.",
            show_default="the files that git tracks",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Run a script with different numbers of workers, and compare speed, time and cost. Keeps no files."""
    from farandole.bench import scaling as plan
    from farandole.bench.scaling_table import notes, result_line
    from farandole.bench.terms import MODES, BenchTerms

    hosts = _hosts(pool or (), listen, files, ddp=ddp)
    here = os.cpu_count() or 1
    cores = math.inf if hosts.are_others else here  # other hosts' cores are not known: workers are taken to share none
    counts = plan.default_workers(here) if workers is None else plan.workers_of(workers)
    modes = plan.choices_of("--mode", mode, MODES)
    codecs = plan.choices_of("--codec", codec, CODECS)
    transports = plan.choices_of("--transport", transport, plan.TRANSPORTS)
    prices = plan.prices_of(price or ())
    words = arguments or []
    values = {" ".join(f"{n}={v}" for n, v in each.items()): each for each in plan.arguments_of(argument or (), words)}
    BenchTerms(workers=1, steps=timed, rounds=1)
    check_script(script)
    check_file("--json", json)
    check_plot(plot)
    for each in codecs:
        require_zstd(each)

    runs = plan.runs_of(counts, modes, codecs, transports, [*values])
    tell(f"{len(runs)} runs, one after the other; all their files are deleted, and no checkpoint is written")
    load = os.getloadavg()[0]
    results: list[ScalingResult] = []
    code = 0
    for number, run in enumerate(runs):
        tell(f"run {number + 1} of {len(runs)}: {run.words(runs)}")
        contestants = plan.contestants_of(run, codecs[0], transports[0], ddp=ddp)
        terms = BenchTerms(workers=run.workers, steps=timed, rounds=1, contestants=contestants, mode=run.mode)
        command = (script, *plan.filled(words, values[run.arguments]))
        started = time.time()
        records = _measure(
            command, terms, threads, hosts, pin=pin, codec=run.codec,
            shared_memory=run.transport == "shared-memory", lines=_no_lines,
        )  # fmt: skip
        if isinstance(records, int):
            code = records or 1
            break
        results.append(plan.measured(run, records, started, contestants))
        tell(f"  {result_line(results[-1])}")
    if results:
        rows = plan.rows_of(results, runs, modes, transports, prices, threads, cores)
        _show_scaling(rows, notes(rows, results, threads, cores, load), json, plot)
    if code:
        raise typer.Exit(code)


def _hosts(pools: Iterable[str], listen: str, files: Path | None, *, ddp: bool) -> Hosts:
    """Raises UsageError: a pool can't be created as requested, or DistributedDataParallel has workers elsewhere."""
    from farandole.bench.measuring import Hosts
    from farandole.cli.supervisor import check
    from farandole.control import security
    from farandole.coordinator import listener
    from farandole.pool import spec

    hosts = Hosts(pools=spec.pools([*pools]), listen=listen, files=files)
    check(hosts.pools, listen, tell)
    if not listener.is_loopback(listener.parse(listen)[0]):
        security.check_available(listen)
    if not hosts.are_others and (files is not None or listen != "127.0.0.1"):
        option = f"--files {files}" if files is not None else f"--listen {listen}"
        raise UsageError(f"{option}: there is no --pool of other hosts; name one, as --pool ssh,hosts=hosts.txt")
    if hosts.are_others and ddp:
        raise UsageError("--ddp: DistributedDataParallel is timed on one machine only; leave out --ddp or --pool")
    return hosts


def _no_lines(*_: object) -> tuple[str, ...]:
    return ()


def _show_scaling(rows: Sequence[ScalingRow], lines: Iterable[str], json: Path | None, plot: Path | None) -> None:
    import msgspec

    from farandole.bench.scaling_table import chart, scaling_table
    from farandole.bench.table import print_table

    tell("")
    print_table(scaling_table(rows))
    tell("")
    for line in lines:
        tell(line)
    if json is not None:
        write_file("--json", json, msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    if plot is not None:
        write_plot(plot, chart(rows))


# --- batch ------------------------------------------------------------------------------------------------------------

SHOWN_EVERY_S = 5.0
MOST_SEEDS = 100


@app.command("batch", context_settings={"allow_interspersed_args": False})
def batch(
    script: Annotated[str, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    target: Annotated[
        str,
        typer.Option(
            "--target", metavar="METRIC>=VALUE|METRIC<=VALUE",
            help="When a training is done, by a metric of run.log, or by 'loss', the mean of the last steps.",
        ),
    ],
    workers: Annotated[
        str, typer.Option("--workers", metavar="N,N,...", help="Use the batches that so many workers have.")
    ] = "1,2,4",
    seeds: Annotated[int, typer.Option("--seeds", help="Trainings with each batch, with different seeds.")] = 1,
    threads: Annotated[int, typer.Option("--threads", help="Intra-op threads.")] = 1,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, for programs.")
    ] = None,
) -> None:  # fmt: skip
    """Count the samples until a metric reaches a target, with the batches of several workers. Keeps no files.

    The script's batch follows the workers (PerWorkerBatch). It trains in one process, as in `farandole rehearse`.
    """
    import msgspec

    from farandole.bench.batch import WINDOW, BatchRow, batch_table, target_of
    from farandole.bench.batch_run import measured
    from farandole.bench.scaling import workers_of
    from farandole.bench.table import print_table

    counts, wanted = workers_of(workers), target_of(target)
    for option, value, most in (("--seeds", seeds, MOST_SEEDS), ("--threads", threads, 1 << 10)):
        if not 1 <= value <= most:
            raise UsageError(f"{option} {value}: from 1 to {most}")
    check_script(script)
    check_file("--json", json)
    tell(f"{len(counts) * seeds} trainings, one after the other, in one process each; all their files are deleted")
    rows = list[BatchRow]()
    for count in counts:
        tell(f"the batch of {count} worker{'s' * (count > 1)}")
        window = max(1, round(WINDOW * counts[-1] / count))
        row, names = measured((script, *(arguments or ())), count, wanted, window, seeds, threads, _Shower(wanted).show)
        _check_batch(row, rows, names, wanted.metric)
        rows.append(row)
        reached = row.mean_samples
        tell(
            f"  a batch of {row.batch:,}: {target} "
            + (f"after {reached:,.0f} samples" if reached is not None else "not reached: the training ended before")
        )
    tell("")
    print_table(batch_table(rows))
    if json is not None:
        write_file("--json", json, msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    if any(row.mean_samples is None for row in rows):
        tell("")
        tell("not reached: let the script train for longer, as with more epochs, or set another --target")
        raise typer.Exit(1)


def _check_batch(row: BatchRow, rows: Sequence[BatchRow], names: Iterable[str], metric: str) -> None:
    """Raises UsageError: the script does not log the metric, or its batch does not follow the workers."""
    if all(best is None for best in row.best):
        logged = ", ".join(sorted({*names, "loss"}))
        raise UsageError(f"--target: the script has logged no {metric} with run.log; there are {logged}")
    if same := [other.workers for other in rows if other.batch == row.batch]:
        raise UsageError(
            f"--workers: {row.workers} workers have the same batch as {same[0]}, {row.batch} samples; use "
            "farandole.PerWorkerBatch in the script, without a max_batch or min_batch that they exceed"
        )


class _Shower:
    """Shows how far a training is, every few seconds."""

    def __init__(self, target: Target) -> None:
        self._target, self._next_at = target, time.monotonic() + SHOWN_EVERY_S

    def show(self, watch: TargetWatch) -> None:
        if time.monotonic() >= self._next_at and watch.samples:
            self._next_at = time.monotonic() + SHOWN_EVERY_S
            value = f", {self._target.metric} {watch.values[-1]:.4g}" if watch.values else ""
            tell(f"  {watch.samples:,} samples{value}")


# --- network ----------------------------------------------------------------------------------------------------------


@app.command("network", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def network(
    context: typer.Context,
    *,
    hosts: Annotated[
        int, typer.Option("--hosts", help="Number of hosts to measure. Count this machine too if it runs a worker.")
    ] = 2,
    mb: Annotated[float, typer.Option("--mb", help="MB (1e6 bytes) of gradients; a ResNet-50 has 102.")] = 102.0,
    timed: Annotated[int, typer.Option("--steps", help="Steps to time, after three steps of warm-up.")] = 10,
    compute_ms: Annotated[
        float, typer.Option("--compute-ms", help="Milliseconds of a step of your training without the exchange.")
    ] = 0.0,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, for programs.")
    ] = None,
) -> None:
    """Measure the links between hosts, and predict a step with each codec.

    All other options are those of `farandole run`. They bring the hosts: --listen 0.0.0.0 with --pool
    ssh,hosts=hosts.txt, or with `farandole join` on the other machines. Keeps no files.
    """
    import msgspec
    from rich.console import Console

    check_file("--json", json)
    for option, value, least in (("--hosts", hosts, 2), ("--steps", timed, 1)):
        if value < least:
            raise UsageError(f"{option} {value}: at least {least}")
    if not (math.isfinite(mb) and mb > 0):
        raise UsageError(f"--mb {mb:g}: above 0")
    if not (math.isfinite(compute_ms) and compute_ms >= 0):
        raise UsageError(f"--compute-ms {compute_ms:g}: at least 0")
    from farandole.bench.network_run import measure
    from farandole.bench.table import links_table, predictions_table

    result = measure(hosts, mb, timed, compute_ms / 1e3, context.args)
    console = Console(highlight=False, soft_wrap=True)
    for table in (links_table(result), predictions_table(result)):
        tell("")
        console.print(table)
    tell("")
    tell(f"recommended: --codec {result.recommended}")
    if json is not None:
        write_file("--json", json, msgspec.json.format(msgspec.json.encode(result)) + b"\n")
