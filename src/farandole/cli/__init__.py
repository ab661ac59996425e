"""The command line: one file a verb.

A verb's module imports nothing heavy at its top (no aiohttp), so that `farandole status` answers at once, and nothing
here names torch: whoever has none can look after runs elsewhere. Verbs that train get it with the script's process.
Our own errors become one line on standard error and exit code 2 (asked for what can't be) or 1; any other exception
is a bug and keeps its traceback.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from farandole import __version__
from farandole.bench import verb
from farandole.cli import attach, control, data, folders, hosts, inspect, reproduce, run, worker
from farandole.cli import pool as instance
from farandole.cli.options import Verbose, bound, check_words
from farandole.errors import FarandoleError, UsageError
from farandole.platform import output
from farandole.platform.output import guard, say, tell
from farandole.platform.process import end_spare
from farandole.settings import verbosity

app = typer.Typer(
    name="farandole",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
PASS_ON = {"allow_interspersed_args": False}  # what follows the script is the script's
ANYWHERE = {"ignore_unknown_options": True}  # so is what these verbs do not know, wherever it stands
app.command("run", context_settings=PASS_ON)(run.run)
app.command("join", context_settings=PASS_ON)(worker.join)
app.command("probe", context_settings=PASS_ON)(data.probe)
app.command("rehearse", context_settings=ANYWHERE)(reproduce.rehearse)
app.command("replay", context_settings=ANYWHERE)(reproduce.replay)
app.command("scale")(control.scale)
app.command("release")(control.release)
app.command("status")(inspect.status)
app.command("top")(inspect.top)
app.command("trace")(inspect.trace)
app.command("dashboard")(inspect.dashboard)
app.command("report")(inspect.report)
app.command("account")(inspect.account)
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


_worker = typer.Typer(add_completion=False)
_worker.command("join")(worker.join)


def _version(asked: bool) -> None:
    if asked:
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
command = typer.main.get_command(app)  # here: who is forked from a process that has loaded this needs not build it


def read_ahead() -> None:
    """Load what typer loads with the first command line that it reads: pydantic, for one, where that is installed."""
    typer.main.get_command(_worker).make_context("join", ["TICKET", "SCRIPT"])


def main() -> None:
    guard()
    try:
        check_words(sys.argv[1:])
        output.show(verbosity())
        command(prog_name="farandole")
    except FarandoleError as error:
        say(f"farandole: error: {error}")
        sys.exit(2 if isinstance(error, UsageError) else 1)
    finally:
        end_spare()  # a `run` that ended with an error has taken none
