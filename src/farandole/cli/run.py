"""`farandole run`: start a run on this machine and supervise it until it ends.

This file checks everything before a process is started; `cli/supervisor.py` does the rest.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from farandole.cli.attach import detach
from farandole.cli.config import ConfigCommand
from farandole.cli.exporters import MetricsToken, TensorBoard, TensorBoardDir, Wandb, exports_of
from farandole.cli.folders import lives
from farandole.cli.options import PASS_ON, Verbose, bound, check_name, check_script, option, part, show_script_help
from farandole.cli.resume import GivenOptions, settle
from farandole.code.pack import Origin
from farandole.control.run_folder import CHECKPOINTS, SETTINGS
from farandole.errors import UsageError
from farandole.platform import cpu
from farandole.platform.output import tell
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import Checkpoints, RunTerms
from farandole.run_options import DATA, LIMITS, MACHINES, WATCHING, WORKERS, default

# --- run --------------------------------------------------------------------------------------------------------------

PoolArgument: TypeAlias = Any  # a text of the command line, or a table [[pool]] of --config


def _pool(argument: PoolArgument) -> PoolArgument:
    return argument  # a table would become text otherwise


def run(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT",
            help="The training script: a Python file, or the name of a module. --config may name it instead.",
            show_default=False,
        ),
    ] = "",
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE.toml",
            help="File with options of this command, as `workers = 4`; also `script` and `arguments`. The command line "
            "wins over it, with --no-NAME for a switch that it turns on.",
        ),
    ] = None,
    wanted: int | None = option("wanted"),
    minimum: int = option("minimum"),
    maximum: int | None = option("maximum"),
    threads: int | None = option("threads"),
    by_speed: bool = option("by_speed"),
    pin: bool = option("pin"),
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Start a new interpreter for each worker, instead of a fork.", rich_help_panel=WORKERS
        ),
    ] = False,
    module: Annotated[
        bool,
        typer.Option("-m", "--module", help="SCRIPT is a module, as for `python -m`.", rich_help_panel=WORKERS),
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            help="The run's folder. If it holds a run: continue it. These options keep its values unless given: "
            "--seed, --threads, --bits, --codec, --checkpoint-every, --keep.",
            show_default="runs/TIME-SCRIPT",
            rich_help_panel=DATA,
        ),
    ] = None,
    every: str | None = option("every"),
    keep: int | None = option("keep"),
    checkpoints: Annotated[
        str | None,
        typer.Option(
            "--checkpoints",
            metavar="URL",
            help="Where to store checkpoints: a folder, or any URL that fsspec knows.",
            show_default="FOLDER/checkpoints",
            rich_help_panel=DATA,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="URL",
            help="Begin with the newest checkpoint of another run's folder or URL, or with one .pt file.",
            rich_help_panel=DATA,
        ),
    ] = None,
    ledger: bool = option("ledger"),
    pool: Annotated[
        list[PoolArgument] | None,
        typer.Option(
            "--pool",
            parser=_pool,
            metavar="KIND[,KEY=VALUE]...|FILE.toml",
            help="Where workers run, in order of preference: `local,size=2`, `ssh,hosts=hosts.txt`, "
            "`ec2,template=NAME,size=8`.",
            show_default="local",
            rich_help_panel=MACHINES,
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST[:PORT]",
            help="Address at which workers of other machines reach the run, over TLS; 0.0.0.0: every interface.",
            show_default="127.0.0.1",
            rich_help_panel=MACHINES,
        ),
    ] = None,
    files: Annotated[
        Path | None,
        typer.Option(
            "--files",
            metavar="LIST",
            help="File that lists what to copy to other hosts, one path or pattern a line.",
            show_default="the files that git tracks",
            rich_help_panel=MACHINES,
        ),
    ] = None,
    setup: Annotated[
        str,
        typer.Option(
            "--setup",
            metavar="COMMAND",
            help="Command that installs dependencies, once on each other host.",
            rich_help_panel=MACHINES,
        ),
    ] = "",
    prepare: Annotated[
        str,
        typer.Option(
            "--prepare",
            metavar="COMMAND",
            help="Command that must succeed on a host before its workers may join.",
            rich_help_panel=MACHINES,
        ),
    ] = "",
    other_code: Annotated[
        bool,
        typer.Option(
            "--other-code", help="Admit external workers whose code differs (logs an event).", rich_help_panel=MACHINES
        ),
    ] = False,
    lost_ticket: Annotated[
        Path | None,
        typer.Option(
            "--take-over",
            metavar="TICKET",
            help="Continue the run of this ticket, whose machine is lost, in a new --folder, with its --checkpoints.",
            rich_help_panel=MACHINES,
        ),
    ] = None,
    keep_failed: Annotated[
        float,
        typer.Option(
            "--keep-failed",
            metavar="MINUTES",
            help="Keep failed instances for this long for debugging.",
            rich_help_panel=MACHINES,
        ),
    ] = 0.0,
    seed: int | None = option("seed"),
    bits: str | None = option("bits"),
    codec: str | None = option("codec"),
    audit: str = option("audit"),
    stop_undecided: bool = option("stop_undecided"),
    detached: Annotated[
        bool,
        typer.Option(
            "--detach",
            help="Run without this terminal; `farandole attach` shows the run again.",
            rich_help_panel=WATCHING,
        ),
    ] = False,
    tensorboard: TensorBoard = False,
    tensorboard_dir: TensorBoardDir = None,
    wandb: Wandb = None,
    metrics_token: MetricsToken = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            "--prices",
            metavar="FILE",
            help="File with the price of an hour of each host, for `farandole account`.",
            rich_help_panel=WATCHING,
        ),
    ] = None,
    traffic_price: float | None = option("traffic_price"),
    verbose: Verbose = 0,
    max_hours: Annotated[
        float | None,
        typer.Option(
            "--max-hours",
            help="Stop after this many hours and save a checkpoint.",
            show_default="no limit",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(
            "--max-cost",
            metavar="DOLLARS",
            help="Stop when instances have cost this much and save a checkpoint.",
            show_default="no limit",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline",
            metavar="TIME",
            help="Be done within this time, as 24h: the last --pool gets workers only when they are needed for that.",
            show_default="no deadline",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    speeds: Annotated[
        Path | None,
        typer.Option(
            "--speeds",
            metavar="FILE",
            help="How fast several workers are, for --deadline: as `farandole simulate --speeds`.",
            show_default="measured during the run",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--start",
            metavar="TIME",
            help="For --deadline: from the request for a worker of the last --pool until it computes.",
            show_default="3m, 5s for local; measured during the run",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    stop_on_nan: bool = option("stop_on_nan"),
    stall_s: float = option("stall_s"),
    orphan_s: float = option("orphan_s"),
    standstill_s: float = option("standstill_s"),
    stop_s: float = option("stop_s"),
) -> None:
    """Start a run, and show it until it ends.

    Its coordinator and workers run on this machine, or its workers in pools.
    """
    del config, verbose  # `ConfigCommand` has read the file
    check_script(script)
    origin = Origin.from_script(script)
    if module and not origin.module:
        raise UsageError(f"-m {script}: {Path.cwd()} has a file of this name; leave out -m, or rename one of them")
    show_script_help(script, arguments)
    if detached:
        given = context.get_parameter_source("detached")
        detach(sys.argv[1:], folder, script, is_word=given is not None and given.name == "COMMANDLINE")
        return
    if not (fresh or prepare or pool):  # --prepare may install the modules that would be loaded
        from farandole.pool.local import load_ahead

        load_ahead(threads or default("threads"), {**os.environ, **cpu.environment_of(bits or default("bits"))})

    from farandole.cli.deadline import checked_speeds
    from farandole.cli.options import read as read_prices
    from farandole.cli.options import seconds
    from farandole.pool.spec import pools
    from farandole.protocol.cost import Prices
    from farandole.protocol.settings import spending_of

    check_name(folder, script)
    specs = pools(pool or [])
    deadline_s = None if deadline is None else seconds("--deadline", deadline)
    start_s = None if start is None else seconds("--start", start)
    relative = checked_speeds(speeds, start, deadline, specs, minimum)
    spending = spending_of(max_hours, max_cost, 60 * keep_failed, time.time(), deadline_s, relative, start_s)
    priced = (read_prices(prices) if prices else Prices()).with_traffic_price(traffic_price)
    terms = RunTerms(  # checks the values before a folder is made
        wanted=2 if wanted is None and not specs else wanted, minimum=minimum, maximum=maximum,
        threads=default("threads") if threads is None else threads, pin=pin, by_speed=by_speed,
        bits=bits or default("bits"), codec=codec or default("codec"), stop_on_nan=stop_on_nan, audit=part(audit),
        stop_undecided=stop_undecided,
        checkpoints=Checkpoints(keep=default("keep") if keep is None else keep),
        stall_s=stall_s, orphan_s=orphan_s, standstill_s=standstill_s, stop_s=stop_s,
    )  # fmt: skip
    first_line = starting(terms.wanted, [spec.name for spec in specs])
    is_new = folder is None or not (folder / SETTINGS).exists()  # else its workers may still train
    if is_new:
        tell(first_line)  # before the imports that follow, which take most of a second

    from farandole.checkpoint.owner import adopt, claim, new_identity, this_run
    from farandole.cli.folders import check_folder, close, foreign, make_folder
    from farandole.cli.supervisor import Supervisor, check, go_on
    from farandole.cli.takeover import fetch, find_takeover
    from farandole.code import pack as copies
    from farandole.code import snapshot
    from farandole.code.pack import FACT, pack
    from farandole.code.snapshot import commit
    from farandole.control import security
    from farandole.control.run_folder import CODE, PACK
    from farandole.coordinator import listener
    from farandole.observe.live import open_display
    from farandole.platform import files as private
    from farandole.platform.extras import require_zstd
    from farandole.pool.ec2 import run_tag
    from farandole.pool.local import OWN
    from farandole.protocol.coordinator.state import OwnPool
    from farandole.protocol.messages import Job

    at = listen or "127.0.0.1"
    check(specs, at, tell, sized=wanted is not None, priced=max_cost is not None)
    if not listener.is_loopback(listener.parse(at)[0]):
        security.check_available(at)
    exports = exports_of(tensorboard, tensorboard_dir, wandb, metrics_token)
    before = GivenOptions(
        seed=seed, threads=threads, checkpoints=checkpoints, every=every, keep=keep, resume=resume, ledger=ledger,
        bits=bits, codec=codec,
    )  # fmt: skip
    if lost_ticket is not None:
        if folder is None or checkpoints is None:
            raise UsageError(f"--take-over {lost_ticket}: give the run's --checkpoints URL and a new --folder")
        fetch(folder, checkpoints, lost_ticket, files)
    if folder is not None:
        check_folder(folder)
        if was := find_takeover(folder, (script, *(arguments or ())), listen):
            raise typer.Exit(go_on(was, prepare, fresh, taken_over=lost_ticket is not None))
    if not is_new:
        tell(first_line)
    travels = bool(files or setup) or any(spec.kind != "local" for spec in specs)
    packed = pack(Path.cwd(), script, files, run=folder) if travels else None
    settled = settle(before, terms, folder)
    if not specs or any(spec.kind == "local" for spec in specs):
        require_zstd(settled.terms.codec)
    others = foreign(folder) if folder else ""
    place = make_folder(folder, script)
    others = others or close(place)
    store = settled.terms.checkpoints
    inside = str(place / CHECKPOINTS)
    if not store.url:
        private.make(place / CHECKPOINTS)
    identity = store.identity or (new_identity() if store.url else adopt(inside, place))
    ours = this_run(identity, place, inside=not store.url)
    claim(store.url or inside, ours, alive=lives, takes=settled.takes)
    read = copies.below(script, Path.cwd(), packed.modules()) if packed else {}
    edited = copies.keep(script, place / CODE, read)
    (place / PACK).unlink(missing_ok=True)
    if packed:
        private.write(place / PACK, packed.content)
    terms = msgspec.structs.replace(settled.terms, checkpoints=msgspec.structs.replace(store, identity=identity))
    settings = RunSettings(
        **msgspec.structs.asdict(terms),
        run=place.name,
        folder=str(place),
        pool=OwnPool(pool=specs[0].name if specs else OWN, host=socket.gethostname(), pid=os.getpid()),
        pools=specs,
        command=(script, *(arguments or ())),
        directory=str(Path.cwd()),
        commit=commit(Path(origin.script).parent),
        code=(*snapshot.of_kept(place / CODE), *(((FACT, packed.hash),) if packed else ())),
        job=packed
        and Job(
            script=packed.script,
            arguments=tuple(arguments or ()),
            pack=packed.hash,
            setup=setup,
            prepare=prepare,
            threads=terms.threads,
            orphan_s=orphan_s,
        ),
        other_code=other_code,
        edited=edited,
        newest=settled.newest,
        listen=at,
        spending=spending,
        prices=priced,
        tag=run_tag(place.name, socket.gethostname(), str(place)),
        exports=exports.within(place),
    )
    tell(f"run folder: {place}")
    for note in filter(None, (*(packed.summary if packed else ()), others, settled.note)):
        tell(note)
    display = open_display(sys.stdout)
    display.wanted = terms.wanted or 0
    flags = {flag for parameter in context.command.params for flag in parameter.opts}
    supervisor = Supervisor(settings, script, arguments or [], display, prepare, fresh, specs, flags=flags)
    raise typer.Exit(supervisor.supervise())


def starting(wanted: int | None, pools: Sequence[str]) -> str:
    """Returns the first line of a run: `wanted` workers are started, in the pools of these names if there are any."""
    workers = "workers" if wanted is None else f"{wanted} worker{'' if wanted == 1 else 's'}"
    return f"starting {workers} in {', '.join(pools)}" if pools else f"starting {workers} (loading torch)"


def command_alone() -> Callable[..., object]:
    """Returns `farandole` with this command alone: the modules of all others would take a quarter of a second."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    app.command("run", cls=ConfigCommand, context_settings=PASS_ON)(run)
    bound(app)
    return typer.main.get_command(app)
