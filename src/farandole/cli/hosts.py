"""`farandole hosts`: check the hosts of a hosts file, run commands, copy files, end left-over processes."""

from __future__ import annotations

import asyncio
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.control.run_folder import is_locked
from farandole.errors import UsageError
from farandole.platform.files import decoded
from farandole.platform.output import one_line, tell

if TYPE_CHECKING:
    from farandole.pool.ssh import HostLine, RemoteCommand

app = typer.Typer(no_args_is_help=True, help="Check, command and clean the hosts of a hosts file.")
File = Annotated[Path, typer.Argument(metavar="FILE", help="The hosts file.")]
Ssh = Annotated[str, typer.Option("--ssh", help="Command to use instead of ssh, such as `ssh -F other`.")]
Python = Annotated[str, typer.Option("--python", help="Python interpreter of hosts whose line names none.")]


@app.command("check")
def check(file: File, *, ssh: Ssh = "", python: Python = "python3") -> None:
    """Show whether each host is ready for a run of this machine. Exit code 0 if all are."""
    from rich.console import Console

    from farandole.observe.tables import hosts_table, ports_table
    from farandole.pool import ssh_check

    lines, remote_command = hosts_of(file, ssh, python)
    this_machine, reports = asyncio.run(ssh_check.survey_with_local(lines, remote_command))
    console = Console(highlight=False)
    console.print(hosts_table(reports, this_machine), soft_wrap=True)
    if len(reports) > 1:
        console.print()
        console.print(ports_table(reports), soft_wrap=True)
    failures = [(each.line.name, problem) for each in reports for problem in ssh_check.problems(each, this_machine)]
    tell("")
    for name, problem in failures:
        tell(f"{name}: {problem}")
    if failures:
        failed = len({name for name, _ in failures})
        tell(f"{failed} of {len(reports)} hosts are not ready")
        raise typer.Exit(1)
    tell(f"all {len(reports)} hosts are ready")


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    file: File,
    command: Annotated[
        list[str], typer.Argument(help="The command. {index}, {count} and {host} are replaced for each host.")
    ],
    *,
    ssh: Ssh = "",
) -> None:
    """Run COMMAND in the shell of every host at once. Exit code 0 if it succeeds on all."""
    from farandole.pool import ssh_everywhere

    lines, remote_command = hosts_of(file, ssh)
    text = command[0] if len(command) == 1 else " ".join(map(_quoted, command))
    width = max(len(line.name) for line in lines)

    def show(host: str, line: str) -> None:
        tell(f"{host:<{width}} | {one_line(line)}")

    codes = asyncio.run(ssh_everywhere.run(lines, text, remote_command, show))
    for host, code in codes.items():
        if code:
            tell(f"{host}: exit code {code}")
    if any(codes.values()):
        raise typer.Exit(1)


@app.command("copy")
def copy(
    file: File,
    source: Annotated[Path, typer.Argument(help="File or folder on this machine.")],
    target: Annotated[str, typer.Argument(help="Path on each host; ~ is the home folder of that host.")],
    *,
    ssh: Ssh = "",
) -> None:
    """Copy SOURCE to every host at once; other files in a folder stay. Exit code 0 if it succeeds on all."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from farandole.pool import ssh_everywhere

    lines, remote_command = hosts_of(file, ssh)
    size = ssh_everywhere.size(source)
    console = Console(highlight=False, soft_wrap=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ThreadPoolExecutor(len(lines)) as threads,
    ):

        def to(line: HostLine) -> str:
            task = progress.add_task(one_line(line.name), total=size)
            return ssh_everywhere.send(
                source, target, line, remote_command, lambda count: progress.advance(task, count)
            )

        reasons = list(threads.map(to, lines))
    for line, reason in zip(lines, reasons, strict=True):
        tell(f"{line.name}: {reason or 'done'}")
    if any(reasons):
        raise typer.Exit(1)


@app.command("clean")
def clean(
    file: File,
    *,
    run_: Annotated[Path, typer.Option("--run", metavar="FOLDER", help="Folder of a run that has ended.")],
    ssh: Ssh = "",
    python: Python = "python3",
) -> None:
    """End the agents and workers that a run left on the hosts after its end, and nothing else."""
    from farandole.control.run_folder import TICKET
    from farandole.control.ticket import load
    from farandole.platform.files import check as check_private
    from farandole.platform.files import opener
    from farandole.pool.agent import mark
    from farandole.pool.ssh import run_command

    lines, remote_command = hosts_of(file, ssh, python)
    check_private(run_)
    if is_locked(run_):
        raise UsageError(
            f"the run in {run_} is alive; `farandole stop --run {run_}` ends it and its processes on the hosts"
        )
    ticket = load(str(run_ / TICKET), opener)
    pools = _ssh_pools(run_)

    async def clean_all() -> list[tuple[str, str]]:
        words = [["host", *("--end=" + mark(ticket, pool, line.name) for pool in pools)] for line in lines]
        return await asyncio.gather(
            *(run_command(remote_command.farandole(line, *w)) for line, w in zip(lines, words, strict=True))
        )

    answers = asyncio.run(clean_all())
    for line, (reason, output) in zip(lines, answers, strict=True):
        ended = [one_line(text) for text in output.splitlines() if text.startswith("ended ")]
        for text in [reason] if reason else ended or ["no process of the run was there"]:
            tell(f"{line.name}: {text}")
    if any(reason for reason, _ in answers):
        raise typer.Exit(1)


def host(end: Annotated[list[str] | None, typer.Option("--end", metavar="AGENT")] = None) -> None:
    """Reports on this host, or ends agents; `farandole hosts` runs this command on each host."""
    from farandole.pool import agent, ssh_check

    if end is None:
        ssh_check.serve_checks()
        return
    for pid, command in agent.kill_agents(end).items():
        tell(f"ended process {pid}: {one_line(command)}")


def hosts_of(file: Path, ssh: str, python: str = "python3") -> tuple[list[HostLine], RemoteCommand]:
    """Returns the lines of a hosts file, and how to run commands there. Raises UsageError: it names no host."""
    from farandole.pool.ssh import SSH, RemoteCommand, read

    lines = list(read(file).values())
    if not lines:
        raise UsageError(f"hosts file {file}: the file names no host; write HOST slots=NUMBER for each")
    return lines, RemoteCommand(ssh=tuple(shlex.split(ssh)) or SSH, python=python)


def _ssh_pools(folder: Path) -> list[str]:
    """Returns the names of the run's ssh pools."""
    import msgspec

    from farandole.control.run_folder import SETTINGS
    from farandole.protocol.coordinator.state import RunSettings

    try:
        with open(folder / SETTINGS, "rb") as file:
            settings = decoded(file.read(), RunSettings)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{folder / SETTINGS}: {error}; name the folder of a run") from None
    pools = [pool.name for pool in settings.pools if pool.kind == "ssh"]
    if not pools:
        raise UsageError(f"the run in {folder} had no hosts of a hosts file")
    return pools


def _quoted(word: str) -> str:
    """Quotes a word for a shell. Placeholders are replaced later."""
    return shlex.quote(word)
