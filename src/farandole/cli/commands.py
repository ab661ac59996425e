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
    doctor,
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
from farandole.cli.config import ConfigCommand
from farandole.cli.options import PASS_ON, Verbose, bound
from farandole.platform.output import tell

app = typer.Typer(
    name="farandole",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
TRAIN, CHECK, WATCH, CHANGE = "Train", "Check and measure", "Watch", "Change a live run"
MACHINES, COST, DATA = "Machines", "Cost", "Data and results"
ANYWHERE = {"ignore_unknown_options": True}  # unknown options belong to the script too, at any place
app.command("run", rich_help_panel=TRAIN, cls=ConfigCommand, context_settings=PASS_ON)(run.run)
app.command("join", rich_help_panel=TRAIN, context_settings=PASS_ON)(worker.join)
app.command("rehearse", rich_help_panel=TRAIN, context_settings=ANYWHERE)(reproduce.rehearse)
app.command("replay", rich_help_panel=TRAIN, context_settings=ANYWHERE)(reproduce.replay)
app.command("status", rich_help_panel=WATCH)(inspect.status)
app.command("top", rich_help_panel=WATCH)(inspect.top)
app.command("attach", rich_help_panel=WATCH)(attach.attach)
app.command("dashboard", rich_help_panel=WATCH)(inspect.dashboard)
app.command("report", rich_help_panel=WATCH)(inspect.report)
app.command("account", rich_help_panel=WATCH)(inspect.account)
app.command("trace", rich_help_panel=WATCH)(inspect.trace)
app.command("scale", rich_help_panel=CHANGE)(control.scale)
app.command("release", rich_help_panel=CHANGE)(control.release)
app.command("stop", rich_help_panel=CHANGE)(control.stop)
app.add_typer(control.app, name="ticket", rich_help_panel=CHANGE)
app.command("doctor", rich_help_panel=MACHINES)(doctor.doctor)
app.add_typer(hosts.app, name="hosts", rich_help_panel=MACHINES)
app.add_typer(instance.app, name="pool", rich_help_panel=MACHINES)
app.command("numerics", rich_help_panel=MACHINES)(reproduce.numerics)
app.add_typer(data.app, name="data", rich_help_panel=DATA)
app.command("evaluate", rich_help_panel=DATA, context_settings=ANYWHERE)(evaluate.evaluate)
app.add_typer(folders.app, name="runs", rich_help_panel=DATA)
app.command("check", rich_help_panel=CHECK, context_settings=PASS_ON)(check.check)
app.command("probe", rich_help_panel=CHECK, context_settings=PASS_ON)(data.probe)
app.add_typer(verb.app, name="bench", rich_help_panel=CHECK)
app.command("plan", rich_help_panel=COST)(market.plan)
app.command("simulate", rich_help_panel=COST)(market.simulate)
app.command("agent", hidden=True)(worker.agent)
app.command("instance", hidden=True)(instance.instance)
app.command("host", hidden=True)(hosts.host)


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
