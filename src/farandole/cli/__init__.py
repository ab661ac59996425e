"""The command line: the commands of `farandole`, and how errors become exit codes.

A command's module imports nothing heavy at its top (no aiohttp), so that `farandole status` answers at once. Nothing
here imports torch: a machine without it can control runs elsewhere. Commands that train load torch with the script.
An error of farandole becomes one line on standard error and exit code 2 (a usage error) or 1. Any other exception is a
bug and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import typer

from farandole.cli import worker
from farandole.cli.options import PASS_ON, OnceCommand, check_words
from farandole.errors import FarandoleError, UsageError
from farandole.platform import output
from farandole.platform.output import guard, say
from farandole.platform.process import end_spare
from farandole.settings import verbosity

# The commands of a host, by themselves: the modules of all others would take a third of a second of each new host.
# They are built at import, so that processes that are forked after it need not build them.
_of_host = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_of_host.command("join", cls=OnceCommand, context_settings=PASS_ON)(worker.join)
_of_host.command("agent", hidden=True)(worker.agent)
_HOST_COMMANDS = {"join", "agent"}
_host_command = typer.main.get_command(_of_host)


def read_ahead() -> None:
    """Loads the modules that typer loads when it first parses a command line, such as pydantic if it is installed."""
    _host_command.make_context("farandole", ["join", "TICKET", "SCRIPT"])


def main() -> None:
    guard()
    try:
        check_words(sys.argv[1:])
        output.show(verbosity())
        _command(sys.argv[1:])(prog_name="farandole")
    except FarandoleError as error:
        say(f"farandole: error: {error}")
        sys.exit(2 if isinstance(error, UsageError) else 1)
    finally:
        end_spare()  # a `run` that ended with an error did not use it


def _command(words: Sequence[str]) -> Callable[..., object]:
    if words and words[0] in _HOST_COMMANDS:
        return _host_command
    if words and words[0] == "run":  # by itself too, so that its first line comes at once
        from farandole.cli.run import command_alone

        return command_alone()
    from farandole.cli.commands import command

    return command
