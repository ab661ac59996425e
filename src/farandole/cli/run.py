"""`farandole run`: start a run on this machine and accompany it to its end.

Checks come first, before anything is started; the rest is `supervise.py`.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.attach import detach
from farandole.cli.checks import check_name, check_script, part
from farandole.cli.exporters import MetricsToken, TensorBoard, TensorBoardDir, Wandb, asked
from farandole.cli.verbose import Verbose
from farandole.errors import UsageError
from farandole.platform import switches


def run(
    script: Annotated[str, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own.")] = None,
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", help="Workers wanted; `farandole scale` changes it.  [default: 2; with --pool: all there are]"
        ),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            "--pool",
            metavar="KIND[,KEY=VALUE]...|FILE.toml",
            help="Where workers come from, the preferred first: `local,size=2`, `ssh,hosts=hosts.txt`, "
            "`ec2,template=NAME,size=8`.  [default: local]",
        ),
    ] = None,
    minimum: Annotated[int, typer.Option("--min", help="Train with as few as this.")] = 1,
    maximum: Annotated[int | None, typer.Option("--max", help="Let in no more than this.  [default: none]")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of initialisation, order and dropout.  [default: 0]")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Intra-op threads of each worker; part of the bits.  [default: 1]")
    ] = None,
    pin: Annotated[
        bool, typer.Option("--pin", help="Each worker on cores of its own, where nothing else runs.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="The run's folder.  [default: runs/TIME-SCRIPT]")
    ] = None,
    ledger: Annotated[bool, typer.Option("--ledger", help="Count every delivered sample.")] = False,
    every: Annotated[
        str | None,
        typer.Option("--checkpoint-every", metavar="PERIOD", help="10m, 30s, 2h, 500steps or never.  [default: 10m]"),
    ] = None,
    keep: Annotated[int | None, typer.Option("--keep", help="Checkpoints to keep.  [default: 3]")] = None,
    checkpoints: Annotated[
        str | None, typer.Option("--checkpoints", metavar="URL", help="Where they go.  [default: FOLDER/checkpoints]")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="URL", help="Begin with a checkpoint: another run's folder, or a place."),
    ] = None,
    prepare: Annotated[
        str,
        typer.Option("--prepare", metavar="COMMAND", help="Must succeed on a host before its workers may join."),
    ] = "",
    files: Annotated[
        Path | None,
        typer.Option(
            "--files", metavar="LIST", help="What other hosts get: a path or pattern a line.  [default: as git]"
        ),
    ] = None,
    setup: Annotated[
        str,
        typer.Option("--setup", metavar="COMMAND", help="Installs what the code needs, once on each other host."),
    ] = "",
    by_speed: Annotated[
        bool, typer.Option("--by-speed/--equal", help="Deal the shards by the workers' measured speed, or equally.")
    ] = True,
    bits: Annotated[
        str | None,
        typer.Option(
            "--bits",
            metavar="same|portable|any",
            help="same: who computes other bits is refused. portable: x86 CPUs with AVX2 compute the same, of whatever "
            "maker. any: all are let in, and it is told from when on no bits are promised.  [default: same]",
        ),
    ] = None,
    stop_on_nan: Annotated[
        bool, typer.Option("--stop-on-nan", help="End the run before the update of a step whose loss is not finite.")
    ] = False,
    audit: Annotated[
        str,
        typer.Option("--audit", metavar="PART", help="Of all shards, computed twice to find who computes wrong: 0.1%."),
    ] = "0",
    stop_undecided: Annotated[
        bool,
        typer.Option(
            "--stop-undecided", help="End the run where two find different things and nobody can tell who errs."
        ),
    ] = False,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST[:PORT]",
            help="Where workers of other machines reach the run, over TLS; 0.0.0.0: all.  [default: 127.0.0.1]",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start an interpreter for each worker, instead of forking it.")
    ] = False,
    other_code: Annotated[
        bool,
        typer.Option("--other-code", help="Let in guests whose script, modules or farandole differ, with an event."),
    ] = False,
    orphan_limit: Annotated[
        float,
        typer.Option(
            "--orphan-limit", metavar="SECONDS", help="Without a coordinator workers go on so long, and save."
        ),
    ] = 600.0,
    max_hours: Annotated[float | None, typer.Option("--max-hours", help="End the run then, with a checkpoint.")] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(
            "--max-cost", metavar="DOLLARS", help="End the run, with a checkpoint, when instances have cost this."
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", metavar="FILE", help="What an hour of a host costs, for `farandole account`."),
    ] = None,
    keep_failed: Annotated[
        float,
        typer.Option("--keep-failed", metavar="MINUTES", help="Keep an instance that has failed so long, for a look."),
    ] = 0.0,
    stall: Annotated[
        float,
        typer.Option(
            "--stall",
            metavar="SECONDS",
            help="A worker that its peers wait for so long (and ten usual steps; ten times so long in its first step) "
            "is replaced.",
        ),
    ] = 30.0,
    standstill: Annotated[float, typer.Option("--standstill", metavar="SECONDS", hidden=True)] = 60.0,
    stop_limit: Annotated[float, typer.Option("--stop-limit", metavar="SECONDS", hidden=True)] = 30.0,
    detached: Annotated[
        bool, typer.Option("--detach", help="Go on without this terminal; `farandole attach` shows it again.")
    ] = False,
    lost: Annotated[
        Path | None,
        typer.Option(
            "--take-over",
            metavar="TICKET",
            help="Go on, in a new --folder, with this ticket's run, whose machine is lost; with its --checkpoints.",
        ),
    ] = None,
    tensorboard: TensorBoard = False,
    tensorboard_dir: TensorBoardDir = None,
    wandb: Wandb = None,
    metrics_token: MetricsToken = None,
    verbose: Verbose = 0,
) -> None:
    """Start a run here, with its coordinator and its workers, and watch it until it is over."""
    del verbose
    check_script(script)
    if detached:
        detach(sys.argv[1:], folder, script)
        return
    if not (fresh or prepare or pool):  # what prepares a host may install what would be loaded
        from farandole.pool.local import load_ahead

        load_ahead(threads or 1, {**os.environ, **switches.of(bits or "same")})
    import msgspec

    from farandole.checkpoint.owner import adopt, claim, new_identity, this_run
    from farandole.cli.folders import check_folder, close, foreign, lives, make_folder
    from farandole.cli.pools import check
    from farandole.cli.price_file import read as read_prices
    from farandole.cli.resume import Asked, settle
    from farandole.cli.supervise import Supervisor, go_on
    from farandole.cli.takeover import fetch, left
    from farandole.code import copies, sources
    from farandole.code.commit import commit
    from farandole.code.pack import FACT, pack
    from farandole.control import tls
    from farandole.control.run_folder import CHECKPOINTS, CODE, PACK
    from farandole.coordinator import endpoint
    from farandole.membership.hosts import Job
    from farandole.membership.messages import Checkpoints
    from farandole.membership.prices import Prices
    from farandole.membership.records import OwnPool, RunSettings
    from farandole.membership.spending import spending_of
    from farandole.membership.terms import RunTerms
    from farandole.observe.display import open_display
    from farandole.platform import private
    from farandole.platform.output import tell
    from farandole.pool.ec2.asked import run_tag
    from farandole.pool.local import OWN
    from farandole.pool.spec import pools

    check_name(folder, script)
    specs = pools(pool or [])
    spending = spending_of(max_hours, max_cost, 60 * keep_failed, time.time())
    priced = read_prices(prices) if prices else Prices()
    at = listen or "127.0.0.1"
    check(specs, at, tell, sized=workers is not None, priced=max_cost is not None)
    if not endpoint.is_loopback(endpoint.parse(at)[0]):
        tls.check_available(at)
    terms = RunTerms(  # checked before a folder is made
        wanted=2 if workers is None and not specs else workers, minimum=minimum, maximum=maximum,
        threads=1 if threads is None else threads, pin=pin,
        by_speed=by_speed, bits=bits or "same", stop_on_nan=stop_on_nan, audit=part(audit),
        stop_undecided=stop_undecided,
        checkpoints=Checkpoints(keep=3 if keep is None else keep),
        orphan_s=orphan_limit, stall_s=stall, standstill_s=standstill, stop_s=stop_limit,
    )  # fmt: skip
    exports = asked(tensorboard, tensorboard_dir, wandb, metrics_token)
    before = Asked(
        seed=seed, threads=threads, checkpoints=checkpoints, every=every, keep=keep, resume=resume, ledger=ledger,
        bits=bits,
    )  # fmt: skip
    if lost is not None:
        if folder is None or checkpoints is None:
            raise UsageError(f"--take-over {lost}: name the run's --checkpoints URL, and a new --folder")
        fetch(folder, checkpoints, lost, files)
    if folder is not None:
        check_folder(folder)
        if was := left(folder, (script, *(arguments or ())), listen):
            raise typer.Exit(go_on(was, prepare, fresh, taken_over=lost is not None))
    travels = bool(files or setup) or any(spec.kind != "local" for spec in specs)
    packed = pack(Path.cwd(), script, files, run=folder) if travels else None
    settled = settle(before, terms, folder)
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
        commit=commit(Path(script).parent),
        code=(*sources.of_kept(place / CODE), *(((FACT, packed.hash),) if packed else ())),
        job=packed
        and Job(
            script=packed.script,
            arguments=tuple(arguments or ()),
            pack=packed.hash,
            setup=setup,
            prepare=prepare,
            threads=terms.threads,
            orphan_s=orphan_limit,
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
    for said in filter(None, (*(packed.said if packed else ()), others, settled.said)):
        tell(said)
    display = open_display(sys.stdout)
    display.wanted = terms.wanted or 0
    raise typer.Exit(Supervisor(settings, script, arguments or [], display, prepare, fresh, specs).supervise())
