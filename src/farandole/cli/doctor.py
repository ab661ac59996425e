"""`farandole doctor`: checks if this machine, and the hosts of a file, are ready for a run, with remedies."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from farandole.cli.folders import Place
from farandole.cli.hosts import Python, Ssh, hosts_of
from farandole.errors import FarandoleError
from farandole.platform.extras import how_to_install
from farandole.platform.output import escaped, tell


def doctor(
    *,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST[:PORT]", help="Address to check, as for `farandole run`.")
    ] = "127.0.0.1",
    runs: Place = Path("runs"),
    hosts: Annotated[
        Path | None, typer.Option("--hosts", metavar="FILE", help="Check the hosts of this hosts file too, over SSH.")
    ] = None,
    ssh: Ssh = "",
    python: Python = "python3",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
) -> None:
    """Check this machine, and hosts: what is wrong, and what to do.

    Python, torch, packages, memory, limits, clock, address and disk; with --hosts each host too, over SSH. Exit code 1
    if a check has failed; a warning does not count.
    """
    try:
        from farandole.coordinator import listener
        from farandole.pool import machine_check, ssh_check
        from farandole.pool.ssh import RemoteCommand
    except ImportError as error:  # such as aiohttp, without which nothing can be checked
        raise FarandoleError(f"{error}: a package of farandole is missing; {how_to_install('tls')}") from None

    host, port = listener.parse(listen)
    at = ("", 0) if listener.is_loopback(host) else (host, port)
    lines, remote_command = hosts_of(hosts, ssh, python) if hosts else ([], RemoteCommand())
    facts = asyncio.run(ssh_check.local_facts(remote_command))
    checks = machine_check.machine_checks(machine_check.Machine(facts, listen, runs))
    if lines:
        reports = asyncio.run(ssh_check.survey(lines, remote_command, at))
        checks += machine_check.host_checks(reports, ssh_check.with_reference(facts, reports))
    if as_json:
        tell(escaped(msgspec.json.format(msgspec.json.encode({"checks": checks}), indent=2).decode()))
    else:
        from rich.console import Console

        from farandole.observe.tables import checks_table

        Console(highlight=False).print(checks_table(checks))
        count = Counter(check.outcome for check in checks)
        tell(f"{count['ok']} ok, {count['warning']} warning, {count['failed']} failed")
    if any(check.outcome == "failed" for check in checks):
        raise typer.Exit(1)
