"""All commands of `farandole`."""

from __future__ import annotations

from typing import Annotated

import typer

from farandole import __version__
from farandole.bench import verb
from farandole.cli import (
    attach,
    check,
    control,
    data,
    evaluate,
    folders,
    hosts,
    inspect,
    market,
    reproduce,
    run,
    worker,
)
from farandole.cli import pool as instance
from farandole.cli.options import PASS_ON, Verbose, bound
from farandole.platform.output import tell

app = typer.Typer(
    name="farandole",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
ANYWHERE = {"ignore_unknown_options": True}  # unknown options belong to the script too, at any place
app.command("run", context_settings=PASS_ON)(run.run)
app.command("join", context_settings=PASS_ON)(worker.join)
app.command("probe", context_settings=PASS_ON)(data.probe)
app.command("check", context_settings=PASS_ON)(check.check)
app.command("rehearse", context_settings=ANYWHERE)(reproduce.rehearse)
app.command("replay", context_settings=ANYWHERE)(reproduce.replay)
app.command("evaluate", context_settings=ANYWHERE)(evaluate.evaluate)
app.command("scale")(control.scale)
app.command("release")(control.release)
app.command("status")(inspect.status)
app.command("top")(inspect.top)
app.command("trace")(inspect.trace)
app.command("dashboard")(inspect.dashboard)
app.command("report")(inspect.report)
app.command("account")(inspect.account)
app.command("simulate")(market.simulate)
app.command("plan")(market.plan)
app.command("stop")(control.stop)
app.command("attach")(attach.attach)
app.command("agent", hidden=True)(worker.agent)
app.command("instance", hidden=True)(instance.instance)
app.command("host", hidden=True)(hosts.host)
app.command("numerics")(reproduce.numerics)
app.add_typer(verb.app, name="bench")
app.add_typer(control.app, name="ticket")
app.add_typer(instance.app, name="pool")
app.add_typer(data.app, name="data")
app.add_typer(hosts.app, name="hosts")
app.add_typer(folders.app, name="runs")


def _version(requested: bool) -> None:
    if requested:
        tell(f"farandole {__version__}")
        raise typer.Exit


@app.callback()
def farandole(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: Verbose = 0,
) -> None:
    """Train PyTorch models on machines that come and go."""
    del version, verbose


bound(app)
command = typer.main.get_command(app)  # built at import, so that processes forked after it need not build it
